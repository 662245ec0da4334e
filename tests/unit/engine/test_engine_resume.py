"""Which changes of a config and its data a resumed run lets through."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import arguments

from imagenet_cls.checkpoint.format import Snapshot, read_checkpoint, write_checkpoint
from imagenet_cls.checkpoint.optimizer_state import Progress
from imagenet_cls.config.load import config_to_dict, load_config
from imagenet_cls.engine.build import Parts, build
from imagenet_cls.engine.resume import check_resumable
from imagenet_cls.engine.saving import describe_run
from imagenet_cls.errors import CheckpointError
from imagenet_cls.guards.agreement import flatten
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group


def parts_for(digits: Path, **changes: object) -> Parts:
    words = [word for word in arguments(digits, Path("unused"), **changes) if "=" in word]
    return build(load_config(None, words).config, Group(RankInfo(), torch.device("cpu")))


def test_the_same_config_passes_and_free_keys_are_told(digits: Path) -> None:
    before = describe_run(parts_for(digits))
    assert check_resumable(before, parts_for(digits), ()) == []
    told = check_resumable(before, parts_for(digits, train__micro_batch_size=64, log__every_steps=7), ())
    assert told == [
        "changed since the checkpoint: log.every_steps: 1 -> 7",
        "changed since the checkpoint: train.micro_batch_size: None -> 64",
    ]


def test_a_changed_recipe_is_refused_unless_allowed(digits: Path) -> None:
    before = describe_run(parts_for(digits))
    changed = parts_for(digits, optimizer__lr=0.5, optimizer__kwargs="{momentum: 0.5}", train__epochs=3)
    with pytest.raises(CheckpointError) as error:
        check_resumable(before, changed, ["train.epochs"])
    text = str(error.value)
    assert "optimizer.lr: 0.03 -> 0.5" in text and "optimizer.kwargs.momentum: 0.9 -> 0.5" in text
    assert "train.epochs" not in text and text.count("\n") == 1
    assert "--allow-change optimizer.kwargs.momentum --allow-change optimizer.lr" in text
    with pytest.raises(CheckpointError):
        check_resumable(before, changed, ["train.epochs", "optimizer.l"])  # half a name is no name
    assert len(check_resumable(before, changed, ["train.epochs", "optimizer"])) == 3
    assert len(check_resumable(before, changed, ["train.epochs", "optimizer.lr", "optimizer.kwargs"])) == 3


def test_keys_that_do_nothing_are_not_compared(digits: Path) -> None:
    before = describe_run(parts_for(digits))
    before["config"]["ema"]["warmup"] = True  # as a checkpoint may hold it from before such keys were refused
    assert check_resumable(before, parts_for(digits), ()) == []
    before = describe_run(parts_for(digits, train__sam_rho=0.1, train__sam_every_steps=2))
    assert len(check_resumable(before, parts_for(digits), ["train.sam_rho"])) == 1
    with pytest.raises(CheckpointError, match=r"train\.sam_every_steps: 2 -> 3"):
        check_resumable(before, parts_for(digits, train__sam_rho=0.1, train__sam_every_steps=3), ())


def test_the_order_of_patterns_is_part_of_the_recipe(digits: Path, tmp_path: Path) -> None:
    """Of `lr_scales` the first pattern that fits counts. The checkpoint keeps their order, whatever their names."""

    def written(*factors: str) -> dict[str, Any]:
        parts = parts_for(digits, optimizer__lr_scales="{" + ", ".join(factors) + "}")
        state = describe_run(parts) | {"step": 1, "progress": Progress(step=1).to_dict(), "scaler": {}}
        numbers = {"groups": [], "parameters": {}, "on_host": []}
        return read_checkpoint(write_checkpoint(tmp_path / "checkpoints", Snapshot({}, {}, numbers, state))).state

    one, other = ('"2.*": 0.5', '"*.weight": 2')
    same, swapped = (
        parts_for(digits, optimizer__lr_scales=f"{{{first}, {second}}}")
        for first, second in ((one, other), (other, one))
    )
    before = written(one, other)
    assert check_resumable(before, same, ()) == []
    with pytest.raises(
        CheckpointError, match=r"optimizer\.lr_scales: \['2\.\*', '\*\.weight'\] -> \['\*\.weight', '2\.\*'\]"
    ):
        check_resumable(before, swapped, ())
    assert len(check_resumable(before, swapped, ["optimizer.lr_scales"])) == 1


def test_another_optimizer_is_refused_whatever_is_allowed(digits: Path) -> None:
    before = describe_run(parts_for(digits))
    with pytest.raises(CheckpointError, match=r"optimizer\.name: 'sgd' -> 'adamw': no optimizer goes on"):
        check_resumable(before, parts_for(digits, optimizer__name="adamw"), ["optimizer"])


def test_when_evaluations_are_made_is_free_unless_the_schedule_goes_by_them(digits: Path) -> None:
    for schedule, refused in (("constant", False), ("plateau", True)):
        before = describe_run(parts_for(digits, schedule__name=schedule))
        other = parts_for(digits, schedule__name=schedule, eval__every_epochs=2)
        if refused:
            with pytest.raises(CheckpointError, match=r"eval\.every_epochs: 1 -> 2"):
                check_resumable(before, other, ())
        else:
            assert len(check_resumable(before, other, ())) == 1


def test_other_images_are_refused_whatever_is_allowed(digits: Path) -> None:
    parts = parts_for(digits)
    before = describe_run(parts)
    with pytest.raises(CheckpointError, match="not those of the checkpoint"):
        check_resumable(before | {"data_digest": "0" * 16}, parts, ["data"])
    with pytest.raises(CheckpointError, match="10 classes here, 2 classes there"):
        check_resumable(before | {"classes": ["a", "b"]}, parts, ["data"])
    fewer = parts_for(digits, data__val_fraction=0.3)
    with pytest.raises(CheckpointError, match="not those of the checkpoint"):
        check_resumable(before, fewer, ["data"])


def test_other_validation_images_are_told(digits: Path) -> None:
    before = describe_run(parts_for(digits))
    (line,) = check_resumable(before | {"val_digest": "0" * 16}, parts_for(digits), ())
    assert line.startswith("other validation images than before")
    del before["val_digest"]  # a checkpoint of an older version
    assert check_resumable(before, parts_for(digits), ()) == []


def test_where_a_step_is_in_its_epochs_is_told_where_that_changes(digits: Path) -> None:
    before = describe_run(parts_for(digits)) | {"step": 11}
    parts = parts_for(digits, train__global_batch_size=64)
    lines = check_resumable(before, parts, ["train.global_batch_size"])
    assert lines[1] == "an epoch had 11 steps and has 22: step 11 was at 1.00 epochs, and is at 0.50 of 2 now"


def test_another_number_of_ranks_is_told(digits: Path) -> None:
    parts = parts_for(digits)
    (line,) = check_resumable(describe_run(parts) | {"world_size": 4}, parts, ())
    assert line.startswith("4 ranks before, 1 now")


def test_flat_keys() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
    assert flatten(config_to_dict(load_config(None).config))["optimizer.kwargs.momentum"] == 0.9
