"""Runs on several labels for an image end in the same bits from a list, from the shards that it was
packed into and from a dataset of one's own, on one rank and on two, also after a kill and a resume.
"""

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import KillPoint, RankServer
from helpers import arguments, losses, newest, saved_bytes, state_digest, succeeds, train_here
from labeled_digits import write_lists

from imagenet_cls.extras.datasets.pack import pack_command
from imagenet_cls.extras.datasets.verify_data import verify_command

SETTINGS = {
    "data__labels": "multi",
    "data__val_fraction": "null",
    "loss__name": "asymmetric",
    "checkpoint__best": "map",
    "mix__mixup_alpha": 0.2,
    "train__epochs": 3,
    "train__global_batch_size": 64,
    "checkpoint__every_steps": 3,
}
LIST = {"data__name": "list", "data__train": "train.csv", "data__val": "val.csv"}


@pytest.fixture(scope="module")
def root(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lists, and `packed` with the shards."""
    root = tmp_path_factory.mktemp("labeled")
    write_lists(digits, root)
    words = line("list", root, root)
    options = ["--multilabel", "--images-per-shard", "100"]
    keys = ("data.name", "data.root", "data.train", "data.val", "data.val_fraction")
    overrides = [word for word in words if word.partition("=")[0] in keys]
    succeeds(pack_command, words[0], root / "packed", *overrides, *options)
    return root


def line(form: str, root: Path, work_dir: Path, **changes: Any) -> list[str]:
    """Arguments of a run from the list, the shards or a dataset of one's own."""
    place, data = {
        "list": (root, LIST),
        "shards": (root / "packed", {"data__name": "folder", "data__val": "val"}),
        "own": (root, {"data__name": "labeled_digits:Listed", "data__val": "val"}),
    }[form]
    return arguments(place, work_dir, "noisy", **SETTINGS | data | changes)


@pytest.fixture(scope="module")
def list_run(root: Path) -> Path:
    train_here(line("list", root, root / "run"))
    assert len(losses(root / "run")) == 12
    return root / "run"


@pytest.mark.parametrize("form", ["list", "shards", "own"])
def test_resumed_run_ends_in_the_bits_of_the_list(
    form: str, root: Path, list_run: Path, tmp_path: Path
) -> None:
    words = line(form, root, tmp_path / "run", data__num_workers=2)
    train_here([*words, "train.max_steps=5"])
    train_here([*words, "--resume"])
    assert losses(tmp_path / "run") == losses(list_run)
    assert saved_bytes(tmp_path / "run") == saved_bytes(list_run)


def test_labels_decide_the_bits(root: Path, list_run: Path, tmp_path: Path) -> None:
    """Otherwise the comparisons show nothing."""
    text = (root / "train.csv").read_text()
    (root / "other.csv").write_text(text.replace("even", "large;even", 1))
    train_here(line("list", root, tmp_path / "run", data__train="other.csv"))
    assert saved_bytes(tmp_path / "run") != saved_bytes(list_run)


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["list", "shards", "own"])
def test_two_ranks_resume_after_a_kill(
    form: str, root: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    whole, parts, output = (tmp_path / name for name in ("whole", "parts", "output.txt"))
    rank_server.train(line("list", root, whole), 2)
    words = line(form, root, parts)
    codes = rank_server.run(words, output, 2, [KillPoint("in_forward", 8, rank=1)])
    assert codes[1] == -9, output.read_text()
    assert newest(parts).name.endswith(("4", "6"))  # in the second epoch of 4 steps
    codes = rank_server.run([*words, "--resume"], output, 2)
    assert codes == [0, 0], output.read_text()
    assert losses(parts) == losses(whole)
    assert state_digest(parts) == state_digest(whole)


def test_verify_data_reads_the_images_of_the_list(root: Path) -> None:
    words = line("list", root, root)
    assert "360 images, 0 bad" in succeeds(verify_command, *words[: words.index("--work-dir")])
