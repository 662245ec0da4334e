"""A command in a child process: its start, the error that it leaves in a file, and its arguments
from values of Python.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from imagenet_cls import errors
from imagenet_cls.config.reader import dump_inline
from imagenet_cls.errors import UsageError, UserError
from imagenet_cls.parallel.exit import CHILD_ERROR_FILE_VARIABLE
from imagenet_cls.parallel.signals import set_parent_death_signal
from imagenet_cls.text import CALLER_VARIABLE

_POLL_SEC = 0.2
# Longer than `parallel.launch` waits for ranks that save.
_STOP_TIMEOUT_SEC = 330


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


def command_arguments(overrides: Mapping[str, Any], **options: Any) -> list[str]:
    """The arguments of a command: `key=value` for each override, and an option for each keyword
    argument.

    An option with True has no value, one with a list is repeated, and one with None, False or an
    empty list is left out. Raises UsageError for an override that is an object, such as a class.
    """
    words = []
    for key, value in overrides.items():
        plain = json.loads(json.dumps(value, default=partial(_plain_value, key)))
        words.append(f"{key}={dump_inline(plain)}")
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [option, str(item)]
    return words


def _plain_value(key: str, value: Any) -> Any:
    """Numbers, texts and lists for a value of numpy, a tensor or a path."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise UsageError(
        f"{key}: {value!r} can't be passed to another process.",
        "Put it into a module in the working directory, and give 'my_module:Name'.",
    )


def run_command(name: str, argv: Sequence[str], watch: Callable[[], object] = lambda: None) -> None:
    """Run a command for the Python API in a child process, and print its output. Raises its error,
    or RuntimeError for a bug.

    watch: called when the process has printed something, and after a successful end.

    Any other exception here, such as KeyboardInterrupt or one of `watch`, stops the process, which
    saves, and is raised when that has ended. A second exception, or a process that takes too long,
    kills it.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "stdout"
        messages = Path(folder) / "stderr"
        with (
            output.open("w") as stdout,
            messages.open("w") as stderr,
            output.open(errors="backslashreplace") as shown,
        ):
            process = Child(
                name,
                argv,
                Path(folder) / "error.json",
                {CALLER_VARIABLE: "python"},
                stdout=stdout,
                stderr=stderr,
            )
            stopped_by = None
            try:
                while (code := process.poll()) is None:
                    time.sleep(_POLL_SEC)
                    if text := shown.read():
                        print(text, end="", flush=True)
                        watch()
                if code == 0:
                    watch()
            except BaseException as error:
                stopped_by = error
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_TIMEOUT_SEC)
            finally:
                process.kill()
                process.wait()
            print(shown.read(), end="", flush=True)
        text = messages.read_text(errors="backslashreplace").strip()
        if stopped_by is None and code:
            found = process.error()
            if isinstance(found, UserError):
                raise found
            raise RuntimeError(text or f"The command ended with exit code {code}.")
    if text:  # the signal is how this function stops the process
        print(text.replace("Stopped by SIGTERM", "Stopped"), file=sys.stderr)
    if stopped_by is not None:
        raise stopped_by
