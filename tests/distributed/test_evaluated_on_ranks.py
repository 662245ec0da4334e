"""`evaluate_weights` on one and two ranks: a separate test set, classes of ImageNet, outputs that are not finite."""

from pathlib import Path

import pytest
import torch
from forked_ranks import RankServer, destroy_group, join_group
from helpers import DEMO, plain

from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import Config
from imagenet_cls.engine.evaluate_weights import evaluate_weights
from imagenet_cls.errors import CheckpointError


def small_config(folder: Path, *more: str) -> Config:
    """Of `helpers:plain`, with the weights in `folder` and images of its folder `images`."""
    settings = {"data.name": "folder", "data.root": folder, "data.train": "absent", "data.val": "images"}
    settings |= {"data.num_workers": 0, "eval.crop_px": 16, "eval.batch_size": 7, "ema.decay": "null"}
    settings |= {"model.name": "helpers:plain", "model.checkpoint": folder / "weights.pth"}
    words = [f"{key}={value}" for key, value in (settings | {"data.val_fraction": "null"}).items()]
    return load_config(DEMO, [*words, *more]).config


def write_images(folder: Path, classes: dict[str, int]) -> None:
    """Images of one random color each. classes: the number of images by class."""
    from PIL import Image

    draws = torch.Generator().manual_seed(0)
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            color = tuple(torch.randint(0, 256, (3,), generator=draws).tolist())
            Image.new("RGB", (16, 16), color).save(folder / name / f"{number}.png")


def evaluate_nan_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    group = join_group(rank, ranks, folder / f"store{ranks}")
    with pytest.raises(CheckpointError) as raised:
        evaluate_weights(small_config(folder), None, group, keep_predictions=False)
    assert "13 (raw) of 13" in str(raised.value) and raised.value.printed_elsewhere == (rank > 0)
    if ranks > 1:
        destroy_group(group)


@pytest.mark.parametrize("ranks", [1, 2])
def test_images_without_finite_outputs_are_counted_over_all_ranks(
    tmp_path: Path, rank_server: RankServer, ranks: int
) -> None:
    write_images(tmp_path / "images", {"a": 6, "b": 7})
    torch.save({name: value * torch.nan for name, value in plain(2).state_dict().items()}, tmp_path / "weights.pth")
    rank_server.call(evaluate_nan_on_ranks, ranks, tmp_path)
