"""Wrong configs that libraries, data or ranks reveal: exit code 2 and the key, before anything is
trained or written.

One case for each check that the command makes before a run; all values are in tests/unit of the
parts. What is found without torch is in tests/unit/config/test_config_errors.py.
"""

from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY, arguments, fails
from torch import Tensor, nn

from imagenet_cls.commands.train import train_command

SMALL_RESNET = (
    "model.name=resnet18 model.kwargs.layers=[1,1,1,1] model.kwargs.channels=[8,16,32,64]"
)


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


# Keys that take `my_module:my_factory`, with the other keys that their factory needs.
FACTORY_KEYS = {
    "model.name": "",
    "data.name": "",
    "loss.name": "",
    "optimizer.name": "optimizer.lr=0.01",
    "schedule.name": "",
    "augment.policy": "",
    "distill.teacher.name": "distill.kind=soft distill.teacher.checkpoint=/",
}

# Changes to a valid recipe, and the key of the error.
BAD = [
    ("model.name=resnet5O", "model.name"),
    ("model.name=helpers:plane", "model.name"),
    ("model.kwargs.widht=3", "model.kwargs.widht"),
    ("model.num_classes=5", "model.num_classes"),
    ("augment.size_px=8", "augment.size_px"),
    (
        "augment.progressive.epochs=[0,1] augment.progressive.sizes_px=[8,16] "
        "augment.progressive.multiple_px=8",
        "augment.progressive.sizes_px",
    ),
    ("augment.policy=randaugment-m9", "augment.policy"),
    (
        "augment.policy=torchvision:rand_augment augment.policy_kwargs.magnitud=3",
        "augment.policy_kwargs.magnitud",
    ),
    ("loss.name=cross_entropie", "loss.name"),
    ("loss.class_weights=[1,2,3]", "loss.class_weights"),
    (
        "distill.kind=soft distill.teacher.name=resnet81 distill.teacher.pretrained=true",
        "distill.teacher.name",
    ),
    ("schedule.name=cosin", "schedule.name"),
    ("schedule.name=cosine schedule.kwargs.min_lr=1", "schedule.kwargs.min_lr"),
    (
        "schedule.name=multistep schedule.kwargs.milestones_epochs=[0,30]",
        "schedule.kwargs.milestones_epochs",
    ),
    # A momentum that the optimizer does not have.
    (
        "schedule.name=one_cycle schedule.warmup_epochs=0 schedule.kwargs.min_momentum=0.8 "
        "schedule.kwargs.max_momentum=0.9 optimizer.name=timm:adafactor optimizer.lr=0.01",
        "schedule.kwargs",
    ),
    ("log.writers=[tensorbord]", "log.writers"),
    ("optimizer.lr_scales={'0.*':.nan}", "optimizer.lr_scales"),
    ("optimizer.name=timm:lambb optimizer.lr=0.01", "optimizer.name"),
    ("optimizer.name=lamb optimizer.lr=null", "optimizer.lr"),
    ("ema.decay=0.9 ema.every_steps=1000", "ema.every_steps"),
    ("train.grad_checkpointing=true", "train.grad_checkpointing"),
    ("model.freeze=[stem.*]", "model.freeze"),
    ("model.freeze_bn=true", "model.freeze_bn"),
    ("model.split_bn=true augment.splits=3 loss.name=jsd", "model.split_bn"),
    ("model.name=test_bad_recipes:returns_a_tuple", "model.name"),
    ("model.name=test_bad_recipes:has_no_parameters", "model.name"),
    ("model.name=test_bad_recipes:is_lazy", "model.name"),
    (f"{SMALL_RESNET} model.kwargs.in_chans=1", "model.kwargs"),
    (f"{SMALL_RESNET} train.micro_batch_size=1", "train.micro_batch_size"),
    # Callables without a signature, or without the arguments that the program passes.
    *((f"{key}=builtins:dict {more}", key) for key, more in FACTORY_KEYS.items()),
    ("schedule.name=builtins:print", "schedule.name"),
    ("model.name=test_bad_recipes:returns_none", "model.name"),
    ("data.name=test_bad_recipes:returns_none", "data.name"),
]


def settings(changes: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in changes.split())


def written(folder: Path) -> list[Path]:
    """Files except the lock and the log of a run that got as far as its folder."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock" and path.parent.name != "logs"
    ]


@pytest.mark.parametrize(("changes", "key"), BAD)
def test_bad_recipe_is_an_error_before_anything_is_written(
    digits: Path, tmp_path: Path, changes: str, key: str
) -> None:
    words = arguments(digits, tmp_path / "run", **settings(changes))
    assert key in fails(2, train_command, *words)
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    "changes",
    ["train.global_batch_size=1", "train.micro_batch_size=1 train.global_batch_size=127"],
)
def test_batch_of_which_a_rank_has_nothing_is_an_error_before_they_start(
    digits: Path, tmp_path: Path, changes: str
) -> None:
    words = arguments(digits, tmp_path / "run", **settings(changes), device="cpu")
    assert "train.global_batch_size" in fails(2, train_command, *words, "--gpus", 2)
    assert not (tmp_path / "run").exists()


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
    assert len(lines) == 3 and "mine.yaml:2: augment.policy" in lines[0]
    assert "loss.kwargs.threshold" in lines[1] and "target_threshold" in lines[1]
    assert "schedule.kwargs.min_rl" in lines[2] and "did you mean 'min_lr'" in lines[2]
    assert written(tmp_path) == [recipe]
