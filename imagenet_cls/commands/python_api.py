"""The Python API of training and evaluation.

`train` and `evaluate` run a command in a child process.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from imagenet_cls.commands.child import Child
from imagenet_cls.commands.own_data import expand_short_keys, is_data
from imagenet_cls.commands.train import load_run
from imagenet_cls.commands.trained_run import TrainedRun
from imagenet_cls.config.load import load_config
from imagenet_cls.config.reader import dump_inline
from imagenet_cls.errors import UsageError, UserError

_POLL_SEC = 0.2
# Longer than `parallel.launch` waits for ranks that save.
_STOP_TIMEOUT_SEC = 330
_PLAIN = (str, int, float, bool, type(None))


def train(
    source: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: str | None = None,
    epochs: int | None = None,
    size: int | None = None,
    lr: float | None = None,
    device: str | int | None = None,
    gpus: int | None = None,
    work_dir: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    allow_change: Sequence[str] = (),
) -> TrainedRun:
    """Train on a dataset, or from a config, in a child process. Returns the run.

    source: a folder of class folders, an archive or a list of images; or a config, such as
    `"configs/resnet50.yaml"`; None for the demo. overrides: values by key, such as
    `{"train.global_batch_size": 32}`. model, epochs, size, lr: short for `model.name`,
    `train.epochs`, `augment.size_px` and `eval.crop_px`, and `optimizer.lr`. device: as in the
    config. gpus: ranks to start on this machine. work_dir: the run folder, by default
    `work_dirs/<name>`. resume, overwrite: as the options of `tools/train.py`; without either, a
    folder that holds a run is an error. allow_change: keys that may differ from the resumed run,
    such as `["train.epochs"]`.

    Prints the lines of the run. Raises the errors of the run as a UserError. An interrupt or
    another exception here, such as a timeout, stops the run, which saves, before it is raised.
    """
    short = {"model": model, "epochs": epochs, "size": size, "lr": lr, "device": device}
    values = {key: value for key, value in short.items() if value is not None}
    arguments = _override_arguments({**(overrides or {}), **values})
    if source is not None:
        source = str(source)
    if source is None or not is_data(source):
        base = load_config(source).config
        arguments = expand_short_keys(arguments, base.model.pretrained)
    argv = [] if source is None else [source]
    argv += arguments
    if gpus is not None:
        argv += ["--gpus", str(gpus)]
    if work_dir is not None:
        if str(work_dir) == "auto":
            raise UsageError("work_dir: 'auto' is for the command line.", "Name a folder.")
        argv += ["--work-dir", str(work_dir)]
    if resume:
        argv.append("--resume")
    if overwrite:
        argv.append("--overwrite")
    for key in allow_change:
        argv += ["--allow-change", key]
    _, folder = load_run(argv)
    run_command("train", argv)
    return TrainedRun(folder)


def evaluate(
    weights: str | os.PathLike[str],
    data: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    device: str | int | None = None,
    gpus: int | None = None,
    allow_import: Sequence[str] = (),
) -> dict[str, dict[str, float]]:
    """Evaluate a `TrainedRun`, a run folder or a checkpoint in a child process.

    data: a separate test set, see docs/your_data.md; None for the validation images of the run.
    device: as in the config. gpus: ranks to start on this machine. allow_import: as for
    `Predictor`.

    Returns the results of the raw weights and of the EMA by name (`raw`, `ema`), such as
    `{"raw": {"top1_pct": 97.2, ...}}`, with data.labels multi `map_pct`; NaN is None. Raises the
    errors of the command as a UserError.
    """
    argv = [os.fspath(weights), *_override_arguments(overrides or {})]
    if device is not None:
        argv.append(f"device={device}")
    for name in allow_import:
        argv += ["--allow-import", name]
    if data is not None:
        argv += ["--data", str(data)]
    if gpus is not None:
        argv += ["--gpus", str(gpus)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        run_command("test", [*argv, "--results", str(file)])
        results: dict[str, dict[str, float]] = json.loads(file.read_text())
        return results


def _override_arguments(values: Mapping[str, Any]) -> list[str]:
    """`key=value` for each value. Raises UsageError for an object, such as a class."""
    return [f"{key}={dump_inline(_plain_value(key, value))}" for key, value in values.items()]


def _plain_value(key: str, value: Any) -> Any:
    """A value, also of numpy, as numbers, texts, lists and dictionaries."""
    if hasattr(value, "tolist"):  # an array or a number of numpy, or a tensor
        value = value.tolist()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, list | tuple):
        return [_plain_value(key, item) for item in value]
    if isinstance(value, dict):
        return {_plain_value(key, name): _plain_value(key, item) for name, item in value.items()}
    if type(value) not in _PLAIN:
        raise UsageError(
            f"{key}: {value!r} can't be passed to another process.",
            "Put it into a module in the working directory, and give 'my_module:Name'.",
        )
    return value


def run_command(name: str, argv: Sequence[str]) -> None:
    """Run a command in a child process and print its output. Raises its error, or RuntimeError for
    a bug.

    Any other exception here, such as KeyboardInterrupt, stops the process, which saves, and is
    raised when that has ended. A second exception, or a process that takes too long, kills it.
    """
    with tempfile.TemporaryDirectory() as folder:
        error_file = Path(folder) / "error.json"
        messages = Path(folder) / "stderr"
        with messages.open("wb") as stderr:
            process = Child(
                name,
                argv,
                error_file,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                errors="backslashreplace",
            )
        failed: list[BaseException] = []
        printer = threading.Thread(target=_print_lines, args=[process.stdout, failed])
        printer.start()
        stopped_by = None
        try:
            while (code := process.poll()) is None:
                time.sleep(_POLL_SEC)
                if failed:
                    raise failed[0]
        except BaseException as error:
            stopped_by = error
            # Not SIGINT for all: a background job of a shell ignores it.
            is_interrupt = isinstance(error, KeyboardInterrupt)
            process.send_signal(signal.SIGINT if is_interrupt else signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_SEC)
        finally:
            process.kill()
            process.wait()
            printer.join()
        text = messages.read_text(errors="backslashreplace").strip()
        if stopped_by is None and code:
            found = process.error()
            if isinstance(found, UserError):
                raise found
            raise RuntimeError(text or f"The command ended with exit code {code}.")
    if text:
        print(text, file=sys.stderr)
    if stopped_by is not None:
        raise stopped_by


def _print_lines(stream: IO[str], failed: list[BaseException]) -> None:
    """Print each line. An error is appended to `failed`; later lines are read, or a full pipe
    would block the process.
    """
    with stream:
        for line in stream:
            try:
                if not failed:
                    print(line, end="", flush=True)
            except BaseException as error:
                failed.append(error)
