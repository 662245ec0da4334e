"""The page of one run or several: results, curves, versions, differences of the configs, checkpoints."""

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from imagenet_cls.files import is_locked
from imagenet_cls.report.jsonl import Record, read_metrics, user_metrics
from imagenet_cls.report.page import Html, escape, heading, image, page, plot, table, text, to_jpeg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_POINTS = 300  # of a curve; each is a mean
_MAX_EVENTS = 100  # of TensorBoard's file that are searched for the first batch, which is among the first
_BATCH_PX = 1000
_MAX_LABEL = 40  # characters of a run's path in a legend
_CURVES = {"lr": "learning rate", "images_per_sec": "images per second", "data_wait_pct": "waiting for data (%)"}

# Columns of the results: title, key of `run_statistics`, format.
_RESULTS = (
    ("best top-1 %", "best_top1_pct", ".2f"),
    ("at step", "best_step", ",d"),
    ("weights", "best_weights", ""),
    ("last top-1 %", "last_top1_pct", ".2f"),
    ("last balanced %", "last_balanced_pct", ".2f"),
    ("last loss", "last_loss", ".4f"),
    ("hours", "hours", ".3g"),
    ("img/s", "images_per_sec", ",.0f"),
    ("waiting %", "data_wait_pct", ".1f"),
    ("ranks", "ranks", "d"),
)


@dataclass(frozen=True)
class RunRecords:
    """What a run folder holds, finished or not. JSON files that are missing or can't be parsed count as empty.

    has_incomplete_last_line: of metrics.jsonl; `metrics` is without it. is_running: its process has the lock.
    environment: `env.json`. state: of the newest checkpoint that has a readable one. checkpoints: by step, newest
    first.
    """

    name: str
    metrics: Sequence[Record]
    has_incomplete_last_line: bool
    is_running: bool
    environment: Mapping[str, Any]
    state: Mapping[str, Any]
    checkpoints: Mapping[int, Path]
    first_batch: bytes | None = field(repr=False)

    def records(self, kind: str) -> list[Record]:
        return [record for record in self.metrics if record["kind"] == kind]


def read_run(folder: Path, checkpoints: Mapping[int, Path]) -> RunRecords:
    """Read a run folder. checkpoints: of the run by step, newest first. Raises CheckpointError as `read_metrics`."""
    metrics = folder / "metrics.jsonl"
    states = (_read_json(path / "state.json") for path in checkpoints.values())
    with metrics.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        last_byte = file.read(1)
    return RunRecords(
        text(folder),
        read_metrics(metrics),
        last_byte not in (b"", b"\n"),
        is_locked(folder),
        _read_json(folder / "env.json"),
        next(filter(None, states), {}),
        checkpoints,
        _first_batch(folder / "tensorboard"),
    )


def run_statistics(run: RunRecords, global_batch: int | None) -> dict[str, Any]:
    """The statistics of a run by name, None where unknown.

    best: the highest top-1; last: the last evaluation of the same weights. hours: of training steps and evaluations,
    from the speed of each logging interval. images_per_sec: the median of the intervals; data_wait_pct: their mean.
    """
    train, results = run.records("train"), run.records("eval")
    best = max(results, key=itemgetter("top1_pct"), default={})
    last = next((record for record in reversed(results) if record["weights"] == best["weights"]), {})
    intervals = [record for record in train if record.get("images_per_sec")]
    first = train[0]["step"] if train else 1  # above 1 for a run that continues another one's checkpoint
    counts = np.diff([first - 1, *(record["step"] for record in intervals)])
    seconds = [(global_batch or 0) * n / record["images_per_sec"] for n, record in zip(counts, intervals, strict=True)]
    evaluated = {record["step"]: record["seconds"] for record in results}
    return {
        "step": train[-1]["step"] if train else 0,
        "total_steps": run.state.get("plan", {}).get("total_steps"),
        "best_top1_pct": best.get("top1_pct"),
        "best_step": best.get("step"),
        "best_weights": best.get("weights"),
        "last_top1_pct": last.get("top1_pct"),
        "last_balanced_pct": last.get("balanced_accuracy_pct"),
        "user_metrics": user_metrics(last),
        "last_loss": train[-1]["loss"] if train else None,
        "hours": (sum(seconds) + sum(evaluated.values())) / 3600 if global_batch and intervals else None,
        "images_per_sec": median(record["images_per_sec"] for record in intervals) if intervals else None,
        "data_wait_pct": fmean(record["data_wait_pct"] for record in intervals) if intervals else None,
        "ranks": int(run.environment.get("variables", {}).get("WORLD_SIZE", 1)) if run.environment else None,
    }


def runs_page(
    runs: Sequence[RunRecords],
    global_batches: Sequence[int | None],
    differences: Mapping[str, Sequence[str | None]],
    notes: Iterable[str],
    folder: Path,
) -> bytes:
    """The page of the runs.

    global_batches: of each run, None if unknown. differences: values of the configs by key, in the order of the runs.
    notes: to be said first. folder: of the page, from which the links to checkpoints lead.
    """
    names = [run.name for run in runs]
    statistics = [run_statistics(run, batch) for run, batch in zip(runs, global_batches, strict=True)]
    incomplete = [
        f"{run.name}: the last line of metrics.jsonl is incomplete and was left out"
        for run in runs
        if run.has_incomplete_last_line
    ]
    own = dict.fromkeys(name for row in statistics for name in row["user_metrics"])
    columns = [("run", ""), ("state", ""), *((title, number_format) for title, _, number_format in _RESULTS)]
    columns += [(f"last {name}", ".4f") for name in own]
    rows = [
        [run.name, _state(run, row), *(row[key] for _, key, _ in _RESULTS), *map(row["user_metrics"].get, own)]
        for run, row in zip(runs, statistics, strict=True)
    ]
    versions = [{"commit": _commit(run)} | run.environment.get("versions", {}) for run in runs]
    parts = [
        heading("Results", *notes, *incomplete),
        table(columns, rows),
        Html("<p>Hours and img/s are of the steps and evaluations, without start-up and saving.</p>"),
        heading(
            "Curves",
            "Lines of training steps are means of neighboring steps. Points are evaluations, for the loss of the raw "
            "weights only.",
        ),
        plot(9, 4, partial(_draw_losses, runs)),
        plot(9, 4, partial(_draw_top1, runs)),
        *(plot(9, 2.6, partial(_draw_curve, runs, key)) for key in _CURVES),
    ]
    by_run = [("", ""), *((name, "") for name in names)]
    if len(runs) > 1:
        parts += [heading("Differences of the configs", *([] if differences else ["None."]))]
    if differences:
        parts += [table(by_run, [[key, *values] for key, values in differences.items()])]
    listed = dict.fromkeys(name for version in versions for name in version)
    parts += [
        heading("Code and versions"),
        table(by_run, [[n, *(v.get(n) for v in versions)] for n in listed]),
    ]
    parts += [
        heading("Checkpoints"),
        table([("run", ""), ("checkpoint", "")], _checkpoint_rows(runs, statistics, folder)),
    ]
    for run in runs:
        if run.first_batch is not None:
            parts += [heading(f"First batch of {run.name}"), image(run.first_batch)]
    return page(names[0] if len(runs) == 1 else f"{len(runs)} runs", parts)


def _state(run: RunRecords, statistics: Mapping[str, Any]) -> str:
    step, total = statistics["step"], statistics["total_steps"]
    progress = run.state.get("progress", {})
    reached = f"step {step:,} of {total:,}" if total else f"step {step:,}, no checkpoint"
    if run.is_running:
        return f"running: {reached}"
    if total and progress.get("step") == step:
        if step >= total:
            return f"done, {step:,} steps"
        if progress.get("stopped_early"):
            return f"stopped early: {reached}"
    return f"interrupted: {reached}"


def _commit(run: RunRecords) -> str | None:
    code = run.environment.get("code")
    return code and code["commit"][:12] + (", with changes" if code["uncommitted_changes"] else "")


def _checkpoint_rows(
    runs: Sequence[RunRecords], statistics: Sequence[Mapping[str, Any]], folder: Path
) -> Iterable[tuple[str, Html]]:
    for run, row in zip(runs, statistics, strict=True):
        for step, path in run.checkpoints.items():
            note = ", best top-1" if step == row["best_step"] else ""
            address = quote(os.fsencode(os.path.relpath(path, folder)))
            yield run.name, Html(f'<a href="{address}">{escape(path.name)}</a>{note}')


def _label(run: RunRecords) -> str:
    name = f"./{run.name}" if run.name.startswith("_") else run.name  # matplotlib leaves out labels with "_" first
    return name if len(name) <= _MAX_LABEL else f"…{name[-_MAX_LABEL:]}"


def _draw_losses(runs: Sequence[RunRecords], figure: "Figure") -> None:
    axes = figure.subplots()
    for number, run in enumerate(runs):
        _draw_means(axes, run.records("train"), "loss", f"C{number}", _label(run))
        results = [record for record in run.records("eval") if record["weights"] == "raw"]
        axes.plot(*_columns(results, "loss"), "o", color=f"C{number}", markersize=3)
    _finish(axes, "loss")


def _draw_top1(runs: Sequence[RunRecords], figure: "Figure") -> None:
    axes = figure.subplots()
    for number, run in enumerate(runs):
        for weights, style in (("raw", "o-"), ("ema", "s--")):
            results = [record for record in run.records("eval") if record["weights"] == weights]
            if results:
                x, y = _columns(results, "top1_pct")
                axes.plot(x, y, style, color=f"C{number}", markersize=3, label=f"{_label(run)}, {weights}")
    _finish(axes, "top-1 (%)")


def _draw_curve(runs: Sequence[RunRecords], key: str, figure: "Figure") -> None:
    axes = figure.subplots()
    for number, run in enumerate(runs):
        _draw_means(axes, [record for record in run.records("train") if key in record], key, f"C{number}", _label(run))
    _finish(axes, _CURVES[key])


def _draw_means(axes: "Axes", records: Sequence[Record], key: str, color: str, label: str) -> None:
    """A line through the means of at most `_MAX_POINTS` parts of the records, at their last steps."""
    if records:
        parts = [np.array_split(column, min(_MAX_POINTS, len(records))) for column in _columns(records, key)]
        axes.plot([part[-1] for part in parts[0]], [part.mean() for part in parts[1]], color=color, label=label)


def _finish(axes: "Axes", label: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _columns(records: Sequence[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values; those that are not finite leave gaps."""
    values = np.array([record[key] for record in records], dtype=np.float64)
    return np.array([record["step"] for record in records]), np.where(np.isfinite(values), values, np.nan)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _first_batch(folder: Path) -> bytes | None:
    """The first augmented batch of a run as JPEG, from TensorBoard's files; None if there is none that can be read.

    TensorBoard can't read paths with undecodable bytes.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    with suppress(Exception):
        files = sorted(filter(Path.is_file, folder.glob("events.*")))[:1]
        for event in chain(*(islice(LegacyEventFileLoader(str(file)).Load(), _MAX_EVENTS) for file in files)):
            for value in event.summary.value:
                if value.tag == "train/first_batch":
                    return to_jpeg(Image.open(io.BytesIO(value.image.encoded_image_string)), _BATCH_PX)
    return None
