"""The results of a sweep: which runs are finished, and the table of settings."""

import csv
import io
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from imagenet_cls.checkpoint.folders import read_state
from imagenet_cls.checkpoint.progress import best_weights
from imagenet_cls.config.keys import per_machine_keys
from imagenet_cls.config.load import comparable_values, load_config
from imagenet_cls.config.metrics import BY_NAME
from imagenet_cls.errors import CheckpointError, UserError, explain_content_errors
from imagenet_cls.extras.sweep.plan import SweepRun
from imagenet_cls.files import write_output
from imagenet_cls.text import command_line, format_columns


def finished_progress(out: Path, run: SweepRun) -> dict[str, Any] | None:
    """The progress of a run that has reached its end and evaluated there, else None. For a folder
    with another config, `train` reports the change.
    """
    folder = out / run.name
    with suppress(UserError), explain_content_errors(CheckpointError, folder):
        state = read_state(folder)
        progress: dict[str, Any] = state["progress"]
        is_last = progress["step"] >= state["plan"]["total_steps"]
        is_evaluated = progress["evaluated_step"] == progress["step"]
        trained = comparable_values(load_config(folder / "config.yaml").config)
        given = comparable_values(run.config)
        ignored = per_machine_keys() - {"model.pretrained", "model.checkpoint"}
        is_same = all(trained[key] == value for key, value in given.items() if key not in ignored)
        if is_same and is_evaluated and (is_last or progress["stopped_early"]):
            return progress
    return None


def show_results(out: Path, runs: Sequence[SweepRun]) -> None:
    """Print a row for each setting, those with the most finished runs first, of these the best
    first, and the command that trains the first one. Write `table.csv`, if a run is finished.
    Raises ResourceError.
    """
    metric = BY_NAME[runs[0].config.checkpoint.best]
    settings: dict[tuple[str, ...], list[SweepRun]] = {}
    for run in runs:
        settings.setdefault(tuple(run.setting.values()), []).append(run)
    rows = []
    for values, repeats in settings.items():
        results = []
        for run in repeats:
            progress = finished_progress(out, run)
            if progress and progress["best"]:  # empty without a finite loss
                best = progress["best"]
                results.append(best[best_weights(best)][metric.field])
        mean = fmean(results) if results else None
        std = stdev(results) if len(results) > 1 else None
        # A setting with fewer finished runs than others would be best by chance.
        rank = len(results), metric.score(mean or 0)
        rows.append((rank, [*values, mean, std, len(results), len(repeats)], repeats))
    rows.sort(key=lambda row: row[0], reverse=True)
    header = [*runs[0].setting, f"mean {metric.field}", "std", "finished", "runs"]
    cells = [cells for _, cells, _ in rows]
    print(format_columns([header, *(list(map(_format, row)) for row in cells)]))
    (finished, _), _, repeats = rows[0]
    if finished:  # else the command may be of another sweep, whose table stays
        file = io.StringIO()
        csv.writer(file).writerows([header, *cells])
        write_output(out / "table.csv", file.getvalue())
        words = ["--work-dir", str(out / "best"), *repeats[0].best_arguments]
        print(f"the best setting: {command_line('train')} {shlex.join(words)}")
        print(f"a page of all runs: {command_line('report')} {shlex.quote(str(out))}/*/")


def _format(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
