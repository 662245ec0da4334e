"""Writers of scalars for services that track runs: Weights & Biases."""

import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

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
