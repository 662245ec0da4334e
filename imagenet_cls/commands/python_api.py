"""The Python API of training and evaluation.

`train` and `evaluate` run a command in a child process. `TrainedRun` reads a run folder.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from imagenet_cls.checkpoint.progress import best_weights
from imagenet_cls.checkpoint.select import state_of_newest
from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import child_command
from imagenet_cls.commands.own_data import expand_short_keys, is_data
from imagenet_cls.commands.report import check_run_folder, report_command
from imagenet_cls.commands.train import load_for_training, run_options, train_parser
from imagenet_cls.config.load import load_config
from imagenet_cls.config.reader import dump_inline
from imagenet_cls.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    ResourceError,
    UsageError,
    UserError,
)
from imagenet_cls.inference.predictor import Predictor
from imagenet_cls.parallel.signals import set_parent_death_signal
from imagenet_cls.report.jsonl import Record, read_metrics
from imagenet_cls.report.plots import draw_run

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_ERRORS = (UsageError, DataError, CheckpointError, ResourceError, NonFiniteError)
# Lines of a run: its steps in all, in the start-up table, and the last step of an interval.
_TOTAL_STEPS = re.compile(r"steps +(\d+) \(")
_STEP = re.compile(r"epoch \d+/\d+  step (\d+)")
# Longer than `parallel.launch` waits for ranks that save.
_STOP_TIMEOUT_SEC = 330
_PLAIN = (str, int, float, bool, type(None))


class TrainedRun:
    """A run, finished or not.

    folder: the run folder, such as `work_dirs/photos`. Raises UsageError if it holds no run.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).absolute()  # the working directory may change
        check_run_folder(self.folder)

    @property
    def metrics(self) -> list[Record]:
        """The records of `metrics.jsonl`, see docs/api.md."""
        return read_metrics(self.folder)

    @property
    def best(self) -> dict[str, Any]:
        """The evaluation whose weights `predictor()` loads: a record of `metrics`.

        Raises CheckpointError if the run has none yet.
        """
        state = state_of_newest(self.folder)
        if state is None:
            raise CheckpointError(
                f"{self.folder}: none of its checkpoints can be read.", "Restore one of them."
            )
        best = state["progress"]["best"]
        if not best:
            raise CheckpointError(f"{self.folder}: no evaluation yet.", "Train for an epoch.")
        weights = best_weights(best)
        for record in self.metrics:
            is_eval = record["kind"] == "eval" and record["weights"] == weights
            if is_eval and record["step"] == best[weights]["step"]:
                return record
        raise CheckpointError(
            f"{self.folder}: metrics.jsonl lacks the best evaluation.", "Restore the file."
        )

    def dataframe(self) -> "pandas.DataFrame":
        """`metrics` as a table of pandas, which has to be installed."""
        try:
            import pandas
        except ImportError as error:
            raise UsageError(
                "A dataframe needs pandas.", "Install it: pip install pandas"
            ) from error
        return pandas.DataFrame(self.metrics)

    def plot(self) -> "Figure":
        """Loss, top-1 or mAP, and learning rate over the steps. A notebook shows the returned
        figure.
        """
        return draw_run(self.metrics)

    def report(self) -> Path:
        """Write the page of `tools/report.py` into the run folder. Returns its path."""
        report_command([str(self.folder)])
        return self.folder / "report.html"

    def predictor(self, **options: Any) -> Predictor:
        """A `Predictor` with the best weights of the run. options: those of `Predictor`."""
        return Predictor(self.folder, **options)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.folder)!r})"


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

    Prints the lines of the run, and shows a progress bar. Raises the errors of the run as a
    UserError. An interrupt or another exception here, such as a timeout, stops the run, which
    saves, before it is raised.
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
    parsed = cli.parse(train_parser(), argv)
    folder = run_options(parsed, load_for_training(parsed)).work_dir
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
    with tempfile.TemporaryFile("w+", errors="backslashreplace") as errors:
        process = subprocess.Popen(
            [*child_command(name), *argv],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="backslashreplace",
            process_group=0,  # Ctrl-C in a terminal reaches it once, from here
            preexec_fn=set_parent_death_signal,
        )
        assert process.stdout is not None
        stopped_by = None
        try:
            _show_output(process.stdout)
            code = process.wait()
        except BaseException as error:
            stopped_by = error
            # Not SIGINT for all: a background job of a shell ignores it.
            is_interrupt = isinstance(error, KeyboardInterrupt)
            process.send_signal(signal.SIGINT if is_interrupt else signal.SIGTERM)
            # reads on, or a full pipe would block the process
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_STOP_TIMEOUT_SEC)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        text = errors.read().strip()
    if stopped_by is None and code != 0:
        raise _error_of(code, text)
    if text:
        print(text, file=sys.stderr)
    if stopped_by is not None:
        raise stopped_by


def _show_output(lines: Iterable[str]) -> None:
    """Print each line. Lines of steps move a progress bar instead."""
    total_steps = None
    bar = None
    for line in lines:
        if total := _TOTAL_STEPS.match(line):
            total_steps = int(total[1])
        step = _STEP.match(line)
        if step is None:
            tqdm.write(line, end="")
            continue
        if bar is None:
            bar = tqdm(total=total_steps, unit="step", leave=False)
        bar.set_postfix_str(line[step.end() :].strip(), refresh=False)
        bar.update(int(step[1]) - bar.n)
    if bar is not None:
        bar.close()


def _error_of(code: int, text: str) -> Exception:
    """The error of a command with this exit code. text: its stderr, the problem and the remedy."""
    problem, _, remedy = text.rpartition("\n")
    if code == ConfigError.exit_code and text and not problem:
        return ConfigError([text])  # of one line, which has its remedy
    if code == 1 or not problem:
        return RuntimeError(text or f"The command ended with exit code {code}.")
    for kind in _ERRORS:
        if kind.exit_code == code:
            return kind(problem, remedy)
    error = UserError(problem, remedy)
    error.exit_code = code
    return error
