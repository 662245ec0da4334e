"""Images of another size than in training: position embeddings against timm."""

from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from imagenet_cls.models.adapt import resize_model
from imagenet_cls.models.weights import load_weights

# A model, what makes it small, and what it is built with at another size.
RESIZED = {
    "vit_tiny_patch16_224": ({"depth": 2, "img_size": 64}, {"img_size": 96}),
    "deit_tiny_distilled_patch16_224": ({"depth": 2, "img_size": 64}, {"img_size": 96}),
    "vit_small_patch16_18x2_224": ({"depth": 2, "img_size": 96}, {"img_size": 64}),
    "swin_tiny_patch4_window7_224": (
        {"depths": (1, 2), "embed_dim": 24, "num_heads": (2, 4), "img_size": 56},
        {},
    ),
    "eva02_tiny_patch14_224": ({"depth": 1, "img_size": 56}, {"img_size": 84}),
    "test_maxvit": ({"img_size": 64}, {"img_size": 96}),
}
SWIN_AT = {"img_size": 96, "window_size": 12}


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """A model at one size, and another one of the same kind at another."""
    small, other = RESIZED[name]
    torch.manual_seed(0)
    make = partial(timm.create_model, name, num_classes=5)
    trained = make(**small)
    with torch.no_grad():  # tables start as zeros or nearly so, and averages of those prove nothing
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return trained.eval(), make(**{**small, **(other or SWIN_AT)}).eval()


@pytest.mark.parametrize("name", RESIZED)
def test_load_weights_of_another_size_equals_timms_loading(name: str, tmp_path: Path) -> None:
    """Against timm.create_model, told to take the file for its pretrained weights: all tensors, and
    so the outputs.
    """
    trained, ours = pair(name)
    safetensors.torch.save_file(trained.state_dict(), tmp_path / "model.safetensors")
    small, other = RESIZED[name]
    size = small["img_size"]
    overlay = {
        "file": str(tmp_path / "model.safetensors"),
        "num_classes": 5,
        "input_size": (3, size, size),
    }
    kwargs = {**small, **(other or SWIN_AT)}
    theirs = timm.create_model(
        name, pretrained=True, num_classes=5, pretrained_cfg_overlay=overlay, **kwargs
    ).eval()
    sentence = load_weights(ours, trained.state_dict(), 5)
    assert "position embeddings resized to this model's grid" in sentence
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=0, atol=1e-6, msg=key)
    px = kwargs["img_size"]
    with torch.no_grad():
        images = torch.randn(2, 3, px, px)
        torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RESIZED)
def test_resize_model_equals_loading_into_a_model_of_that_size(name: str) -> None:
    trained, built = pair(name)
    load_weights(built, trained.state_dict(), 5)
    small, other = RESIZED[name]
    size_px = (other or SWIN_AT)["img_size"]
    assert resize_model(trained, small["img_size"]) is None
    sentence = resize_model(trained, size_px)
    assert f"{size_px} px" in sentence
    with torch.no_grad():
        images = torch.randn(2, 3, size_px, size_px)
        torch.testing.assert_close(trained(images), built(images), rtol=0, atol=1e-6)
