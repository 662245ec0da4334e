"""Ranks forked from one process that has imported torch: a function on each rank, or whole runs of
`train.py`.

`RankServer` uses the fork server of multiprocessing, because a test's process may hold threads,
which do not survive a fork. There is no launcher: once a rank was killed, the server kills the
others.
"""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from helpers import REPOSITORY, environment, free_port, python_path

HERE = Path(__file__).parent
# How long ranks may run after another rank was killed or a function raised, after `train.py` failed
# on another rank, and in all. The latter two only end what hangs.
KILLED_SEC, FAILED_SEC, TIMEOUT_SEC = 0.5, 240.0, 480.0


@dataclass(frozen=True)
class KillPoint:
    """Rank `rank` sends itself a signal when it passes a point of `faults/kill_points.py` for the
    `passing`-th time.
    """

    point: str
    passing: int = 1
    rank: int = 0
    signal: int = signal.SIGKILL


class RankServer:
    """Starts ranks from a fork server that has imported torch and most of what a run needs."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            [
                "kill_points",
                "torch.utils.tensorboard",
                "imagenet_cls.commands.train",
                "imagenet_cls.parallel.wrap",
            ]
        )
        self.started_at = 0.0
        paths = python_path(HERE / "faults", HERE / "distributed", HERE, REPOSITORY)
        with patch.dict(os.environ, environment(PYTHONPATH=paths), clear=True):
            forkserver.ensure_running()

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
        """Run `train.py` on `ranks` ranks. Returns the exit code of each rank, negative for a
        signal.

        output: the file that receives stdout and stderr. arguments_of_rank_1: where rank 1 gets
        other arguments.
        """
        # TensorBoard orders its files by the second of their start
        if int(time.time()) == int(self.started_at):
            time.sleep(1.0 - time.time() % 1.0)
        self.started_at = time.time()
        if ranks > 1:
            env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        calls: list[tuple[Any, ...]] = []
        for rank in range(ranks):
            words = (
                arguments_of_rank_1 if rank == 1 and arguments_of_rank_1 is not None else arguments
            )
            own_env = env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
            calls.append(
                (train, list(words), [kill for kill in kills if kill.rank == rank], own_env)
            )
        return self._start(output, calls, FAILED_SEC)

    def train(self, arguments: Sequence[str], ranks: int) -> str:
        """Run `train.py` on `ranks` ranks. Returns their output; fails if a rank does."""
        with tempfile.NamedTemporaryFile("r") as output:
            codes = self.run(arguments, Path(output.name), ranks)
            printed = output.read()
        assert codes == [0] * ranks, printed
        return printed

    def call(self, function: Callable[[int, int, Path], None], ranks: int, folder: Path) -> None:
        """Call `function(rank, ranks, folder)` of a test module on each rank; fails with their
        output if one raises.

        The function creates the process groups itself (`join_ranks`).
        """
        output = folder / f"{function.__name__}.txt"
        codes = self._start(
            output, [(function, rank, ranks, folder) for rank in range(ranks)], KILLED_SEC
        )
        assert codes == [0] * ranks, output.read_text()

    def _start(
        self, output: Path, calls: Sequence[tuple[Any, ...]], failed_sec: float
    ) -> list[int]:
        """Call a function on each rank. Returns the exit codes. Kills ranks that outlive a failure
        or a timeout.
        """
        ranks = [self.context.Process(target=run_rank, args=(output, *call)) for call in calls]
        for rank in ranks:
            rank.start()
        running, end = ranks, time.monotonic() + TIMEOUT_SEC
        while running:
            connection.wait([rank.sentinel for rank in running], max(0.01, end - time.monotonic()))
            for rank in running:
                if rank.exitcode:
                    end = min(
                        end, time.monotonic() + (KILLED_SEC if rank.exitcode < 0 else failed_sec)
                    )
                elif rank.exitcode is None and time.monotonic() > end:
                    rank.kill()
            running = [rank for rank in running if rank.exitcode is None]
        return [rank.exitcode or 0 for rank in ranks]


def run_rank(output: Path, function: Callable[..., int | None], *args: Any) -> NoReturn:
    """Call the function in this process, with its output in a file. Exits with what it returns, or
    1 if it raises.
    """
    gc.freeze()  # otherwise the collector copies the pages of all modules
    os.chdir(REPOSITORY)
    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = function(*args) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def train(arguments: list[str], kills: Sequence[KillPoint], env: dict[str, str]) -> int:
    """Run `train.py` in this process, in the working directory PWD. Returns its exit code."""
    os.environ |= env
    os.chdir(env.get("PWD", REPOSITORY))
    from kill_points import arm

    from imagenet_cls.commands.cli import main
    from imagenet_cls.commands.train import train_command

    for kill in kills:
        arm(kill.point, kill.passing, kill.signal)
    return main(train_command, arguments)


def join_ranks(rank: int, world_size: int, store: Path, timeout_sec: float = 240.0) -> Any:
    """Returns the RankContext of one of `world_size` ranks that meet at the file `store`."""
    import torch

    from imagenet_cls.parallel.environment import RankInfo
    from imagenet_cls.parallel.process_group import init_process_groups

    rank_info = RankInfo(rank, rank, world_size, world_size)
    return init_process_groups(
        rank_info, torch.device("cpu"), "auto", "gloo", f"file://{store}", timeout_sec
    )


def destroy_process_groups(context) -> None:
    """Destroy the process groups once all ranks are done."""
    import torch.distributed as dist

    dist.barrier(group=context.cpu_group)
    dist.destroy_process_group()
