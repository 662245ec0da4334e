"""Writers of scalars besides metrics.jsonl.

TensorBoard, Weights & Biases, MLflow, or a class of the user.
"""

import inspect
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.config.compare import changed_values
from imagenet_cls.config.load import dump_yaml
from imagenet_cls.config.schema import Config, LogConfig
from imagenet_cls.errors import Problem, ResourceError
from imagenet_cls.files import write_file
from imagenet_cls.lookup import NameNotFoundError, find_factory
from imagenet_cls.text import first_line

if TYPE_CHECKING:
    from torch import Tensor

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

    def first_batch(self, images: "Tensor", labels: Sequence[str]) -> None:
        """Show the first batch of a run: uint8 images (B, C, H, W) on the CPU, and their labels. C
        is `data.channels`.
        """

    def flush(self) -> None:
        """Write everything to the files, before a checkpoint. Called by another thread."""

    def close(self, finished: bool) -> None:
        """Flush and close. finished: whether the run has ended, or may be resumed."""


class TensorBoard(Writer):
    """TensorBoard's event files: scalars, the config and the first batch.

    TensorBoard hides the events of earlier processes from the resumed step on (`purge_step`). A
    thread writes the files, so that an error is raised by a later call.
    """

    def __init__(self, folder: Path, config: Config, resume_step: int):
        # This import takes over a second, and TensorBoard may be switched off.
        from torch.utils.tensorboard import SummaryWriter

        self.last_step = resume_step - 1 if any(folder.glob("events.*")) else 0
        self._first_step = max(resume_step, 1)
        self._writer = SummaryWriter(str(folder), purge_step=self._first_step, max_queue=1000)
        # indented lines are code in Markdown
        code = "\n".join("    " + line for line in dump_yaml(config).splitlines())
        self._writer.add_text("config", code, self._first_step)

    def write(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)

    def first_batch(self, images: "Tensor", labels: Sequence[str]) -> None:
        from torchvision.utils import make_grid

        listing = "\n".join(f"{number}. {label}" for number, label in enumerate(labels, start=1))
        self._writer.add_image("train/first_batch", make_grid(images, nrow=8), self._first_step)
        self._writer.add_text("train/first_batch_labels", listing, self._first_step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()


class Wandb(Writer):
    """A run of Weights & Biases, set up by its environment variables, such as WANDB_PROJECT and
    WANDB_MODE=offline.

    A resumed run continues the same run there: steps that it has keep their first values. Offline,
    each start writes a new folder.
    """

    def __init__(self, folder: Path, config: Config, resume_step: int):
        import wandb

        id_file = folder / "run_id"
        if not id_file.exists():
            write_file(id_file, uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "imagenet-cls"),
            name=folder.resolve().parent.name,
            id=id_file.read_text(),
            resume="allow",
            dir=folder.parent,
            config=asdict(config),
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        # `step` is the step that the next `log` would write, 0 for a new run
        self.last_step = self._run.step - 1

    def write(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            self._run.log(values, step=step)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class Mlflow(Writer):
    """A run of MLflow, at MLFLOW_TRACKING_URI; default: `mlflow/mlflow.db` in the run folder.

    A resumed run continues the same run there: steps that it has keep their first values. A
    background thread sends the metrics. The metric `step` is the last step that was sent.
    """

    def __init__(self, folder: Path, config: Config, resume_step: int):
        import mlflow

        mlflow.set_tracking_uri(
            os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.resolve()}/mlflow.db")
        )
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "imagenet-cls"))
        id_file = folder / "run_id"
        run_id = id_file.read_text() if id_file.exists() else None
        run = mlflow.start_run(run_id, run_name=folder.resolve().parent.name)
        if run_id is None:
            mlflow.log_params(changed_values(config))
            write_file(id_file, run.info.run_id)
        self.last_step = int(run.data.metrics.get("step", 0))
        self._mlflow = mlflow
        self._run_id = run.info.run_id
        self._thread = ThreadPoolExecutor(1)
        self._sent: list[Future[None]] = []

    def write(self, rows: Sequence[Row]) -> None:
        """Raises the error of an earlier call that failed."""
        while self._sent and self._sent[0].done():  # the thread sends them in order
            self._sent.pop(0).result()
        self._sent.append(self._thread.submit(self._send, rows))

    def _send(self, rows: Sequence[Row]) -> None:
        metric = partial(self._mlflow.entities.Metric, timestamp=int(time.time() * 1000))
        for start in range(0, len(rows), 50):  # a batch has at most 1,000 metrics
            metrics = []
            for step, values in rows[start : start + 50]:
                metrics += [metric(tag, value, step=step) for tag, value in values.items()]
                metrics.append(metric("step", step, step=step))
            self._mlflow.MlflowClient().log_batch(self._run_id, metrics)

    def close(self, finished: bool) -> None:
        self._thread.shutdown()
        for future in self._sent:
            future.result()
        self._mlflow.end_run("FINISHED" if finished else "KILLED")


BUILT_IN: dict[str, type[Writer]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}


def writer_names(log: LogConfig) -> list[str]:
    """The writers of a run besides metrics.jsonl."""
    left_out = ("jsonl",) if log.tensorboard else ("jsonl", "tensorboard")
    return [name for name in dict.fromkeys(log.writers) if name not in left_out]


def open_writers(folder: Path, config: Config, resume_step: int) -> dict[str, Writer]:
    """Start the writers of a config, by name, in a run folder. If one of them fails, close the
    others and raise ResourceError.
    """
    writers: dict[str, Writer] = {}
    for name in writer_names(config.log):
        own_folder = folder / (name if name in BUILT_IN else f"writers/{name}")
        try:
            own_folder.mkdir(parents=True, exist_ok=True)
            writers[name] = find_factory("writer", name, BUILT_IN)(own_folder, config, resume_step)
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
            writer = find_factory("writer", name, BUILT_IN)
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
        if name in ("wandb", "mlflow") and getattr(find_spec(name), "origin", None) is None:
            problems.append(
                Problem(
                    "log.writers",
                    f"{name!r} needs a package that is missing; run: pip install "
                    f"'imagenet-cls[{name}]'",
                )
            )
    return problems
