"""Collectives; with a single rank they do nothing."""

import socket
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from imagenet_cls.errors import UserError
from imagenet_cls.parallel.process_group import RankContext

T = TypeVar("T")


def all_reduce_sum(tensor: Tensor, context: RankContext) -> Tensor:
    """Sum over all ranks, in place, on the default process group; the same bits on every rank."""
    if context.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_mean(tensor: Tensor, context: RankContext) -> Tensor:
    """Mean over all ranks, in place; floating-point tensors only."""
    return (
        all_reduce_sum(tensor, context).div_(context.world_size)
        if context.world_size > 1
        else tensor
    )


def gather_to_main(rows: list, context: RankContext) -> list:
    """Concatenate all ranks' lists on rank 0, in the order of ranks; an empty list elsewhere. For
    small host data.
    """
    if context.cpu_group is None:
        return rows
    parts: list | None = [None] * context.world_size if context.is_main else None
    dist.gather_object(rows, parts, dst=0, group=context.cpu_group)
    return [row for part in parts or [] for row in part]


def gather_shards(shard: Tensor, num_rows: int, context: RankContext) -> Tensor:
    """Gather rows of which row i is on rank i % world_size. Rank 0 returns
    all rows in order, (num_rows, ...) on the CPU, other ranks their own.

    Rank 0 holds the result and one shard at a time.
    """
    if context.cpu_group is None:
        return shard
    if not context.is_main:
        if len(shard):
            dist.send(shard, 0, group=context.cpu_group)
        return shard
    gathered = shard.new_empty(num_rows, *shard.shape[1:])
    gathered[:: context.world_size] = shard
    for rank in range(1, min(context.world_size, num_rows)):
        received = torch.empty_like(
            gathered[rank :: context.world_size], memory_format=torch.contiguous_format
        )
        dist.recv(received, rank, group=context.cpu_group)
        gathered[rank :: context.world_size] = received
    return gathered


def all_gather_objects(value: T, context: RankContext) -> list[T]:
    """The values of all ranks, which are pickled, in the order of ranks, on every rank."""
    values = [value] * context.world_size
    if context.cpu_group is not None:
        dist.all_gather_object(values, value, group=context.cpu_group)
    return values


def find_differences(values: dict[str, str], context: RankContext) -> dict[str, list[int]]:
    """Names of values that differ from rank 0's, with the ranks where they do; the same result on
    every rank.
    """
    gathered = all_gather_objects(values, context)
    found = {}
    for name in dict.fromkeys(chain(*gathered)):
        ranks = [
            rank for rank, other in enumerate(gathered) if other.get(name) != gathered[0].get(name)
        ]
        if ranks:
            found[name] = ranks
    return found


def broadcast_tensors(tensors: dict[str, Tensor] | None, context: RankContext) -> dict[str, Tensor]:
    """Broadcast rank 0's named CPU tensors, of any shapes and dtypes, in their order, over the CPU
    group.
    """
    if context.cpu_group is None:
        assert tensors is not None
        return tensors
    own = tensors or {}
    listing = run_on_main(
        context, lambda: [(name, tensor.dtype, tensor.shape) for name, tensor in own.items()]
    )
    received = {}
    for name, dtype, shape in listing:
        tensor = own[name].contiguous() if context.is_main else torch.empty(shape, dtype=dtype)
        broadcast_as_bytes(tensor, context.cpu_group)
        received[name] = tensor
    return received


def broadcast_as_bytes(tensor: Tensor, process_group: Any = None) -> None:
    """Broadcast rank 0's contiguous tensor, in place. gloo does not support every dtype, but it
    supports bytes.
    """
    if tensor.numel():
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0, group=process_group)


def run_on_main(
    context: RankContext, action: Callable[[], T], to_send: Callable[[T], Any] | None = None
) -> T:
    """Run `action` on rank 0 and return its result, which is pickled, or raise its UserError, on
    every rank.

    to_send: called with the result; the other ranks get what it returns in place of the result.
    """
    if context.cpu_group is None:
        return action()
    result: Any = None
    outcome: list[Any] = [None, None]
    if context.is_main:
        try:
            result = action()
            outcome[0] = result if to_send is None else to_send(result)
        except UserError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=context.cpu_group)
    if outcome[1] is not None:
        raise mark_printed_by_main(outcome[1], context)
    return result if context.is_main else outcome[0]


def run_on_main_first(context: RankContext, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and then on the other ranks, so that an error of rank 0 (a missing
    file, no network) is raised once, on all ranks.
    """
    result = run_on_main(context, action, to_send=lambda _: None)
    return result if context.is_main else action()


def run_once_per_machine(
    context: RankContext, action: Callable[[], T], key: str, to_send: Callable[[T], T | None]
) -> T:
    """Run `action` on rank 0, whose error is raised on all ranks, and then on the first rank of
    each other machine. The other ranks get the result from the first one of their machine.

    key: names the action; ranks with other keys count as on other machines. to_send: returns what
    is sent, pickled; None to have the other ranks run `action`, too.
    """
    result = run_on_main(context, action, to_send=lambda _: None)
    places = all_gather_objects((socket.gethostname(), key), context)
    here = [rank for rank, place in enumerate(places) if place == places[context.rank]]
    if context.rank != here[0]:
        received: list[Any] = [None]
        dist.recv_object_list(received, here[0], group=context.cpu_group)
        return action() if received[0] is None else received[0]
    if not context.is_main:
        result = action()
    for rank in here[1:]:
        dist.send_object_list([to_send(result)], rank, group=context.cpu_group)
    return result


def mark_printed_by_main(error: UserError, context: RankContext) -> UserError:
    """Mark an error that every rank raises, so that only rank 0 prints it."""
    error.printed_elsewhere = not context.is_main
    return error
