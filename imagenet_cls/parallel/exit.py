"""How a rank ends, between itself and the process that started it: messages, exit codes, and who goes with whom.

Owns the files that ranks leave for their launching process, in torchrun's own format, and what is made of them. Refuses
to start a process, or to end another. Called by `ranks` and `parallel.group` in a rank, by `spawn` and `torchrun` in
the launching process, and by `data.workers`.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE

# torchrun's own variable: the file that a failing rank leaves its message in.
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"

# Also torchrun's: how often it may start the ranks again.
_RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"

# Our own, beside that file: the code of a rank that was stopped as asked.
STOPPED_FILE = "stopped"

# How long a rank that was asked to stop may take to save before it is killed; and once one has failed, how long the
# others may take to end by themselves, and then, by SIGTERM, again.
PATIENCE_WITH_STOP_SEC = 300
PATIENCE_AFTER_FAILURE_SEC = 3.0

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_launcher() -> None:
    """In a rank that our launching process started: ask for SIGTERM when that process is gone, however it went.

    A launcher that was killed can't end its ranks, and they would go on unseen. On SIGTERM a training rank saves. To be
    called first in a rank, from its main thread; does nothing elsewhere. Linux only: other systems keep ranks of
    torchrun's agent, though not spawned ones (`spawn`).
    """
    launcher = os.environ.get(LAUNCHED_VARIABLE)
    if launcher is None or not signal_when_parent_dies(signal.SIGTERM):
        return
    try:
        os.kill(int(launcher), 0)
    except ProcessLookupError:  # it was gone before the kernel knew of our wish
        os._exit(128 + signal.SIGTERM)


def signal_when_parent_dies(number: signal.Signals) -> bool:
    """Ask the kernel for a signal once this process's parent is gone: the thread of it, that is, that started us.

    Returns whether it can (Linux).
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return prctl is not None and prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0


def write_error_file(message: str, exit_code: int) -> None:
    """Leave this rank's message where the process that started it looks for it (in torchrun's own format)."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path:
        extra = {"timestamp": str(int(time.time())), "py_callstack": ""}
        record = {"message": {"message": message, "errorCode": exit_code, "extraInfo": extra}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(record))


def code_after_stop(code: int) -> int:
    """What a rank that was stopped as asked ends with: the exit code of that, unless it would be started again for it.

    torchrun's agent starts ranks again (--max-restarts) that end with anything but 0. So this one ends with 0 then, and
    leaves the code in a file for our launching process.
    """
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if LAUNCHED_VARIABLE not in os.environ or os.environ.get(_RESTARTS_VARIABLE, "0") == "0" or not error_file:
        return code
    try:
        Path(error_file).with_name(STOPPED_FILE).write_text(str(code))
    except OSError:
        return code
    return 0


def shell_code(code: int) -> int:
    """A shell's exit code for a process's: 128 + n for one that signal n ended."""
    return 128 - code if code < 0 else code


def report_failure(rank: int, code: int, error_file: Path | None) -> None:
    """Print the failing rank's message, or what can be said of a rank that left none."""
    if code - 128 in (signal.SIGINT, signal.SIGUSR2, signal.SIGTERM):
        return  # stopped as asked, and rank 0 has said so
    message = ""
    if error_file is not None and error_file.is_file():
        with contextlib.suppress(ValueError, KeyError):
            message = json.loads(error_file.read_text())["message"]["message"]
    if not message and code < 0:
        name = signal.Signals(-code).name
        hint = "the kernel may have run out of memory (see `dmesg`)" if -code == signal.SIGKILL else "somebody sent it"
        message = (
            f"rank {rank} was killed by {name}: {hint}; the other ranks were ended.\n"
            "Go on with the same command and --resume."
        )
    elif not message:
        message = (
            f"rank {rank} ended with exit code {code} and left no message; see logs/rank{rank}.log in the run folder."
        )
    print(message, file=sys.stderr, flush=True)
