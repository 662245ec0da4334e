"""The last lines of a run."""

from pathlib import Path

import torch

from imagenet_cls.checkpoint.format import checkpoint_path
from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.engine.meter import Meter
from imagenet_cls.engine.summary import final_message
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group


def test_last_lines_name_the_best_checkpoints_and_say_which_is_missing(tmp_path: Path) -> None:
    progress = Progress(
        step=20,
        best={"raw": {"step": 10, "top1_pct": 90.0}, "ema": {"step": 20, "top1_pct": 91.5}},
        latest={"raw": {"top1_pct": 85.25}, "ema": {"top1_pct": 91.5}},
    )
    kept, deleted = (checkpoint_path(tmp_path / "checkpoints", step) for step in (20, 10))
    kept.mkdir(parents=True)
    meter = Meter(Group(RankInfo(), torch.device("cpu")), global_batch=8)
    done, trained, raw, ema = final_message(progress, tmp_path, meter).splitlines()
    assert done == "done" and meter.describe_total() in trained
    assert "85.25 %" in raw and "90.00 % at step 10" in raw and str(deleted) in raw
    assert "91.50 % at step 20" in ema and str(kept) in ema
    assert ["missing" in line for line in (raw, ema)] == [True, False]
