"""The end of a process: messages, exit codes, error files, requeueing by SLURM.

Imports no torch.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from imagenet_cls.errors import ConfigError, ResourceError, Stopped, UserError
from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE, RankInfo
from imagenet_cls.parallel.signals import handle_interrupts
from imagenet_cls.text import first_line, printable

# torchelastic sets this variable: the file for the message of a failing rank.
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# The file for the error of a process that `commands.child` started, and of its ranks.
CHILD_ERROR_FILE_VARIABLE = "IMAGENET_CLS_ERROR_FILE"
# What to do after a failure of the machine or of another rank.
RESTART_ADVICE = "Resume a training with the same command and --resume; run other commands again."

_REQUEUE_TIMEOUT_SEC = 30
_OUTPUT_TIMEOUT_SEC = 5


@contextlib.contextmanager
def exit_if_blocked(code: int) -> Iterator[None]:
    """Around the last output: end this process if it takes more than five seconds. Errors of the
    stream are ignored.
    """
    timer = threading.Timer(_OUTPUT_TIMEOUT_SEC, os._exit, [code])
    timer.daemon = True
    # Python 3.12.0 and 3.12.1 start no thread in exit functions.
    with contextlib.suppress(RuntimeError):
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


def write_error_file(error: BaseException) -> None:
    """Write the class and the arguments of an error as JSON for the process that started this
    one, if it asks for them. The first error counts. Of a bug, the class is RuntimeError.
    """
    path = os.environ.get(CHILD_ERROR_FILE_VARIABLE)
    if path is None:
        return
    record: dict[str, Any] = {
        "class": "RuntimeError",
        "arguments": [f"{type(error).__name__}: {first_line(error)}"],
    }
    if isinstance(error, UserError):
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == UserError.__module__)
        arguments = [error.lines] if isinstance(error, ConfigError) else error.args
        record = {"class": kind.__name__, "arguments": arguments}
    with contextlib.suppress(OSError), Path(path).open("x") as file:
        json.dump(record, file)


def print_rank_failure(rank: int, code: int, message: str) -> int:
    """Print the error of the rank that failed first, in the launching process. Returns the shell's
    exit code.

    code: the process's exit code; -n after signal n, for which a shell has 128 + n. message: "" if
    it left none.
    """
    if not message and code < 0:
        hints = {
            signal.SIGKILL: "out of memory, perhaps (see `dmesg`)",
            signal.SIGABRT: "by nccl after a timeout, perhaps (see logs/rank*.log and "
            "logs/nccl_trace_rank*)",
        }
        hint = hints.get(signal.Signals(-code), "sent by another process")
        killed = ResourceError(
            f"Rank {rank} was killed by {signal.Signals(-code).name}: {hint}; the other ranks "
            "were ended.",
            RESTART_ADVICE,
        )
        write_error_file(killed)
        message = str(killed)
    elif not message:
        message = (
            f"Rank {rank} exited with code {code} and no message; see logs/rank{rank}.log "
            "in the run folder."
        )
    code = 128 - code if code < 0 else code
    print_error(message, code)
    return code


def report_error(error: BaseException, text: str, code: int, rank: int) -> None:
    """Log a rank's error and write it to the launcher's error file, from which our launching
    process prints it. text: what is printed.

    Under another launcher print it, rank 0 first, since a launcher may end the others once one has
    exited; not at all if another rank prints it.
    """
    write_error_file(error)
    log = logging.getLogger("imagenet_cls")
    if log.hasHandlers():  # without a handler, logging would print it
        log.error("this rank exits with code %d: %s", code, text)
    if path := os.environ.get(ERROR_FILE_VARIABLE):
        record = {"message": text, "exit_code": code, "timestamp": int(time.time())}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(record))
    if LAUNCHED_VARIABLE in os.environ:
        return
    if not getattr(error, "printed_elsewhere", False):
        if rank != 0:
            time.sleep(1.0)
        print_error(text, code)


def abort_rank(rank_info: RankInfo, error: UserError) -> NoReturn:
    """Report `error` and end this process, from any thread."""
    report_error(error, str(error), error.exit_code, rank_info.rank)
    hard_exit(error.exit_code)


def hard_exit(code: int) -> NoReturn:
    """Flush and exit without the interpreter's finalization, in which gloo's threads sometimes
    abort (code 134).
    """
    handle_interrupts(signal.SIG_IGN)
    with exit_if_blocked(code):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def requeue_if_slurm(stopped: Stopped, env: Mapping[str, str]) -> Stopped:
    """Ask SLURM to requeue the job if it sent SIGUSR2. Returns the exception to report, with the
    outcome.
    """
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
        outcome = (
            f"SLURM did not requeue job {job}: {failure} Resume with the same command and --resume."
        )
    return Stopped(stopped.problem, outcome, stopped.signal_number)
