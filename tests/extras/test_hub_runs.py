"""Runs from datasets in the formats of the Hugging Face Hub end in the bits of a run from class
folders, on one rank and on two, also after a kill and a resume.
"""

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import KillPoint, RankServer
from helpers import (
    arguments,
    datasets_in,
    digits_as_rows,
    fails,
    losses,
    newest,
    saved_bytes,
    state_digest,
    succeeds,
    train_here,
)

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.extras.datasets.pack import pack_command
from imagenet_cls.extras.datasets.verify_data import verify_command

datasets = pytest.importorskip("datasets")
SETTINGS = {"data__val": "train", "data__val_fraction": "null", "train__epochs": 1}


@pytest.fixture(scope="module")
def rows(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`rows/saved` and `rows/parquet` have the digits as rows."""
    folder = tmp_path_factory.mktemp("rows")
    train = digits_as_rows(digits)
    datasets.DatasetDict({"train": train}).save_to_disk(folder / "saved")
    for number in range(2):
        shard = train.shard(2, number)
        shard.to_parquet(folder / "parquet" / f"train-{number:05d}-of-00002.parquet")
    return folder


@pytest.fixture(autouse=True)
def own_cache(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", rows / "cache")


def words(place: Path, work_dir: Path, **changes: Any) -> list[str]:
    settings = {"data__name": f"hf:{place}"} | SETTINGS | changes
    return arguments(".", work_dir, "noisy", **settings)


@pytest.fixture(scope="module")
def folder_run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work_dir = tmp_path_factory.mktemp("folder") / "run"
    train_here(arguments(digits, work_dir, "noisy", data__name="folder", **SETTINGS))
    return work_dir


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_resumed_run_ends_in_the_bits_of_class_folders(
    kind: str, rows: Path, tmp_path: Path, folder_run: Path
) -> None:
    changes = {"data__num_workers": 2}
    train_here([*words(rows / kind, tmp_path / "run", **changes), "train.max_steps=5"])
    train_here([*words(rows / kind, tmp_path / "run", **changes), "--resume"])
    assert losses(tmp_path / "run") == losses(folder_run)
    assert saved_bytes(tmp_path / "run") == saved_bytes(folder_run)


@pytest.mark.nightly
def test_two_ranks_resume_after_a_kill(
    rows: Path, digits: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    """From Parquet files, which the ranks convert at the start of the first run."""
    every = {"checkpoint__every_steps": 4}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = SETTINGS | every
    rank_server.train(arguments(digits, whole, "noisy", data__name="folder", **settings), 2)
    output = tmp_path / "output.txt"
    start = words(rows / "parquet", parts, **every)
    env = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    kill = KillPoint("in_forward", 9, rank=1)
    codes = rank_server.run(start, output, 2, [kill], **env)
    assert codes[1] == -9, output.read_text()
    assert newest(parts).name.endswith(("4", "8"))
    codes = rank_server.run([*start, "--resume"], output, 2, **env)
    assert codes == [0, 0], output.read_text()
    assert losses(parts) == losses(whole)
    assert state_digest(parts) == state_digest(whole)


def test_commands_read_the_rows(rows: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    held_out = {"data__val": "null", "data__val_fraction": 0.2, "model__name": "resnet20_cifar"}
    line = words(rows / "saved", run, **held_out)
    train_here([*line, "train.max_steps=2"])
    assert "359 images of 10 classes" in succeeds(evaluate_command, run)
    config, *overrides = line[:-2]
    fails(2, verify_command, config, *overrides)
    succeeds(pack_command, config, tmp_path / "packed", *overrides)
    assert len(datasets_in(tmp_path / "packed").train) == 1438
