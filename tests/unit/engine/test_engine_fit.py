"""Which BatchNorm gets too few values, against torch's own refusal; what else is refused is in test_bad_recipes."""

from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.schema import Config
from imagenet_cls.engine.build import batch_norm_sees
from imagenet_cls.engine.fit import check_model_outputs
from imagenet_cls.engine.plan import plan_run
from imagenet_cls.errors import ConfigError
from imagenet_cls.models.freeze import freeze


def config_of(size_px: int = 32, **sections: dict) -> Config:
    sizes = {"augment": {"size_px": size_px, "splits": sections.pop("splits", 1)}, "eval": {"crop_px": size_px}}
    return config_from_dict({"optimizer": {"lr": 0.1}, "model": {"name": "resnet18"}} | sizes | sections)


def small_resnet() -> nn.Module:
    return timm.create_model("resnet18", num_classes=10, layers=[1, 1, 1, 1], channels=[8, 16, 32, 64])


@pytest.mark.parametrize("size_px", [32, 48])
@pytest.mark.parametrize("images", [1, 2])
def test_what_torch_would_refuse_in_training(size_px: int, images: int) -> None:
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


def test_frozen_batch_norm_takes_one_image() -> None:
    config = config_of(model={"name": "resnet18", "freeze_bn": True})
    model = small_resnet()
    freeze(model, config.model, 10)
    check_model_outputs(model, config, 10, 1)
    assert model.training and not model.bn1.training
    model(torch.zeros(1, 3, 32, 32))


def test_batch_norm_sees_the_images_of_a_device_or_of_all() -> None:
    config = config_of(train={"global_batch_size": 12, "micro_batch_size": 3})
    plan = plan_run(config.train, 100, world_size=2)
    assert batch_norm_sees(config, plan) == 3
    assert batch_norm_sees(replace(config, parallel=replace(config.parallel, sync_bn=True)), plan) == 6
    views = replace(config, augment=replace(config.augment, splits=3))
    assert batch_norm_sees(views, plan) == 9
    assert batch_norm_sees(replace(views, model=replace(views.model, split_bn=True)), plan) == 3
