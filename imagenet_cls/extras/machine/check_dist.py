"""`tools/check_dist.py`: check that the ranks can communicate and all-reduce correctly."""

import argparse
import os
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import add_rank_options, run_on_ranks
from imagenet_cls.config.load import LoadedConfig, load_config
from imagenet_cls.errors import ResourceError
from imagenet_cls.parallel.collectives import all_gather_objects, run_on_main
from imagenet_cls.parallel.environment import name_ranks
from imagenet_cls.parallel.process_group import RankContext, check_backend
from imagenet_cls.text import format_columns

# The gradients of a ResNet-18 in float32.
_ELEMENTS = 12_000_000
_REPEATS = 3
_MAX_TIMEOUT_SEC = 60.0  # shorter than a run's


def check_command(argv: Sequence[str]) -> int:
    """Check the ranks of any launcher, or of --gpus N. Returns the exit code."""
    parser = cli.build_parser(
        "check-dist",
        "Join the ranks, compare versions, run an all-reduce. Exit code 0 if all checks "
        "pass, else 5.",
        "[key=value ...] [options]",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="device=cpu, parallel.backend=gloo, ..."
    )
    add_rank_options(parser)
    return run_on_ranks("check-dist", check_command, parser, argv, load_over_gloo, check_ranks)


def load_over_gloo(arguments: argparse.Namespace) -> LoadedConfig:
    """The config for a rendezvous over gloo, whose errors are clear. `check_ranks` uses the
    configured backend later.
    """
    loaded = load_config(None, arguments.overrides)
    timeout_sec = min(loaded.config.parallel.timeout_sec, _MAX_TIMEOUT_SEC)
    parallel = replace(loaded.config.parallel, mode="auto", backend="gloo", timeout_sec=timeout_sec)
    return replace(loaded, config=replace(loaded.config, parallel=parallel))


@dataclass(frozen=True)
class RankReport:
    """A row of the table. gpu: the device's UUID. gb_per_sec: bus bandwidth, 2 (n - 1) / n x bytes
    / time, as in NCCL's tests.
    """

    rank: int
    local_rank: int
    host: str
    device: str
    gpu: str
    interface: str
    torch: str
    python: str
    nccl: str
    sum: str = "-"
    gb_per_sec: str = "-"


def check_ranks(arguments: argparse.Namespace, loaded: LoadedConfig, context: RankContext) -> None:
    """Compare all ranks, all-reduce, and print a table on rank 0. A collective over gloo.

    The configured backend is initialized only if the ranks have no problem: nccl's message for two
    ranks on one GPU is obscure. Raises ResourceError with the problems on every rank, UsageError
    for a missing backend.
    """
    report = describe_rank(context)
    check_reports(context, report)
    if context.world_size == 1:
        print("One rank: there is no all-reduce to check. All checks passed.")
        return
    configured = load_config(None, arguments.overrides).config.parallel.backend
    backend, process_group = new_process_group(
        configured, context, loaded.config.parallel.timeout_sec
    )
    is_right, bandwidth = measure_all_reduce(context, process_group)
    report = replace(report, sum="right" if is_right else "WRONG", gb_per_sec=f"{bandwidth:.2f}")
    check_reports(context, report, show_always=True)
    if context.is_main:
        print(
            f"{context.world_size} ranks over {backend}, {_ELEMENTS * 4 / 1e6:.0f} MB reduced: "
            "all checks passed"
        )


def new_process_group(backend: str, context: RankContext, timeout_sec: float) -> tuple[str, Any]:
    """A further process group of all ranks, whose default group is over gloo. A collective.

    backend: `parallel.backend`. Returns the name of the backend, and the group, None for the
    default one. Raises UsageError for a missing backend.
    """
    check_backend(backend, context.rank_info.launcher)
    if backend == "auto":
        backend = "nccl" if context.device.type == "cuda" else "gloo"
    if backend == "gloo":
        return backend, None
    # Otherwise torch guesses a GPU from the rank.
    device = context.device if backend == "nccl" else None
    timeout = timedelta(seconds=timeout_sec)
    return backend, dist.new_group(backend=backend, timeout=timeout, device_id=device)


def check_reports(context: RankContext, own: RankReport, show_always: bool = False) -> None:
    """Gather the reports, print them on rank 0, and raise ResourceError with their problems on
    every rank.
    """
    reports = all_gather_objects(own, context)

    def show() -> None:
        problems = report_problems(reports)
        if problems or show_always or context.world_size == 1:
            print(table(reports))
        if problems:
            more = f" There are {len(problems) - 2} more problems." if len(problems) > 2 else ""
            raise ResourceError("\n".join(problems[:2]) + more, "Fix this before starting a run.")

    run_on_main(context, show)


def describe_rank(context: RankContext) -> RankReport:
    device, gpu = "cpu", "-"
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        device, gpu = f"{context.device} {properties.name}", str(properties.uuid)
    return RankReport(
        rank=context.rank,
        local_rank=context.rank_info.local_rank,
        host=socket.gethostname(),
        device=device,
        gpu=gpu,
        interface=os.environ.get("GLOO_SOCKET_IFNAME", "-"),
        torch=torch.__version__,
        python=platform.python_version(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "-",
    )


def measure_all_reduce(context: RankContext, process_group: Any) -> tuple[bool, float]:
    """Whether all-reduces over `process_group` (None: the default one) are right in every element,
    and their bus bandwidth in GB/s.
    """
    tensor = torch.empty(_ELEMENTS, device=context.device)
    synchronize = torch.cuda.synchronize if tensor.is_cuda else lambda: None
    seconds = []
    for _ in range(1 + _REPEATS):  # the first one opens connections
        tensor.fill_(context.rank + 1)
        synchronize()
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=process_group)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    expected = context.world_size * (context.world_size + 1) / 2
    moved_bytes = 2 * (context.world_size - 1) / context.world_size * tensor.nbytes
    return bool((tensor == expected).all()), moved_bytes / min(seconds[1:]) / 1e9


def report_problems(reports: Sequence[RankReport]) -> list[str]:
    """A line for each problem of these ranks together."""
    problems = []
    for name in ("torch", "python", "nccl"):
        ranks_of = ranks_by(reports, name)
        if len(ranks_of) > 1:
            listing = "; ".join(
                f"{version} on {name_ranks(ranks)}" for (version,), ranks in ranks_of.items()
            )
            problems.append(f"The ranks have different versions of {name}: {listing}.")
    for (host, _), ranks in ranks_by(
        [report for report in reports if report.gpu != "-"], "host", "gpu"
    ).items():
        if len(ranks) > 1:
            device = next(report.device for report in reports if report.rank == ranks[0])
            problems.append(
                f"On {host}, {name_ranks(ranks)} share one GPU ({device}): give each rank its own."
            )
    wrong = [report.rank for report in reports if report.sum == "WRONG"]
    if wrong:
        problems.append(
            f"An all-reduce gave a wrong sum on {name_ranks(wrong)}: the network or a "
            "device corrupts data."
        )
    return problems


def ranks_by(reports: Sequence[RankReport], *names: str) -> dict[tuple[str, ...], list[int]]:
    """The ranks that report the same, by the values of these fields."""
    found: dict[tuple[str, ...], list[int]] = {}
    for report in reports:
        found.setdefault(tuple(getattr(report, name) for name in names), []).append(report.rank)
    return found


def table(reports: Sequence[RankReport]) -> str:
    """The reports as aligned text, a line for each rank."""
    rows = [list(map(str, astuple(report))) for report in reports]
    return format_columns([[field.name for field in fields(RankReport)], *rows])
