"""The models for images of 32 px."""

from typing import Any

import pytest
import torch

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.models.factory import build_model, model_problems


@pytest.mark.parametrize(
    ("name", "kwargs", "parameters", "last", "side"),
    [
        # of kuangliu/pytorch-cifar
        ("resnet18_cifar", {"drop_rate": 0.3}, 11_173_962, "layer4", 4),
        # 0.27 million in the paper
        ("resnet20_cifar", {"layers": [3, 3, 3]}, 272_474, "blocks", 8),
        # 36.5 million in the paper
        ("wrn28_10_cifar", {"drop_rate": 0.3}, 36_479_194, "norm", 8),
    ],
)
def test_model_has_the_published_size(
    name: str, kwargs: dict[str, Any], parameters: int, last: str, side: int
) -> None:
    config = ModelConfig(name, kwargs=kwargs)
    assert model_problems(config) == []
    with torch.device("meta"):
        model = build_model(config, 10)
        features = []
        getattr(model, last).register_forward_hook(
            lambda _, __, output: features.append(output.shape)
        )
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert next(build_model(config, 10, channels=1).parameters()).shape[1] == 1
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert features[0][2:] == (side, side)
