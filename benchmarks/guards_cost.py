"""Cost of the guards of a training step, each measured alone: `python benchmarks/guards_cost.py`.

On the CPU, with the tensors of a ResNet-50 and two gloo ranks for collectives. Each row is the median over blocks of
calls; the cost of rarer calls is divided by the steps between them. The sum is relative to a step of 100 ms, about that
of a GPU with 256 images.
"""

import argparse
import multiprocessing
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import timm
import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import Progress, Snapshot
from imagenet_cls.checkpoint.saver import CheckpointSaver
from imagenet_cls.config.schema import CheckpointConfig, LogConfig, ParallelConfig
from imagenet_cls.engine.meter import Meter
from imagenet_cls.guards.agreement import digest_of_sources
from imagenet_cls.guards.heartbeat import Heartbeat, Member
from imagenet_cls.guards.nonfinite import NonFiniteGuard
from imagenet_cls.guards.replicas import ReplicaCheck, replicated_tensors, tensor_hashes
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group, init_group
from imagenet_cls.parallel.signals import StopSignalHandler
from imagenet_cls.parallel.wrap import BatchNormStatistics
from imagenet_cls.seeding import hash_key, seed_generators

CPU = torch.device("cpu")
STEP_SEC = 0.1
# Between two stop requests: shorter than any step, but long enough for the all-reduce.
PAUSE_SEC = 0.005
# A job on one machine.
HEARTBEAT_RANKS = 8


class Row(NamedTuple):
    """calls: measured. a_step: calls per step."""

    guard: str
    calls: int
    call_sec: float
    a_step: float
    note: str = ""

    @property
    def step_sec(self) -> float:
        return self.call_sec * self.a_step


def measured(action: Callable[[], object], calls: int) -> float:
    """Seconds of a call: the median of up to 100 blocks of calls, since something else may run on the machine."""
    action()
    blocks = min(100, calls)
    seconds = []
    for _ in range(blocks):
        begin = time.perf_counter()
        for _ in range(calls // blocks):
            action()
        seconds.append((time.perf_counter() - begin) / (calls // blocks))
    return median(seconds)


def resnet50() -> tuple[nn.Module, torch.optim.Optimizer]:
    """With gradients and, after one step, momentum."""
    torch.manual_seed(0)
    model = timm.create_model("resnet50").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def on_one_rank(calls: int) -> Iterator[Row]:
    group = Group(RankInfo(), CPU)
    model, optimizer = resnet50()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)

    def key_of_a_micro_batch() -> None:
        seed_generators(hash_key("batch", 0, 12345, 0, 0), CPU)

    def finite() -> Tensor:
        return (~torch.isfinite(norm)).float()

    yield Row("key of the random draws of a micro-batch", calls, measured(key_of_a_micro_batch, calls), 1)
    yield Row("check that the norm is finite", calls, measured(finite, calls), 1)
    few = max(3, calls // 100)
    yield Row("norm of the gradient", few, measured(lambda: nn.utils.get_total_norm(gradients), few), 1, _NORM)
    statistics, skipped = BatchNormStatistics(model, group), torch.tensor(False)
    yield Row("BatchNorm's running statistics", calls, measured(lambda: statistics.sync(skipped), calls), 1)
    meter, nonfinite = Meter(group, 256), NonFiniteGuard(group, 10, 1000)
    every = LogConfig().every_steps
    loss_and_top1 = torch.tensor([1.0, 0.5])
    yield Row(
        "meter: add a step", calls, measured(lambda: meter.add(1, 0, 0.1, loss_and_top1, norm, skipped), calls), 1
    )

    def look() -> None:
        meter.rows, meter.values = [(1, 0, 0.1)] * every, values
        records = meter.flush()
        nonfinite.count_and_describe(records)
        nonfinite.check(records, meter.own_losses)

    values = meter.values[:every]
    yield Row(f"meter: read {every} steps", calls, measured(look, calls), 1 / every)
    batches = meter.time_waiting(iter(lambda: 0, 1))
    yield Row("meter: data wait", calls, measured(lambda: next(batches), calls), 1)
    saver = CheckpointSaver(
        Path("none"), CheckpointConfig(), False, Progress(), lambda: Snapshot({}, {}, {}, {}), lambda: None, print
    )
    yield Row("check for a failed save", calls, measured(saver.check, calls), 1)
    every = ParallelConfig().check_every_steps or 0
    drift = ReplicaCheck(group, every, 0, dict)
    yield Row("check whether a comparison is due", calls, measured(lambda: drift.check_if_due(1), calls), 1)
    held = replicated_tensors(model, timm.create_model("resnet50"), optimizer.state)
    few = max(3, calls // 500)
    yield Row("hash of weights, EMA and momentum", few, measured(lambda: tensor_hashes(held), few), 1 / every, _HASH)


def heartbeats(calls: int) -> Row:
    """Send to and receive from every other rank once a second."""
    ours, theirs = Heartbeat(0, "127.0.0.1", 600.0), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    theirs.bind(("127.0.0.1", 0))
    address = ("127.0.0.1", theirs.getsockname()[1])
    ours._run = b"8 bytes."
    ours._others = {1: Member(1, "host", "127.0.0.1", address[1], 1)}
    ours._addresses = [address]
    theirs.connect(("127.0.0.1", ours.me.port))

    def send_and_receive() -> None:
        ours._send(0)
        theirs.send(theirs.recv(64)[:8] + (1).to_bytes(4, "big") + b"\0")
        ours._note(ours._socket.recv(64))

    sec = measured(send_and_receive, calls)
    theirs.close()
    return Row("heartbeat to and from a rank", calls, sec, (HEARTBEAT_RANKS - 1) * STEP_SEC, _BEAT)


def on_two_ranks(rank: int, folder: str, calls: int) -> None:
    """A rank's part of the collectives: the stop request and the comparison of replicas."""
    torch.set_num_threads(1)
    group = init_group(RankInfo(rank, rank, 2, 2), CPU, "auto", "gloo", f"file://{folder}/store", 60.0)
    stop = StopSignalHandler(group)
    sec = measured(stop.check, calls)
    stop.close()

    paused, spent = StopSignalHandler(group), []
    for _ in range(calls):
        time.sleep(PAUSE_SEC)
        begin = time.perf_counter()
        paused.check()
        spent.append(time.perf_counter() - begin)
    paused.close()
    check = ReplicaCheck(group, 1, 0, lambda: {"one": torch.ones(1)})
    steps = iter(range(1, 10**9))
    compare = measured(lambda: check.check(next(steps)), calls)
    if rank == 0:
        lines = [sec, median(spent), compare]
        Path(folder, "seconds").write_text(" ".join(map(str, lines)))
    os._exit(0)


def between_ranks(calls: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=on_two_ranks, args=(rank, folder, calls)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        back_to_back, with_time, compare = map(float, Path(folder, "seconds").read_text().split())
    yield Row("stop request, all-reduced", calls, with_time, 1, _FLAG.format(back_to_back * 1e6))
    yield Row("comparison of replicas between ranks", calls, compare, 1 / (ParallelConfig().check_every_steps or 1))


_NORM = "on one CPU core, 102 MB read. Not in the sum: it is reported as `grad_norm`"
_HASH = "on one CPU core, 307 MB read"
_BEAT = f"both directions, with {HEARTBEAT_RANKS} ranks, in a background thread"
_FLAG = f"{PAUSE_SEC * 1e3:.0f} ms after the previous one" + "; without a pause {:.0f} us"


def table(rows: list[Row]) -> str:
    lines = ["| guard | calls | us per call | us per step | |", "|---|---:|---:|---:|---|"]
    lines += [
        f"| {row.guard} | {row.calls} | {row.call_sec * 1e6:.1f} | {row.step_sec * 1e6:.1f} | {row.note} |"
        for row in rows
    ]
    total = sum(row.step_sec for row in rows if row.note is not _NORM)
    lines.append(f"| sum | | | {total * 1e6:.0f} | {100 * total / STEP_SEC:.2f} % of {STEP_SEC * 1e3:.0f} ms |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="of each guard; of those on whole models fewer")
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    rows = [*between_ranks(calls), heartbeats(calls), *on_one_rank(calls)]
    print(f"torch {torch.__version__}, timm {timm.__version__}, Python {platform.python_version()}, one thread\n")
    print(table(rows))
    package = Path(__file__).resolve().parents[1] / "imagenet_cls"
    begin = time.perf_counter()
    digest_of_sources(package)
    print(f"\nonce, at the start: digest of the source files {1e3 * (time.perf_counter() - begin):.0f} ms")


if __name__ == "__main__":
    main()
