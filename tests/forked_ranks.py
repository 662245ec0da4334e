"""Ranks that are forked from one process, so that torch is imported once for all tests: a test's function on each, or
whole runs of `train.py`.

`ForkedRanks` starts this file as a program of its own, since a test's own process may hold threads by now, which do not
survive a fork. There is no launcher; what it would do for ranks that lost another is done here: a moment of patience,
then SIGKILL.
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
# For ranks whose peer has died, before they are ended, as a launcher does; and for all of it, before it has failed.
PATIENCE_SEC, LIMIT_SEC = 0.5, 90.0


@dataclass(frozen=True)
class KillPoint:
    """Rank `rank` sends itself a signal at the `passing`-th passing of a point of `faults/kill_points.py`."""

    point: str
    passing: int = 1
    rank: int = 0
    signal: int = signal.SIGKILL


class ForkedRanks:
    """The program's other end. To be used as a context manager."""

    def __enter__(self) -> Self:
        paths = ":".join(map(str, (HERE / "faults", HERE / "distributed", HERE, REPOSITORY)))
        self.server = subprocess.Popen(
            [sys.executable, str(HERE / "forked_ranks.py")], env=environment(PYTHONPATH=paths), cwd=REPOSITORY,
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.communicate()

    def run(
        self,
        words: Sequence[str],
        output: Path,
        ranks: int = 1,
        strikes: Sequence[KillPoint] = (),
        *,
        words_of_rank_1: Sequence[str] | None = None,
        **env: str,
    ) -> list[int]:
        """`train.py` with these words on so many ranks; the exit code of each, negative for a signal.

        output: the file that receives what they print. words_of_rank_1: where it was not started as the others were.
        """  # fmt: skip
        words_by_rank = [list(words) for _ in range(ranks)]
        if words_of_rank_1 is not None:
            words_by_rank[1] = list(words_of_rank_1)
        strikes_told = [asdict(strike) for strike in strikes]
        return self._order(output, ranks=ranks, words=words_by_rank, strikes=strikes_told, env=env)

    def call(self, function: Callable[[int, int, Path], None], ranks: int, folder: Path) -> None:
        """Call `function(rank, ranks, folder)`, of a test module, on so many ranks, which meet by themselves (`meet`).

        Fails with all that they printed where one raises.
        """
        output = folder / f"{function.__name__}.txt"
        name = f"{function.__module__}:{function.__name__}"
        codes = self._order(output, ranks=ranks, function=name, folder=str(folder))
        assert codes == [0] * ranks, output.read_text()

    def _order(self, output: Path, **order: Any) -> list[int]:
        assert self.server.stdin and self.server.stdout
        watchdog = Timer(LIMIT_SEC + 60, self.server.kill)  # its import of torch comes first
        watchdog.start()
        try:
            self.server.stdin.write(json.dumps(order | {"output": str(output)}) + "\n")
            self.server.stdin.flush()
            codes = json.loads(self.server.stdout.readline() or "null")
        finally:
            watchdog.cancel()
        assert codes is not None, f"the ranks did not end in {LIMIT_SEC} s; see {output}"
        return codes


def meet(rank: int, world_size: int, store: Path, timeout_sec: float = 30.0):  # type: ignore[no-untyped-def]  # no torch up here
    """The group of `world_size` ranks that meet over the file `store`."""
    import torch

    from imagenet_cls.parallel.environment import RankInfo
    from imagenet_cls.parallel.process_group import init_group

    rank_info = RankInfo(rank, rank, world_size, world_size)
    return init_group(rank_info, torch.device("cpu"), "auto", "gloo", f"file://{store}", timeout_sec)


def part(group) -> None:  # type: ignore[no-untyped-def]
    """Take the group down, when all are done with it."""
    import torch.distributed as dist

    dist.barrier(group=group.control)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- the program


def fork_rank(order: dict[str, Any], rank: int, shared: dict[str, str]) -> int:
    """Returns the process id; the child never comes back."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = call_function(order, rank) if "function" in order else train(order, rank, shared)
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


def train(order: dict[str, Any], rank: int, shared: dict[str, str]) -> int:
    os.environ |= order["env"]
    if order["ranks"] > 1:
        os.environ |= shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    from imagenet_cls.commands.program import main
    from imagenet_cls.commands.train import train_command

    for strike in order["strikes"]:
        if strike["rank"] == rank:
            from kill_points import arm

            arm(strike["point"], strike["passing"], strike["signal"])
    return main(train_command, order["words"][rank])


def codes_of(pids: list[int]) -> list[int]:
    """Wait for all ranks; after the first that fails, for the others only a moment."""
    codes: dict[int, int] = {}
    end = time.monotonic() + LIMIT_SEC
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] != 0:
                    end = min(end, time.monotonic() + PATIENCE_SEC)
        if time.monotonic() > end:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def wait_for_another_second(started_at: float) -> None:
    """TensorBoard's files are ordered by the second, and no real start comes within that of the one before."""
    if int(time.time()) == int(started_at):
        time.sleep(1.0 - time.time() % 1.0)


def main() -> None:
    import kill_points  # noqa: F401  # what a run needs is imported with it, but for what is imported late
    import numpy
    import torch
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import imagenet_cls.parallel.exit  # noqa: F401
    from imagenet_cls.report import plots

    torch.set_num_threads(1)
    plots.draw_batch(numpy.zeros((1, 3, 8, 8), numpy.uint8), ["0"])
    gc.freeze()  # else each fork's collector would copy the pages of all modules
    started_at = 0.0
    for line in sys.stdin:
        order = json.loads(line)
        shared = {}
        if "words" in order:
            wait_for_another_second(started_at)
            started_at = time.time()
            world = str(order["ranks"])
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, **address}
        pids = [fork_rank(order, rank, shared) for rank in range(order["ranks"])]
        print(json.dumps(codes_of(pids)), flush=True)


if __name__ == "__main__":
    main()
