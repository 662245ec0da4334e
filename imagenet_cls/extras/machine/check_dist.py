"""`tools/check_dist.py`: check that the ranks can communicate and all-reduce correctly."""

import argparse
import socket
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import add_rank_options, run_on_ranks
from imagenet_cls.config.load import LoadedConfig, load_config
from imagenet_cls.errors import ResourceError
from imagenet_cls.guards.agreement import check_same_code
from imagenet_cls.parallel.collectives import all_gather_objects, run_on_main
from imagenet_cls.parallel.environment import name_ranks
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.text import format_columns

# The gradients of a ResNet-18 in float32.
_ELEMENTS = 12_000_000
_REPEATS = 3
_TIMEOUT = "parallel.timeout_sec=60"  # shorter than a run's


def check_command(argv: Sequence[str]) -> int:
    """Check the ranks of any launcher, or of --gpus N. Returns the exit code."""
    parser = cli.build_parser(
        "check-dist",
        "Join the ranks, compare their code and libraries, run an all-reduce. Exit code 0 if all "
        "checks pass.",
        "[key=value ...] [options]",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="device=cpu, parallel.backend=gloo, ..."
    )
    add_rank_options(parser)

    def load(arguments: argparse.Namespace) -> LoadedConfig:
        return load_config(None, [_TIMEOUT, *arguments.overrides])

    return run_on_ranks("check-dist", check_command, parser, argv, load, check_ranks)


def check_ranks(arguments: argparse.Namespace, loaded: LoadedConfig, context: RankContext) -> None:
    """Compare all ranks, all-reduce, and print a table on rank 0. A collective.

    Raises UsageError for ranks with other code or libraries, and ResourceError for a wrong sum, on
    every rank.
    """
    check_same_code(loaded.config, context, training=False)
    is_right, bandwidth = measure_all_reduce(context)
    total = "right" if is_right else "WRONG"
    row = [f"{context.rank}", socket.gethostname(), f"{context.device}", total, f"{bandwidth:.2f}"]
    rows = all_gather_objects(row, context)

    def show() -> None:
        print(format_columns([["rank", "host", "device", "sum", "gb_per_sec"], *rows]))
        wrong = [rank for rank, (*_, result, _) in enumerate(rows) if result == "WRONG"]
        if wrong:
            raise ResourceError(
                f"An all-reduce of {_ELEMENTS * 4 / 1e6:.0f} MB gave a wrong sum on "
                f"{name_ranks(wrong)}.",
                "The network or a device corrupts data: repair it before starting a run.",
            )
        print("all checks passed")

    run_on_main(context, show)


def measure_all_reduce(context: RankContext) -> tuple[bool, float]:
    """Whether all-reduces are right in every element, and their bus bandwidth in GB/s:
    2 (n - 1) / n x bytes / time, as in NCCL's tests. A single rank has none.
    """
    if context.world_size == 1:
        return True, 0.0
    tensor = torch.empty(_ELEMENTS, device=context.device)
    synchronize = torch.cuda.synchronize if tensor.is_cuda else lambda: None
    seconds = []
    for _ in range(1 + _REPEATS):  # the first one opens connections
        tensor.fill_(context.rank + 1)
        synchronize()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    expected = context.world_size * (context.world_size + 1) / 2
    moved_bytes = 2 * (context.world_size - 1) / context.world_size * tensor.nbytes
    return bool((tensor == expected).all()), moved_bytes / min(seconds[1:]) / 1e9
