"""Ranks forked from one process that has imported torch: a function on each rank, or whole runs of `train.py`.

`RankServer` starts this file as a separate program, because a test's process may hold threads, which do not survive a
fork. There is no launcher: once a rank was killed, the server kills the others.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import Any, Self

from helpers import REPOSITORY, environment, free_port

HERE = Path(__file__).parent
# How long ranks may run after another rank was killed or a function raised, after `train.py` failed on another rank,
# and in all. The latter two only end what hangs.
KILLED_SEC, FAILED_SEC, TIMEOUT_SEC = 0.5, 120.0, 300.0


@dataclass(frozen=True)
class KillPoint:
    """Rank `rank` sends itself a signal when it passes a point of `faults/kill_points.py` for the `passing`-th time."""

    point: str
    passing: int = 1
    rank: int = 0
    signal: int = signal.SIGKILL


class RankServer:
    """The client of the server process; a context manager."""

    def __enter__(self) -> Self:
        paths = ":".join(map(str, (HERE / "faults", HERE / "distributed", HERE, REPOSITORY)))
        command = [sys.executable, str(HERE / "forked_ranks.py")]
        self.server = subprocess.Popen(
            command, env=environment(PYTHONPATH=paths), cwd=REPOSITORY, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.communicate()

    def run(
        self,
        arguments: Sequence[str],
        output: Path,
        ranks: int = 1,
        kills: Sequence[KillPoint] = (),
        *,
        arguments_of_rank_1: Sequence[str] | None = None,
        **env: str,
    ) -> list[int]:
        """Run `train.py` on `ranks` ranks. Returns the exit code of each rank, negative for a signal.

        output: the file that receives stdout and stderr. arguments_of_rank_1: where rank 1 gets other arguments.
        """
        by_rank = [list(arguments) for _ in range(ranks)]
        if arguments_of_rank_1 is not None:
            by_rank[1] = list(arguments_of_rank_1)
        return self._order(output, ranks=ranks, arguments=by_rank, kills=[asdict(kill) for kill in kills], env=env)

    def call(self, function: Callable[[int, int, Path], None], ranks: int, folder: Path) -> None:
        """Call `function(rank, ranks, folder)` of a test module on each rank; fails with their output if one raises.

        The function creates the process group itself (`join_group`).
        """
        output = folder / f"{function.__name__}.txt"
        name = f"{function.__module__}:{function.__name__}"
        codes = self._order(output, ranks=ranks, function=name, folder=str(folder))
        assert codes == [0] * ranks, output.read_text()

    def _order(self, output: Path, **order: Any) -> list[int]:
        assert self.server.stdin and self.server.stdout
        watchdog = Timer(2 * TIMEOUT_SEC, self.server.kill)  # the first order waits for the import of torch, too
        watchdog.start()
        try:
            self.server.stdin.write(json.dumps(order | {"output": str(output)}) + "\n")
            self.server.stdin.flush()
            codes = json.loads(self.server.stdout.readline() or "null")
        finally:
            watchdog.cancel()
        assert codes is not None, f"the rank server died or hangs; see {output}"
        return codes


def join_group(rank: int, world_size: int, store: Path, timeout_sec: float = 60.0):  # type: ignore[no-untyped-def]  # no torch up here
    """Returns the Group of `world_size` ranks that rendezvous over the file `store`."""
    import torch

    from imagenet_cls.parallel.environment import RankInfo
    from imagenet_cls.parallel.process_group import init_group

    rank_info = RankInfo(rank, rank, world_size, world_size)
    return init_group(rank_info, torch.device("cpu"), "auto", "gloo", f"file://{store}", timeout_sec)


def destroy_group(group) -> None:  # type: ignore[no-untyped-def]
    """Destroy the process groups once all ranks are done."""
    import torch.distributed as dist

    dist.barrier(group=group.control)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- the server


def fork_rank(order: dict[str, Any], rank: int, env: dict[str, str]) -> int:
    """Returns the process id; the child never returns."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = call_function(order, rank) if "function" in order else train(order, rank, env)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def call_function(order: dict[str, Any], rank: int) -> int:
    module, name = order["function"].split(":")
    getattr(import_module(module), name)(rank, order["ranks"], Path(order["folder"]))
    return 0


def train(order: dict[str, Any], rank: int, env: dict[str, str]) -> int:
    os.environ |= order["env"]
    if order["ranks"] > 1:
        os.environ |= env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    from imagenet_cls.commands.program import main
    from imagenet_cls.commands.train import train_command

    for kill in order["kills"]:
        if kill["rank"] == rank:
            from kill_points import arm

            arm(kill["point"], kill["passing"], kill["signal"])
    return main(train_command, order["arguments"][rank])


def wait_for_ranks(pids: list[int], failed_sec: float) -> list[int]:
    """Returns the exit codes. Ranks that still run `failed_sec` after one failed are killed."""
    codes: dict[int, int] = {}
    end = time.monotonic() + TIMEOUT_SEC
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] != 0:
                    end = min(end, time.monotonic() + (KILLED_SEC if codes[pid] < 0 else failed_sec))
        if time.monotonic() > end:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def wait_for_another_second(started_at: float) -> None:
    """TensorBoard orders its files by the second: two starts must not share one."""
    if int(time.time()) == int(started_at):
        time.sleep(1.0 - time.time() % 1.0)


def main() -> None:
    import kill_points  # noqa: F401  # imports most of what a run needs
    import numpy
    import torch
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import imagenet_cls.parallel.exit  # noqa: F401
    from imagenet_cls.report import plots

    torch.set_num_threads(1)
    plots.draw_batch(numpy.zeros((1, 3, 8, 8), numpy.uint8), ["0"])
    gc.freeze()  # otherwise each fork's collector copies the pages of all modules
    started_at = 0.0
    for line in sys.stdin:
        order = json.loads(line)
        env = {}
        if "arguments" in order:
            wait_for_another_second(started_at)
            started_at = time.time()
            world = str(order["ranks"])
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            env = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, **address}
        pids = [fork_rank(order, rank, env) for rank in range(order["ranks"])]
        failed_sec = FAILED_SEC if "arguments" in order else KILLED_SEC
        print(json.dumps(wait_for_ranks(pids, failed_sec)), flush=True)


if __name__ == "__main__":
    main()
