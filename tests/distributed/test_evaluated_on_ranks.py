"""`evaluate_weights` on one and two ranks: a separate test set, classes of ImageNet, outputs that
are not finite.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import arguments, plain, train_here

from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import Config
from imagenet_cls.data.test_set import locate_test_set
from imagenet_cls.errors import CheckpointError, DataError
from imagenet_cls.inference.evaluate_weights import evaluate_weights, prediction_rows
from imagenet_cls.inference.load_weights import WeightsSource


def small_config(folder: Path, *more: str) -> Config:
    """Of `helpers:plain`, with the weights in `folder` and images of its folder `images`."""
    settings: dict[str, Any] = {
        "data__name": "folder",
        "data__train": "absent",
        "data__val": "images",
        "data__val_fraction": "null",
        "eval__batch_size": 7,
        "model__checkpoint": folder / "weights.pth",
    }
    config, *words = arguments(folder, folder, **settings)[:-2]
    return load_config(config, [*words, *more]).config


def write_images(folder: Path, classes: dict[str, int]) -> None:
    """Images of one color each. classes: the number of images by class."""
    from PIL import Image

    for index, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            color = (10 * number, 80 * index, 100)
            Image.new("RGB", (16, 16), color).save(folder / name / f"{number}.png")


def evaluate_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    """Write the results of a separate test set, and of weights for ImageNet. Another folder's
    split, and outputs that are not finite, counted over all ranks, are errors.
    """
    context = join_ranks(rank, ranks, folder / f"store{ranks}")
    run = folder / "run"
    config = load_config(run / "config.yaml").config
    test_set = locate_test_set(folder / "testset", config.data)
    weights = WeightsSource(run, allow_import=["helpers:plain"])
    evaluations = {"run": evaluate_weights(config, weights, context, test_set, record=True)}
    with pytest.raises(DataError):
        moved = replace(config, data=replace(config.data, root=str(folder), train="testset"))
        evaluate_weights(moved, weights, context)
    with pytest.raises(CheckpointError, match=r"13 \(raw\) of 13"):
        checkpoint = f"model.checkpoint={folder}/nan.pth"
        evaluate_weights(small_config(folder, checkpoint), WeightsSource(), context)
    some = small_config(folder, "model.num_classes=1000")
    evaluations["imagenet"] = evaluate_weights(some, WeightsSource(), context, record=True)
    if rank == 0:
        found = {}
        for kind, evaluation in evaluations.items():
            for result in evaluation.results.values():
                del result["seconds"]
            found[kind] = [evaluation.results, list(prediction_rows(evaluation))]
        (folder / f"found{ranks}.json").write_text(json.dumps(found))
    if ranks > 1:
        destroy_process_groups(context)


def test_test_set_and_matched_outputs_do_not_depend_on_the_ranks(
    tmp_path: Path, rank_server: RankServer
) -> None:
    write_images(tmp_path / "photos", {"a": 20, "b": 20, "c": 20})
    write_images(tmp_path / "testset", {"a": 3, "b": 5, "c": 7})
    write_images(tmp_path / "images", {"goldfish": 6, "tench": 7})
    split = {
        "data__name": "folder",
        "data__train": ".",
        "data__val": "null",
        "data__val_fraction": 0.2,
    }
    train_here(
        arguments(
            tmp_path / "photos",
            tmp_path / "run",
            **split,
            train__epochs=1,
            train__global_batch_size=16,
        )
    )
    torch.manual_seed(0)
    torch.save(plain(1000).state_dict(), tmp_path / "weights.pth")
    not_finite = {name: value * torch.nan for name, value in plain(2).state_dict().items()}
    torch.save(not_finite, tmp_path / "nan.pth")
    for ranks in (1, 2):
        rank_server.call(evaluate_on_ranks, ranks, tmp_path)
    first, second = (json.loads((tmp_path / f"found{ranks}.json").read_text()) for ranks in (1, 2))
    for kind, images in (("run", 15), ("imagenet", 13)):
        (results, rows), (others, other_rows) = first[kind], second[kind]
        assert results["raw"]["images"] == len(rows) == images
        assert [row["image"] for row in rows] == [row["image"] for row in other_rows]
        hits = sum(row["top"][0][0] == row["target"] for row in rows)
        assert results["raw"]["top1_pct"] == pytest.approx(100 * hits / images)
        assert others["raw"] == pytest.approx(results["raw"], rel=1e-5)
