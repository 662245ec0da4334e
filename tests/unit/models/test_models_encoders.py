"""Files of self-supervised and image-text pre-training, generated from timm's models with the
published names: a model gets all of the encoder, and a new head.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import read_weights
from torch import Tensor

from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.weights import load_weights

State = dict[str, Tensor]
TINY = {"depth": 4, "embed_dim": 24, "num_heads": 2, "img_size": 64}


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


def renamed(state: State, *rules: tuple[str, str]) -> State:
    for pattern, new in rules:
        state = {re.sub(pattern, new, name): value for name, value in state.items()}
    return state


def layers(prefix: str, *names: str) -> State:
    """Tensors that only pre-training uses."""
    return {f"{prefix}{name}": torch.randn(8, 24) for name in names}


def mae(state: State) -> Any:
    names = ("mask_token", "decoder_pos_embed", "decoder_embed.weight", "decoder_blocks.0.weight")
    return {"model": state | layers("", *names), "epoch": 800}


def dino(state: State) -> Any:
    """The teacher of a training checkpoint."""
    return {"teacher": prefixed("backbone.", state) | layers("head.", "mlp.0.weight")}


def dinov2(state: State) -> Any:
    names = ((r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3"))
    return renamed(state, *names) | {"mask_token": torch.zeros(1, 24)}


def dinov3(state: State) -> Any:
    names = ((r"gamma_([12])", r"ls\1.gamma"), ("reg_token", "storage_tokens"))
    state = renamed(state, *names)
    state |= {"mask_token": torch.zeros(1, 24), "rope_embed.periods": torch.ones(3)}
    weights = [name for name in state if "qkv.weight" in name]
    biases = {name.replace("weight", "bias"): torch.zeros(72) for name in weights}
    return state | biases | {f"{name}_mask": value for name, value in biases.items()}


CLIP_NAMES = (
    (r"patch_embed\.proj", "conv1"),
    ("pos_embed", "positional_embedding"),
    (r"^norm_pre", "ln_pre"),
    (r"^norm\.", "ln_post."),
    (r"\.norm", ".ln_"),
    (r"attn\.qkv\.", "attn.in_proj_"),
    (r"attn\.proj", "attn.out_proj"),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
    (r"^blocks", "transformer.resblocks"),
    ("cls_token", "class_embedding"),
)


def clip(state: State) -> Any:
    state = renamed(state, *CLIP_NAMES)
    state["positional_embedding"] = state["positional_embedding"][0]
    state |= {"class_embedding": state["class_embedding"][0, 0], "proj": torch.randn(24, 8)}
    names = ("positional_embedding", "token_embedding.weight", "transformer.resblocks.0.weight")
    text = layers("", *names)
    return {"state_dict": prefixed("module.", prefixed("visual.", state) | text)}


def open_clip(state: State) -> Any:
    text = layers("", "visual.head.proj.weight", "text.token_embedding.weight")
    return prefixed("visual.trunk.", state) | text


def simclr(state: State) -> Any:
    """With the projections of SwAV, too."""
    names = ("projector.0.weight", "projection_head.0.weight", "prototypes.weight")
    return {"state_dict": prefixed("module.", prefixed("encoder.", state) | layers("", *names))}


LAYOUTS: dict[Callable[[State], Any], tuple[str, dict[str, Any]]] = {
    mae: ("vit_tiny_patch16_224", TINY),
    dino: ("vit_tiny_patch16_224", TINY),
    dinov2: ("vit_giant_patch14_dinov2", {**TINY, "img_size": 56}),
    dinov3: ("vit_small_patch16_dinov3", {"depth": 2, "embed_dim": 24, "num_heads": 2}),
    clip: ("vit_base_patch16_clip_quickgelu_224", TINY),
    open_clip: ("vit_base_patch16_clip_224", TINY),
    simclr: ("test_resnet", {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_encoder_of_pretraining_gives_the_same_features(
    layout: Callable[[State], Any], tmp_path: Path
) -> None:
    name, kwargs = LAYOUTS[layout]
    torch.manual_seed(0)
    source = timm.create_model(name, num_classes=0, **kwargs).eval()
    for parameter in source.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    weights = {key: value for key, value in source.state_dict().items() if "num_batches" not in key}
    torch.save(layout(weights), tmp_path / "pretrained.pth")
    state, _ = read_weights(tmp_path / "pretrained.pth")
    target = timm.create_model(name, num_classes=7, **kwargs).eval()
    head = target.get_classifier()
    before = head.weight.clone()
    sentence = load_weights(target, state, 7)
    size = kwargs.get("img_size", 64)
    image = torch.linspace(-1, 1, 3 * size * size).view(1, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(target.forward_features(image), source.forward_features(image))
    assert torch.equal(head.weight, before)
    assert "dropped" in sentence and "newly initialized" in sentence


@pytest.mark.parametrize(
    "prefix", ["encoder.", "net._orig_mod.module.", "_fsdp_wrapped_module.", "classifier."]
)
def test_prefix_of_all_names_is_removed(prefix: str, tmp_path: Path) -> None:
    """Also for an evaluation, and where the head has another size."""
    source = timm.create_model("test_resnet", num_classes=7)
    torch.save({"state_dict": prefixed(prefix, source.state_dict())}, tmp_path / "weights.pth")
    state, _ = read_weights(tmp_path / "weights.pth")
    target = timm.create_model("test_resnet", num_classes=7)
    load_weights(target, state, 7, head_may_differ=False)
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
    sentence = load_weights(timm.create_model("test_resnet", num_classes=4), state, 4)
    assert "it had 7 outputs, the model has 4" in sentence and "warning" not in sentence
    with pytest.raises(CheckpointError):
        load_weights(timm.create_model("resnet18", num_classes=7), state, 7)


@pytest.mark.parametrize(
    "rules",
    [
        ((r"^", "backbone."), (r"^backbone\.fc\.", "head.fc.")),  # mmpretrain
        ((r"^fc\.", "fc.1."),),
    ],
)
def test_head_under_another_name_is_an_error_if_it_has_the_size(
    rules: tuple[tuple[str, str], ...],
) -> None:
    state = renamed(timm.create_model("test_resnet", num_classes=7).state_dict(), *rules)
    for may_differ in (True, False):
        with pytest.raises(CheckpointError):
            load_weights(timm.create_model("test_resnet", num_classes=7), state, 7, may_differ)
    other = timm.create_model("test_resnet", num_classes=4)
    assert "newly initialized" in load_weights(other, state, 4)


def test_head_is_new_on_request() -> None:
    source, target = (timm.create_model("test_resnet", num_classes=7) for _ in range(2))
    sentence = load_weights(target, source.state_dict(), 7, keep_head=False)
    assert "newly initialized 2 (fc.weight, fc.bias)" in sentence
    assert not torch.equal(target.fc.weight, source.fc.weight)


def test_two_prefixes_that_fit_equally_are_an_error() -> None:
    state = timm.create_model("test_resnet", num_classes=7).state_dict()
    model = timm.create_model("test_resnet", num_classes=7)
    for first, second in (("net.", "ema."), ("", "ema."), ("encoder_q.", "encoder_k.")):  # MoCo's
        with pytest.raises(CheckpointError, match="prefixes"):
            load_weights(model, prefixed(first, state) | prefixed(second, state), 7)


def test_encoder_of_another_model_is_an_error() -> None:
    """More layers, a norm or a token that the model lacks: dropping them would give other
    features.
    """
    vit = ("vit_tiny_patch16_224", TINY)
    for wanted, given, prefix in (
        (vit, ("vit_tiny_patch16_224", {**TINY, "depth": 5}), ""),
        (vit, ("deit_tiny_distilled_patch16_224", TINY), "backbone."),
        (vit, ("vit_base_patch16_clip_224", TINY), ""),
        (("resnet18", {}), ("resnet34", {}), "encoder."),
        (("resnet34", {}), ("resnet18", {}), ""),
    ):
        model, source = (
            timm.create_model(name, num_classes=count, **kwargs)
            for (name, kwargs), count in ((wanted, 7), (given, 0))
        )
        with pytest.raises(CheckpointError, match=r"don't fit this model: .*(missing|unexpected)"):
            load_weights(model, prefixed(prefix, source.state_dict()), 7)
