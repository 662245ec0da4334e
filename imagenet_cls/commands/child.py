"""A command in a child process: its start, and the error that it leaves in a file."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from imagenet_cls import errors
from imagenet_cls.errors import UserError
from imagenet_cls.parallel.exit import CHILD_ERROR_FILE_VARIABLE
from imagenet_cls.parallel.signals import set_parent_death_signal


def child_command(name: str) -> list[str]:
    """The command line, without arguments, of a process that runs a command of `entry_points`.

    The process imports the same package as this one, for which this function may set PYTHONPATH,
    and no modules of the working directory (-P).
    """
    root = Path(__file__).resolve().parents[2]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root.name not in ("site-packages", "dist-packages") and str(root) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), *paths]))
    return [sys.executable, "-u", "-P", "-m", "imagenet_cls", name]


class Child(subprocess.Popen[Any]):
    """A command in a process that receives SIGTERM when this one ends (Linux), and no Ctrl-C of the
    terminal.

    name: of a command in `entry_points`. error_file: a new file, from which `error` reads. env:
    further variables. cpus: those that it may use; none for all. options: of Popen.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        error_file: Path | None = None,
        env: Mapping[str, str] | None = None,
        cpus: Sequence[int] = (),
        **options: Any,
    ):
        self._error_file = error_file
        command = child_command(name)  # may set PYTHONPATH
        variables = {**os.environ, **(env or {})}
        variables.pop(CHILD_ERROR_FILE_VARIABLE, None)  # of this process, if it is a child
        if error_file is not None:
            variables[CHILD_ERROR_FILE_VARIABLE] = str(error_file)
        super().__init__(
            [*command, *argv],
            stdin=subprocess.DEVNULL,
            env=variables,
            process_group=0,
            preexec_fn=partial(_prepare, cpus),
            **options,
        )

    def error(self) -> Exception | None:
        """The error of the process, which has ended; a RuntimeError for a bug; None if it left
        none.
        """
        if self._error_file is None or not self._error_file.is_file():
            return None
        record = json.loads(self._error_file.read_text())
        if record["class"] == "RuntimeError":
            return RuntimeError(*record["arguments"])
        error: UserError = getattr(errors, record["class"])(*record["arguments"])
        error.exit_code = self.returncode
        return error


def _prepare(cpus: Sequence[int]) -> None:
    set_parent_death_signal()
    if cpus:
        os.sched_setaffinity(0, cpus)
