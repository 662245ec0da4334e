"""Training steps without a run folder, evaluations and checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import closing, suppress

from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.config.schema import Config, ScheduleConfig
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.engine.build import build
from imagenet_cls.engine.meter import StepResult
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.train import train
from imagenet_cls.guards.device import explain_device_errors
from imagenet_cls.optim.schedule import Horizon, Schedule
from imagenet_cls.parallel.process_group import RankContext


def run_steps(
    config: Config,
    context: RankContext,
    after_step: Callable[[StepResult, TrainingParts], bool | None],
    lr_at: Callable[[int], float] | None = None,
) -> None:
    """Train from step 0 to the last step, and call `after_step` after each, which may return True
    to end the training. Raises the errors of a training.

    lr_at: the learning rate of step 0, 1, ..., in place of the schedule.
    """
    with explain_device_errors():
        parts = build(config, context)
        if lr_at is not None:
            per_epoch = parts.plan.steps_per_epoch
            parts.schedule = Schedule(
                settings=ScheduleConfig(name="constant"),
                curve=lambda t, _: lr_at(int(t)),
                horizon=Horizon(parts.schedule.horizon.peak_lr, parts.plan.total_steps, per_epoch),
                start=0,
                warmup=0,
                steps_per_epoch=per_epoch,
            )
        with closing(parts.train_loader), suppress(_End):
            train(_ShortRun(parts, after_step))


class _End(Exception):
    """Ends the training within an epoch."""


class _ShortRun:
    """An `engine.train.TrainingRun`, see `run_steps`."""

    def __init__(
        self,
        parts: TrainingParts,
        after_step: Callable[[StepResult, TrainingParts], bool | None],
    ):
        self.parts = parts
        self.progress = Progress()
        self._after_step = after_step

    def epoch_batches(self, epoch: int, first_step: int) -> Iterator[TrainBatch]:
        return self.parts.prefetch(self.parts.train_loader.epoch(epoch, first_step))

    def after_step(self, result: StepResult) -> None:
        if self._after_step(result, self.parts):
            raise _End

    def after_epoch(self) -> None:
        """Do nothing: there is no evaluation."""
