"""Runs on several labels for an image end in the same bits from a list, from the shards that it was
packed into and from a dataset of one's own, on one rank and on two, also after a kill and a resume.
"""

from pathlib import Path

import pytest
from forked_ranks import KillPoint, RankServer
from helpers import (
    DEMO,
    arguments,
    losses,
    newest,
    saved_bytes,
    state_digest,
    succeeds,
    train_here,
)
from labeled_digits import write_lists

from imagenet_cls.extras.datasets.pack import pack_command

SETTINGS = {
    "data__num_workers": 2,
    "data__labels": "multi",
    "data__val_fraction": "null",
    "loss__name": "asymmetric",
    "checkpoint__best": "map",
    "mix__mixup_alpha": 0.2,
    "train__epochs": 3,
    "train__global_batch_size": 64,
    "checkpoint__every_steps": 3,
}
LIST = {"name": "list", "train": "train.csv", "val": "val.csv"}
FORMS = {
    "list": {f"data__{key}": value for key, value in LIST.items()},
    "shards": {"data__name": "folder", "data__val": "val"},
    "own": {"data__name": "labeled_digits:Listed", "data__val": "val"},
}


@pytest.fixture(scope="module")
def root(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lists, and `packed` with the shards."""
    root = tmp_path_factory.mktemp("labeled")
    write_lists(digits, root)
    places = [f"data.{key}={value}" for key, value in LIST.items()]
    places += [f"data.root={root}", "data.val_fraction=null"]
    options = ["--multilabel", "--images-per-shard", 100]
    succeeds(pack_command, DEMO, root / "packed", *places, *options)
    return root


def line(form: str, root: Path, work_dir: Path) -> list[str]:
    """Arguments of a run from the list, the shards or a dataset of one's own."""
    place = root / "packed" if form == "shards" else root
    return arguments(place, work_dir, "noisy", **SETTINGS, **FORMS[form])


@pytest.fixture(scope="module")
def list_run(root: Path) -> Path:
    train_here([*line("list", root, root / "run"), "data.num_workers=0"])
    assert len(losses(root / "run")) == 12
    return root / "run"


@pytest.mark.parametrize("form", FORMS)
def test_resumed_run_ends_in_the_bits_of_the_list(
    form: str, root: Path, list_run: Path, tmp_path: Path
) -> None:
    words = line(form, root, tmp_path / "run")
    train_here([*words, "train.max_steps=5"])
    train_here([*words, "--resume"])
    assert losses(tmp_path / "run") == losses(list_run)
    assert saved_bytes(tmp_path / "run") == saved_bytes(list_run)


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_resume_after_a_kill(
    form: str, root: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    whole, parts, output = (tmp_path / name for name in ("whole", "parts", "output.txt"))
    rank_server.train(line("list", root, whole), 2)
    words = line(form, root, parts)
    codes = rank_server.run(words, output, 2, [KillPoint("in_forward", 8, rank=1)])
    assert codes[1] == -9, output.read_text()
    assert newest(parts).name.endswith(("4", "6"))  # in the second epoch of 4 steps
    rank_server.train([*words, "--resume"], 2)
    assert losses(parts) == losses(whole)
    assert state_digest(parts) == state_digest(whole)
