"""Wrong configs that libraries, data or ranks reveal: exit code 2 and the key, before anything is
trained or written; and for mistakes in names the file, the line and a name that was meant.

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
        # names
        ("imports=[no_such_module]", "imports"),
        ("data.name=digit", "data.name"),
        # callables that take other arguments, or return nothing
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
        ("ema.decay=0.9 ema.every_steps=1000", "ema.every_steps"),
    ],
)
def test_bad_recipe_is_an_error_before_anything_is_written(
    digits: Path, tmp_path: Path, changes: str, key: str
) -> None:
    words = [*arguments(digits, tmp_path / "run"), *changes.split()]
    assert f"{key}: " in fails(2, train_command, *words)
    assert contents(tmp_path) == {}


def test_argument_that_the_first_step_rejects_is_an_error(digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path / "run", optimizer__kwargs="{maximize: 3.5}")
    assert "optimizer.kwargs: " in fails(2, train_command, *words)


# Text of a config file, the key of its mistake, and a name that the error suggests.
MISTAKES = [
    ("model: {name: resnet5O}", "model.name", "resnet50"),
    ("model: {name: 'torchvision:resnet5'}", "model.name", "torchvision:resnet50"),
    ("model: {name: resnet50.a1_inlk}", "model.name", "a1_in1k"),
    ("model: {name: 'helpers:plane'}", "model.name", "plain"),
    ("model: {name: 'helpers:plain', kwargs: {widht: 4}}", "model.kwargs.widht", "width"),
    # an argument that a library rejects has no suggestion
    ("model: {name: resnet10t, kwargs: {drop_rat: 0}}", "model.kwargs", "drop_rat"),
    ("model: {name: resnet10t, freeze: [layr1.*]}", "model.freeze", "layer1.*"),
    ("optimizer: {name: adamv, lr: 1}", "optimizer.name", "adamw"),
    ("optimizer: {kwargs: {momentun: 0.9}}", "optimizer.kwargs.momentun", "momentum"),
    (
        "optimizer: {name: 'timm:lion', lr: 1, kwargs: {beta: [0.9, 0.99]}}",
        "optimizer.kwargs.beta",
        "betas",
    ),
    ("optimizer: {lr_scales: {5.weigth: 10}}", "optimizer.lr_scales", "5.weight"),
    ("schedule: {name: cosine, kwargs: {min_rl: 0}}", "schedule.kwargs.min_rl", "min_lr"),
    ("loss: {name: cross_entropie}", "loss.name", "cross_entropy"),
    ("loss: {name: focal, kwargs: {gama: 2}}", "loss.kwargs.gama", "gamma"),
    ("augment: {policy: rnd-m9}", "augment.policy", "rand"),
    (
        "augment: {policy: 'torchvision:rand_augment', policy_kwargs: {magnitud: 9}}",
        "augment.policy_kwargs.magnitud",
        "magnitude",
    ),
    ("data: {name: 'torchvision:CIFAR1O'}", "data.name", "CIFAR10"),
    (
        "data: {name: synthetic, kwargs: {num_clases: 10}}",
        "data.kwargs.num_clases",
        "num_classes",
    ),
    (
        "distill: {kind: soft, teacher: {name: 'helpers:plain', kwargs: {widht: 4}}}",
        "distill.teacher.kwargs.widht",
        "width",
    ),
    ("log: {writers: [tensorbord]}", "log.writers", "tensorboard"),
]


@pytest.mark.parametrize(("text", "key", "meant"), MISTAKES, ids=[row[1] for row in MISTAKES])
def test_mistake_has_a_file_a_line_and_a_suggestion(
    digits: Path, tmp_path: Path, text: str, key: str, meant: str
) -> None:
    demo, *words = arguments(digits, tmp_path / "run")
    (tmp_path / "mine.yaml").write_text(f"_base_: {demo}\n\n{text}\n")
    section = text.partition(":")[0]
    # other overrides of the section would replace that of the file
    others = [word for word in words if section != "model" or not word.startswith("model.")]
    (line,) = fails(2, train_command, tmp_path / "mine.yaml", *others).splitlines()
    assert line.startswith(f"{tmp_path}/mine.yaml:3: {key}: ") and meant in line
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
    assert [": ".join(line.split(": ")[:2]) for line in lines] == [
        f"{recipe}:2: augment.policy",
        f"{recipe}:3: loss.kwargs.threshold",
        f"{recipe}:4: schedule.kwargs.min_rl",
    ]
    assert list(contents(tmp_path)) == ["mine.yaml"]
