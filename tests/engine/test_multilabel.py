"""Runs on images with several labels (`data.labels` multi)."""

from pathlib import Path

import pytest
from helpers import MULTILABEL, arguments, assert_resumes, evaluations, fails, state_of, train_here

from imagenet_cls.commands.print_config import print_config_command
from imagenet_cls.commands.train import train_command

EVERYTHING = {
    **dict(word.split("=") for word in MULTILABEL),
    "loss.name": "asymmetric",
    "loss.label_smoothing": 0.1,
    "loss.class_weights": "balanced",
    "mix.mixup_alpha": 0.2,
    "mix.cutmix_alpha": 1.0,
    "augment.erasing.prob": 0.5,
    "ema.decay": 0.9,
    "schedule.name": "plateau",
    "train.early_stop.patience_evals": 2,
    "train.early_stop.metric": "micro_f1",
    "train.epochs": 3,
    "eval.threshold": 0.4,
}


def test_interrupted_run_has_the_same_bits(tmp_path: Path) -> None:
    assert_resumes(tmp_path, tmp_path, 25, **EVERYTHING)
    raw, ema = evaluations(tmp_path / "whole")[-2:]
    assert raw.keys() == ema.keys() >= {"map_pct", "micro_f1_pct", "macro_f1_pct", "best_threshold"}
    assert not raw.keys() & {"top1_pct", "top5_pct", "balanced_accuracy_pct"}
    progress = state_of(tmp_path / "whole")["progress"]
    assert progress["latest"]["raw"]["best_threshold"] == raw["best_threshold"]
    assert set(progress["best"]["raw"]) == {"map_pct", "step"}
    assert progress["evaluations"][-1][1] == raw["map_pct"]  # of the plateau


def test_run_learns_and_own_metrics_get_rows(tmp_path: Path) -> None:
    """The mean average precision rises; that of random outputs is 18 %."""
    words = arguments(tmp_path, tmp_path / "run", optimizer__lr=0.1)
    train_here([*words, *MULTILABEL, "eval.metrics=[helpers:label_precision]"])
    first, *_, last = evaluations(tmp_path / "run")
    assert last["map_pct"] > first["map_pct"] and last["map_pct"] > 25
    assert last["label_precision"] == pytest.approx(last["map_pct"] / 100, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("loss.name=cross_entropy", "loss.name"),
        ("loss.class_weights=effective", "loss.class_weights"),
        ("checkpoint.best=top1", "checkpoint.best"),
        ("train.early_stop.patience_evals=2", "train.early_stop.metric"),
        ("data.balance=0.5", "data.balance"),
        ("data.name=digits data.val=null data.val_fraction=0.2", "data.labels"),
        ("data.name=torchvision:FashionMNIST", "data.labels"),
        ("eval.classes=present", "eval.classes"),
        ("distill.kind=soft distill.teacher.name=resnet18", "distill.kind"),
        ("data.labels=single", "checkpoint.best"),
        ("data.labels=single checkpoint.best=top1 loss.name=asymmetric", "loss.name"),
    ],
)
def test_settings_that_do_not_fit_name_their_key(settings: str, key: str) -> None:
    words = [*arguments("data", "run")[:-2], *MULTILABEL, *settings.split()]
    assert f"{key}:" in fails(2, print_config_command, *words)


@pytest.mark.parametrize("setting", ["model.num_classes=11", "loss.kwargs.target_threshold=0.2"])
def test_what_only_one_label_has_is_an_error(tmp_path: Path, setting: str) -> None:
    words = [*arguments(tmp_path, tmp_path / "run"), *MULTILABEL, setting]
    assert f"{setting.partition('=')[0]}:" in fails(2, train_command, *words)
