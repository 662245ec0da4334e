"""The learning rate range test: a short training with a growing rate."""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from imagenet_cls.config.schema import Config
from imagenet_cls.engine.meter import StepResult
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.short_run import run_steps
from imagenet_cls.parallel.process_group import RankContext

_SMOOTHING = 0.9
_DIVERGED = 4.0  # times the lowest loss


@dataclass
class LrRange:
    """The steps of a learning rate range test. smoothed: moving average of the losses with bias
    correction. lr_factor: what `optimizer.lr_base_batch` multiplies the configured rate by.
    """

    lrs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    end: str = "at the last step"
    lr_factor: float = 1.0

    def steepest(self) -> float | None:
        """The rate where the smoothed loss falls fastest with the logarithm of the rate, up to the
        lowest loss. The first tenth does not count: its averages are of few losses.

        A rule of fastai's lr_find. None if the loss does not fall.
        """
        first = len(self.lrs) // 10
        lowest = int(np.argmin(self.smoothed[first:])) if self.lrs else 0
        if lowest == 0:
            return None
        slopes = np.gradient(self.smoothed, np.log(self.lrs))
        return self.lrs[first + int(np.argmin(slopes[first : first + lowest + 1]))]


def lr_range(
    config: Config,
    context: RankContext,
    low: float,
    high: float,
    steps: int,
) -> LrRange:
    """The learning rate range test (Smith 2015, "Cyclical Learning Rates for Training Neural
    Networks", section 3.3), from the config's initial weights, with a rate that grows
    geometrically. It ends early where the loss is not finite or has diverged.
    """
    epochs = max(config.train.epochs, steps)
    defaults = Config()
    config = replace(
        config,
        train=replace(config.train, epochs=epochs, max_steps=steps),
        schedule=replace(defaults.schedule, name="constant"),
        ema=defaults.ema,
    )
    found = LrRange()
    average = 0.0

    def after_step(result: StepResult, parts: TrainingParts) -> bool:
        nonlocal average
        found.lr_factor = parts.schedule.horizon.peak_lr / config.optimizer.lr
        lr = result.lr
        loss = float(result.loss_and_metric[0])
        if not math.isfinite(loss):
            found.end = f"at lr {lr:.3g}, where the loss is not finite"
            return True
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        found.lrs.append(lr)
        found.losses.append(loss)
        found.smoothed.append(average / (1 - _SMOOTHING ** len(found.lrs)))
        if found.smoothed[-1] > _DIVERGED * min(found.smoothed):
            found.end = (
                f"at lr {lr:.3g}, where the smoothed loss is above {_DIVERGED:g} times the lowest"
            )
            return True
        return False

    run_steps(config, context, after_step, lambda step: low * (high / low) ** (step / (steps - 1)))
    return found
