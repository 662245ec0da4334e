"""Whole runs of `train.py`, one after the other, on ranks that are forked from one process: torch is imported once.

`ForkedRuns` starts this file as a program of its own, since a test's own process may hold threads by now, which do not
survive a fork. Each rank carries out the real command, to the end of its process. There is no launcher; what it would
do for ranks that lost another is done here: a moment of patience, then SIGKILL.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from typing import Any, Self

from bed import REPOSITORY, environment, free_port

# For ranks whose peer has died, before they are ended, as a launcher does; and for a whole run, before it has failed.
PATIENCE_SEC, LIMIT_SEC = 0.5, 60.0


@dataclass(frozen=True)
class Strike:
    """Rank `rank` sends itself a signal at the `passing`-th passing of a point of `kill_points`."""

    point: str
    passing: int = 1
    rank: int = 0
    signal: int = signal.SIGKILL


class ForkedRuns:
    """The program's other end. To be used as a context manager."""

    def __enter__(self) -> Self:
        here = Path(__file__)
        paths = f"{here.parent}:{here.parents[1]}:{REPOSITORY}"
        self.server = subprocess.Popen(
            [sys.executable, str(here)], env=environment(PYTHONPATH=paths), cwd=REPOSITORY, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.communicate()

    def run(
        self, words: Sequence[str], output: Path, ranks: int = 1, strikes: Sequence[Strike] = (), **env: str
    ) -> list[int]:
        """`train.py` with these words on so many ranks; the exit code of each, negative for a signal.

        output: the file that receives what they print.
        """
        assert self.server.stdin and self.server.stdout
        order = {"words": list(words), "output": str(output), "ranks": ranks, "env": env}
        watchdog = Timer(LIMIT_SEC + 30, self.server.kill)  # its import of torch comes first
        watchdog.start()
        try:
            self.server.stdin.write(json.dumps(order | {"strikes": [asdict(strike) for strike in strikes]}) + "\n")
            self.server.stdin.flush()
            codes = json.loads(self.server.stdout.readline() or "null")
        finally:
            watchdog.cancel()
        assert codes is not None, f"the run did not end in {LIMIT_SEC} s; see {output}"
        return codes


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
        os.environ |= order["env"]
        if order["ranks"] > 1:
            os.environ |= shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        from kill_points import arm

        from imagenet_cls.cli import main, train_command

        for strike in order["strikes"]:
            if strike["rank"] == rank:
                arm(strike["point"], strike["passing"], strike["signal"])

        code = main(train_command, order["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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


def main() -> None:
    import kill_points  # noqa: F401  # what a run needs is imported with it, but for what is imported late
    import numpy
    import torch
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import imagenet_cls.parallel.launch  # noqa: F401
    from imagenet_cls.report import plots

    torch.set_num_threads(1)
    plots.draw_batch(numpy.zeros((1, 3, 8, 8), numpy.uint8), ["0"])
    gc.freeze()  # else each fork's collector would copy the pages of all modules
    started_at = 0.0
    for line in sys.stdin:
        order = json.loads(line)
        if int(time.time()) == int(
            started_at
        ):  # TensorBoard's files are ordered by the second, which is no real start's
            time.sleep(1.0 - time.time() % 1.0)
        started_at = time.time()
        world = str(order["ranks"])
        shared = {
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
        }
        pids = [fork_rank(order, rank, shared) for rank in range(order["ranks"])]
        print(json.dumps(codes_of(pids)), flush=True)


if __name__ == "__main__":
    main()
