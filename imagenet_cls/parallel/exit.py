"""The end of a process: Ctrl-C, torchelastic's error files, exit codes, messages, SLURM's requeue. Imports no torch."""

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from imagenet_cls.errors import Stopped, UserError, printable
from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE, RankInfo

# What stops a run after saving. A terminal that closes sends SIGHUP; SLURM sends SIGUSR2 before the time limit of a
# job that was submitted with --signal=USR2@SECONDS; SIGUSR1 is used by NCCL.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)

ERROR_FILE_VARIABLE = (
    "TORCHELASTIC_ERROR_FILE"  # torchelastic's: the file for a failing rank's message
)
COMMAND_VARIABLE = (
    "IMAGENET_CLS_COMMAND"  # the command that this process, or its launching process, runs
)

Handler = Callable[[int, FrameType | None], object]

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_REQUEUE_TIMEOUT_SEC = 30
_OUTPUT_TIMEOUT_SEC = 5
# Two interrupts closer than this are one: `timeout` and some launchers deliver a single Ctrl-C twice.
_SECOND_INTERRUPT_SEC = 0.5


def handle_interrupts(handler: Handler | signal.Handlers) -> None:
    """Set the handler of Ctrl-C in the main thread, unless it is ignored, as in a background job of a script."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    ):
        signal.signal(signal.SIGINT, handler)


def exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler that ends this process silently."""
    os._exit(128 + number)


def handle_stop_signals(handler: Handler) -> dict[int, Any]:
    """Set the handler of the `STOP_SIGNALS` that are not ignored; returns the previous ones. A second Ctrl-C exits."""
    times: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            times.append(time.monotonic())
            if times[-1] - times[0] > _SECOND_INTERRUPT_SEC:
                exit_on_signal(number, frame)
        handler(number, frame)

    return {
        n: signal.signal(n, handle) for n in STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN
    }


def terminate_with_launching_process() -> None:
    """In a rank started by our launching process: receive SIGTERM when that process ends, even by SIGKILL (Linux)."""
    launcher = os.environ.get(LAUNCHED_VARIABLE)
    if (
        launcher is not None
        and set_parent_death_signal(signal.SIGTERM)
        and os.getppid() != int(launcher)
    ):
        os._exit(128 + signal.SIGTERM)  # the launching process ended before the call to prctl


def set_parent_death_signal(number: signal.Signals) -> bool:
    """Set the signal that the kernel sends to this process when its parent ends. False if unsupported."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return prctl is not None and prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0


def signal_launching_process(number: int) -> None:
    """Send our launching process, if any, the signal by which this rank was stopped, or it restarts the ranks.

    SIGINT is sent as SIGTERM, since a second SIGINT would end it at once.
    """
    if os.environ.get(LAUNCHED_VARIABLE) == str(os.getppid()):
        for forwarded in STOP_SIGNALS:
            signal.signal(forwarded, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM if number == signal.SIGINT else number)


@contextlib.contextmanager
def exit_if_blocked(code: int) -> Iterator[None]:
    """Around the last output: end this process if it takes more than five seconds. Errors of the stream are ignored."""
    timer = threading.Timer(_OUTPUT_TIMEOUT_SEC, os._exit, [code])
    timer.daemon = True
    timer.start()
    try:
        with contextlib.suppress(OSError, ValueError):
            yield
    finally:
        timer.cancel()


def print_error(text: object, code: int) -> None:
    """Print an error on stderr, after which this process exits with `code`."""
    with exit_if_blocked(code):
        print("\n".join(map(printable, str(text).split("\n"))), file=sys.stderr, flush=True)


def restart_advice() -> str:
    """What to do after a failure of the machine or of another rank."""
    return (
        "Resume with the same command and --resume." if trains() else "Run the same command again."
    )


def trains() -> bool:
    """Whether the command that this process runs is `train`."""
    return os.environ.get(COMMAND_VARIABLE, "train") == "train"


def print_rank_failure(rank: int, code: int, message: str) -> int:
    """Print the error of the rank that failed first, in the launching process. Returns the shell's exit code.

    code: the process's exit code; -n after signal n, for which a shell has 128 + n. message: "" if it left none.
    """
    if not message and code < 0:
        hints = {
            signal.SIGKILL: "out of memory, perhaps (see `dmesg`)",
            signal.SIGABRT: "by nccl after a timeout, perhaps (see logs/rank*.log and logs/nccl_trace_rank*)",
        }
        hint = hints.get(signal.Signals(-code), "sent by another process")
        message = (
            f"rank {rank} was killed by {signal.Signals(-code).name}: {hint}; the other ranks were ended.\n"
            + restart_advice()
        )
    elif not message:
        message = f"rank {rank} exited with code {code} and no message; see logs/rank{rank}.log in the run folder."
    code = 128 - code if code < 0 else code
    print_error(message, code)
    return code


def report_error(text: str, code: int, rank: int, printed_elsewhere: bool = False) -> None:
    """Log a rank's error and write it to the launcher's error file, from which our launching process prints it.

    Under another launcher print it, rank 0 first, since a launcher may end the others once one has exited.
    """
    log = logging.getLogger("imagenet_cls")
    if log.hasHandlers():  # without a handler, logging would print it
        log.error("this rank exits with code %d: %s", code, text)
    if path := os.environ.get(ERROR_FILE_VARIABLE):
        record = {"message": text, "exit_code": code, "timestamp": int(time.time())}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(record))
    if LAUNCHED_VARIABLE in os.environ:
        return
    if not printed_elsewhere:
        if rank != 0:
            time.sleep(1.0)
        print_error(text, code)


def abort_rank(rank_info: RankInfo, error: UserError) -> NoReturn:
    """Report `error` and end this process, from any thread."""
    report_error(str(error), error.exit_code, rank_info.rank, error.printed_elsewhere)
    end_process(error.exit_code)


def end_process(code: int) -> NoReturn:
    """Flush and exit without the interpreter's finalization, in which gloo's threads sometimes abort (code 134)."""
    handle_interrupts(signal.SIG_IGN)
    with exit_if_blocked(code):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def requeue_if_slurm(stopped: Stopped, env: Mapping[str, str]) -> Stopped:
    """Ask SLURM to requeue the job if it sent SIGUSR2. Returns the exception to report, with the outcome."""
    job = env.get("SLURM_JOB_ID", "")
    if stopped.signal_number != signal.SIGUSR2 or not job:
        return stopped
    try:
        subprocess.run(
            ["scontrol", "requeue", job],
            check=True,
            capture_output=True,
            text=True,
            timeout=_REQUEUE_TIMEOUT_SEC,
        )
        outcome = f"SLURM will restart job {job}, which resumes by itself."
    except (OSError, subprocess.SubprocessError) as error:
        failure = " ".join(str(getattr(error, "stderr", "") or error).split())[:200]
        outcome = f"SLURM did not requeue job {job}: {failure}\nResume with the same command and --resume."
    return Stopped(f"{str(stopped).splitlines()[0]}\n{outcome}", stopped.signal_number)
