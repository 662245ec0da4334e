"""Writers of scalars for services that track runs: Weights & Biases and MLflow."""

import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from imagenet_cls.config.compare import differing_values
from imagenet_cls.config.schema import Config
from imagenet_cls.files import write_file
from imagenet_cls.report.writers import Row, Writer


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
            differences = differing_values([Config(), config])
            mlflow.log_params(
                {
                    key: value
                    for key, (_, value) in differences.items()
                    if not key.startswith("expect.")  # published results
                }
            )
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
