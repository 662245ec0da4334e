"""Do the ranks find each other, and does what they exchange arrive? Asked before a long run is started.

Owns the look at each rank (`look`), what is wrong with all of them together (`find_problems`), and the table. Refuses
to start ranks and to know configs. Called by `tools/check_dist.py`.
"""

import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from imagenet_cls.errors import ResourceError
from imagenet_cls.parallel.collectives import gather_to_main
from imagenet_cls.parallel.process_group import Group, check_backend, run_on_main

# What is summed: as much as the gradients of a ResNet-18, in float32.
_ELEMENTS = 12_000_000
_REPEATS = 3


@dataclass(frozen=True)
class RankReport:
    """What one rank is and saw. gpu: the device's UUID, "" on a CPU.

    sum_is_right: whether every element of the all-reduce had the value that it must have. bandwidth_gb_per_sec: bus
    bandwidth, 2 (n - 1) / n x bytes / time, as NCCL's own tests count it. Both None where nothing was reduced.
    """

    rank: int
    local_rank: int
    world_size: int
    host: str
    device: str
    gpu: str
    interface: str
    torch: str
    python: str
    nccl: str
    sum_is_right: bool | None = None
    bandwidth_gb_per_sec: float | None = None


def check_ranks(group: Group, backend: str, say: Callable[[str], None] = print) -> None:
    """Look at all ranks, let them reduce once, and show a table on rank 0. A collective: every rank calls it.

    group: ranks that met over gloo, whatever the run will use. backend: `auto`, `nccl`, `gloo` or `mpi`: what the run
    reduces over. It is started only where the ranks are in order, since nccl's own words for two ranks on one GPU help
    nobody. Raises UsageError for a transport that isn't there, and ResourceError, on every rank, with what is wrong.
    """
    check_backend(backend, group.rank_info.launcher)
    backend = {"auto": "nccl" if group.device.type == "cuda" else "gloo"}.get(backend, backend)
    report = look(group)
    on_main_raise(group, [report], say)
    if group.world_size == 1:
        if group.is_main:
            say("one rank alone has nobody to talk to; all is well")
        return
    over = dist.new_group(backend=backend) if backend != "gloo" else None
    right, bandwidth = all_reduce(group, over)
    measured = RankReport(**(vars(report) | {"sum_is_right": right, "bandwidth_gb_per_sec": bandwidth}))
    on_main_raise(group, [measured], say, show_always=True)
    if group.is_main:
        say(f"{group.world_size} ranks over {backend}, {_ELEMENTS * 4 / 1e6:.0f} MB reduced: all is well")


def on_main_raise(group: Group, own: list[RankReport], say: Callable[[str], None], show_always: bool = False) -> None:
    """Bring the reports together on rank 0, show them, and raise on every rank what is wrong with them."""
    reports = gather_to_main(own, group)

    def judge() -> None:
        problems = find_problems(reports)
        if problems or show_always or group.world_size == 1:
            say(table(reports))
        if problems:
            more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
            raise ResourceError("\n".join(problems[:2]) + more + "\nPut this right before a run is started.")

    run_on_main(group, judge)


def look(group: Group) -> RankReport:
    """What this rank knows of itself."""
    device, gpu = "cpu", ""
    if group.device.type == "cuda":
        properties = torch.cuda.get_device_properties(group.device)
        device, gpu = f"{group.device} {properties.name}", str(properties.uuid)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "-"
    return RankReport(
        rank=group.rank,
        local_rank=group.rank_info.local_rank,
        world_size=group.world_size,
        host=socket.gethostname(),
        device=device,
        gpu=gpu,
        interface=os.environ.get("GLOO_SOCKET_IFNAME", "-"),
        torch=torch.__version__,
        python=platform.python_version(),
        nccl=nccl,
    )


def all_reduce(group: Group, over: Any) -> tuple[bool, float]:
    """(is every element what it must be, bus bandwidth in GB/s) of all-reduces over a process group."""
    tensor = torch.empty(_ELEMENTS, device=group.device)
    seconds = []
    for _ in range(1 + _REPEATS):  # the first one connects
        tensor.fill_(group.rank + 1)
        _wait_for_device(group)
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=over)
        _wait_for_device(group)
        seconds.append(time.perf_counter() - begin)
    expected = group.world_size * (group.world_size + 1) / 2
    travelled = 2 * (group.world_size - 1) / group.world_size * tensor.nbytes
    return bool((tensor == expected).all()), travelled / min(seconds[1:]) / 1e9


def _wait_for_device(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


def find_problems(reports: Sequence[RankReport]) -> list[str]:
    """A line for each thing that is wrong with these ranks together."""
    problems = []
    for name in ("torch", "python", "nccl"):
        ranks_of: dict[str, list[int]] = {}
        for report in reports:
            ranks_of.setdefault(getattr(report, name), []).append(report.rank)
        if len(ranks_of) > 1:
            listing = "; ".join(f"{version} on {_ranks(ranks)}" for version, ranks in ranks_of.items())
            problems.append(f"different versions of {name}: {listing}")
    ranks_on: dict[tuple[str, str], list[int]] = {}
    for report in reports:
        if report.gpu:
            ranks_on.setdefault((report.host, report.gpu), []).append(report.rank)
    for (host, _), ranks in ranks_on.items():
        if len(ranks) > 1:
            device = next(report.device for report in reports if report.rank == ranks[0])
            problems.append(f"{_ranks(ranks)} share one GPU of {host} ({device}): give each rank its own")
    wrong = [report.rank for report in reports if report.sum_is_right is False]
    if wrong:
        problems.append(f"an all-reduce gave a wrong sum on {_ranks(wrong)}: the network or a device damages data")
    return problems


def _ranks(numbers: Sequence[int]) -> str:
    listing = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {listing}"


def table(reports: Sequence[RankReport]) -> str:
    """The reports as aligned text, a line for each rank."""
    titles = ["rank", "local", "of", "host", "device", "interface", "torch", "python", "nccl", "sum", "GB/s"]
    rows = [titles]
    for r in sorted(reports, key=lambda report: report.rank):
        right = {None: "-", True: "right", False: "WRONG"}[r.sum_is_right]
        speed = "-" if r.bandwidth_gb_per_sec is None else f"{r.bandwidth_gb_per_sec:.2f}"
        numbers = [str(r.rank), str(r.local_rank), str(r.world_size)]
        rows.append([*numbers, r.host, r.device, r.interface, r.torch, r.python, r.nccl, right, speed])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
