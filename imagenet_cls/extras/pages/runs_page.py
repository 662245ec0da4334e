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

import numpy as np

from imagenet_cls.checkpoint.folders import list_checkpoints, read_state, step_of
from imagenet_cls.config.compare import differing_values
from imagenet_cls.config.load import load_config
from imagenet_cls.config.metrics import BY_FIELD
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import CheckpointError, UserError, explain_content_errors
from imagenet_cls.extras.pages.curves import (
    Curves,
    comparison_charts,
    curves_of,
    main_metrics,
    run_charts,
)
from imagenet_cls.extras.pages.evaluation_charts import chart_of_classes
from imagenet_cls.extras.pages.figures import COLORS, GREY, svg
from imagenet_cls.extras.pages.render import DURATION, data_url, render, utf8_text
from imagenet_cls.files import is_locked
from imagenet_cls.report.jsonl import Record, read_metrics, user_metrics
from imagenet_cls.text import command_line, first_line

_MAX_COLUMNS = 6  # differing keys that are columns of the table of runs
# Results of a run: title, key of `run_statistics`, format.
_RESULTS = (
    ("last training loss", "last_loss", ".4f"),
    ("time", "hours", DURATION),
    ("images per second", "images_per_sec", ",.0f"),
    ("waiting for data, %", "data_wait_pct", ".1f"),
)


@dataclass(frozen=True)
class RunRecords:
    """What a run folder holds, finished or not; empty where a file is missing.

    metrics: see `read_metrics`. versions: of the code and the libraries. checkpoints: by step,
    newest first. state: how far the run is. config: None, with a note, if it can't be read.
    statistics: see `run_statistics`.
    """

    name: str
    folder: Path
    metrics: Sequence[Record]
    versions: Mapping[str, str | None]
    checkpoints: Mapping[int, Path]
    state: str
    config: Config | None
    note: str | None
    curves: Curves
    statistics: Mapping[str, Any]


def run_names(folders: Sequence[Path]) -> list[str]:
    """A name for each run: its path below the folder that holds all of them."""
    paths = [folder.absolute() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [utf8_text(path.relative_to(common)) for path in paths]


def read_run(folder: Path, name: str) -> RunRecords:
    """Read a run folder. Raises CheckpointError if values of its files are missing or invalid."""
    metrics = read_metrics(folder)
    checkpoints = {step_of(path): path for path in list_checkpoints(folder / "checkpoints")}
    config = note = None
    try:
        config = load_config(folder / "config.yaml").config
    except UserError as error:
        note = f"{folder}: its config can't be read and is not compared: {first_line(error)}"
    with explain_content_errors(CheckpointError, folder, "missing or invalid values"):
        versions: dict[str, str | None] = {"commit": None}
        if (folder / "env.json").exists():
            environment = json.loads((folder / "env.json").read_bytes())
            if code := environment.get("code"):
                changes = ", with changes" if code["uncommitted_changes"] else ""
                versions["commit"] = f"{code['commit'][:12]}{changes}"
            versions |= environment.get("versions", {})
        steps_per_epoch = None
        train = [record for record in metrics if record["kind"] == "train"]
        step = train[-1]["step"] if train else 0
        reached = f"step {step:,}, no checkpoint"
        state = "running" if is_locked(folder) else "interrupted"
        if checkpoints:
            stored = read_state(folder)
            steps_per_epoch = stored["plan"]["steps_per_epoch"]
            total = stored["plan"]["total_steps"]
            reached = f"step {step:,} of {total:,}"
            if stored["progress"]["step"] == step:  # also while its process ends
                if step >= total:
                    state = "done"
                elif stored["progress"]["stopped_early"]:
                    state = "stopped early"
        curves = curves_of(metrics, steps_per_epoch)
        statistics = run_statistics(curves, config)
    state = f"{state}: {reached}"
    return RunRecords(
        name, folder, metrics, versions, checkpoints, state, config, note, curves, statistics
    )


def run_statistics(curves: Curves, config: Config | None) -> dict[str, Any]:
    """The statistics of a run by name, None where unknown.

    best: the highest top-1, or mAP (`metric`); last: the last evaluation of the same weights.
    hours: of training steps and evaluations, from the speed of each logging interval; images are
    counted by epochs, since the batch may change where a run is resumed. images_per_sec: the median
    of the intervals; data_wait_pct: their mean.
    """
    train = [record for record in curves.records if record["kind"] == "train"]
    results = [record for record in curves.records if record["kind"] == "eval"]
    metric = main_metrics(results)[0].field
    best = max(results, key=itemgetter(metric), default={})
    last = next(
        (record for record in reversed(results) if record["weights"] == best["weights"]), {}
    )
    intervals = [record for record in train if record.get("images_per_sec")]
    hours = images_per_sec = data_wait_pct = None
    if intervals:
        speeds = [record["images_per_sec"] for record in intervals]
        images_per_sec = median(speeds)
        data_wait_pct = fmean(record["data_wait_pct"] for record in intervals)
        if config:
            ends = [curves.steps[0], *(record["step"] for record in intervals)]
            epochs = np.diff(np.interp(ends, curves.steps, curves.epochs))
            images = epochs * curves.steps_per_epoch * config.train.global_batch_size
            seconds = sum(images / speeds) + sum(record["seconds"] for record in results)
            hours = float(seconds) / 3600
    return {
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


def runs_page(folders: Sequence[Path], folder: Path) -> bytes:
    """The page of runs, best first. folder: of the page, from which the links to checkpoints lead.
    Raises CheckpointError.
    """
    runs = [read_run(path, name) for path, name in zip(folders, run_names(folders), strict=True)]

    def score(run: RunRecords) -> float:
        best = run.statistics["best"]
        return -math.inf if best is None else best

    runs.sort(key=score, reverse=True)
    best, *others = runs
    differences = config_differences(runs)
    colors = [*COLORS, *[GREY] * len(runs)][: len(runs)]
    kinds = [run.statistics["best_record"].get("weights", "raw") for run in runs]
    if others:
        charts = comparison_charts([run.curves for run in runs], kinds, colors)
    else:
        charts = run_charts(best.curves)
    file = best.folder / "classes.json"
    if not others and best.statistics["best_record"] and file.exists():
        with explain_content_errors(CheckpointError, file):
            title = "Average precision" if best.statistics["metric"] == "map_pct" else "Accuracy"
            charts.append(chart_of_classes(title, json.loads(file.read_bytes()), kinds[0]))
    picture = best.folder / "plots" / "first_batch.jpg"
    titles = [metric.title for metric in main_metrics(chain(*(run.metrics for run in runs)))]
    versions: dict[str, list[RunRecords]] = {}  # by text: their values may be damaged
    for run in runs:
        versions.setdefault(str(run.versions), []).append(run)
    changed = differing_values([Config(), best.config]) if best.config else {}
    return render(
        "runs.html",
        title=f"{len(runs)} runs" if others else best.name,
        notes=[run.note for run in runs if run.note],
        runs=runs,
        colors=colors,
        metric=" or ".join(titles),
        results=_RESULTS,
        differences=differences,
        are_columns=len(differences) <= _MAX_COLUMNS,
        charts=[(chart, svg(chart, [run.name for run in runs])) for chart in charts],
        first_batch=data_url(picture.read_bytes()) if picture.is_file() else None,
        changed={key: values[1] for key, values in changed.items()},
        versions=versions.values(),
        test_command=command_line("test"),
        address=lambda path: quote(os.fsencode(os.path.relpath(path, folder))),
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
