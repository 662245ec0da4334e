"""Checks of a built model: BatchNorm with too few values."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.schema import Config
from imagenet_cls.engine.build import batch_norm_images
from imagenet_cls.engine.plan import plan_run
from imagenet_cls.engine.training_model import check_model_outputs
from imagenet_cls.errors import ConfigError
from imagenet_cls.models.adapt import freeze


def config_of(size_px: int = 32, **sections: dict) -> Config:
    sizes = {
        "augment": {"size_px": size_px, "splits": sections.pop("splits", 1)},
        "eval": {"crop_px": size_px},
    }
    return config_from_dict(
        {"optimizer": {"lr": 0.1}, "model": {"name": "resnet18"}} | sizes | sections
    )


def small_resnet() -> nn.Module:
    return timm.create_model(
        "resnet18", num_classes=10, layers=[1, 1, 1, 1], channels=[8, 16, 32, 64]
    )


@pytest.mark.parametrize(
    ("size_px", "images", "fits"), [(32, 1, False), (32, 2, True), (48, 1, True)]
)
def test_batch_norm_of_a_single_value_rejected(size_px: int, images: int, fits: bool) -> None:
    """32 px end in a map of one pixel, 48 px in one of 2 x 2."""
    model = small_resnet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"^train\.micro_batch_size: "):
        check_model_outputs(model, config_of(size_px), 10, images)
    if fits:
        assert model.training and all(
            torch.equal(value, before[name]) for name, value in model.state_dict().items()
        )


def test_arguments_with_which_the_forward_pass_fails_rejected() -> None:
    """timm's ResNet calls four stages, however many `layers` names."""
    kwargs = {"layers": [1, 1], "channels": [8, 16]}
    config = config_of(model={"name": "resnet18", "kwargs": kwargs})
    with pytest.raises(ConfigError, match=r"^model\.kwargs: "):
        check_model_outputs(timm.create_model("resnet18", num_classes=10, **kwargs), config, 10, 8)


def test_frozen_batch_norm_single_image_accepted() -> None:
    config = config_of(model={"name": "resnet18", "freeze_bn": True})
    model = small_resnet()
    freeze(model, config.model, 10)
    check_model_outputs(model, config, 10, 1)
    assert model.training and not model.bn1.training
    model(torch.zeros(1, 3, 32, 32))


def test_batch_norm_images_per_device_or_over_ranks() -> None:
    config = config_of(train={"global_batch_size": 12, "micro_batch_size": 3})
    plan = plan_run(config.train, 100, world_size=2)
    assert batch_norm_images(config, plan) == [3]
    assert batch_norm_images(
        replace(config, parallel=replace(config.parallel, sync_bn=True)), plan
    ) == [6]
    split = replace(config, augment=replace(config.augment, splits=3))
    assert batch_norm_images(split, plan) == [9]
    assert batch_norm_images(replace(split, model=replace(split.model, split_bn=True)), plan) == [3]
