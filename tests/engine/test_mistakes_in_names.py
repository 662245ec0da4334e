"""Mistakes in names of components and of their arguments: each error has the file, the line and a
name that was meant, also where only the construction of the component shows the mistake.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import arguments

from imagenet_cls.commands.train import train_command

VIT = "name: vit_tiny_patch16_224, kwargs: "
# Text of a config file, the key of its mistake, and a name that the error suggests.
MISTAKES = [
    ("model: {name: resnet5O}", "model.name", "resnet50"),
    ("model: {name: 'torchvision:resnet5'}", "model.name", "torchvision:resnet50"),
    ("model: {name: resnet50.a1_in1kk}", "model.name", "a1_in1k"),
    ("model: {name: 'helpers:plane'}", "model.name", "plain"),
    ("model: {name: 'helpers:plain', kwargs: {widht: 4}}", "model.kwargs.widht", "width"),
    ("model: {name: resnet10t, kwargs: {drop_rat: 0}}", "model.kwargs.drop_rat", "drop_rate"),
    (f"model: {{{VIT}{{drop_rat: 0}}}}", "model.kwargs.drop_rat", "drop_rate"),
    (
        "model: {name: 'torchvision:resnet18', kwargs: {width_per_grup: 64}}",
        "model.kwargs.width_per_grup",
        "width_per_group",
    ),
    ("model: {name: resnet10t, freeze: [layr1.*]}", "model.freeze", "layer1.*"),
    ("optimizer: {name: adamv, lr: 1}", "optimizer.name", "adamw"),
    ("optimizer: {name: 'timm:lionn', lr: 1}", "optimizer.name", "timm:lion"),
    ("optimizer: {kwargs: {momentun: 0.9}}", "optimizer.kwargs.momentun", "momentum"),
    (
        "optimizer: {name: 'timm:lion', lr: 1, kwargs: {beta: [0.9, 0.99]}}",
        "optimizer.kwargs.beta",
        "betas",
    ),
    ("optimizer: {lr_scales: {5.weigth: 10}}", "optimizer.lr_scales", "5.weight"),
    ("schedule: {name: cosin}", "schedule.name", "cosine"),
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
        "distill: {kind: soft, teacher: {name: resnet81, pretrained: true}}",
        "distill.teacher.name",
        "resnet18",
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
    digits: Path, tmp_path: Path, call: Callable, text: str, key: str, meant: str
) -> None:
    demo, *words = arguments(digits, tmp_path / "run")
    (tmp_path / "mine.yaml").write_text(f"_base_: {demo}\n\n{text}\n")
    section = text.partition(":")[0]
    # other overrides of the section would replace that of the file
    others = [word for word in words if section != "model" or not word.startswith("model.")]
    code, _, err = call(train_command, tmp_path / "mine.yaml", *others)
    (line,) = err.splitlines()
    assert code == 2 and line.startswith(f"{tmp_path}/mine.yaml:3: {key}: ") and meant in line
    assert not (tmp_path / "run").exists()
