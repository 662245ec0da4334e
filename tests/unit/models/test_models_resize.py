"""Messages about image sizes; the resizing itself is compared in tests/parity."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.adapt import resize_model, size_remedy
from imagenet_cls.models.check import model_problems
from imagenet_cls.models.weights import load_weights

TINY_VIT = {"depth": 1, "embed_dim": 24, "num_heads": 2, "img_size": 64}


@pytest.mark.parametrize(
    ("name", "kwargs", "remedy"),
    [
        ("vit_tiny_patch16_224", TINY_VIT, {"dynamic_img_size": True}),
        ("swin_tiny_patch4_window7_224", {"depths": (1, 1), "num_heads": (1, 2)}, {"dynamic_img_size": True}),
        ("test_maxvit", {}, {"img_size": 96}),
        ("torchvision:vit_b_16", {}, {"image_size": 96}),
    ],
)  # fmt: skip
def test_size_remedy_makes_the_model_take_the_size(name: str, kwargs: dict, remedy: dict) -> None:
    """What the message says to put into model.kwargs passes the check, and the model then takes the size."""
    ((key, value),) = remedy.items()
    origin, _, rest = name.rpartition(":")

    def build(**more: object) -> nn.Module:
        if origin:
            return torchvision.models.get_model(rest, num_classes=5, **more)
        return timm.create_model(name, num_classes=5, **{**kwargs, **more})

    assert model_problems(ModelConfig(name=name, kwargs={**kwargs, **remedy})) == []
    with torch.device("meta"):
        assert size_remedy(build(), 96).startswith(f"; set model.kwargs.{key} to {str(value).lower()}, which ")
        assert build(**remedy).eval()(torch.zeros(1, 3, 96, 96)).shape == (1, 5)


def test_model_of_any_size_has_no_remedy() -> None:
    assert size_remedy(timm.create_model("test_resnet"), 96) == ""
    assert resize_model(timm.create_model("test_resnet"), 40) is None


def test_resize_model_without_support_raises_and_keeps_the_mode() -> None:
    stiff = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 5))
    assert resize_model(stiff, 16) is None
    with pytest.raises(ValueError, match="mat1 and mat2 shapes cannot be multiplied"):
        resize_model(stiff, 32)
    assert stiff.training


def test_resize_model_keeps_embedding_frozen() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=5, **TINY_VIT)
    vit.pos_embed.requires_grad_(False)
    resize_model(vit, 96)
    assert vit.pos_embed.shape[1] == 37 and not vit.pos_embed.requires_grad


def test_load_weights_with_another_patch_size_is_an_error() -> None:
    """timm would also resample patches of 16 px to 32: another model, and an error here."""
    trained = timm.create_model("vit_tiny_patch16_224", num_classes=5, **TINY_VIT)
    coarse = timm.create_model("vit_tiny_patch16_224", num_classes=5, patch_size=32, **TINY_VIT)
    before = {name: value.clone() for name, value in coarse.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"2 of another shape \(pos_embed"):
        load_weights(coarse, trained.state_dict(), 5)
    assert all(torch.equal(value, before[name]) for name, value in coarse.state_dict().items())


def test_load_weights_with_another_grid_and_head() -> None:
    trained = timm.create_model("vit_tiny_patch16_224", num_classes=10, **TINY_VIT)
    other = timm.create_model("vit_tiny_patch16_224", num_classes=5, **{**TINY_VIT, "img_size": 96})
    head = other.head.weight.clone()
    sentence = load_weights(other, trained.state_dict(), 5)
    assert "(pos_embed (1, 17, 24) to (1, 37, 24))" in sentence
    assert "it had 10 outputs, the model has 5" in sentence
    assert torch.equal(other.head.weight, head)
    assert torch.equal(other.cls_token, trained.cls_token)
