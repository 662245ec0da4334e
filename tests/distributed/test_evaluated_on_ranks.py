"""Outputs of an evaluation that are not finite, on two ranks. Results and rows:
test_ranks_agree.py, tests/extras/test_evaluation_report.py.
"""

from pathlib import Path

import pytest
import torch
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import arguments, plain

from imagenet_cls.config.load import load_config
from imagenet_cls.errors import CheckpointError
from imagenet_cls.inference.evaluate_weights import evaluate_weights
from imagenet_cls.inference.load_weights import WeightsSource


def evaluate_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    context = join_ranks(rank, ranks, folder / "store")
    settings = {
        "data__name": "synthetic",
        "data__kwargs": "{train_images: 8, val_images: 13, num_classes: 10, size_px: 16}",
        "model__checkpoint": folder / "nan.pth",
    }
    config, *words = arguments(folder, folder, **settings)[:-2]
    with pytest.raises(CheckpointError, match=r"13 \(raw\) of 13"):
        evaluate_weights(load_config(config, words).config, WeightsSource(), context)
    destroy_process_groups(context)


def test_outputs_that_are_not_finite_are_counted_over_all_ranks(
    tmp_path: Path, rank_server: RankServer
) -> None:
    state = {name: value * torch.nan for name, value in plain(10).state_dict().items()}
    torch.save(state, tmp_path / "nan.pth")
    rank_server.call(evaluate_on_ranks, 2, tmp_path)
