"""The page of one run or several: results, curves, differences of the configs."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import quote

from imagenet_cls.errors import CheckpointError, explain_content_errors
from imagenet_cls.extras.pages.figures import curve_figures
from imagenet_cls.extras.pages.plots import main_metrics
from imagenet_cls.extras.pages.render import DURATION, render, utf8_text
from imagenet_cls.files import is_locked
from imagenet_cls.report.jsonl import Record, read_metrics, user_metrics
from imagenet_cls.text import command_line

_MAX_COLUMNS = 6  # differing keys that are columns of the table of runs

# Columns of the results: title, key of `run_statistics`, format.
_BEST_RESULTS = (("at step", "best_step", ",d"), ("weights", "best_weights", ""))
_LAST_RESULTS = {
    "top1_pct": (
        ("last validation top-1 %", "last_top1_pct", ".2f"),
        ("last validation balanced %", "last_balanced_pct", ".2f"),
    ),
    "map_pct": (
        ("last validation mAP %", "last_map_pct", ".2f"),
        ("last validation micro F1 %", "last_micro_f1_pct", ".2f"),
    ),
}
_RESULTS = (
    ("last training loss", "last_loss", ".4f"),
    ("time", "hours", DURATION),
    ("img/s", "images_per_sec", ",.0f"),
    ("waiting %", "data_wait_pct", ".1f"),
    ("ranks", "ranks", "d"),
)


@dataclass(frozen=True)
class RunRecords:
    """What a run folder holds, finished or not; None and empty where a file is missing.

    metrics: see `read_metrics`. is_running: its process has the lock. ranks,
    total_steps, steps_per_epoch, offset (see `engine.plan.Plan`), saved_step and stopped_early: of
    the newest checkpoint that is there. checkpoints: by step, newest first.
    """

    name: str
    folder: Path
    metrics: Sequence[Record]
    is_running: bool
    versions: Mapping[str, str | None]
    ranks: int | None
    total_steps: int | None
    steps_per_epoch: int | None
    offset: int
    saved_step: int | None
    stopped_early: bool
    checkpoints: Mapping[int, Path]

    def records(self, kind: str) -> list[Record]:
        return [record for record in self.metrics if record["kind"] == kind]


def run_names(folders: Sequence[Path]) -> list[str]:
    """A name for each run: its path below the folder that holds all of them."""
    paths = [folder.absolute() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [utf8_text(path.relative_to(common)) for path in paths]


def read_run(folder: Path, name: str, checkpoints: Mapping[int, Path]) -> RunRecords:
    """Read a run folder. checkpoints: the checkpoints of the run by step, newest first.

    Raises CheckpointError with the file that can't be read.
    """
    file = folder / "metrics.jsonl"
    with explain_content_errors(CheckpointError, file):
        metrics = read_metrics(file)
    versions: dict[str, str | None] = {"commit": None}
    ranks = total_steps = steps_per_epoch = saved_step = None
    stopped_early = False
    offset = 0
    file = folder / "env.json"
    with explain_content_errors(CheckpointError, file):
        if file.exists():
            environment = json.loads(file.read_bytes())
            code = environment.get("code")
            commit = None
            if code:
                note = ", with changes" if code["uncommitted_changes"] else ""
                commit = f"{code['commit'][:12]}{note}"
            versions = {"commit": commit, **environment.get("versions", {})}
    for path in checkpoints.values():
        file = path / "state.json"
        with explain_content_errors(CheckpointError, file):
            if file.is_file():
                state = json.loads(file.read_bytes())
                total_steps = int(float(state["plan"]["total_steps"]))  # OverflowError for 10^400
                steps_per_epoch = int(state["plan"].get("steps_per_epoch", 0)) or None
                offset = int(state["plan"].get("offset", 0))
                saved_step = int(state["progress"]["step"])
                ranks = int(state["world_size"])
                stopped_early = bool(state["progress"].get("stopped_early"))
                break
    return RunRecords(
        name,
        folder,
        metrics,
        is_locked(folder),
        versions,
        ranks,
        total_steps,
        steps_per_epoch,
        offset,
        saved_step,
        stopped_early,
        checkpoints,
    )


def run_statistics(run: RunRecords, global_batch: int | None) -> dict[str, Any]:
    """The statistics of a run by name, None where unknown.

    best: the highest top-1, or mAP (`metric`); last: the last evaluation of the same weights.
    hours: of training steps and evaluations, from the speed of each logging interval.
    images_per_sec: the median of the intervals; data_wait_pct: their mean.
    """
    train = run.records("train")
    results = run.records("eval")
    metric = main_metrics(results)[0].field
    best = max(results, key=itemgetter(metric), default={})
    last = next(
        (record for record in reversed(results) if record["weights"] == best["weights"]), {}
    )
    intervals = [record for record in train if record.get("images_per_sec")]
    hours = images_per_sec = data_wait_pct = None
    if intervals:
        images_per_sec = median(record["images_per_sec"] for record in intervals)
        data_wait_pct = fmean(record["data_wait_pct"] for record in intervals)
    # after a change of the batch, that of earlier intervals is unknown
    if intervals and global_batch and not run.offset:
        # The first step is above 1 for a run that continues another one's checkpoint.
        previous = train[0]["step"] - 1
        seconds = sum({record["step"]: record["seconds"] for record in results}.values())
        for record in intervals:
            seconds += global_batch * (record["step"] - previous) / record["images_per_sec"]
            previous = record["step"]
        hours = seconds / 3600
    return {
        "step": train[-1]["step"] if train else 0,
        "total_steps": run.total_steps,
        "metric": metric,
        "best_top1_pct": best.get("top1_pct"),
        "best_map_pct": best.get("map_pct"),
        "best_step": best.get("step"),
        "best_epoch": best.get("epoch"),
        "best_weights": best.get("weights"),
        "last_top1_pct": last.get("top1_pct"),
        "last_balanced_pct": last.get("balanced_accuracy_pct"),
        "last_map_pct": last.get("map_pct"),
        "last_micro_f1_pct": last.get("micro_f1_pct"),
        "user_metrics": user_metrics(last),
        "last_loss": train[-1]["loss"] if train else None,
        "hours": hours,
        "images_per_sec": images_per_sec,
        "data_wait_pct": data_wait_pct,
        "ranks": run.ranks,
    }


def runs_page(
    runs: Sequence[RunRecords],
    global_batches: Sequence[int | None],
    config_texts: Sequence[str | None],
    differences: Mapping[str, Sequence[str | None]],
    notes: Sequence[str],
    folder: Path,
    settings: tuple[Sequence[tuple[str, str]], Sequence[Sequence[Any]]] | None = None,
) -> bytes:
    """The page of the runs. Raises CheckpointError for records with missing values.

    global_batches: the global batch size of each run, None if unknown. config_texts: the content of
    config.yaml of each run, None if it can't be read. differences: values of the
    configs by key, in the order of the runs. notes: to be said first. folder: the folder of the
    page, from which the links to checkpoints lead. settings: columns and rows of the table
    of settings of a sweep.
    """
    statistics = []
    for run, global_batch in zip(runs, global_batches, strict=True):
        file = run.folder / "metrics.jsonl"
        with explain_content_errors(CheckpointError, file, "missing or invalid values"):
            statistics.append(run_statistics(run, global_batch))
    states = [_state(run, row) for run, row in zip(runs, statistics, strict=True)]
    found = main_metrics(record for run in runs for record in run.metrics)
    titles = {metric.field: metric.title for metric in found}
    metrics = list(titles)
    main = f"best_{metrics[0]}"
    known = [row for row in statistics if row[main] is not None]
    values = sorted(row[main] for row in known)
    best = max(known, key=itemgetter(main), default=statistics[0])
    return render(
        "runs.html",
        curve_figures([run.metrics for run in runs]),
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        notes=notes,
        settings=settings,
        runs=runs,
        config_texts=config_texts,
        test_command=command_line("test"),
        statistics=statistics,
        states=states,
        num_states=Counter(re.split("[:,]", state)[0] for state in states),
        best=best,
        best_run=runs[statistics.index(best)],
        metrics=metrics,
        titles=titles,
        best_values=values,
        median_value=median(values) if values else None,
        hours=[row["hours"] for row in statistics if row["hours"] is not None],
        results=[*_BEST_RESULTS, *chain(*(_LAST_RESULTS[name] for name in metrics)), *_RESULTS],
        own_metrics=list(dict.fromkeys(name for row in statistics for name in row["user_metrics"])),
        differences=differences,
        are_columns=len(differences) <= _MAX_COLUMNS,
        versions=list(dict.fromkeys(name for run in runs for name in run.versions)),
        address=lambda path: quote(os.fsencode(os.path.relpath(path, folder))),
    )


def _state(run: RunRecords, statistics: Mapping[str, Any]) -> str:
    step = statistics["step"]
    total = statistics["total_steps"]
    reached = f"step {step:,} of {total:,}" if total else f"step {step:,}, no checkpoint"
    if run.is_running:
        return f"running: {reached}"
    if total and run.saved_step == step:
        if step >= total:
            return f"done, {step:,} steps"
        if run.stopped_early:
            return f"stopped early: {reached}"
    return f"interrupted: {reached}"
