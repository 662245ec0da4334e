"""The page of one run or several: results, curves, differences of the configs."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import quote

from imagenet_cls.checkpoint.folders import list_checkpoints, step_of
from imagenet_cls.config.compare import differing_values
from imagenet_cls.config.load import load_config
from imagenet_cls.config.metrics import BY_FIELD
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import CheckpointError, UsageError, UserError, explain_content_errors
from imagenet_cls.extras.pages.curves import (
    FEW,
    Curves,
    Group,
    comparison_charts,
    curves_of,
    main_metrics,
    run_charts,
)
from imagenet_cls.extras.pages.evaluation_charts import chart_of_classes
from imagenet_cls.extras.pages.figures import COLORS, svg
from imagenet_cls.extras.pages.render import DURATION, data_url, render, utf8_text
from imagenet_cls.files import is_locked
from imagenet_cls.optim.schedule import scaled_lr
from imagenet_cls.report.jsonl import Record, read_metrics, user_metrics
from imagenet_cls.text import command_line, first_line, join_names

_MAX_COLUMNS = 6  # differing keys that are columns of the table of runs
_REPEATS = ("seed", "data.fold")  # keys whose values are no other setting
_COLORED_GROUPS = 5  # of many runs
# Results of a run: title, key of `run_statistics`, format.
_RESULTS = (
    ("last training loss", "last_loss", ".4f"),
    ("time", "hours", DURATION),
    ("images per second", "images_per_sec", ",.0f"),
    ("waiting for data, %", "data_wait_pct", ".1f"),
)


@dataclass(frozen=True)
class RunRecords:
    """What a run folder holds, finished or not; None and empty where a file is missing.

    metrics: see `read_metrics`. is_running: its process has the lock. state: total_steps,
    steps_per_epoch, offset (see `engine.plan.Plan`), step and stopped_early of the newest
    checkpoint that is there. checkpoints: by step, newest first. config: None, with a note, if it
    can't be read.
    """

    name: str
    folder: Path
    metrics: Sequence[Record]
    is_running: bool
    versions: Mapping[str, str | None]
    state: Mapping[str, int]
    checkpoints: Mapping[int, Path]
    config: Config | None
    note: str | None

    def records(self, kind: str) -> list[Record]:
        return [record for record in self.metrics if record["kind"] == kind]

    @property
    def batch(self) -> int | None:
        """The global batch size."""
        return self.config.train.global_batch_size if self.config else None

    def curves(self, axis: str) -> Curves:
        return curves_of(self.metrics, axis, self.state.get("steps_per_epoch"), self.batch)


def run_names(folders: Sequence[Path]) -> list[str]:
    """A name for each run: its path below the folder that holds all of them."""
    paths = [folder.absolute() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [utf8_text(path.relative_to(common)) for path in paths]


def read_run(folder: Path, name: str) -> RunRecords:
    """Read a run folder. Raises CheckpointError with the file that can't be read."""
    file = folder / "metrics.jsonl"
    with explain_content_errors(CheckpointError, file):
        metrics = read_metrics(file)
    versions: dict[str, str | None] = {"commit": None}
    file = folder / "env.json"
    with explain_content_errors(CheckpointError, file):
        if file.exists():
            environment = json.loads(file.read_bytes())
            code = environment.get("code")
            commit = None
            if code:
                changes = ", with changes" if code["uncommitted_changes"] else ""
                commit = f"{code['commit'][:12]}{changes}"
            versions = {"commit": commit, **environment.get("versions", {})}
    state: dict[str, int] = {}
    checkpoints = {step_of(path): path for path in list_checkpoints(folder / "checkpoints")}
    for path in checkpoints.values():
        file = path / "state.json"
        with explain_content_errors(CheckpointError, file):
            if file.is_file():
                stored = json.loads(file.read_bytes())
                plan, progress = stored["plan"], stored["progress"]
                state = {
                    "total_steps": int(float(plan["total_steps"])),  # OverflowError for 10^400
                    "steps_per_epoch": int(plan.get("steps_per_epoch", 0)),
                    "offset": int(plan.get("offset", 0)),
                    "step": int(progress["step"]),
                    "stopped_early": bool(progress.get("stopped_early")),
                }
                break
    config = note = None
    try:
        config = load_config(folder / "config.yaml").config
    except UserError as error:
        note = f"{folder}: its config can't be read and is not compared: {first_line(error)}"
    return RunRecords(
        name,
        folder,
        metrics,
        is_locked(folder),
        versions,
        state,
        checkpoints,
        config,
        note,
    )


def run_statistics(run: RunRecords) -> dict[str, Any]:
    """The statistics of a run by name, None where unknown.

    best: the highest top-1, or mAP (`metric`); last: the last evaluation of the same weights.
    hours: see `curves_of`. images_per_sec: the median of the intervals; data_wait_pct: their mean.
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
        if run.batch:
            hours = float(run.curves("minutes").places[-1]) / 60
    return {
        "step": train[-1]["step"] if train else 0,
        "metric": metric,
        "best": best.get(metric),
        "best_text": BY_FIELD[metric].format(best[metric], 2, best.get("images")) if best else "–",
        "best_record": best,
        "last": last.get(metric),
        "own_metrics": user_metrics(last),
        "last_loss": train[-1]["loss"] if train else None,
        "hours": hours,
        "images_per_sec": images_per_sec,
        "data_wait_pct": data_wait_pct,
    }


def runs_page(
    runs: Sequence[RunRecords],
    folder: Path,
    axis: str = "epoch",
    group_by: str | None = None,
    refresh_sec: int | None = None,
) -> bytes:
    """The page of the runs, best first. Raises CheckpointError for records with missing values, and
    UsageError for a key in which the runs do not differ.

    folder: of the page, from which the links to checkpoints lead. axis: of `curves.AXES`. group_by:
    the key by whose values curves are colored. refresh_sec: after how many seconds a browser loads
    the page again.
    """
    rows = []
    for run in runs:
        file = run.folder / "metrics.jsonl"
        with explain_content_errors(CheckpointError, file, "missing or invalid values"):
            rows.append((run, run_statistics(run)))
    rows.sort(key=lambda row: -math.inf if row[1]["best"] is None else row[1]["best"], reverse=True)
    runs = [run for run, _ in rows]
    statistics = [row for _, row in rows]
    differences = config_differences(runs)
    groups = group_runs(runs, statistics, differences, group_by)
    curves = [run.curves(axis) for run in runs]
    weights = [row["best_record"].get("weights", "raw") for row in statistics]
    charts = run_charts(curves[0])
    if len(runs) > 1:
        charts = comparison_charts(curves, weights, groups)
    best = statistics[0]
    values = [row["best"] for row in statistics if row["best"] is not None]
    picture = runs[0].folder / "plots" / "first_batch.jpg"
    file = runs[0].folder / "classes.json"
    if len(runs) == 1 and values and file.exists():
        with explain_content_errors(CheckpointError, file):
            title = "Average precision" if best["metric"] == "map_pct" else "Accuracy"
            result = json.loads(file.read_bytes())
            charts.append(chart_of_classes(title, result, weights[0]))
    titles = [metric.title for metric in main_metrics(chain(*(run.metrics for run in runs)))]
    states = [_state(run, row["step"]) for run, row in zip(runs, statistics, strict=True)]
    versions: dict[str, list[RunRecords]] = {}  # by text: their values may be damaged
    for run in runs:
        versions.setdefault(str(run.versions), []).append(run)
    return render(
        "runs.html",
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        notes=[run.note for run in runs if run.note],
        runs=runs,
        statistics=statistics,
        states=states,
        best=best,
        metric=" or ".join(titles),
        values=values,
        median_value=median(values) if values else None,
        hours=[row["hours"] for row in statistics if row["hours"] is not None],
        results=_RESULTS,
        differences=differences,
        are_columns=len(differences) <= _MAX_COLUMNS,
        groups=groups,
        charts=[(chart, svg(chart, [run.name for run in runs])) for chart in charts],
        first_batch=data_url(picture.read_bytes()) if picture.is_file() else None,
        changed=changed_settings(runs[0]),
        events=runs[0].records("event") if len(runs) == 1 else [],
        versions=versions.values(),
        test_command=command_line("test"),
        address=lambda path: quote(os.fsencode(os.path.relpath(path, folder))),
        refresh_sec=refresh_sec,
    )


def config_differences(runs: Sequence[RunRecords]) -> dict[str, list[str | None]]:
    """The values of each key in which the configs differ, in the order of the runs."""
    known = [number for number, run in enumerate(runs) if run.config]
    found = differing_values([run.config for run in runs if run.config])
    differences = {}
    for key, values in found.items():
        by_run = dict(zip(known, values, strict=True))
        differences[key] = [by_run.get(number) for number in range(len(runs))]
    return differences


def group_runs(
    runs: Sequence[RunRecords],
    statistics: Sequence[Mapping[str, Any]],
    differences: Mapping[str, Sequence[str | None]],
    group_by: str | None,
) -> list[Group]:
    """The groups of curves, best first: of few runs each is one; of more those of one setting, and
    the best ones have colors.
    """
    if group_by and group_by not in differences:
        raise UsageError(
            f"--group-by {group_by}: the configs do not differ in it.",
            f"They differ in: {join_names(list(differences)) or 'nothing'}.",
        )
    if len(runs) <= FEW and not group_by:
        return [Group(run.name, [i], COLORS[i]) for i, run in enumerate(runs)]
    keys = [group_by] if group_by else [key for key in differences if key not in _REPEATS]
    members: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        setting = ", ".join(f"{key}={differences[key][number]}" for key in keys if run.config)
        members.setdefault(setting or run.name, []).append(number)

    def order(group: tuple[str, Sequence[int]]) -> tuple[int, float]:
        """Those with the most results first."""
        found = [statistics[number]["best"] for number in group[1]]
        values = [value for value in found if value is not None]
        return len(values), fmean(values or [-math.inf])

    ordered = sorted(members.items(), key=order, reverse=True)
    colors = [*COLORS[:_COLORED_GROUPS], *[None] * len(ordered)]
    return [
        Group(label, numbers, color)
        for (label, numbers), color in zip(ordered, colors, strict=False)
    ]


def changed_settings(run: RunRecords) -> dict[str, str]:
    """The settings of a run that differ from the defaults, and the learning rate as it is used."""
    if not run.config:
        return {}
    changed = {key: values[1] for key, values in differing_values([Config(), run.config]).items()}
    optimizer = run.config.optimizer
    lr, note = scaled_lr(optimizer, run.config.train.global_batch_size)
    if note:
        base = f"{optimizer.lr:g} for a batch of {optimizer.lr_base_batch}"
        changed["optimizer.lr"] = f"{lr:g} ({base})"
    return changed


def _state(run: RunRecords, step: int) -> str:
    total = run.state.get("total_steps")
    reached = f"step {step:,} of {total:,}" if total else f"step {step:,}, no checkpoint"
    if total and run.state["step"] == step:  # also while its process ends
        if step >= total:
            return f"done, {step:,} steps"
        if run.state["stopped_early"]:
            return f"stopped early: {reached}"
    return f"running: {reached}" if run.is_running else f"interrupted: {reached}"
