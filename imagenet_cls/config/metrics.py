"""The results of an evaluation by which weights are compared, by their names in configs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MIN_CLASSES_FOR_TOP5 = 10  # of fewer classes nearly every image has its class among five
_ENOUGH_IMAGES = 2000  # of as many, the interval of a top-1 is at most 4.4 points wide
_Z = 1.96  # the 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True)
class Metric:
    """field: its name in records; that of a percentage ends in `_pct`. title: its name in messages
    and figures. is_shown(result, num_classes): whether a message about the result has this metric.
    """

    field: str
    title: str
    higher_is_better: bool = True
    is_shown: Callable[[Mapping[str, Any], int], bool] = lambda result, num_classes: True

    @property
    def is_percent(self) -> bool:
        return self.field.endswith("_pct")

    def score(self, value: float) -> float:
        """A number that is higher for better values."""
        return value if self.higher_is_better else -value

    def format(self, value: float, digits: int = 2, images: int | None = None) -> str:
        """`81.23 %`. digits: after the decimal point of percentages. images: of the evaluation; a
        top-1 of fewer than 2,000 images then has its 95 % interval, as in `71.67 % (59 to 81)`.
        """
        text = f"{value:.{digits}f} %" if self.is_percent else f"{value:.4f}"
        if self.field == "top1_pct" and images and images < _ENOUGH_IMAGES:
            low, high = wilson_interval(value, images)
            places = int(high - low < 10)
            text += f" ({low:.{places}f} to {high:.{places}f})"
        return text


def wilson_interval(share_pct: float, images: int) -> tuple[float, float]:
    """The ends in percent of the 95 % interval of a share of images: Wilson's score interval,

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    of the share p of n images, with z = 1.96.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal of
    the American Statistical Association 22 (1927), pages 209 to 212.
    """
    share = share_pct / 100
    ratio = _Z**2 / images
    center = share + ratio / 2
    half = math.sqrt(ratio * (share * (1 - share) + ratio / 4))
    scale = 100 / (1 + ratio)
    return (center - half) * scale, (center + half) * scale


def _differs_from_top1(result: Mapping[str, Any], num_classes: int) -> bool:
    return abs(result["balanced_accuracy_pct"] - result["top1_pct"]) >= 0.1


_LOSS = Metric("loss", "loss", higher_is_better=False)
# By `data.labels`. The first one is that of figures.
METRICS = {
    "single": {
        "top1": Metric("top1_pct", "top-1"),
        "top5": Metric("top5_pct", "top-5", is_shown=lambda _, n: n >= MIN_CLASSES_FOR_TOP5),
        "loss": _LOSS,
        "balanced_accuracy": Metric(
            "balanced_accuracy_pct", "balanced accuracy", is_shown=_differs_from_top1
        ),
    },
    "multi": {
        "map": Metric("map_pct", "mAP"),
        "micro_f1": Metric("micro_f1_pct", "micro F1"),
        "macro_f1": Metric("macro_f1_pct", "macro F1"),
        "loss": _LOSS,
    },
}
# Of the training images of a step, as they are augmented and mixed.
TRAIN_METRICS = {
    "single": METRICS["single"]["top1"],
    "multi": Metric("sample_f1_pct", "F1"),
}
BY_NAME = METRICS["single"] | METRICS["multi"]
BY_FIELD = {metric.field: metric for metric in BY_NAME.values()}


def metrics_of(result: Mapping[str, Any]) -> list[Metric]:
    """The metrics in the result of an evaluation; older ones lack some."""
    found = [[m for m in of.values() if m.field in result] for of in METRICS.values()]
    return max(found, key=len)


def main_metric(result: Mapping[str, Any]) -> Metric:
    """The first of the `metrics_of` a result."""
    return metrics_of(result)[0]
