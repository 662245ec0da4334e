"""The models for images of 32 px."""

import pytest
import torch

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.models.build import build_model, model_problems


@pytest.mark.parametrize(
    ("name", "classes", "parameters", "side"),
    [
        ("resnet18_cifar", 10, 11_173_962, 4),  # of kuangliu/pytorch-cifar
        ("wrn28_10_cifar", 10, 36_479_194, 8),  # 36.5 million in the paper
        ("wrn28_10_cifar", 100, 36_536_884, 8),
    ],
)
def test_model_has_the_published_size(name: str, classes: int, parameters: int, side: int) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name), classes)
        features = []
        last = model.layer4 if name.startswith("resnet") else model.norm
        last.register_forward_hook(lambda _, __, output: features.append(output.shape))
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert features[0][2:] == (side, side)


@pytest.mark.parametrize("name", ["resnet18_cifar", "wrn28_10_cifar"])
def test_section_with_the_model_is_checked(name: str) -> None:
    assert model_problems(ModelConfig(name, kwargs={"drop_rate": 0.3})) == []
    assert [problem.key for problem in model_problems(ModelConfig(name, kwargs={"zebra": 1}))] == ["model.kwargs.zebra"]
    assert [problem.key for problem in model_problems(ModelConfig(name, pretrained=True))] == ["model.pretrained"]
    with torch.device("meta"):
        assert next(build_model(ModelConfig(name), 10, 1).parameters()).shape[1] == 1
