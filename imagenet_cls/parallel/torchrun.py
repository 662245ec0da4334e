"""Ranks by torchrun's elastic agent, which starts them again after a failure where it is asked to (`pytorch`).

Owns what torch's agent is told and what is made of how it ends. Called by `ranks`.
"""

import logging
import math
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.interrupts import raise_interrupts
from imagenet_cls.parallel.environment import address_towards
from imagenet_cls.parallel.exit import (
    PATIENCE_AFTER_FAILURE_SEC,
    PATIENCE_WITH_STOP_SEC,
    STOPPED_FILE,
    report_failure,
    shell_code,
)
from imagenet_cls.parallel.launch import DEFAULT_PORT, Ranks, variables

_PASSED_ON = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR2", "SIGHUP")


def run_torchrun(ranks: Ranks, script: str, argv: Sequence[str]) -> int:
    """Start the ranks of this machine, wait for them, and return the exit code that a shell should see.

    The code is the one of the rank that failed first, and its message is printed here, once. script, argv: the command
    line that each rank runs. torch.distributed.run is called as a function: as a program it turns every exit code into
    1, in 44 lines.
    """
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException, api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    os.environ.update(variables(ranks))
    for name in logging.root.manager.loggerDict:  # each of torch's modules gives its own a level
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(PATIENCE_WITH_STOP_SEC))
    # What the other ranks are granted once one has failed. There is no option for it, only this default, of 30 s: too
    # long for ranks that wait for one that is gone.
    api.PContext.close.__defaults__ = (None, int(2 * PATIENCE_AFTER_FAILURE_SEC))
    api._terminate_process_handler = _raise_twice(SignalException)  # type: ignore[assignment]
    raise_interrupts()  # there is a folder to be removed
    # torch would listen to those, too, that this process was told to ignore: by nohup, or a script's `&`.
    heard = [name for name in _PASSED_ON if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", ",".join(heard))
    meeting = _meeting_words(ranks)
    words = [f"--nproc-per-node={ranks.gpus}", f"--nnodes={ranks.nodes}", f"--max-restarts={ranks.max_restarts}"]
    # Where ranks leave their messages. A folder of torchrun's own would stay behind.
    with tempfile.TemporaryDirectory(prefix="imagenet-cls-", ignore_cleanup_errors=True) as folder:
        try:
            torchrun.run(torchrun.parse_args([*words, *meeting, f"--log-dir={folder}", script, *argv]))
            return max((int(file.read_text()) for file in Path(folder).rglob(STOPPED_FILE)), default=0)
        except ChildFailedError as failure:
            rank, first = failure.get_first_failure()
            report_failure(rank, first.exitcode, Path(first.error_file) if first.error_file else None)
            return shell_code(first.exitcode)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
        except (OSError, DistError, RendezvousError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise ResourceError(
                f"could not start {ranks.gpus} ranks ({' '.join(meeting)}): {reason}\n"
                "Check the address, the port and the limits, and that every machine was started."
            ) from error


def _raise_twice(exception: Callable[[str, signal.Signals], Exception]) -> Callable[[int, FrameType | None], None]:
    """In place of torch's handler of signals, which raises for each: once to stop, and once more not to wait for it.

    A third would interrupt what cleans up after those. Ranks hear all of them by themselves.
    """
    heard: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if len(heard) <= 2:
            raise exception(f"got signal {number}", signal.Signals(number))

    return handle


def _meeting_words(ranks: Ranks) -> list[str]:
    """torchrun's options for where its agents, one on each machine, meet.

    Where ranks may be started again, agents meet by c10d and each round of ranks at a port of its own: torch 2.15 keeps
    the store of the round before otherwise, and with it addresses of ranks that are dead. Which machine has rank 0 is
    open then, so the run folder must be on a disk that all share.
    """
    restarts = ":" in ranks.nodes or ranks.max_restarts > 0
    if restarts:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    master = ranks.master_addr or "127.0.0.1"
    if ranks.nodes == "1" and ranks.master_port is None:  # the agent takes a free port and holds it
        return ["--standalone", "--local-addr=127.0.0.1"]
    port = ranks.master_port or DEFAULT_PORT
    if restarts:
        endpoint = ["--rdzv-backend=c10d", f"--rdzv-endpoint={master}:{port}", "--rdzv-id=imagenet-cls"]
        return [*endpoint, f"--local-addr={address_towards(master)}"]
    if ranks.nodes != "1" and ranks.master_addr is None:
        raise UsageError(
            f"{ranks.nodes} machines need one address to meet at, and none was given.\n"
            "On each, set MASTER_ADDR (--master-addr) to the first machine's address, and NODE_RANK to 0, 1, ..."
        )
    if ranks.nodes != "1":  # torch waits without a word
        print(f"node rank {ranks.node_rank} of {ranks.nodes} meets the others at {master}:{port}", flush=True)
    timeout = f"--rdzv-conf=timeout={math.ceil(ranks.timeout_sec)}"
    return [f"--node-rank={ranks.node_rank}", f"--master-addr={master}", f"--master-port={port}", timeout]
