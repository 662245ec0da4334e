"""How far a run is: its step, and the results of its evaluations. `state.json` holds it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from imagenet_cls.config.metrics import BY_FIELD, BY_NAME, Metric
from imagenet_cls.config.schema import EarlyStopConfig


@dataclass
class Progress:
    """How far a run is.

    step: optimizer updates done. evaluated_step: the last step that was evaluated. best: for each
    kind of weights (raw, ema) the `step` of the best evaluation and the metric of
    `checkpoint.best`. latest: metrics of the last evaluation for each kind. history: metrics of
    the evaluations after `eval.every_epochs` epochs, for `train.early_stop`. stopped_early: whether
    that ended the run.
    """

    step: int = 0
    evaluated_step: int = 0
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    latest: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    stopped_early: bool = False

    def record(self, kind: str, result: Mapping[str, Any], metric: Metric) -> bool:
        """Record the result of one kind of weights at the present step. Returns whether it is the
        best of that kind so far.
        """
        # Without `seconds`, which would make the state of equal runs differ.
        self.latest[kind] = {key: value for key, value in result.items() if key != "seconds"}
        field = metric.field
        best = self.best.get(kind, {})
        is_better = field not in best or metric.score(result[field]) > metric.score(best[field])
        # NaN logits have a top-1, too (topk sorts NaN first), so the loss must be finite.
        if not is_better or not math.isfinite(result["loss"]):
            return False
        # Results of another metric, before a change of `checkpoint.best`, can't be compared.
        comparable = {other: entry for other, entry in self.best.items() if field in entry}
        self.best = comparable | {kind: {field: result[field], "step": self.step}}
        return True


def best_metric(best: Mapping[str, float]) -> Metric:
    """The metric of an entry of `Progress.best`."""
    (field,) = (name for name in best if name != "step")
    return BY_FIELD[field]


def best_score(best: Mapping[str, float]) -> float:
    """The score of an entry of `Progress.best`."""
    metric = best_metric(best)
    return metric.score(best[metric.field])


def stops_early(history: Sequence[Mapping[str, float]], config: EarlyStopConfig) -> bool:
    """Whether the last `patience_evals` evaluations brought no improvement. An improvement is
    better than the previous improvement by more than `min_delta`.

    history: the metrics of the regular evaluations, in order; of the EMA weights if there are any.
    An evaluation without the metric is ignored. NaN is never better.
    """
    if config.patience_evals is None:
        return False
    metric = BY_NAME[config.metric]
    reference = -math.inf
    waited = 0
    for results in history:
        if metric.field not in results:
            continue
        value = metric.score(results[metric.field])
        if value > reference + config.min_delta:
            reference = value
            waited = 0
        else:
            waited += 1
    return waited >= config.patience_evals


def best_weights(best: Mapping[str, Mapping[str, float]]) -> str:
    """The kind of weights with the best result in `Progress.best`; of equal ones the first."""
    return max(best, key=lambda name: best_score(best[name]))


def read_progress(values: Mapping[str, Any]) -> Progress:
    """The progress that `state.json` holds. Values that an older version did not write have their
    defaults.

    Raises TypeError or ValueError for unknown names, as of a newer version.
    """
    removed = {"evaluations"}  # of older versions
    return Progress(**{name: value for name, value in values.items() if name not in removed})
