"""The figures of a sweep: the result by the values of the swept keys."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.extras.pages.figures import BLUE, SIZE, Chart, tinted
from imagenet_cls.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDE = 10  # ratio of the largest to the smallest value from which an axis is logarithmic
_SETTING = 12  # characters of a value
Settings = Sequence[tuple[Mapping[str, str], Sequence[float]]]
"""The values of the swept keys of settings, and the results of their runs."""


@dataclass(frozen=True)
class SweepKey:
    """A swept key. places: of its values on an axis, in the order of the axis."""

    name: str
    places: Mapping[str, float]

    def value(self, setting: Mapping[str, str]) -> str:
        return setting.get(self.name, "")

    def ticks(self) -> tuple[list[float], list[str]]:
        return list(self.places.values()), [shorten(value, _SETTING) for value in self.places]


def sweep_charts(title: str, settings: Settings) -> list[Chart]:
    """The result by each swept key; of two keys also a heat map, of more the settings as lines over
    parallel axes. title: of the result.
    """
    settings = [(setting, results) for setting, results in settings if results]
    keys = []
    for name in dict.fromkeys(name for setting, _ in settings for name in setting):
        values = dict.fromkeys(setting.get(name, "") for setting, _ in settings)
        if len(values) > 1:
            keys.append(SweepKey(name, places_of(list(values))))
    charts = [
        Chart(f"{title} by {key.name}", partial(_draw_key, settings, key, title)) for key in keys
    ]
    if len(keys) == 2:
        charts.append(Chart(f"Mean {title}", partial(_draw_map, settings, keys[0], keys[1])))
    elif len(keys) > 2:
        size = 2 * SIZE[0], SIZE[1]
        charts.append(Chart("All settings", partial(_draw_parallel, settings, keys, title), size))
    return charts


def places_of(values: Sequence[str]) -> dict[str, float]:
    """Where values are on an axis, in ascending order. Numbers are on a linear axis or, where
    they span a factor of 10 or more, on a logarithmic one, with zero apart at its start. Where a
    value is no number, all are categories.
    """
    numbers: dict[str, float] = {}
    with suppress(ValueError):
        numbers = {value: float(value) for value in values}
    if len(numbers) < len(values) or not all(map(math.isfinite, numbers.values())):
        return {value: float(place) for place, value in enumerate(sorted(values))}
    ordered = dict(sorted(numbers.items(), key=lambda item: item[1]))
    positive = [number for number in ordered.values() if number > 0]
    if min(ordered.values()) < 0 or not positive or max(positive) < _WIDE * min(positive):
        return ordered
    zero = math.log10(min(positive)) - 1
    return {value: math.log10(number) if number else zero for value, number in ordered.items()}


def _draw_key(settings: Settings, key: SweepKey, title: str, axes: "Axes") -> None:
    """Draw the runs as points, and the mean and deviation of the runs of each value."""
    means, deviations = [], []
    for value, place in key.places.items():
        runs = [
            run for setting, results in settings if key.value(setting) == value for run in results
        ]
        axes.plot([place] * len(runs), runs, "o", color=BLUE, alpha=0.5)
        means.append(fmean(runs))
        deviations.append(stdev(runs) if len(runs) > 1 else 0)
    places, labels = key.ticks()
    axes.plot(places, means, color=BLUE)
    low, high = np.array(means) - deviations, np.array(means) + deviations
    axes.fill_between(places, low, high, color=BLUE, alpha=0.15)
    axes.set_xticks(places, labels)
    axes.set_xlabel(key.name)
    axes.set_ylabel(title)


def _draw_map(settings: Settings, first: SweepKey, second: SweepKey, axes: "Axes") -> None:
    """Draw the mean result of each pair of values as a cell."""
    rows, columns = list(first.places), list(second.places)
    means = np.full((len(rows), len(columns)), np.nan)
    for setting, results in settings:
        cell = rows.index(first.value(setting)), columns.index(second.value(setting))
        means[cell] = fmean(results)
        axes.text(*cell[::-1], f"{means[cell]:.4g}", ha="center", va="center")
    opacity = (means - np.nanmin(means)) / (np.nanmax(means) - np.nanmin(means) or 1)
    axes.imshow(tinted(BLUE, 0.8 * np.nan_to_num(opacity)), interpolation="none", aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), second.ticks()[1])
    axes.set_yticks(range(len(rows)), first.ticks()[1])
    axes.set_xlabel(second.name)
    axes.set_ylabel(first.name)


def _draw_parallel(settings: Settings, keys: Sequence[SweepKey], title: str, axes: "Axes") -> None:
    """Draw each setting as a line over an axis for each key, and one for its mean result."""
    from matplotlib import colormaps

    means = [fmean(results) for _, results in settings]
    ends = {f"{mean:.4g}": mean for mean in (min(means), max(means))}
    heights = []
    for place, key in enumerate([*keys, SweepKey(title, ends)]):
        low, high = min(key.places.values()), max(key.places.values())
        span = high - low or 1
        for value, number in key.places.items():
            label = shorten(value, _SETTING), (place, (number - low) / span), (4, 3)
            axes.annotate(*label, textcoords="offset points")
        numbers = means if place == len(keys) else [key.places[key.value(s)] for s, _ in settings]
        heights.append([(number - low) / span for number in numbers])
    for line in zip(*heights, strict=True):
        axes.plot(line, color=colormaps["viridis"](line[-1]), alpha=0.8)
    axes.set_xticks(range(len(heights)), [*(key.name for key in keys), f"mean {title}"])
    axes.set_yticks([])
    axes.margins(0.1)
