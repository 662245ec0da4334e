"""The results of a sweep: which runs are finished, and the table of settings."""

import csv
import io
import math
import shlex
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from imagenet_cls.checkpoint.folders import read_state
from imagenet_cls.checkpoint.progress import best_metric, best_weights
from imagenet_cls.config.keys import per_machine_keys
from imagenet_cls.config.load import comparable_values, load_config
from imagenet_cls.config.metrics import BY_NAME, Metric
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import CheckpointError, UsageError, UserError, explain_content_errors
from imagenet_cls.extras.pages.render import format_cell
from imagenet_cls.extras.pages.report import write_page
from imagenet_cls.extras.pages.runs_page import Sweep
from imagenet_cls.extras.pages.sweep_charts import sweep_charts
from imagenet_cls.extras.sweep.plan import SweepRun, load_runs, read_runs, split_overrides
from imagenet_cls.files import write_output
from imagenet_cls.text import command_line, count_of, first_line, format_columns, format_value

# Beginnings of keys that do not change results, or for which the data is compared.
_NOT_COMPARED = (
    "log.",
    "checkpoint.every",
    "checkpoint.keep",
    *(per_machine_keys() - {"model.pretrained", "model.checkpoint"}),
)
# What `state.json` records besides the config, by names for messages.
_CONDITIONS = {
    "training images": "data_digest",
    "training files": "data_sizes",
    "validation images": "val_digest",
    "validation files": "val_sizes",
    "distill.teacher": "teacher_digest",
}


@dataclass
class Row:
    """A setting in the table. setting: the values of the swept keys, and as `others` the arguments
    that only some runs of the sweep have. results: of its finished runs.
    """

    setting: dict[str, Any]
    runs: list[SweepRun] = field(default_factory=list)
    results: list[float] = field(default_factory=list)


def finished_state(folder: Path) -> dict[str, Any] | None:
    """`state.json` of a run that has reached its end and evaluated there, else None."""
    with suppress(CheckpointError), explain_content_errors(CheckpointError, folder):
        state = read_state(folder)
        progress = state["progress"]
        is_last = progress["step"] >= state["plan"]["total_steps"]
        is_evaluated = progress["evaluated_step"] == progress["step"]
        if (is_last or progress["stopped_early"]) and is_evaluated:
            return state
    return None


def is_finished(folder: Path, config: Config) -> bool:
    """Whether the run in a folder is finished, and has this config. For a changed config `train`
    reports the change.
    """
    with suppress(UserError):
        if load_config(folder / "config.yaml").config == config:
            return finished_state(folder) is not None
    return False


def best_result(folder: Path) -> tuple[Metric, float] | None:
    """The metric of `checkpoint.best` and its best value in a finished run; None for another run,
    or without a finite loss.
    """
    state = finished_state(folder)
    results = state and state["progress"]["best"]
    if not results:
        return None
    best = results[best_weights(results)]
    metric = best_metric(best)
    return metric, best[metric.field]


def check_comparable(
    folder: Path, runs: Iterable[SweepRun], configs: Iterable[Config] = ()
) -> None:
    """Raise UsageError if results of runs with these configs and of the finished ones of `runs`
    can't be compared: of other metrics, or where a config file or the data changed between them.

    Runs may differ as their arguments do. So the configs that the arguments give now are compared,
    too: where values of these are equal, the recorded ones must be.
    """
    trained: list[tuple[str, Config, Config, dict[str, Any], set[str]]] = [
        ("the runs to start", config, config, {}, set()) for config in configs
    ]
    for run in runs:
        path = folder / run.name
        state = finished_state(path)
        if state is None:
            continue
        try:
            now = load_runs([run.arguments])[0].config
            config = load_config(path / "config.yaml").config
        except UserError as error:  # such as a file that is gone
            print(f"{path} is not compared with the others: {first_line(error)}")
            continue
        given = split_overrides(run.arguments).keys() - {"checkpoint.best"}
        trained.append((str(path), now, config, state, given))
    known: dict[tuple[str, str], tuple[str, Any]] = {}
    for name, now, config, state, given in trained:
        wanted = comparable_values(now) | {"checkpoint.best": None}  # one for all runs
        recorded = comparable_values(config)
        for condition, field_name in _CONDITIONS.items():
            if field_name in state:
                wanted[condition] = now.data, now.distill
                recorded[condition] = state[field_name]
        for key in sorted({*wanted, *recorded}):
            if key.startswith(_NOT_COMPARED):
                continue
            value = recorded.get(key)
            first = ("its arguments", wanted.get(key)) if key in given else (name, value)
            other, expected = known.setdefault((key, repr(wanted.get(key))), first)
            if value != expected:
                raise UsageError(
                    f"{name} can't be compared with {other}. They differ in {key}: "
                    f"{format_value(value)} and {format_value(expected)}.",
                    "Restore the config and the data, remove one of these runs, or name another "
                    "folder with --out.",
                )


def read_table(folder: Path) -> tuple[Metric | None, list[Row]]:
    """The metric of the results, None without any, and the settings of a sweep: those with the most
    finished runs first, of these the best first.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    metric = None
    runs = list(read_runs(folder).values())
    check_comparable(folder, runs)
    common = set.intersection(*(set(run.conditions) for run in runs)) if runs else set()
    for run in runs:
        setting = dict(run.setting)
        others = [argument for argument in run.conditions if argument not in common]
        if others:
            setting["others"] = shlex.join(others)
        row = rows.setdefault(tuple(setting.items()), Row(setting))
        row.runs.append(run)
        result = best_result(folder / run.name)
        if result is not None:
            metric, value = result
            row.results.append(value)

    def order(row: Row) -> tuple[int, float]:
        # A setting with fewer finished runs than others would be best by chance.
        mean = metric.score(fmean(row.results)) if metric and row.results else -math.inf
        return len(row.results), mean

    return metric, sorted(rows.values(), key=order, reverse=True)


def differ(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether the results of two settings differ: by Welch's t-test, two-sided, at p < 0.05.

    False where the test is not defined: for a setting of one run, and if all results of each
    setting are equal.
    """
    from scipy.stats import ttest_ind  # takes a second to import; scikit-learn requires it

    if len({*first}) == len({*second}) == 1:
        return False
    with warnings.catch_warnings(action="ignore"):  # about one value, or equal ones
        p = ttest_ind(first, second, equal_var=False).pvalue
    return bool(p < 0.05)  # p is NaN with one run


def show_results(folder: Path) -> None:
    """Print the table, and write `table.csv` and `report.html`. Raises UsageError for a folder
    without a sweep.
    """
    metric, rows = read_table(folder)
    if not rows:
        raise UsageError(f"{folder}: no sweep (it has no sweep.json).", "Start one first.")
    keys = list(dict.fromkeys(key for row in rows for key in row.setting))
    digits = ".4f" if metric == BY_NAME["loss"] else ".2f"
    header = [*keys, f"mean {metric.field}" if metric else "mean", "std", "finished", "runs"]
    formats = [*[""] * len(keys), digits, digits, "d", "d"]
    cells = []
    for row in rows:
        values = [row.setting.get(key) for key in keys]
        mean = fmean(row.results) if row.results else None
        std = stdev(row.results) if len(row.results) > 1 else None
        cells.append([*values, mean, std, len(row.results), len(row.runs)])
    texts = [list(map(format_cell, line, formats)) for line in cells]
    print(format_columns([header, *texts]))
    file = io.StringIO()
    csv.writer(file).writerows([header, *cells])
    write_output(folder / "table.csv", file.getvalue())
    conclusion = best_setting(folder, rows)
    runs = [folder / run.name for row in rows for run in row.runs]
    begun = [run for run in runs if (run / "metrics.jsonl").is_file()]
    if begun:
        columns = list(zip(header, formats, strict=True))
        title = metric.title if metric else "result"
        charts = sweep_charts(title, [(row.setting, row.results) for row in rows])
        sweep = Sweep(charts, columns, cells, conclusion)
        write_page(begun, folder / "report.html", sweep=sweep)
    print(conclusion)


def best_setting(folder: Path, rows: Sequence[Row]) -> str:
    """A line with the command that trains the best setting, and whether it differs from others; ""
    without results. folder: of the sweep. rows: the best first.
    """
    best, *others = rows
    if not best.results:
        return ""
    alike = [row for row in others if row.results and not differ(best.results, row.results)]
    note = ""
    if alike:
        count = count_of(len(alike), "other")
        note = f" (no difference from {count} shown by Welch's t-test at p < 0.05)"
        if len(best.results) == 1:
            note = " of one run each, so chance may decide"
    arguments = ["--work-dir", str(folder / "best"), *best.runs[0].best_arguments]
    return f"the best setting{note}: {command_line('train')} {shlex.join(arguments)}"
