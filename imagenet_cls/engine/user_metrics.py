"""User-defined metrics of an evaluation: `eval.metrics`.

From torchmetrics, or modules with the same methods.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from imagenet_cls.errors import ConfigError, Problem, UserError
from imagenet_cls.lookup import NameNotFoundError, import_factory, kwargs_problems
from imagenet_cls.parallel.collectives import (
    all_reduce_sum,
    gather_to_main,
    mark_printed_by_main,
    run_on_main,
)
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.report.jsonl import EVAL_FIELDS
from imagenet_cls.text import describe_type, printable

UserMetrics = dict[str, Any]
"""The metrics of one kind of weights, by the names of their factories."""

_DOCS = "docs/extending.md, A metric"


def metric_problems(names: Sequence[str]) -> list[Problem]:
    """Factories that are missing or take other arguments. They are not called."""
    problems = []
    for name in names:
        try:
            factory = import_factory(name)
        except NameNotFoundError as error:
            problems.append(Problem("eval.metrics", f"{name!r}: {error}"))
            continue
        problems += kwargs_problems("eval.metrics", factory, {}, passed=("num_classes",))
    return problems


def build_metrics(
    names: Sequence[str], num_classes: int, weights: Sequence[str], context: RankContext
) -> dict[str, UserMetrics]:
    """The metrics of each set of weights. Raises ConfigError for an object that can't be used."""
    return {
        kind: {name: build_metric(name, num_classes, context) for name in names} for kind in weights
    }


def metric_error(name: str, problem: str, context: RankContext) -> UserError:
    """The error of a metric, which all ranks have, and which rank 0 prints."""
    return mark_printed_by_main(ConfigError([f"eval.metrics: {name!r}: {problem}"]), context)


def build_metric(name: str, num_classes: int, context: RankContext) -> Any:
    """A `torch.nn.Module` with the methods of a metric. Raises ConfigError."""
    metric = import_factory(name)(num_classes=num_classes)
    fault = "" if isinstance(metric, nn.Module) else "is not a torch.nn.Module"
    for method in ("compute", "reset", "update"):
        if not fault and not callable(getattr(metric, method, None)):
            fault = f"has no method {method!r}"
    if fault:
        problem = f"the factory returned a {type(metric).__name__}, which {fault}; see {_DOCS}"
        raise metric_error(name, problem, context)
    return metric.to(context.device)


def update_metrics(
    outputs: Iterable[Any],
    metrics: Mapping[str, UserMetrics],
    num_classes: int,
    no_targets: Tensor,
) -> Iterator[Any]:
    """Yield the outputs of an evaluation (`EvalOutputs`), after the metrics of each model have got
    them; targets of several labels as int64. no_targets: those of an empty batch, on the device.
    """
    all_metrics = [metric for own in metrics.values() for metric in own.values()]
    for metric in all_metrics:
        metric.reset()
    is_empty = True
    for logits, targets, indices in outputs:
        is_empty = False
        for name, own in metrics.items():
            for metric in own.values():
                # copies, since it may change them
                metric.update(logits[name].clone(), _metric_targets(targets))
        yield logits, targets, indices
    if is_empty:
        # A rank with an empty shard passes an empty batch, so that torchmetrics that gather lists
        # know the dtype and shape. Others may reject it.
        no_logits = torch.zeros(0, num_classes, device=no_targets.device)
        for metric in all_metrics:
            with suppress(Exception):
                metric.update(no_logits, _metric_targets(no_targets))


def _metric_targets(targets: Tensor) -> Tensor:
    return (targets >= 0.5).long() if targets.is_floating_point() else targets.clone()


def compute_metrics(metrics: UserMetrics, context: RankContext) -> dict[str, float]:
    """The values over the images of all ranks, by field. A collective.

    The tensors in each `state_dict()` are summed over the ranks, but not the tensors of a
    `torchmetrics.Metric`, which gathers its state in `compute`. Raises ConfigError if a value is
    not a number or differs between ranks by more than 0.1 %.
    """
    if not metrics:
        return {}
    torchmetrics = sys.modules.get("torchmetrics")  # imported if a metric is from it
    gathering_types = () if torchmetrics is None else (torchmetrics.Metric,)
    for metric in metrics.values():
        # The prefixes of the names of tensors that torchmetrics gathers. The metric itself has the
        # prefix "", with which all names begin.
        prefixes = []
        for name, module in metric.named_modules():
            if isinstance(module, gathering_types):
                prefixes.append(f"{name}." if name else "")
        for name, tensor in metric.state_dict().items():
            if not name.startswith(tuple(prefixes)):
                all_reduce_sum(tensor, context)
    values = values_by_field({name: metric.compute() for name, metric in metrics.items()}, context)
    values_of_ranks = gather_to_main([values], context)

    def check_equal() -> None:
        for field, value in values.items():
            # A rank that has no value of this name differs.
            found = [other.get(field, np.inf) for other in values_of_ranks]
            if not np.allclose(found, value, rtol=1e-3, equal_nan=True):
                raise ConfigError(
                    [
                        f"eval.metrics: {field!r} differs between ranks; keep its counts in "
                        "buffers, which are summed over the ranks"
                    ]
                )

    run_on_main(context, check_equal)
    return values


def values_by_field(results: Mapping[str, Any], context: RankContext) -> dict[str, float]:
    """The fields of a record. results: what `compute` returned, by factory. Raises ConfigError."""
    values: dict[str, float] = {}
    for name, result in results.items():
        own_name = name.rpartition(":")[2].rpartition(".")[2]
        fields = result if isinstance(result, Mapping) else {own_name: result}
        for field, value in fields.items():
            is_name = isinstance(field, str) and printable(field) == field
            if not is_name or field in EVAL_FIELDS or field in values:
                problem = f"the name {field!r} is already used or is not a printable string"
                raise metric_error(name, f"{problem}; rename it", context)
            try:
                values[field] = float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                kind = describe_type(value)
                problem = f"{field!r} is {kind}, not a number; return one from compute()"
                raise metric_error(name, problem, context) from error
    return values
