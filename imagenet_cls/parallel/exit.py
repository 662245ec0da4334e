"""The end of a rank: error files in torchelastic's format, exit codes, messages, SLURM's requeue. Imports no torch."""

import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from imagenet_cls.errors import Stopped, UserError
from imagenet_cls.interrupts import ignore_interrupts
from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE

# What stops a run after saving. SLURM sends SIGUSR2 before a time limit; SIGUSR1 is used by NCCL.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
# Two interrupts closer than this are one: `timeout` and some launchers deliver a single Ctrl-C twice.
SECOND_INTERRUPT_SEC = 0.5

# torchelastic's variables: the file for a failing rank's message, and how often ranks may be restarted.
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"
# Beside the error file: the exit code of a rank that stopped on request.
STOPPED_FILE = "stopped"

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_REQUEUE_TIMEOUT_SEC = 30


def terminate_with_launcher() -> None:
    """In a rank started by our launching process: receive SIGTERM when that process ends, even by SIGKILL (Linux).

    Called first in a rank, from its main thread. A rank in training then saves and exits.
    """
    launcher = os.environ.get(LAUNCHED_VARIABLE)
    if launcher is None or not set_parent_death_signal(signal.SIGTERM):
        return
    try:
        os.kill(int(launcher), 0)
    except ProcessLookupError:  # it ended before the call to prctl
        os._exit(128 + signal.SIGTERM)


def set_parent_death_signal(number: signal.Signals) -> bool:
    """Set the signal that the kernel sends to this process when its parent ends. False if unsupported."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return prctl is not None and prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0


def write_error_file(message: str, exit_code: int) -> None:
    """Write this rank's error where its launcher looks for it, in torchelastic's format."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path:
        extra = {"timestamp": str(int(time.time())), "py_callstack": ""}
        record = {"message": {"message": message, "errorCode": exit_code, "extraInfo": extra}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(record))


def read_error_file(path: Path | None) -> tuple[str, int]:
    """(message, exit code) of an error file; ("", 1) if there is none."""
    try:
        error = json.loads(path.read_text())["message"] if path else {}
        return error["message"], int(error["errorCode"])
    except (OSError, ValueError, KeyError):
        return "", 1


def exit_code_of_stopped_rank(code: int) -> int:
    """The exit code of a rank that stopped on request: `code`, or 0 if torchrun would restart it for that.

    torchrun restarts ranks that exit with anything but 0 (--max-restarts). Then `code` is left in a file for our
    launching process.
    """
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if LAUNCHED_VARIABLE not in os.environ or os.environ.get(_RESTARTS_VARIABLE, "0") == "0" or not error_file:
        return code
    try:
        Path(error_file).with_name(STOPPED_FILE).write_text(str(code))
    except OSError:
        return code
    return 0


def report_failure(rank: int, code: int, error_file: Path | None) -> int:
    """Print the message of the rank that failed first, in the launching process. Returns the shell's exit code.

    code: the process's exit code; -n after signal n, for which a shell has 128 + n.
    """
    shell_code = 128 - code if code < 0 else code
    if code - 128 in STOP_SIGNALS:
        return shell_code  # stopped on request; rank 0 has reported it
    message, _ = read_error_file(error_file)
    if not message and code < 0:
        hint = "out of memory, perhaps (see `dmesg`)" if -code == signal.SIGKILL else "sent by another process"
        message = (
            f"rank {rank} was killed by {signal.Signals(-code).name}: {hint}; the other ranks were ended.\n"
            "Resume with the same command and --resume."
        )
    elif not message:
        message = f"rank {rank} exited with code {code} and no message; see logs/rank{rank}.log in the run folder."
    print(message, file=sys.stderr, flush=True)
    return shell_code


def report_error(text: str, code: int, launched: bool, reported_elsewhere: bool = False) -> None:
    """Log a rank's error, write its error file, and print it unless our launching process will.

    reported_elsewhere: another rank of this machine prints the same error.
    """
    log = logging.getLogger("imagenet_cls")
    if log.hasHandlers():  # without a handler, logging would print it
        log.error("this rank exits with code %d: %s", code, text)
    write_error_file(text, code)
    if reported_elsewhere and not launched:
        time.sleep(1.0)  # the launcher may kill the other rank once this one has exited
    elif not launched:
        print(text, file=sys.stderr, flush=True)


def abort_rank(launched: bool, error: UserError) -> NoReturn:
    """Report `error` and end this process, from any thread."""
    report_error(str(error), error.exit_code, launched, error.reported_by_main)
    end_process(error.exit_code)


def end_process(code: int) -> NoReturn:
    """Flush and exit without the interpreter's finalization, in which gloo's threads sometimes abort (code 134)."""
    ignore_interrupts()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def requeue(stopped: Stopped, env: Mapping[str, str]) -> Stopped:
    """`stopped`; if SLURM sent SIGUSR2 before a time limit, ask it to requeue the job and add the outcome.

    The job is one submitted with `--signal=USR2@SECONDS` and `--requeue` (`scripts/slurm_train.sh` with BATCH=1). After
    the requeue, `engine.run` resumes. Called on rank 0 after the save; never raises.
    """
    job = env.get("SLURM_JOB_ID", "")
    if stopped.exit_code != 128 + signal.SIGUSR2 or not job:
        return stopped
    try:
        command = [shutil.which("scontrol") or "scontrol", "requeue", job]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_REQUEUE_TIMEOUT_SEC)
        failure = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    outcome = (
        f"SLURM did not requeue job {job}: {failure}\nResume with the same command and --resume."
        if failure
        else f"SLURM will restart job {job}, which resumes by itself."
    )
    return Stopped(f"{str(stopped).splitlines()[0]}\n{outcome}", stopped.exit_code)
