"""`tools/check_dist.py`: check before a long run that the ranks can communicate and all-reduce correctly."""

import argparse
import os
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import RankCommand, add_rank_options, join_group, run_command
from imagenet_cls.config.load import LoadedConfig, load_config
from imagenet_cls.errors import ResourceError
from imagenet_cls.parallel.collectives import gather_on_all, mark_printed_by_main
from imagenet_cls.parallel.environment import RankInfo, name_ranks
from imagenet_cls.parallel.process_group import Group, bound_device, check_backend

# The gradients of a ResNet-18 in float32.
_ELEMENTS = 12_000_000
_REPEATS = 3
_MAX_TIMEOUT_SEC = 60.0  # shorter than a run's


def check_command(argv: Sequence[str]) -> int:
    """Check the ranks of any launcher, or of --gpus N. Returns the exit code."""
    checks = (load_for_check, check_nothing, check_nothing)
    return run_command(
        RankCommand("check-dist", check_parser, *checks, check_ranks, join_over_gloo), argv
    )


def check_parser() -> argparse.ArgumentParser:
    description = "Join the ranks, compare versions, run an all-reduce. Exit code 0 if all checks pass, else 5."
    parser = cli.build_parser("check-dist", description, "[key=value ...] [options]")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="device=cpu, parallel.backend=gloo, ..."
    )
    add_rank_options(parser)
    return parser


def load_for_check(arguments: argparse.Namespace) -> LoadedConfig:
    return load_config(None, arguments.overrides)


def check_nothing(*_: object) -> None:
    """No checks in the launching process: this command trains nothing."""


def join_over_gloo(loaded: LoadedConfig, rank_info: RankInfo) -> Group:
    """Rendezvous over gloo, whose errors are clear; `check_ranks` uses the configured backend later."""
    timeout_sec = min(loaded.config.parallel.timeout_sec, _MAX_TIMEOUT_SEC)
    parallel = replace(loaded.config.parallel, mode="auto", backend="gloo", timeout_sec=timeout_sec)
    return join_group(replace(loaded, config=replace(loaded.config, parallel=parallel)), rank_info)


@dataclass(frozen=True)
class RankReport:
    """A row of the table. gpu: the device's UUID. gb_per_sec: bus bandwidth, 2 (n - 1) / n x bytes / time, as in NCCL's
    tests."""

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


def check_ranks(arguments: argparse.Namespace, loaded: LoadedConfig, group: Group) -> None:
    """Compare all ranks, all-reduce, and print a table on rank 0. A collective over gloo.

    The configured backend is initialized only if the ranks have no problem: nccl's message for two ranks on one GPU is
    obscure. Raises ResourceError with the problems on every rank, UsageError for a missing backend.
    """
    backend: str = loaded.config.parallel.backend
    check_backend(backend, group.rank_info.launcher)
    backend = {"auto": "nccl" if group.device.type == "cuda" else "gloo"}.get(backend, backend)
    report = describe_rank(group)
    raise_problems(group, report)
    if group.world_size == 1:
        print("one rank: no all-reduce to check; all checks passed")
        return
    device_id = bound_device(backend, group.device)
    over = dist.new_group(backend=backend, device_id=device_id) if backend != "gloo" else None
    is_right, bandwidth = measure_all_reduce(group, over)
    report = replace(report, sum="right" if is_right else "WRONG", gb_per_sec=f"{bandwidth:.2f}")
    raise_problems(group, report, show_always=True)
    if group.is_main:
        print(
            f"{group.world_size} ranks over {backend}, {_ELEMENTS * 4 / 1e6:.0f} MB reduced: all checks passed"
        )


def raise_problems(group: Group, own: RankReport, show_always: bool = False) -> None:
    """Gather the reports, print them on rank 0, and raise ResourceError with their problems on every rank."""
    reports = gather_on_all(own, group)
    problems = rank_problems(reports)
    if group.is_main and (problems or show_always or group.world_size == 1):
        print(table(reports))
    if problems:
        more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
        error = ResourceError("\n".join(problems[:2]) + more + "\nFix this before starting a run.")
        raise mark_printed_by_main(error, group)


def describe_rank(group: Group) -> RankReport:
    device, gpu = "cpu", "-"
    if group.device.type == "cuda":
        properties = torch.cuda.get_device_properties(group.device)
        device, gpu = f"{group.device} {properties.name}", str(properties.uuid)
    return RankReport(
        rank=group.rank,
        local_rank=group.rank_info.local_rank,
        host=socket.gethostname(),
        device=device,
        gpu=gpu,
        interface=os.environ.get("GLOO_SOCKET_IFNAME", "-"),
        torch=torch.__version__,
        python=platform.python_version(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "-",
    )


def measure_all_reduce(group: Group, over: Any) -> tuple[bool, float]:
    """(whether every element is right, bus bandwidth in GB/s) of all-reduces over process group `over`."""
    tensor = torch.empty(_ELEMENTS, device=group.device)
    synchronize = torch.cuda.synchronize if tensor.is_cuda else lambda: None
    seconds = []
    for _ in range(1 + _REPEATS):  # the first one opens connections
        tensor.fill_(group.rank + 1)
        synchronize()
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=over)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    expected = group.world_size * (group.world_size + 1) / 2
    moved_bytes = 2 * (group.world_size - 1) / group.world_size * tensor.nbytes
    return bool((tensor == expected).all()), moved_bytes / min(seconds[1:]) / 1e9


def rank_problems(reports: Sequence[RankReport]) -> list[str]:
    """A line for each problem of these ranks together."""
    problems = []
    for name in ("torch", "python", "nccl"):
        ranks_of = ranks_by(reports, name)
        if len(ranks_of) > 1:
            listing = "; ".join(
                f"{version} on {name_ranks(ranks)}" for (version,), ranks in ranks_of.items()
            )
            problems.append(f"different versions of {name}: {listing}")
    for (host, _), ranks in ranks_by(
        [report for report in reports if report.gpu != "-"], "host", "gpu"
    ).items():
        if len(ranks) > 1:
            device = next(report.device for report in reports if report.rank == ranks[0])
            problems.append(
                f"{name_ranks(ranks)} share one GPU of {host} ({device}): give each rank its own"
            )
    wrong = [report.rank for report in reports if report.sum == "WRONG"]
    if wrong:
        problems.append(
            f"an all-reduce gave a wrong sum on {name_ranks(wrong)}: the network or a device corrupts data"
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
    return cli.aligned([[field.name for field in fields(RankReport)], *rows])
