"""User-defined metrics of an evaluation, `eval.metrics`."""

import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from imagenet_cls.errors import ConfigError, Problem, first_line, printable
from imagenet_cls.lookup import import_factory
from imagenet_cls.parallel.collectives import (
    all_reduce_sum,
    gather_to_main,
    mark_printed_by_main,
    run_on_main,
)
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.report.jsonl import EVAL_FIELDS

Metrics = dict[str, Any]
"""Metrics of one set of weights, by the names of their factories."""

_TRIAL_IMAGES = 8


def metric_problems(names: Sequence[str]) -> list[Problem]:
    """Factories that are missing or take other arguments. They are not called."""
    problems = []
    for name in names:
        try:
            inspect.signature(import_factory(name)).bind(num_classes=1)
        except (
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # ValueError: a function without a signature
            problems.append(Problem("eval.metrics", f"{name!r}: {error}"))
    return problems


def build_metrics(
    names: Sequence[str], num_classes: int, weights: Sequence[str], group: Group
) -> dict[str, Metrics]:
    """The metrics of each set of weights. Raises ConfigError for an object that can't be used. A collective.

    They are tried on a few images. Exceptions of `compute` are ignored: the metric may need more.
    """
    metrics = {
        kind: {name: build_metric(name, num_classes, group) for name in names} for kind in weights
    }
    targets = torch.arange(min(num_classes, _TRIAL_IMAGES), device=group.device)
    logits = torch.eye(len(targets), num_classes, device=group.device)
    results = {}
    for name, metric in metrics[weights[0]].items():
        with warnings.catch_warnings(action="ignore"):
            try:
                metric.update(logits, targets)
            except Exception as error:
                text = f"{name!r}: update(logits, targets) raised {first_line(error)}; see docs/extending.md, A metric"
                raise mark_printed_by_main(ConfigError([f"eval.metrics: {text}"]), group) from error
            with suppress(Exception):
                results[name] = metric.compute()
    values_by_field(results, group)
    return metrics


def build_metric(name: str, num_classes: int, group: Group) -> Any:
    """A `torch.nn.Module` with the methods of a metric. Raises ConfigError."""
    metric = import_factory(name)(num_classes=num_classes)
    missing = [
        method
        for method in ("update", "compute", "reset")
        if not callable(getattr(metric, method, None))
    ]
    if missing or not isinstance(metric, nn.Module):
        fault = f"has no method {missing[0]!r}" if missing else "is not a torch.nn.Module"
        text = f"{name!r} returned a {type(metric).__name__}, which {fault}; see docs/extending.md, A metric"
        raise mark_printed_by_main(ConfigError([f"eval.metrics: {text}"]), group)
    return metric.to(group.device)


def compute_metrics(metrics: Metrics, group: Group) -> dict[str, float]:
    """The values over the images of all ranks, by field. A collective.

    The tensors in each `state_dict()` are summed over the ranks, but not those of a `torchmetrics.Metric`, which
    gathers its state in `compute`. Raises ConfigError if a value is not a number or differs between ranks by more
    than 0.1 %.
    """
    if not metrics:
        return {}
    gathers = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    for metric in metrics.values():
        names = (name for name, module in metric.named_modules() if isinstance(module, gathers))
        gathered = tuple(name and f"{name}." for name in names)
        for name, tensor in metric.state_dict().items():
            if not name.startswith(gathered):
                all_reduce_sum(tensor, group)
    values = values_by_field({name: metric.compute() for name, metric in metrics.items()}, group)
    of_ranks = gather_to_main([values], group)

    def check_equal() -> None:
        for field, value in values.items():
            if not np.allclose(
                [found.get(field, np.inf) for found in of_ranks], value, rtol=1e-3, equal_nan=True
            ):
                text = f"{field!r} differs between ranks; keep its counts in buffers, which are summed over the ranks"
                raise ConfigError([f"eval.metrics: {text}"])

    run_on_main(group, check_equal)
    return values


def values_by_field(results: Mapping[str, Any], group: Group) -> dict[str, float]:
    """The fields of a record. results: what `compute` returned, by factory. Raises ConfigError."""
    values: dict[str, float] = {}
    for name, result in results.items():
        fields = (
            result
            if isinstance(result, Mapping)
            else {name.rpartition(":")[2].rpartition(".")[2]: result}
        )
        for field, value in fields.items():
            number = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
            is_too_large = isinstance(number, int) and number.bit_length() > 1023  # for a float
            if not isinstance(number, Real) or isinstance(number, bool) or is_too_large:
                shape = (
                    f" of shape {tuple(value.shape)}, {value.dtype}"
                    if isinstance(value, Tensor)
                    else ""
                )
                text = f"{field!r} is a {type(value).__name__}{shape}, not a number; return one from compute()"
            elif (
                not isinstance(field, str)
                or printable(field) != field
                or field in EVAL_FIELDS
                or field in values
            ):
                text = f"the name {field!r} is already used or is not a printable string; rename it"
            else:
                values[field] = float(number)
                continue
            raise mark_printed_by_main(ConfigError([f"eval.metrics: {name!r}: {text}"]), group)
    return values
