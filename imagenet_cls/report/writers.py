"""Writers of scalars besides metrics.jsonl.

TensorBoard, that of `extras.trackers`, or a class of the user.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from imagenet_cls.config.schema import Config, LogConfig
from imagenet_cls.entry_points import load_extra
from imagenet_cls.errors import Problem, ResourceError
from imagenet_cls.lookup import NameNotFoundError, find_factory
from imagenet_cls.text import first_line

Row = tuple[int, dict[str, float]]
"""A step, and its scalars by tag, such as `train/loss`, `val/top1_pct` and `val_ema/top1_pct`."""


class Writer:
    """Base class of writers. `log.writers: [my_module:MyWriter]` calls `MyWriter(folder, config,
    resume_step)`.

    folder: for this writer's files. resume_step: the step of the checkpoint that the run resumes
    from, 0 for a new run. Rank 0 only. A writer that raises in `__init__` ends the run; one that
    raises later is not called again in this process. last_step: the last step that is not to be
    written again.
    """

    last_step = 0

    def __init__(self, folder: Path, config: Config, resume_step: int):
        pass

    def write(self, rows: Sequence[Row]) -> None:
        """Write steps in increasing order, possibly none. Each step comes once, complete with its
        evaluations.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Write everything to the files, before a checkpoint. Called by another thread."""

    def close(self, finished: bool) -> None:
        """Flush and close. finished: whether the run has ended, or may be resumed."""


class TensorBoard(Writer):
    """TensorBoard's event files: scalars.

    TensorBoard hides the events of earlier processes from the resumed step on (`purge_step`). A
    thread writes the files, so that an error is raised by a later call.
    """

    def __init__(self, folder: Path, config: Config, resume_step: int):
        # This import takes over a second, and TensorBoard may be switched off.
        from torch.utils.tensorboard import SummaryWriter

        self.last_step = resume_step - 1 if any(folder.glob("events.*")) else 0
        purge_step = max(resume_step, 1)
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, max_queue=1000)

    def write(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()


BUILT_IN: dict[str, type[Writer]] = {"tensorboard": TensorBoard}
TRACKER = "wandb"  # in `extras.trackers`, and the package that it needs


def writer_names(log: LogConfig) -> list[str]:
    """The writers of a run besides metrics.jsonl."""
    left_out = ("jsonl",) if log.tensorboard else ("jsonl", "tensorboard")
    return [name for name in dict.fromkeys(log.writers) if name not in left_out]


def find_writer(name: str) -> Callable[..., Any]:
    """The class of a writer. Raises NameNotFoundError, or what the user's module raises."""
    if name == TRACKER:
        return load_extra(f"log.writers={name}")
    return find_factory("writer", name, BUILT_IN | {TRACKER: Writer})


def open_writers(folder: Path, config: Config, resume_step: int) -> dict[str, Writer]:
    """Start the writers of a config, by name, in a run folder. If one of them fails, close the
    others and raise ResourceError.
    """
    writers: dict[str, Writer] = {}
    for name in writer_names(config.log):
        file_name = name.replace(":", ".")  # Windows and tar take a colon for something else
        own_folder = folder / (name if name in {*BUILT_IN, TRACKER} else f"writers/{file_name}")
        try:
            own_folder.mkdir(parents=True, exist_ok=True)
            writers[name] = find_writer(name)(own_folder, config, resume_step)
        except (Exception, SystemExit) as error:
            for started in writers.values():
                with suppress(Exception, SystemExit):  # the first error is the one to report
                    started.close(finished=False)
            raise ResourceError(
                f"log.writers: {name!r} could not start: {type(error).__name__}: "
                f"{first_line(error)}",
                "Fix this, or remove it from log.writers.",
            ) from error
    return writers


def writer_problems(log: LogConfig) -> list[Problem]:
    """All problems of `log.writers`: unknown names, classes that take other arguments, and missing
    packages.
    """
    problems = []
    for name in writer_names(log):
        try:
            writer = find_writer(name)
        except NameNotFoundError as error:
            problems.append(Problem("log.writers", f"{name!r}: {error}"))
            continue
        try:
            if not (isinstance(writer, type) and issubclass(writer, Writer)):
                raise TypeError(f"is no subclass of {Writer.__module__}.Writer")
            inspect.signature(writer).bind("folder", "config", "resume_step")
        except TypeError as error:
            problems.append(Problem("log.writers", f"{name!r}: {error}"))
        # A folder `wandb` in the working directory has a spec without an origin.
        if name == TRACKER and getattr(find_spec(name), "origin", None) is None:
            problems.append(
                Problem(
                    "log.writers",
                    f"{name!r} needs a package that is missing; run: pip install "
                    f"'imagenet-cls[{name}]'",
                )
            )
    return problems
