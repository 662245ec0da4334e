"""Do all ranks hold the same bits? A hash of every tensor, made where the tensor lies, and compared between ranks.

Ranks that have come apart stay apart: they apply the same gradients to different weights, losses look well, and nothing
shows. So the bits are compared at the start, every `parallel.check_every_steps` steps and before each checkpoint.

Owns the hash, the comparison and its words. Refuses to mend: which rank is right is not known. Called by
`parallel.wrap` (start), `engine.train` (later) and `engine.build` (the teacher's identity).
"""

import hashlib
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_cls.errors import ResourceError
from imagenet_cls.parallel.environment import name_ranks
from imagenet_cls.parallel.process_group import Group, reported_by_main

# 2**64 divided by the golden ratio, as a signed number: multiples of it are spread evenly over 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
# What bits are read as. Not more than 32 at once: a product keeps only the lowest bit of the highest of 64.
_INTEGERS = {1: torch.uint8, 2: torch.int16}

# Words of a row: as many as fit into a core's own memory with their products. And rows at once: on a GPU a launch costs
# more, and what products take there stays small beside a model.
_ROW = 2**16
_ROWS_ON_CPU, _ROWS_ON_GPU = 1, 64

# Names that an error lists.
_SHOWN = 3


class ReplicaCheck:
    """Compares the ranks again and again in a run. One for each start; every rank makes the same calls.

    every_steps: `parallel.check_every_steps`, None for never. start_step: at which rank 0 handed out the state.
    tensors: all that must be equal, by name, as it is when asked for.
    """

    def __init__(
        self, group: Group, every_steps: int | None, start_step: int, tensors: Callable[[], Mapping[str, Tensor]]
    ):
        self.group = group
        self.every_steps = every_steps if group.world_size > 1 else None
        self.agreed_at = start_step
        self.tensors = tensors

    def check_if_due(self, step: int) -> None:
        """`check`, in every so many steps."""
        if self.every_steps is not None and step % self.every_steps == 0:
            self.check(step)

    def check(self, step: int) -> None:
        """Raise ResourceError, on every rank, unless all hold the same bits after `step`. A collective; waits for the
        device. Does nothing twice for a step, or where the config wants no checks.
        """
        if self.every_steps is None or self.agreed_at == step:
            return
        check_replicas(self.tensors(), step, self.agreed_at, self.group)
        self.agreed_at = step


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that no checkpoint keeps included."""
    return dict(chain(model.named_parameters(), model.named_buffers()))


@torch.no_grad()
def tensor_hashes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A 64-bit hash of the bits of each tensor, of any shape, dtype and device; memory formats make no difference.

    Multilinear hashing (Lemire and Kaser 2014, "Strongly universal string hashing is fast", section 3): the sum, modulo
    2**64, of words of at most 32 bits, each times an odd number that belongs to its place. An odd factor can be undone,
    so a change within one word always changes the sum; other changes go unseen with a chance of about 2**-32 or less.
    Unlike there, the factors are not random but mixed from the place, so that all ranks have the same. Whole numbers
    add up to the same in any order, so every device gives the same hash.

    Runs on the tensors' own devices, a few kernels for each tensor, and waits for each device once.
    """
    words = {name: _as_integers(tensor) for name, tensor in tensors.items()}
    sums: dict[str, int] = {}
    for device in {tensor.device for tensor in words.values()}:
        factors = _factors(2 * _ROW, device)
        here = {name: _hash(tensor, factors) for name, tensor in words.items() if tensor.device == device}
        sums |= zip(here, torch.stack(list(here.values())).tolist(), strict=True)
    return {name: sums[name] for name in tensors}


def _hash(words: Tensor, factors: Tensor) -> Tensor:
    """Of whole numbers (elements,): an int64 scalar on their device. factors: of the places in a row, then of the rows.

    A word's factor is the product of its row's and its place's, so that a few will do for any length.
    """
    in_row, of_row = factors.split(_ROW)
    whole = words.numel() // _ROW * _ROW
    at_once = _ROWS_ON_CPU if words.device.type == "cpu" else _ROWS_ON_GPU
    rows = [(in_row * some).sum(1) for some in words[:whole].view(-1, _ROW).split(at_once)]
    rest = words[whole:]
    sums = torch.cat([*rows, (in_row[: rest.numel()] * rest).sum().view(1)])
    return (sums * of_row[: sums.numel()]).sum()


def _as_integers(tensor: Tensor) -> Tensor:
    """The bits of a tensor's elements, in logical order: whole numbers, (elements,), two or more for a wide one."""
    return tensor.detach().reshape(-1).view(_INTEGERS.get(tensor.element_size(), torch.int32))


def _factors(count: int, device: torch.device) -> Tensor:
    """An odd 64-bit number for each place, (count,)."""
    mixed = torch.arange(1, count + 1, device=device).mul_(_GOLDEN)
    return mixed.bitwise_xor_(mixed >> 29).mul_(_GOLDEN).bitwise_or_(1)


def model_digest(model: nn.Module) -> str:
    """A digest over names, shapes, types and bits of every parameter and buffer, the same on every device."""
    weights = weights_of(model)
    kinds = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in weights.items()}
    return _digest([kinds, tensor_hashes(weights)])


def _digest(rows: object) -> str:
    return hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()


def diverged_ranks(tensors: Mapping[str, Tensor], group: Group) -> tuple[dict[int, str], list[str]]:
    """Which ranks hold other bits than most, with their hosts, and in which tensors; empty where all agree.

    A collective, with the same answer on every rank: the digests first, 32 bytes of each rank, and only where these
    differ a list. With no majority, those are apart that differ from rank 0.
    """
    if group.control is None:
        return {}, []
    sums = tensor_hashes(tensors)
    digests: list[str] = [""] * group.world_size
    dist.all_gather_object(digests, _digest(sums), group=group.control)
    if len(set(digests)) == 1:
        return {}, []
    (common, count), *_ = Counter(digests).most_common()
    reference = digests.index(common) if count > group.world_size / 2 else 0
    everything: list[tuple[str, dict[str, int]]] = [("", {})] * group.world_size
    dist.all_gather_object(everything, (socket.gethostname(), sums), group=group.control)
    expected = everything[reference][1]
    apart = {rank: everything[rank][0] for rank, digest in enumerate(digests) if digest != digests[reference]}
    names = {*expected}.union(*(everything[rank][1] for rank in apart))
    different = {name for name in names if any(everything[rank][1].get(name) != expected.get(name) for rank in apart)}
    order = [*expected, *sorted(names - expected.keys())]
    return apart, [name for name in order if name in different]


def check_same_weights(model: nn.Module, group: Group) -> None:
    """Raise ResourceError, on every rank, unless all start with the same weights and buffers. A collective."""
    apart, names = diverged_ranks(weights_of(model), group)
    if apart:
        raise reported_by_main(
            ResourceError(
                f"{len(apart)} of {group.world_size} ranks start from other weights than the rest: {_where(apart)}, in "
                f"{_some(names)}.\n"
                "Check that all machines have the same code, config and versions; else suspect the network or a memory."
            ),
            group,
        )


def check_replicas(tensors: Mapping[str, Tensor], step: int, agreed_at: int, group: Group) -> None:
    """Raise ResourceError, on every rank, unless all hold the same bits after `step`. A collective.

    It is no mistake in a config: a device, a memory or the network gave a rank other numbers, so it is told as what
    else gives out in a machine (exit code 5). agreed_at: the step after which all were last seen to agree.
    """
    apart, names = diverged_ranks(tensors, group)
    if apart:
        verb = "hold" if len(apart) > 1 else "holds"
        raise reported_by_main(
            ResourceError(
                f"{_where(apart)} of {group.world_size} {verb} other bits than the rest after step {step}, in "
                f"{_some(names)}.\n"
                "Suspect a GPU or a memory there, GPUs of different kinds, or a model that changes itself by what one "
                "rank sees; parallel.check_every_steps=null trains it unchecked.\n"
                f"All agreed after step {agreed_at}, and no checkpoint was written since: go on with --resume."
            ),
            group,
        )


def _where(apart: Mapping[int, str]) -> str:
    hosts = list(dict.fromkeys(apart.values()))
    return f"{name_ranks(list(apart))} ({', '.join(hosts[:3])}{', ...' if len(hosts) > 3 else ''})"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
