"""TensorBoard event files: the same records as `metrics.jsonl`, plus the config and a look at the first batch.

Owns the tags. Refuses to be a source: nothing is read back from here. Event files are never shortened on a resume;
instead `purge_step` tells TensorBoard to forget what it has of the steps that are about to be written again. Called by
`reporter`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from imagenet_cls.report.jsonl import Record, writing
from imagenet_cls.report.plots import draw_batch

_TRAIN_FIELDS = ("loss", "lr", "grad_norm", "images_per_sec", "data_wait_pct", "memory_mib")
_EVAL_FIELDS = ("top1_pct", "top5_pct", "loss")
_EVAL_GROUPS = {"raw": "val", "ema": "val_ema"}


class TensorBoard:
    """Event files in one folder.

    folder: `tensorboard/` of the run. resume_step: the step of the checkpoint that the run goes on from, None for a new
    run. Tags: `train/FIELD` and `val/FIELD` or `val_ema/FIELD` at their own steps; `config` (text), `train/first_batch`
    (image) and `train/first_batch_labels` (text) at the first step that this process makes, so that a resume replaces
    what it shows again (scalars and images; TensorBoard forgets no texts and lists them all). All methods raise
    ResourceError where the file system refuses, if late: event files are written by a thread.
    """

    def __init__(self, folder: Path, resume_step: int | None):
        # Here and not above: this import takes over a second, and a run may have TensorBoard switched off.
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._first_step = (resume_step or 0) + 1
        with writing(folder):
            # Purging is right for a new run as well: it may follow one that died before its first checkpoint.
            self._writer = SummaryWriter(str(folder), purge_step=self._first_step, max_queue=1000)

    def write(self, record: Record) -> None:
        """Add a record's scalars. Events are for people who read the log; they have no curve and are left out."""
        if record["kind"] == "train":
            self._scalars("train", _TRAIN_FIELDS, record)
        elif record["kind"] == "eval":
            self._scalars(_EVAL_GROUPS[record["weights"]], _EVAL_FIELDS, record)

    def config_text(self, config: str) -> None:
        """Show the resolved config, as YAML."""
        # Markdown takes text that is indented by four as code, and keeps its line ends.
        code = "\n".join("    " + line for line in config.splitlines())
        with writing(self._folder):
            self._writer.add_text("config", code, self._first_step)

    def first_batch(self, images: np.ndarray, labels: list[str]) -> None:
        """Show images as the model sees them, before normalising, each under its label.

        images: uint8 (B, 3, H, W); labels: B class names. The text tag holds the labels in full, numbered as the grid
        reads.
        """
        listing = "\n".join(f"{number}. {label}" for number, label in enumerate(labels, start=1))
        with writing(self._folder):
            self._writer.add_image("train/first_batch", draw_batch(images, labels), self._first_step, dataformats="HWC")
            self._writer.add_text("train/first_batch_labels", listing, self._first_step)

    def flush(self) -> None:
        """Hand everything so far to the operating system."""
        with writing(self._folder):
            self._writer.flush()

    def close(self) -> None:
        """Flush and close; may be called again."""
        with writing(self._folder):
            self._writer.close()

    def _scalars(self, group: str, fields: Sequence[str], record: Record) -> None:
        """Add those of `fields` that the record has."""
        with writing(self._folder):
            for field in fields:
                if field in record:
                    self._writer.add_scalar(f"{group}/{field}", record[field], record["step"])
