"""Detects diverged replicas.

Ranks whose parameters, BatchNorm buffers, EMA or optimizer state differ in any bit.
"""

import hashlib
import socket
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.errors import ResourceError
from imagenet_cls.parallel.collectives import (
    all_gather_objects,
    find_differences,
    mark_printed_by_main,
)
from imagenet_cls.parallel.environment import name_ranks
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.private_names import BatchNormBase
from imagenet_cls.text import join_names

# 2**64 divided by the golden ratio, as a signed number: its multiples are spread evenly over 64
# bits.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
# Integer dtype by element size; larger elements are read as several int32, since the top bits of an
# int64 change only the top bits of a product.
_INTEGERS = {1: torch.uint8, 2: torch.int16}

_ROW = 2**16  # elements; a row and its products fit in a core's cache


class ReplicaCheck:
    """Compares the ranks during a run. Every rank makes the same calls.

    every_steps: None for never. start_step: where all ranks got rank 0's state. get_tensors:
    `replicated_tensors`.
    """

    def __init__(
        self,
        context: RankContext,
        every_steps: int | None,
        start_step: int,
        get_tensors: Callable[[], Mapping[str, Tensor]],
    ):
        self.context = context
        self.every_steps = every_steps if context.world_size > 1 else None
        self.last_equal_step = start_step
        self.get_tensors = get_tensors

    def check_if_due(self, step: int) -> None:
        """`check`, every `every_steps` steps."""
        if self.every_steps is not None and step % self.every_steps == 0:
            self.check(step)

    def check(self, step: int) -> None:
        """Raise ResourceError, on all ranks, if they have diverged after `step`. A collective;
        waits for the device.
        """
        if self.every_steps is None or self.last_equal_step == step:
            return
        check_equal_on_ranks(
            self.get_tensors(),
            self.context,
            f"after step {step}",
            "Possible causes: a faulty GPU or memory, mixed GPU models, a forward pass that "
            "updates parameters or buffers from its input, or a train.step that calls parts.model "
            "in place of parts.wrapped (parallel.check_every_steps=null turns this check off).\n"
            f"All ranks were equal after step {self.last_equal_step}, and no checkpoint was saved "
            "since: resume with --resume.",
        )
        self.last_equal_step = step


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, including non-persistent buffers."""
    return dict(chain(model.named_parameters(), model.named_buffers()))


def replicated_tensors(
    model: nn.Module, ema: nn.Module | None, optimizer_state: Mapping[Tensor, Mapping[str, Any]]
) -> dict[str, Tensor]:
    """All tensors that a step changes and that are the same on every rank: of buffers only
    BatchNorm's. Not copies.
    """
    may_differ = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if not isinstance(module, BatchNormBase)
        for name, _ in module.named_buffers(recurse=False)
    }
    tensors = {name: tensor for name, tensor in weights_of(model).items() if name not in may_differ}
    if ema is not None:
        tensors |= {
            f"EMA of {name}": tensor
            for name, tensor in weights_of(ema).items()
            if name not in may_differ
        }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer_state.items():
        name = names[id(parameter)]
        tensors |= {
            f"{key} of {name}": value for key, value in state.items() if isinstance(value, Tensor)
        }
    return tensors


@torch.no_grad()
def tensor_hashes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A 64-bit hash of the bits of each tensor, of any shape, dtype, device and memory format.

    Multilinear hashing (Lemire and Kaser 2014, "Strongly universal string hashing is fast", section
    3): the sum, modulo 2**64, of integers of at most 32 bits, each times an odd factor for its
    position. A change of one integer always changes the sum; others go unseen with a chance of
    about 2**-32. Unlike there, the factors are derived from the position. Integer sums do not
    depend on the order, so every device gives the same hash. (torch.hash_tensor is an XOR: blind to
    the order of elements and to changes that come in pairs.)

    Runs on each tensor's device, a few kernels for each tensor, and waits for each device once.
    """
    sums: dict[str, int] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        mixed = torch.arange(1, 2 * _ROW + 1, device=device).mul_(_GOLDEN)
        # an odd 64-bit number for each position
        factors = mixed.bitwise_xor_(mixed >> 29).mul_(_GOLDEN).bitwise_or_(1)
        here = {
            name: _hash(tensor, factors)
            for name, tensor in tensors.items()
            if tensor.device == device
        }
        sums |= zip(here, torch.stack(list(here.values())).tolist(), strict=True)
    return {name: sums[name] for name in tensors}


def _hash(tensor: Tensor, factors: Tensor) -> Tensor:
    """An int64 scalar of a tensor of at most 2**32 elements. factors: of positions in a row, then
    of rows.
    """
    # a copy if the tensor is in the memory format channels_last
    integers = tensor.detach().reshape(-1).view(_INTEGERS.get(tensor.element_size(), torch.int32))
    in_row, of_row = factors.split(_ROW)
    sums = torch.stack([(row * in_row[: len(row)]).sum() for row in integers.split(_ROW)])
    return (sums * of_row[: len(sums)]).sum()


def model_digest(model: nn.Module) -> str:
    """A digest of the names, shapes, dtypes and bits of all parameters and buffers, the same on
    every device.
    """
    weights = weights_of(model)
    kinds = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in weights.items()}
    return _digest([kinds, tensor_hashes(weights)])


def _digest(rows: object) -> str:
    return hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()


def check_same_weights(model: nn.Module, context: RankContext) -> None:
    """`check_equal_on_ranks` for the weights and buffers at the start of a run."""
    remedy = (
        "Check that all machines have the same code, config and versions; else suspect the "
        "network or memory."
    )
    check_equal_on_ranks(weights_of(model), context, "at the start", remedy)


def check_equal_on_ranks(
    tensors: Mapping[str, Tensor], context: RankContext, when: str, remedy: str
) -> None:
    """Raise ResourceError, on all ranks, unless the tensors have the same bits on all ranks. A
    collective.
    """
    if context.cpu_group is None:
        return
    sums = tensor_hashes(tensors)
    if len(set(all_gather_objects(_digest(sums), context))) == 1:
        return
    different = find_differences({name: str(value) for name, value in sums.items()}, context)
    ranks = sorted({rank for listed in different.values() for rank in listed})
    all_hosts = all_gather_objects(socket.gethostname(), context)
    hosts = list(dict.fromkeys(all_hosts[rank] for rank in ranks))
    error = ResourceError(
        f"Diverged replicas: {name_ranks(ranks)} ({join_names(hosts)}) of {context.world_size} and "
        f"rank 0 differ {when}, in {join_names(list(different))}.",
        remedy,
    )
    raise mark_printed_by_main(error, context)
