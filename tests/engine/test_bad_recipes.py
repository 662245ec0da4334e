"""Errors of a recipe are reported before anything is trained or written: exit code 2 and the key.

One case for each check that the command makes before a run; all values are in tests/unit of the parts.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY, TRAIN, arguments, run
from torch import Tensor, nn

from imagenet_cls.commands.program import main
from imagenet_cls.commands.train import train_command
from imagenet_cls.report.log import close_log

QUICK = REPOSITORY / "configs" / "quick"
MIX = {"mix__mixup_alpha": 0.2, "mix__cutmix_alpha": 1.0}
RESNET = {"model__name": "resnet18", "model__kwargs": "{layers: [1,1,1,1], channels: [8,16,32,64]}"}


def returns_a_tuple(num_classes: int) -> nn.Module:
    class Pair(nn.Linear):
        def forward(self, images: Tensor) -> Any:
            logits = super().forward(images.mean((2, 3)))
            return logits, logits

    return Pair(3, num_classes)


def has_no_parameters(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(num_classes))


def is_lazy(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


# Changes to a valid recipe, and the key of the error.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown policy": ({"augment__policy": "randaugment-m9"}, "augment.policy"),
    "policy setting out of range": ({"augment__policy": "rand-m9-n0"}, "augment.policy"),
    "unknown argument of a policy": (
        {"augment__policy": "torchvision:rand_augment", "augment__policy_kwargs": "{magnitud: 3}"},
        "augment.policy_kwargs.magnitud",
    ),
    "jsd without splits": ({"loss__name": "jsd"}, "loss.name"),
    "splits and mixing": ({**MIX, "augment__splits": 3, "loss__name": "bce"}, "augment.splits"),
    "more repeats than a batch": ({"data__repeats": 4, "train__global_batch_size": 2}, "data.repeats"),
    "odd micro-batch to mix": (
        {**MIX, "train__global_batch_size": 126, "train__micro_batch_size": 63},
        "train.global_batch_size",
    ),
    "warm-up longer than the run": ({"schedule__warmup_epochs": 5}, "schedule.warmup_epochs"),
    "milestones after the end of the run": (
        {
            "schedule__name": "multistep",
            "schedule__warmup_epochs": 0,
            "schedule__kwargs": "{milestones_epochs: [1, 30]}",
        },
        "schedule.kwargs.milestones_epochs",
    ),
    "unknown schedule": ({"schedule__name": "cosin"}, "schedule.name"),
    "min_lr above the learning rate": (
        {"schedule__name": "cosine", "schedule__kwargs": "{min_lr: 1}"},
        "schedule.kwargs.min_lr",
    ),
    "momentum that the optimizer does not have": (
        {
            "schedule__name": "one_cycle",
            "schedule__warmup_epochs": 0,
            "schedule__kwargs": "{min_momentum: 0.8, max_momentum: 0.9}",
            "optimizer__name": "timm:adafactor",
        },
        "schedule.kwargs",
    ),
    "kwargs that are not finite": ({"optimizer__lr_scales": "{'0.*': .nan}"}, "optimizer.lr_scales.0.*"),
    "unknown optimizer": ({"optimizer__name": "timm:lambb", "optimizer__lr": 0.01}, "optimizer.name"),
    "another optimizer without its rate": ({"optimizer__name": "lamb", "optimizer__lr": None}, "optimizer.lr"),
    "two kinds of clipping": ({"train__clip_norm": 1, "train__clip_value": 1}, "train.clip_value"),
    "EMA without an update": ({"ema__decay": 0.9, "ema__every_steps": 1000}, "ema.every_steps"),
    "gradient checkpointing without support": ({"train__grad_checkpointing": "true"}, "train.grad_checkpointing"),
    "freeze pattern without a match": ({"model__freeze": "[stem.*]"}, "model.freeze"),
    "split BatchNorm of a model without": (
        {"model__split_bn": "true", "augment__splits": 3, "loss__name": "jsd"},
        "model.split_bn",
    ),
    "freezing BatchNorm of a model without": ({"model__freeze_bn": "true"}, "model.freeze_bn"),
    "model that returns a tuple": ({"model__name": "test_bad_recipes:returns_a_tuple"}, "model.name"),
    "model without parameters": ({"model__name": "test_bad_recipes:has_no_parameters"}, "model.name"),
    "model with lazy parameters": ({"model__name": "test_bad_recipes:is_lazy"}, "model.name"),
    "model for grey images": (
        {**RESNET, "model__kwargs": "{layers: [1,1,1,1], channels: [8,16,32,64], in_chans: 1}"},
        "model.kwargs",
    ),
    "BatchNorm of one image": ({**RESNET, "train__micro_batch_size": 1}, "train.micro_batch_size"),
}


@pytest.fixture(autouse=True)
def log_closed() -> Iterator[None]:
    yield
    close_log()


def problems_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a command that must end with exit code 2, and quickly."""
    capsys.readouterr()
    code = main(train_command, words)
    output = capsys.readouterr()
    assert code == 2, output.err
    assert "Traceback" not in output.err
    return output.err.splitlines()


def written(folder: Path) -> list[Path]:
    """Files except the lock and the log of a run that got as far as its folder."""
    return [
        path for path in folder.rglob("*") if path.is_file() and path.name != ".lock" and path.parent.name != "logs"
    ]


@pytest.mark.parametrize("case", BAD)
def test_bad_recipe_is_an_error_before_anything_is_written(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    changes, key = BAD[case]
    lines = problems_of(arguments(digits, tmp_path / "run", **changes), capsys)
    assert any(key in line for line in lines) and len(lines) <= 3, lines
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"data__repeats": 3, "data__repeats_multiple": 255}, "data.repeats_multiple"),
        ({**MIX, "train__global_batch_size": 126}, "train.global_batch_size"),  # 63 each, though 126 are even
    ],
)
def test_batch_that_does_not_fit_the_ranks_is_an_error_before_they_start(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], key: str
) -> None:
    lines = problems_of([*arguments(digits, tmp_path / "run", **changes, device="cpu"), "--gpus", "2"], capsys)
    assert key in lines[0]
    assert not (tmp_path / "run").exists()


def test_problems_of_stage_1_are_reported_at_once(tmp_path: Path) -> None:
    """A file with four mistakes that need no library: a line each, with the file's lines."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"_base_: {QUICK / 'resnet_tv_v2.yaml'}\n"
        "data: {repeats_multiple: 0}\n"
        "loss: {name: focal}\n"
        "ema: {decay: 0.9}\n"
        "train: {clip_norm: 1, clip_agc: 0.1}\n"
    )
    done = run([sys.executable, TRAIN, str(recipe), "--work-dir", str(tmp_path / "run")])
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    keys = ["data.repeats_multiple", "mix", "ema.half_life_images", "train.clip_agc"]
    assert [any(f"{key}: " in line for line in lines) for key in keys] == [True] * 4, lines
    assert any("mine.yaml:2" in line for line in lines) and len(lines) <= 3 * len(keys)
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_problems_of_stage_2_are_reported_at_once(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"_base_: {QUICK / 'resnet_rsb_a2.yaml'}\n"
        "augment: {policy: rnd-m9}\n"
        "loss: {name: bce, kwargs: {threshold: 0.2}}\n"
        "schedule: {name: cosine, kwargs: {min_rl: 0}}\n"
    )
    done = run(
        [sys.executable, TRAIN, str(recipe), f"data.root={tmp_path / 'data'}", "--work-dir", str(tmp_path / "run")]
    )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 3 and "mine.yaml:2: augment.policy" in lines[0]
    assert "loss.kwargs.threshold" in lines[1] and "target_threshold" in lines[1]
    assert "schedule.kwargs.min_rl" in lines[2] and "did you mean 'min_lr'" in lines[2]
    assert written(tmp_path) == [recipe]
