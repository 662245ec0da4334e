"""TensorBoard event files: the records of `metrics.jsonl`, the config, and the first batch.

Event files are never shortened on a resume: `purge_step` makes TensorBoard forget the steps that are written again.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from imagenet_cls.report.jsonl import Record
from imagenet_cls.report.plots import draw_batch

_TRAIN_FIELDS = ("loss", "lr", "grad_norm", "images_per_sec", "data_wait_pct", "memory_mib")
_EVAL_FIELDS = ("top1_pct", "top5_pct", "loss")
_EVAL_GROUPS = {"raw": "val", "ema": "val_ema"}


class TensorBoard:
    """Event files in one folder.

    resume_step: the step of the checkpoint that the run resumes from, None for a new run. Tags: `train/FIELD`, and
    `val/FIELD` or `val_ema/FIELD`, at the steps of their records; `config` (text), `train/first_batch` (image) and
    `train/first_batch_labels` (text) at the first step of this process. All methods raise OSError where the file system
    fails, perhaps late: event files are written by a thread.
    """

    def __init__(self, folder: Path, resume_step: int | None):
        from torch.utils.tensorboard import SummaryWriter  # here: takes over a second, and may be switched off

        self._first_step = (resume_step or 0) + 1
        # A new run purges, too: it may follow one that died before its first checkpoint.
        self._writer = SummaryWriter(str(folder), purge_step=self._first_step, max_queue=1000)

    def write(self, record: Record) -> None:
        """Add a record's scalars. Events have none."""
        if record["kind"] not in ("train", "eval"):
            return
        group = "train" if record["kind"] == "train" else _EVAL_GROUPS[record["weights"]]
        for field in _TRAIN_FIELDS if group == "train" else _EVAL_FIELDS:
            if field in record:
                self._writer.add_scalar(f"{group}/{field}", record[field], record["step"])

    def config(self, config: str) -> None:
        """Show the resolved config, as YAML."""
        code = "\n".join("    " + line for line in config.splitlines())  # indented by four, Markdown takes it as code
        self._writer.add_text("config", code, self._first_step)

    def first_batch(self, images: np.ndarray, labels: Sequence[str]) -> None:
        """Show images as the model sees them, before normalising, each under its label.

        images: uint8 (B, 3, H, W); labels: B class names, which the text tag holds in full, numbered in reading order.
        """
        listing = "\n".join(f"{number}. {label}" for number, label in enumerate(labels, start=1))
        self._writer.add_image("train/first_batch", draw_batch(images, labels), self._first_step, dataformats="HWC")
        self._writer.add_text("train/first_batch_labels", listing, self._first_step)

    def flush(self) -> None:
        """Write everything so far to the files."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close; may be called again."""
        self._writer.close()
