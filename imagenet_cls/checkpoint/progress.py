"""How far a run is: its step, and the results of its evaluations. `state.json` holds it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from imagenet_cls.config.schema import EarlyStopConfig

# Results of an evaluation by their names in configs (`checkpoint.best`, `train.early_stop.metric`).
RESULT_FIELDS = {
    "top1": "top1_pct",
    "top5": "top5_pct",
    "loss": "loss",
    "balanced_accuracy": "balanced_accuracy_pct",
    "map": "map_pct",
    "micro_f1": "micro_f1_pct",
    "macro_f1": "macro_f1_pct",
}


@dataclass
class Progress:
    """How far a run is.

    step: optimizer updates done. evaluated_step: the last step that was evaluated. best: for each
    kind of weights (raw, ema) the `step` of the best evaluation and the metric of
    `checkpoint.best`. latest: metrics of the last evaluation for each kind. evaluations: (step
    counted in the epochs of the present plan, top-1 or mAP in percent of the raw weights), for
    `plateau`. history: metrics of the same evaluations, for `train.early_stop`. stopped_early:
    whether that ended the run.
    """

    step: int = 0
    evaluated_step: int = 0
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    latest: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    stopped_early: bool = False

    def record(self, kind: str, result: Mapping[str, Any], metric: str) -> bool:
        """Record the result of one kind of weights at the present step. Returns whether it is the
        best of that kind so far. metric: one of the values of `RESULT_FIELDS`.
        """
        # Without `seconds`, which would make the state of equal runs differ.
        self.latest[kind] = {key: value for key, value in result.items() if key != "seconds"}
        best = self.best.get(kind, {})
        is_better = metric not in best or score(result, metric) > score(best, metric)
        # NaN logits have a top-1, too (topk sorts NaN first), so the loss must be finite.
        if not is_better or not math.isfinite(result["loss"]):
            return False
        # Results of another metric, before a change of `checkpoint.best`, can't be compared.
        comparable = {other: entry for other, entry in self.best.items() if metric in entry}
        self.best = comparable | {kind: {metric: result[metric], "step": self.step}}
        return True


def score(results: Mapping[str, float], metric: str) -> float:
    """A number that is higher for better results. metric: one of the values of `RESULT_FIELDS`."""
    return -results[metric] if metric == "loss" else results[metric]


def best_metric(best: Mapping[str, float]) -> str:
    """The metric of an entry of `Progress.best`."""
    (metric,) = (name for name in best if name != "step")
    return metric


def best_score(best: Mapping[str, float]) -> float:
    """The score of an entry of `Progress.best`."""
    return score(best, best_metric(best))


def stops_early(history: Sequence[Mapping[str, float]], config: EarlyStopConfig) -> bool:
    """Whether the last `patience_evals` evaluations brought no improvement. An improvement is
    better than the previous improvement by more than `min_delta`.

    history: the metrics of the regular evaluations, in order; of the EMA weights if there are any.
    An evaluation without the metric is ignored. NaN is never better.
    """
    if config.patience_evals is None:
        return False
    metric = RESULT_FIELDS[config.metric]
    reference = -math.inf
    waited = 0
    for results in history:
        if metric not in results:
            continue
        value = score(results, metric)
        if value > reference + config.min_delta:
            reference = value
            waited = 0
        else:
            waited += 1
    return waited >= config.patience_evals


def best_of(best: Mapping[str, Mapping[str, float]]) -> tuple[str, str, float]:
    """Of `Progress.best`: the kind of weights with the best result, its metric and the value."""
    weights = best_weights(best)
    metric = best_metric(best[weights])
    return weights, metric, best[weights][metric]


def best_weights(best: Mapping[str, Mapping[str, float]]) -> str:
    """The kind of weights with the best result in `Progress.best`; of equal ones the first."""
    return max(best, key=lambda name: best_score(best[name]))


def read_progress(values: Mapping[str, Any]) -> Progress:
    """The progress that `state.json` holds. Values that an older version did not write have their
    defaults.

    Raises TypeError or ValueError for unknown names, as of a newer version.
    """
    progress = Progress(**values)
    progress.evaluations = [(step, top1_pct) for step, top1_pct in progress.evaluations]
    return progress
