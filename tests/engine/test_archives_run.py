"""Runs from archives end in the bits of a run from the folder that they hold."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import arguments, saved_bytes, succeeds, train_here

from imagenet_cls.extras.datasets.pack import pack_command

FOLDER = {
    "data__name": "folder",
    "data__val": "null",
    "data__val_fraction": 0.2,
    "train__epochs": 1,
}


def write_zip(digits: Path, root: Path) -> dict[str, Any]:
    shutil.make_archive(str(root / "train"), "zip", digits / "train")
    return {"data__train": "train.zip"}


def write_shards(digits: Path, root: Path) -> dict[str, Any]:
    config = root.with_suffix(".yaml")
    config.write_text(
        f"data: {{name: folder, root: {digits}, val: train}}\noptimizer: {{lr: 0.1}}\n"
    )
    succeeds(pack_command, config, root, "--images-per-shard", 400)
    return {"data__train": "train/train-{00000..00004}.tar", "data__num_workers": 2}


@pytest.mark.parametrize("write", [write_zip, write_shards])
def test_run_continues_from_the_folder_in_archives_of_it(
    write: Callable[[Path, Path], dict[str, Any]], digits: Path, tmp_path: Path
) -> None:
    """The digest and the sizes of the images are the same, so only the path has changed."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_here(arguments(digits, whole, **FOLDER))
    train_here(arguments(digits, run, train__max_steps=5, **FOLDER))
    changes = FOLDER | write(digits, tmp_path / "data")
    resumed = arguments(tmp_path / "data", run, **changes)
    train_here([*resumed, "--resume", "--allow-change", "data.train"])
    assert saved_bytes(run) == saved_bytes(whole)
