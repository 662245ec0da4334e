"""The end of a run whose loss or gradient is no longer finite: which ranks it was, and what they were looking at.

Owns the words of NonFiniteError, and who says them. Refuses to count steps, which `engine.meter` does before it asks
here. Nothing of this costs a step anything: ranks tell each other what they saw only when the run ends.
"""

import logging
import math
from collections.abc import Sequence
from copy import copy
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from imagenet_cls.data import EpochSampler, ImageSource
from imagenet_cls.errors import NonFiniteError
from imagenet_cls.parallel.environment import name_ranks
from imagenet_cls.parallel.process_group import Group, reported_by_main

# Of the samples, on the screen; the logs have all.
_SHOWN = 3


def samples_of_step(sampler: EpochSampler, source: ImageSource, step: int) -> list[str]:
    """Names of the images that this rank saw in a step (from 1 on), repeated ones once: the sampler's order is a pure
    function of the step, so nobody has to carry names through the loader. sampler: this rank's; left as it is.
    """
    sampler = copy(sampler)
    sampler.set_epoch(*divmod(step - 1, sampler.steps_per_epoch))
    share = sampler.global_batch_size // sampler.world_size
    return list(dict.fromkeys(source.name(index) for _, index, _ in islice(sampler, share)))


def check_finite_weights(model: nn.Module, step: int, group: Group) -> None:
    """Raise NonFiniteError, on every rank alike, where a trained weight is NaN or infinite: no step can mend that, so
    such a state is not worth saving, and must not take the place of one that is.
    """
    # A sum is as finite as what it adds, and takes a tenth of the time of a norm on a CPU.
    sums = [weight.detach().sum(dtype=torch.float32) for weight in model.parameters() if weight.requires_grad]
    if sums and not torch.stack(sums).isfinite().all():
        error = NonFiniteError(
            f"weights are NaN or infinite after step {step}, by too large an update: this state is not saved.\n"
            "Lower optimizer.lr, warm up longer, or set train.clip_norm; a checkpoint from before is as it was."
        )
        raise reported_by_main(error, group)


def nonfinite_error(
    record: dict[str, Any], steps_in_a_row: int, own_loss: float, samples: Sequence[str], group: Group
) -> NonFiniteError:
    """What every rank raises when a run gives up. A collective: the loss is that of all ranks together, so all get
    here at the same step.

    record: the step that was one too many, as `Meter.flush` made it. own_loss: this rank's in that step. samples: what
    it saw in it. Ranks whose own loss was not finite are named; where each was finite, it was the gradient that
    overflowed, on nobody knows which rank.
    """
    logger = logging.getLogger("imagenet_cls")
    mine = (math.isfinite(own_loss), len(samples), list(samples[:_SHOWN]))
    seen: list[Any] = [mine]
    if group.control is not None:
        seen = [None] * group.world_size
        dist.all_gather_object(seen, mine, group=group.control)
    culprits = [rank for rank, (is_finite, _, _) in enumerate(seen) if not is_finite]
    suspects = culprits or list(range(group.world_size))
    if group.rank in suspects:
        logger.info("the samples of step %d on this rank: %s", record["step"], ", ".join(samples))
    lines = [
        f"loss or gradient was NaN or infinite in {steps_in_a_row} steps in a row, the last one step "
        f"{record['step']} (loss {record['loss']:g}, lr {record['lr']:g}).",
        "Such a gradient is never applied, but too large an update makes weights NaN, too. Lower optimizer.lr, warm "
        "up longer, or set train.clip_norm.",
    ]
    count = sum(seen[rank][1] for rank in suspects)
    if count:
        told = [name for rank in suspects for name in seen[rank][2]][:_SHOWN]
        more = f" and {count - len(told)} more (logs/rank{suspects[0]}.log)" if count > len(told) else ""
        what = "the loss" if culprits else "the gradient, after finite losses,"
        lines.insert(1, f"It was {what} on {name_ranks(suspects)} of {group.world_size}, from {', '.join(told)}{more}.")
    error = NonFiniteError("\n".join(lines))
    reported_by_main(error, group)
    return error
