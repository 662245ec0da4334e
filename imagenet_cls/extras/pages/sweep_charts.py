"""The figures of a sweep: the result by the values of the swept keys."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.extras.pages.figures import BLUE, Chart, tinted
from imagenet_cls.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SETTING = 12  # characters of a value
Settings = Sequence[tuple[Mapping[str, str], Sequence[float]]]
"""The values of the swept keys of settings, and the results of their runs."""


def sweep_charts(title: str, settings: Settings) -> list[Chart]:
    """The result by each swept key; of two keys also a heat map. title: of the result."""
    settings = [(setting, results) for setting, results in settings if results]
    values: dict[str, list[str]] = {}  # of each key with several, in the order of an axis
    for name in dict.fromkeys(name for setting, _ in settings for name in setting):
        found = {setting.get(name, "") for setting, _ in settings}
        if len(found) > 1:
            values[name] = sorted(found, key=_order)
    charts = [
        Chart(f"{title} by {name}", partial(_draw_key, settings, name, of_key, title))
        for name, of_key in values.items()
    ]
    if len(values) == 2:
        first, second = values.items()
        charts.append(Chart(f"Mean {title}", partial(_draw_map, settings, first, second)))
    return charts


def _order(value: str) -> tuple[float, str]:
    """Numbers by their size, then other values."""
    try:
        return float(value), value
    except ValueError:
        return float("inf"), value


def _labels(values: Sequence[str]) -> list[str]:
    return [shorten(value, _SETTING) for value in values]


def _draw_key(
    settings: Settings, name: str, values: Sequence[str], title: str, axes: "Axes"
) -> None:
    """Draw the runs as points, and the mean and deviation of the runs of each value."""
    means, deviations = [], []
    for place, value in enumerate(values):
        runs = [
            run
            for setting, results in settings
            if setting.get(name, "") == value
            for run in results
        ]
        axes.plot([place] * len(runs), runs, "o", color=BLUE, alpha=0.5)
        means.append(fmean(runs))
        deviations.append(stdev(runs) if len(runs) > 1 else 0)
    places = range(len(values))
    axes.plot(places, means, color=BLUE)
    low, high = np.array(means) - deviations, np.array(means) + deviations
    axes.fill_between(places, low, high, color=BLUE, alpha=0.15)
    axes.set_xticks(places, _labels(values))
    axes.set_xlabel(name)
    axes.set_ylabel(title)


def _draw_map(
    settings: Settings,
    first: tuple[str, Sequence[str]],
    second: tuple[str, Sequence[str]],
    axes: "Axes",
) -> None:
    """Draw the mean result of each pair of values as a cell. first, second: the name and the values
    of a key.
    """
    (row_key, rows), (column_key, columns) = first, second
    means = np.full((len(rows), len(columns)), np.nan)
    for setting, results in settings:
        cell = rows.index(setting.get(row_key, "")), columns.index(setting.get(column_key, ""))
        means[cell] = fmean(results)
        axes.text(*cell[::-1], f"{means[cell]:.4g}", ha="center", va="center")
    opacity = (means - np.nanmin(means)) / (np.nanmax(means) - np.nanmin(means) or 1)
    axes.imshow(tinted(BLUE, 0.8 * np.nan_to_num(opacity)), interpolation="none", aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), _labels(columns))
    axes.set_yticks(range(len(rows)), _labels(rows))
    axes.set_xlabel(column_key)
    axes.set_ylabel(row_key)
