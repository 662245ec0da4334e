"""The models for images of 32 px."""

from typing import Any

import pytest
import torch

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.models.factory import build_model, model_problems


@pytest.mark.parametrize(
    ("name", "classes", "parameters", "side"),
    [
        ("resnet18_cifar", 10, 11_173_962, 4),  # of kuangliu/pytorch-cifar
        ("resnet20_cifar", 10, 272_474, 8),  # 0.27 million in the paper
        ("wrn28_10_cifar", 10, 36_479_194, 8),  # 36.5 million in the paper
        ("wrn28_10_cifar", 100, 36_536_884, 8),
    ],
)
def test_model_has_the_published_size(name: str, classes: int, parameters: int, side: int) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name), classes)
        features = []
        last = {"resnet18_cifar": "layer4", "resnet20_cifar": "blocks", "wrn28_10_cifar": "norm"}[
            name
        ]
        getattr(model, last).register_forward_hook(
            lambda _, __, output: features.append(output.shape)
        )
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert features[0][2:] == (side, side)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("resnet18_cifar", {"drop_rate": 0.3}),
        ("resnet20_cifar", {"layers": [1, 1, 1]}),
        ("wrn28_10_cifar", {"drop_rate": 0.3}),
    ],
)
def test_section_with_the_model_is_checked(name: str, kwargs: dict[str, Any]) -> None:
    assert model_problems(ModelConfig(name, kwargs=kwargs)) == []
    with torch.device("meta"):
        assert next(build_model(ModelConfig(name), 10, 1).parameters()).shape[1] == 1
