"""Counts and reports steps whose loss or gradient is NaN or infinite.

Too many in a row end the run.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.errors import NonFiniteError, UserError
from imagenet_cls.parallel.collectives import all_gather_objects, mark_printed_by_main
from imagenet_cls.parallel.environment import name_ranks
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.text import join_names

_SHOWN = 4  # samples of each rank; the error lists three, and the log all
# fp16: GradScaler starts at 65,536 and halves the scale at each overflow until the gradients fit.
_LOSS_SCALE_SEARCH_STEPS = 50
_REMEDY = "Lower optimizer.lr, warm up longer, or set train.clip_norm."


@dataclass
class NonFiniteGuard:
    """Counts the steps without a finite loss and gradient in the records of `Meter.flush`.

    fp16: a skipped step with a finite loss is normal, since the loss scale was too high.
    samples_of: returns the names of the images that this rank read in a step, counted from 1.
    """

    context: RankContext
    max_steps: int
    fp16: bool = False
    samples_of: Callable[[int], Sequence[str]] = lambda step: ()
    last_step_finite: bool = field(default=True, init=False)
    count: int = field(default=0, init=False)
    consecutive: int = field(default=0, init=False)

    def count_and_describe(self, records: Sequence[dict[str, Any]]) -> str | None:
        """Add the non-finite steps among `records` to `count`, and return a line about them; None
        if there are none.
        """
        steps = [record["step"] for record in records if not self._is_normal(record)]
        if not steps:
            return None
        self.count += len(steps)
        text = f"step {steps[0]}"
        if len(steps) > 1:
            text = f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
        return f"{text}: loss or gradient was NaN or infinite ({self.count} such steps so far)"

    def check(self, records: Sequence[dict[str, Any]], own_losses: Tensor | None) -> None:
        """Raise NonFiniteError, on all ranks alike, after too many non-finite steps in a row.

        own_losses: (steps,), this rank's loss in each step, on any device; only read where the run
        ends.
        """
        for row, record in enumerate(records):
            self.last_step_finite = self._is_normal(record)
            self.consecutive += 1
            if _is_applied(record):
                self.consecutive = 0
            patience = 0
            if self.fp16 and math.isfinite(record["loss"]):
                patience = _LOSS_SCALE_SEARCH_STEPS
            if self.consecutive >= self.max_steps + patience:
                assert own_losses is not None
                raise self._error(record, own_losses[row].item())

    def check_any_applied(self, step: int) -> None:
        """Raise NonFiniteError, on all ranks alike, where none of all `step` steps was applied."""
        if 0 < step == self.consecutive:
            error = NonFiniteError(
                f"None of the {step} steps changed the weights: loss or gradient was NaN or "
                "infinite in each.",
                _REMEDY,
            )
            raise mark_printed_by_main(error, self.context)

    def _is_normal(self, record: dict[str, Any]) -> bool:
        """Whether a step is not to be reported: with fp16 also if it was skipped at a finite
        loss.
        """
        return _is_applied(record) or (self.fp16 and math.isfinite(record["loss"]))

    def _error(self, record: dict[str, Any], own_loss: float) -> UserError:
        """Names the ranks whose own loss was not finite, if any. Else only the gradient overflowed.
        A collective.
        """
        step = record["step"]
        samples = self.samples_of(step)
        seen = all_gather_objects((math.isfinite(own_loss), list(samples[:_SHOWN])), self.context)
        with_nan = [rank for rank, (is_finite, _) in enumerate(seen) if not is_finite]
        suspects = with_nan or list(range(self.context.world_size))
        if self.context.rank in suspects:
            logging.getLogger("imagenet_cls").info(
                "the samples of step %d on this rank: %s", step, ", ".join(samples)
            )
        problem = (
            f"Loss or gradient was NaN or infinite in {self.consecutive} steps in a row, the last "
            f"one step {step} (loss {record['loss']:g}, lr {record['lr']:g})."
        )
        if shown := [name for rank in suspects for name in seen[rank][1]]:
            what = "the loss" if with_nan else "the gradient (the losses were finite)"
            where = f"{name_ranks(suspects)} of {self.context.world_size}"
            log = f"logs/rank{suspects[0]}.log"
            problem += f"\nIt was {what} on {where}, from {join_names(shown)} ({log} has all)."
        return mark_printed_by_main(NonFiniteError(problem, _REMEDY), self.context)


def _is_applied(record: dict[str, Any]) -> bool:
    """Whether a step had a finite loss and changed the weights."""
    return math.isfinite(record["loss"]) and "skipped" not in record


def check_finite_weights(model: nn.Module, step: int, context: RankContext) -> None:
    """Raise NonFiniteError, on all ranks alike, where a trained weight is NaN or infinite: no step
    can repair that.
    """
    # A NaN or infinite weight makes the sum NaN or infinite. On a CPU the sum takes a tenth of the
    # time of a norm.
    sums = [
        weight.detach().sum(dtype=torch.float32)
        for weight in model.parameters()
        if weight.requires_grad
    ]
    if sums and not torch.stack(sums).isfinite().all():
        error = NonFiniteError(
            f"Weights are NaN or infinite after step {step}: the update was too large. This state "
            "is not saved.",
            "Lower optimizer.lr, warm up longer, or set train.clip_norm; older checkpoints are "
            "unchanged.",
        )
        raise mark_printed_by_main(error, context)
