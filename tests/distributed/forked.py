"""Gloo ranks for a test's function, in one process tree: torch is imported once, then the ranks are forked.

`run_on_ranks` starts this file as a program of its own, since a test's own process may hold threads by now, which do
not survive a fork.
"""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path

from bed import REPOSITORY, run

HERE = Path(__file__).parent


def run_on_ranks(function: Callable, world_size: int, folder: Path) -> None:
    """Call `function(rank, world_size, folder)`, which must be importable, on each of `world_size` processes.

    The function meets the other ranks by itself (`meet`). Fails with the tracebacks where one raises.
    """
    words = [function.__module__, function.__name__, str(world_size), str(folder)]
    paths = f"{HERE}:{HERE.parent}:{REPOSITORY}"
    done = run([sys.executable, str(HERE / "forked.py"), *words], timeout_sec=120, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr


def meet(rank: int, world_size: int, store: Path):  # type: ignore[no-untyped-def]  # no torch up here
    """The group of `world_size` ranks that meet over the file `store`."""
    import torch

    from imagenet_cls.parallel.group import start_group
    from imagenet_cls.parallel.place import Place

    place = Place(rank, rank, world_size, world_size)
    return start_group(place, torch.device("cpu"), "auto", "gloo", f"file://{store}", 30.0)


def part(group) -> None:  # type: ignore[no-untyped-def]
    """Take the group down, when all are done with it."""
    import torch.distributed as dist

    dist.barrier(group=group.control)
    dist.destroy_process_group()


def _call(function: Callable, rank: int, world_size: int, folder: Path) -> None:
    code = 1
    try:
        function(rank, world_size, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    module, name, world_size, folder = sys.argv[1:]
    function = getattr(import_module(module), name)
    context = multiprocessing.get_context("fork")
    arguments = [(function, rank, int(world_size), Path(folder)) for rank in range(int(world_size))]
    ranks = [context.Process(target=_call, args=words) for words in arguments]
    for rank in ranks:
        rank.start()
    waiting = {rank.sentinel: rank for rank in ranks}
    while waiting:
        for sentinel in wait(list(waiting)):
            rank = waiting.pop(sentinel)  # type: ignore[index]  # of a process, not of a socket
            rank.join()  # its pipe closes a little before its exit code is there
            if rank.exitcode != 0:
                for other in waiting.values():
                    other.kill()
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
