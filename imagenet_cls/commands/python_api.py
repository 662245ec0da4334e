"""The Python API of training, which runs the command in a child process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from imagenet_cls.commands.child import command_arguments, run_command
from imagenet_cls.commands.train import load_run
from imagenet_cls.commands.trained_run import TrainedRun
from imagenet_cls.errors import UsageError
from imagenet_cls.lookup import suggest_keywords
from imagenet_cls.report.jsonl import Record, read_metrics


@suggest_keywords
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
    on_eval: Callable[[Record], object] | None = None,
) -> TrainedRun:
    """Train on a dataset, or from a config, in a child process. Returns the run.

    source: a folder of class folders, an archive or a list of images; or a config, such as
    `"configs/resnet50.yaml"`; None for the demo. overrides: values by key, such as
    `{"train.global_batch_size": 32}`. model, epochs, size, lr: short for `model.name`,
    `train.epochs`, `augment.size_px` and `eval.crop_px`, and `optimizer.lr`. device: as in the
    config. gpus: ranks to start on this machine. work_dir: the run folder, by default
    `work_dirs/<name>`. resume, overwrite: as the options of `tools/train.py`; without either, a
    folder that holds a run is an error. allow_change: keys that may differ from the resumed run,
    such as `["train.epochs"]`. on_eval: called here with the record of each evaluation while the
    run goes on. If it returns a true value, the run is asked to stop: it makes some more steps,
    saves, and can be resumed.

    Prints the lines of the run. Raises the errors of the run as a UserError. An interrupt or
    another exception here, such as a timeout or one of `on_eval`, stops the run, which saves,
    before it is raised.
    """
    if on_eval is not None and not callable(on_eval):
        raise UsageError(f"on_eval={on_eval!r} is no function.", "Give a function of one record.")
    short = {"model": model, "epochs": epochs, "size": size, "lr": lr, "device": device}
    values = {key: value for key, value in short.items() if value is not None}
    arguments = command_arguments({**(overrides or {}), **values})
    argv = [] if source is None else [str(source)]
    argv += arguments
    argv += command_arguments(
        {},
        gpus=gpus,
        work_dir=work_dir,
        resume=resume,
        overwrite=overwrite,
        allow_change=allow_change,
    )
    _, folder = load_run(argv)
    with suppress(StopRun):
        run_command("train", argv, evaluation_watcher(folder / "metrics.jsonl", on_eval))
    return TrainedRun(folder)


class StopRun(Exception):
    """`on_eval` has asked the run to stop."""


def evaluation_watcher(
    file: Path, on_eval: Callable[[Record], object] | None
) -> Callable[[], None]:
    """A function that calls `on_eval` with the evaluations that a run has added to its
    `metrics.jsonl` since the last call. It raises StopRun.
    """
    # As text, in which NaN is equal to NaN.
    seen = [*map(repr, read_metrics(file, "eval"))] if file.is_file() else []

    def watch() -> None:
        if on_eval is None or not file.is_file():
            return
        # A run that resumes, or is started again, replaces the file. Of an evaluation that it makes
        # again the seconds differ.
        new = [record for record in read_metrics(file, "eval") if repr(record) not in seen]
        seen.extend(map(repr, new))
        stops = [on_eval(record) for record in new]
        if any(stops):
            raise StopRun

    return watch
