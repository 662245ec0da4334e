"""SAM, clipping by unit and rates by name on two ranks: the losses of one."""

from pathlib import Path

import pytest
from forked_ranks import RankServer
from helpers import arguments, losses, train_here

from imagenet_cls.report.log import close_log


def test_two_ranks_repeat_one_with_sam_clipping_and_factors(
    digits: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    parts = {"train__sam_rho": 0.2, "train__clip_agc": 0.05, "optimizer__lr_scales": '{"5.*": 2}'}
    parts |= {"optimizer__norm_weight_decay": 0, "train__micro_batch_size": 32, "train__max_steps": 4}
    train_here(arguments(digits, tmp_path / "one", **parts))
    close_log()
    words = arguments(digits, tmp_path / "two", **parts, parallel__init_method=f"file://{tmp_path / 'store'}")
    assert rank_server.run(words, tmp_path / "said", ranks=2) == [0, 0], (tmp_path / "said").read_text()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
