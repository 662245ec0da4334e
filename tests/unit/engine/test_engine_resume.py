"""Which changes of config, data and environment a resumed run accepts, and which it reports."""

from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import arguments, single_rank

from imagenet_cls.checkpoint.format import Snapshot
from imagenet_cls.config.load import config_from_dict, load_config
from imagenet_cls.engine.build import build
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.state import (
    check_optimizer_state,
    check_resumable,
    describe_run,
)
from imagenet_cls.errors import CheckpointError


def words_for(digits: Path, **changes: object) -> tuple[str, ...]:
    return tuple(word for word in arguments(digits, Path("unused"), **changes) if "=" in word)


@cache
def cached_parts(overrides: tuple[str, ...]) -> TrainingParts:
    return build(load_config(None, overrides).config, single_rank())


def parts_for(digits: Path, **changes: object) -> TrainingParts:
    return cached_parts(words_for(digits, **changes))


def state_for(digits: Path, **changes: object) -> dict[str, Any]:
    return describe_run(parts_for(digits, **changes)) | {"step": 11}


def test_keys_that_are_not_recipe_may_change_and_are_reported(digits: Path) -> None:
    before = state_for(digits)
    assert check_resumable(before, parts_for(digits), ()) == []
    parts = parts_for(digits, train__micro_batch_size=64, log__every_steps=7)
    first, second = check_resumable(before, parts, ())
    assert "log.every_steps: 1 -> 7" in first and "train.micro_batch_size: null -> 64" in second


@pytest.mark.parametrize(
    ("name", "before", "now", "missing"),
    [
        ("adamw", {}, {"amsgrad": True}, "max_exp_avg_sq"),
        ("timm:rmsproptf", {"momentum": 0}, {}, "momentum_buffer"),
    ],
)
def test_optimizer_argument_that_needs_more_state_is_an_error(
    name: str, before: dict, now: dict, missing: str
) -> None:
    config = config_from_dict({"optimizer": {"name": name, "lr": 0.1, "kwargs": before}})
    checkpoint = Snapshot({}, {}, {}, {"config": asdict(config)}, path=Path("step-0000001"))
    optimizer = replace(config.optimizer, kwargs=now)
    with pytest.raises(CheckpointError, match=f"step-0000001.*{missing}"):
        check_optimizer_state(checkpoint, optimizer, torch.device("cpu"))


def test_recipe_change_is_an_error_unless_allowed(digits: Path) -> None:
    before = state_for(digits)
    changed = parts_for(
        digits, optimizer__lr=0.5, optimizer__kwargs="{momentum: 0.5}", train__epochs=3
    )
    with pytest.raises(CheckpointError) as error:
        check_resumable(before, changed, ["train.epochs"])
    text = str(error.value)
    assert "optimizer.lr: 0.03 -> 0.5" in text and "optimizer.kwargs.momentum: 0.9 -> 0.5" in text
    assert "train.epochs" not in text and "--allow-change optimizer.kwargs.momentum" in text
    with pytest.raises(CheckpointError):
        check_resumable(before, changed, ["train.epochs", "optimizer.l"])  # half a name is no name
    for allowed in (["optimizer"], ["optimizer.lr", "optimizer.kwargs"]):
        assert len(check_resumable(before, changed, ["train.epochs", *allowed])) == 3


def test_ineffective_keys_are_not_compared(digits: Path) -> None:
    before = state_for(digits)
    before["config"]["ema"]["warmup"] = True
    assert check_resumable(before, parts_for(digits), ()) == []
    before = state_for(digits, train__sam_rho=0.1, train__sam_every_steps=2)
    assert len(check_resumable(before, parts_for(digits), ["train.sam_rho"])) == 1
    parts = parts_for(digits, eval__every_epochs=2)
    assert len(check_resumable(state_for(digits), parts, ())) == 1


@pytest.mark.parametrize(
    ("recipe", "key", "value"),
    [
        ({"train__sam_rho": 0.1}, "train.sam_every_steps", 3),
        # which has no effect any more, since it is after the last epoch
        ({"mix__mixup_alpha": 0.2, "mix__off_epoch": 1}, "mix.off_epoch", 500),
    ],
)
def test_change_of_an_effective_key_is_an_error_unless_allowed(
    digits: Path, recipe: dict[str, Any], key: str, value: int
) -> None:
    before = state_for(digits, **recipe)
    parts = parts_for(digits, **(recipe | {key.replace(".", "__"): value}))
    with pytest.raises(CheckpointError, match=f"{key}: 1 -> {value}"):
        check_resumable(before, parts, ())
    assert len(check_resumable(before, parts, [key])) == 1


def test_order_of_lr_scales_is_part_of_the_recipe(digits: Path) -> None:
    """The first pattern that matches counts. That a checkpoint keeps the order:
    tests/unit/checkpoint.
    """
    first, second = '"2.*": 0.5', '"*.weight": 2'
    before = state_for(digits, optimizer__lr_scales=f"{{{first}, {second}}}")
    swapped = parts_for(digits, optimizer__lr_scales=f"{{{second}, {first}}}")
    with pytest.raises(CheckpointError, match=r"optimizer\.lr_scales"):
        check_resumable(before, swapped, ())
    assert len(check_resumable(before, swapped, ["optimizer.lr_scales"])) == 1


def test_other_optimizer_or_training_images_are_an_error_even_if_allowed(digits: Path) -> None:
    before, parts = state_for(digits), parts_for(digits)
    for state, now in (
        (before, parts_for(digits, optimizer__name="adamw")),
        (before, parts_for(digits, data__val_fraction=0.3)),
        (before | {"data_digest": "0" * 16}, parts),
        (before | {"classes": ["a", "b"]}, parts),
    ):
        with pytest.raises(CheckpointError, match="another optimizer"):
            check_resumable(state, now, ["optimizer", "data"])


@pytest.mark.parametrize(
    ("recorded", "key"), [("teacher_digest", "distill.teacher"), ("data_sizes", "data.files")]
)
def test_other_teacher_or_sizes_of_images_are_an_error_unless_allowed(
    digits: Path, monkeypatch: pytest.MonkeyPatch, recorded: str, key: str
) -> None:
    parts = parts_for(digits)
    monkeypatch.setattr(parts, "teacher_digest", "this one")
    before = describe_run(parts) | {"step": 11, recorded: "another"}
    with pytest.raises(CheckpointError, match=f"--allow-change {key}"):
        check_resumable(before, parts, ())
    assert len(check_resumable(before, parts, [key.partition(".")[0]])) == 1


def test_invalid_config_of_a_checkpoint_is_an_error_with_its_path(digits: Path) -> None:
    before = state_for(digits)
    before["config"]["train"] |= {"epochs": "many"}
    with pytest.raises(CheckpointError, match=r"^a/step-0000011: .*train\.epochs"):
        check_resumable(before, parts_for(digits), (), Path("a/step-0000011"))


@pytest.mark.parametrize(
    ("change", "name", "rounding"),
    [
        ({"val_digest": "0" * 16}, "validation images", False),
        ({"val_sizes": "1 files"}, "validation files", False),
        ({"plan": {"steps_per_epoch": 22}}, "steps per epoch", False),
        ({"world_size": 4}, "ranks", True),
        ({"cpu_threads": 99}, "CPU threads", True),
        ({"versions": {"torch": "0.1"}}, "versions.torch", True),
    ],
)
def test_changed_environment_is_reported(
    digits: Path, change: dict[str, Any], name: str, rounding: bool
) -> None:
    first, *others = check_resumable(state_for(digits) | change, parts_for(digits), ())
    assert f": {name}: " in first and len(others) == rounding


def test_older_checkpoint_that_states_less_is_accepted(digits: Path) -> None:
    before = state_for(digits) | {"teacher_digest": "of a teacher that the run no longer has"}
    del before["val_digest"], before["data_sizes"], before["val_sizes"]
    assert check_resumable(before, parts_for(digits), ()) == []
