"""A training step of the user's own, `train.step`, in place of `engine.train.forward_backward`."""

import inspect
from collections.abc import Iterator
from itertools import islice

from torch import Tensor

from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.engine.parts import ForwardBackward, TrainingParts
from imagenet_cls.errors import ConfigError, Problem
from imagenet_cls.lookup import NameNotFoundError, find_factory
from imagenet_cls.parallel.wrap import check_gradients_reduced
from imagenet_cls.seeding import hash_key, seed_generators


def step_problems(name: str | None) -> list[Problem]:
    """The problem of `train.step`, if any: no such function, or other arguments."""
    if name is None:
        return []
    try:
        inspect.signature(find_factory("training step", name, {})).bind(*range(4))
    except NameNotFoundError as error:
        return [Problem("train.step", str(error))]
    except TypeError:
        text = f"{name} must take four arguments: parts, batches, epoch, step"
        return [Problem("train.step", text)]
    return []


def build_user_step(name: str) -> ForwardBackward:
    """The function `my_module:my_step`. Each call of it raises ConfigError where it breaks what
    `engine.train.forward_backward` does: it takes the micro-batches of one step, leaves gradients
    that are averaged over the ranks, and returns the loss and the metric.
    """
    user_step = find_factory("training step", name, {})

    def forward_backward(
        parts: TrainingParts, batches: Iterator[TrainBatch], epoch: int, step: int
    ) -> Tensor:
        count = parts.plan.accumulation
        micro_batches = islice(batches, count)
        # A step that draws random numbers draws the same ones after a resume.
        key = hash_key("step", parts.config.seed, step, parts.context.rank)
        seed_generators(key, *parts.devices.all)
        try:
            result = user_step(parts, micro_batches, epoch, step)
        except StopIteration as error:
            text = f"took more than the {count} micro-batches of a step"
            raise ConfigError([f"train.step: {name} {text}; use plan.accumulation"]) from error
        except RuntimeError as error:
            if "double backward" not in str(error):
                raise
            text = "differentiates a gradient, which a compiled model does not support; use false"
            raise ConfigError([f"train.compile: {name} {text}"]) from error
        if next(micro_batches, None) is not None:
            text = f"took fewer than the {count} micro-batches of a step"
            raise ConfigError([f"train.step: {name} {text}; use plan.accumulation"])
        check_gradients_reduced(parts.wrapped)
        device = parts.context.device
        found = type(result).__name__
        if isinstance(result, Tensor):
            if result.shape == (2,) and result.device == device:
                return result.detach()
            found = f"a tensor {tuple(result.shape)} on {result.device}"
        raise ConfigError(
            [
                f"train.step: {name} returned {found}; return the loss and the metric, a tensor "
                f"(2,) on {device}"
            ]
        )

    return forward_backward
