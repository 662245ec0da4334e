"""Checks of a built model: BatchNorm with too few values, against the error of torch."""

from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.schema import Config
from imagenet_cls.engine.build import batch_norm_images
from imagenet_cls.engine.model_checks import check_model_outputs
from imagenet_cls.engine.plan import plan_run
from imagenet_cls.errors import ConfigError
from imagenet_cls.models.adapt import freeze


def config_of(size_px: int = 32, **sections: dict) -> Config:
    sizes = {"augment": {"size_px": size_px, "splits": sections.pop("splits", 1)}, "eval": {"crop_px": size_px}}
    return config_from_dict({"optimizer": {"lr": 0.1}, "model": {"name": "resnet18"}} | sizes | sections)


def small_resnet() -> nn.Module:
    return timm.create_model("resnet18", num_classes=10, layers=[1, 1, 1, 1], channels=[8, 16, 32, 64])


@pytest.mark.parametrize("size_px", [32, 48])
@pytest.mark.parametrize("images", [1, 2])
def test_batch_norm_single_value_rejected_where_torch_fails(size_px: int, images: int) -> None:
    """32 px end in a map of one pixel, 48 px in one of 2 x 2."""
    model = small_resnet()
    try:
        model(torch.zeros(images, 3, size_px, size_px))
        trains = True
    except ValueError as error:
        assert "more than 1 value per channel" in str(error)
        trains = False
    assert trains == (size_px == 48 or images == 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        check_model_outputs(model, config_of(size_px), 10, images)
        assert trains and model.training
    except ConfigError as error:
        assert not trains and str(error).startswith("train.micro_batch_size: ")
    if trains:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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
    assert batch_norm_images(config, plan) == 3
    assert batch_norm_images(replace(config, parallel=replace(config.parallel, sync_bn=True)), plan) == 6
    views = replace(config, augment=replace(config.augment, splits=3))
    assert batch_norm_images(views, plan) == 9
    assert batch_norm_images(replace(views, model=replace(views.model, split_bn=True)), plan) == 3
