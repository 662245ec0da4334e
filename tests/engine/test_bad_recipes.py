"""Wrong configs that libraries, data or ranks reveal: exit code 2 and the key, before anything is
trained or written.

One case for each check that the command makes before a run; all values are in tests/unit of the
parts. What is found without torch is in tests/unit/config/test_config_errors.py.
"""

from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY, arguments, fails
from test_bad_input import contents
from torch import Tensor, nn

from imagenet_cls.commands.train import train_command


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


def returns_none(**kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        # names and arguments
        ("imports=[no_such_module]", "imports"),
        ("model.name=resnet5O", "model.name"),
        ("data.name=digit", "data.name"),
        ("augment.policy=randaugment-m9", "augment.policy"),
        ("loss.name=cross_entropie", "loss.name"),
        (
            "distill.kind=soft distill.teacher.name=resnet81 distill.teacher.pretrained=true",
            "distill.teacher.name",
        ),
        ("schedule.name=cosin", "schedule.name"),
        ("optimizer.name=timm:lambb optimizer.lr=0.01", "optimizer.name"),
        ("log.writers=[tensorbord]", "log.writers"),
        # callables without a signature, or that return nothing
        ("loss.name=builtins:dict", "loss.name"),
        ("schedule.name=builtins:print", "schedule.name"),
        ("model.name=test_bad_recipes:returns_none", "model.name"),
        ("data.name=test_bad_recipes:returns_none", "data.name"),
        # what the images and the model need
        ("model.num_classes=5", "model.num_classes"),
        ("loss.class_weights=[1,2,3]", "loss.class_weights"),
        ("augment.size_px=8", "augment.size_px"),
        (
            "augment.progressive.epochs=[0,1] augment.progressive.sizes_px=[8,16] "
            "augment.progressive.multiple_px=8",
            "augment.progressive.sizes_px",
        ),
        ("train.grad_checkpointing=true", "train.grad_checkpointing"),
        ("model.freeze=[stem.*]", "model.freeze"),
        ("model.split_bn=true augment.splits=3 loss.name=jsd", "model.split_bn"),
        ("model.name=test_bad_recipes:returns_a_tuple", "model.name"),
        ("model.name=test_bad_recipes:has_no_parameters", "model.name"),
        ("model.name=test_bad_recipes:is_lazy", "model.name"),
        ("model.name=resnet10t train.micro_batch_size=1", "train.micro_batch_size"),
        # the optimizer has no momentum, and the run fewer steps
        (
            "schedule.name=one_cycle schedule.warmup_epochs=0 schedule.kwargs.min_momentum=0.8 "
            "schedule.kwargs.max_momentum=0.9 optimizer.name=timm:adafactor optimizer.lr=0.01",
            "schedule.kwargs.max_momentum",
        ),
        ("ema.decay=0.9 ema.every_steps=1000", "ema.every_steps"),
    ],
)
def test_bad_recipe_is_an_error_before_anything_is_written(
    digits: Path, tmp_path: Path, changes: str, key: str
) -> None:
    words = [*arguments(digits, tmp_path / "run"), *changes.split()]
    assert f"{key}: " in fails(2, train_command, *words)
    assert contents(tmp_path) == {}


def test_problems_of_a_config_are_reported_at_once(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"_base_: {REPOSITORY / 'configs' / 'quick' / 'resnet_rsb_a2.yaml'}\n"
        "augment: {policy: rnd-m9}\n"
        "loss: {name: bce, kwargs: {threshold: 0.2}}\n"
        "schedule: {name: cosine, kwargs: {min_rl: 0}}\n"
    )
    words = [recipe, f"data.root={tmp_path / 'data'}", "--work-dir", tmp_path / "run"]
    lines = fails(2, train_command, *words).splitlines()
    assert [": ".join(line.split(": ")[:2]) for line in lines] == [
        f"{recipe}:2: augment.policy",
        f"{recipe}:3: loss.kwargs.threshold",
        f"{recipe}:4: schedule.kwargs.min_rl",
    ]
    assert "target_threshold" in lines[1] and "did you mean 'min_lr'" in lines[2]
    assert list(contents(tmp_path)) == ["mine.yaml"]
