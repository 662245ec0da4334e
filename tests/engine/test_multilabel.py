"""Runs on images with several labels (`data.labels` multi).

They end in the same bits from a list, from the shards that it was packed into and from a dataset of
one's own, on one rank and on two, also after a kill and a resume.
"""

from pathlib import Path

import pytest
from forked_ranks import KillPoint, RankServer
from helpers import (
    DEMO,
    MULTILABEL,
    arguments,
    evaluations,
    fails,
    losses,
    newest,
    saved_bytes,
    state_digest,
    state_of,
    succeeds,
    train_here,
)
from labeled_digits import write_lists

from imagenet_cls.commands.print_config import print_config_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.extras.datasets.pack import pack_command


def test_run_learns_and_own_metrics_get_rows(tmp_path: Path) -> None:
    """The mean average precision rises; that of random outputs is 18 %."""
    words = arguments(tmp_path, tmp_path / "run", optimizer__lr=0.1)
    metrics = "eval.metrics=[helpers:label_precision]"
    train_here([*words, *MULTILABEL, "loss.class_weights=balanced", metrics])
    first, *_, last = evaluations(tmp_path / "run")
    assert last["map_pct"] > first["map_pct"] and last["map_pct"] > 25
    assert last["label_precision"] == pytest.approx(last["map_pct"] / 100, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("checkpoint.best=top1", "checkpoint.best"),
        ("train.early_stop.patience_evals=2", "train.early_stop.metric"),
        ("data.balance=0.5", "data.balance"),
        ("loss.class_weights=effective", "data.labels"),
        ("data.name=digits data.val=null data.val_fraction=0.2", "data.labels"),
        ("eval.classes=present", "eval.classes"),
        ("distill.kind=soft distill.teacher.name=resnet18", "distill.kind"),
        ("data.labels=single", "checkpoint.best"),
    ],
)
def test_settings_that_do_not_fit_name_their_key(settings: str, key: str) -> None:
    words = [*arguments("data", "run")[:-2], *MULTILABEL, *settings.split()]
    assert f"{key}:" in fails(2, print_config_command, *words)


def test_another_number_of_outputs_than_labels_is_an_error(tmp_path: Path) -> None:
    words = [*arguments(tmp_path, tmp_path / "run"), *MULTILABEL, "model.num_classes=11"]
    assert "model.num_classes:" in fails(2, train_command, *words)


# ---- a list, shards and a dataset of one's own: the same bits

# All that a run of images with several labels may set.
SETTINGS = {
    "data__num_workers": 2,
    "data__labels": "multi",
    "data__val_fraction": "null",
    "loss__name": "asymmetric",
    "loss__label_smoothing": 0.1,
    "checkpoint__best": "map",
    "checkpoint__every_steps": 3,
    "mix__mixup_alpha": 0.2,
    "mix__cutmix_alpha": 1.0,
    "augment__erasing__prob": 0.5,
    "ema__decay": 0.9,
    "train__early_stop__patience_evals": 2,
    "train__early_stop__metric": "micro_f1",
    "train__epochs": 3,
    "train__global_batch_size": 64,
    "eval__threshold": 0.4,
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


def test_results_are_those_of_several_labels(list_run: Path) -> None:
    raw, ema = evaluations(list_run)[-2:]
    assert raw.keys() == ema.keys() >= {"map_pct", "micro_f1_pct", "macro_f1_pct", "best_threshold"}
    assert not raw.keys() & {"top1_pct", "top5_pct", "balanced_accuracy_pct"}
    progress = state_of(list_run)["progress"]
    assert progress["latest"]["raw"]["best_threshold"] == raw["best_threshold"]
    assert set(progress["best"]["raw"]) == {"map_pct", "step"}


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
