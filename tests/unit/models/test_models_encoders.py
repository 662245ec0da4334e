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
    def network(state: State) -> State:
        return prefixed("backbone.", state) | layers("head.", "mlp.0.weight", "last_layer.weight_g")

    student = network({name: value + 1 for name, value in state.items()})
    more = {"dino_loss": {"center": torch.zeros(1, 8)}, "epoch": 100}
    return {"student": prefixed("module.", student), "teacher": network(state), **more}


def dinov2(state: State) -> Any:
    names = ((r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3"))
    return renamed(state, *names) | {"mask_token": torch.zeros(1, 24)}


def dinov2_training(state: State) -> Any:
    """Four blocks in two chunks. With registers, the embedding of the class token has a
    position.
    """
    state = {**state, "register_tokens": state["reg_token"], "mask_token": torch.zeros(1, 24)}
    position = torch.randn(1, 1, 24)
    state |= {"cls_token": state["cls_token"] - position}
    state |= {"pos_embed": torch.cat([position, state["pos_embed"]], dim=1)}
    del state["reg_token"]
    state = renamed(state, (r"^blocks\.(\d)", r"blocks.\1.\1"))
    state = renamed(state, (r"^blocks\.[01]", "blocks.0"), (r"^blocks\.[23]", "blocks.1"))
    return {"teacher": prefixed("backbone.", state) | layers("dino_head.", "mlp.0.weight")}


def dinov3(state: State) -> Any:
    names = ((r"gamma_([12])", r"ls\1.gamma"), ("reg_token", "storage_tokens"))
    state = renamed(state, *names)
    state |= {"mask_token": torch.zeros(1, 24), "rope_embed.periods": torch.ones(3)}
    weights = [name for name in state if "qkv.weight" in name]
    biases = {name.replace("weight", "bias"): torch.zeros(72) for name in weights}
    return state | biases | {f"{name}_mask": value for name, value in biases.items()}


def moco(state: State) -> Any:
    """In version 1 the projection has the name of a classifier, here also its size."""
    other = {name: value + 1 for name, value in state.items()}
    width = state["layer4.0.conv1.weight"].shape[0]
    networks = prefixed("encoder_q.", state | {"fc.weight": torch.zeros(7, width)})
    networks |= prefixed("encoder_k.", other) | layers("encoder_q.fc.", "0.weight", "2.weight")
    networks |= layers("", "queue", "queue_ptr")
    return {"state_dict": prefixed("module.", networks), "arch": "resnet50"}


def moco_v3(state: State) -> Any:
    other = {name: value + 1 for name, value in state.items()}
    networks = prefixed("base_encoder.", state) | prefixed("momentum_encoder.", other)
    networks |= layers("base_encoder.head.", "0.weight") | layers("predictor.", "0.weight")
    return {"state_dict": prefixed("module.", networks)}


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
    """The projection has as many outputs as the model has classes."""
    state = renamed(state, *CLIP_NAMES)
    state["positional_embedding"] = state["positional_embedding"][0]
    state |= {"class_embedding": state["class_embedding"][0, 0], "proj": torch.randn(24, 7)}
    names = ("positional_embedding", "token_embedding.weight", "transformer.resblocks.0.weight")
    text = layers("", *names)
    return {"state_dict": prefixed("module.", prefixed("visual.", state) | text)}


def open_clip(state: State) -> Any:
    text = layers("", "visual.head.proj.weight", "text.token_embedding.weight")
    return prefixed("visual.trunk.", state) | text


def clip_in_a_module(state: State) -> Any:
    """As of a LightningModule."""
    return {"state_dict": prefixed("model.", clip(state)["state_dict"])}


def simclr(state: State) -> Any:
    """With the projections of SwAV, too."""
    names = ("projector.0.weight", "projection_head.0.weight", "prototypes.weight")
    return {"state_dict": prefixed("module.", prefixed("encoder.", state) | layers("", *names))}


LAYOUTS: dict[Callable[[State], Any], tuple[str, dict[str, Any], int]] = {
    # The model, its arguments, and how many tensors of the file it does not use.
    mae: ("vit_tiny_patch16_224", TINY, 4),
    dino: ("vit_tiny_patch16_224", TINY, 2),
    dinov2: ("vit_giant_patch14_dinov2", {**TINY, "img_size": 56}, 1),
    dinov2_training: ("vit_small_patch14_reg4_dinov2", {**TINY, "img_size": 56}, 2),
    dinov3: ("vit_small_patch16_dinov3", {"depth": 2, "embed_dim": 24, "num_heads": 2}, 6),
    moco: ("test_resnet", {}, 80),
    moco_v3: ("vit_tiny_patch16_224", TINY, 56),
    clip: ("vit_base_patch16_clip_quickgelu_224", TINY, 4),
    clip_in_a_module: ("vit_base_patch16_clip_quickgelu_224", TINY, 4),
    open_clip: ("vit_base_patch16_clip_224", TINY, 2),
    simclr: ("test_resnet", {}, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_encoder_of_pretraining_gives_the_same_features(
    layout: Callable[[State], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, kwargs, dropped = LAYOUTS[layout]
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
    assert capsys.readouterr().out == ""  # of timm's function for DINOv3
    size = kwargs.get("img_size", 64)
    image = torch.linspace(-1, 1, 3 * size * size).view(1, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(target.forward_features(image), source.forward_features(image))
    assert torch.equal(head.weight, before)
    counts = re.findall(r"loaded (\d+) .*dropped (\d+) .*, newly initialized (\d+)", sentence)
    assert counts == [(str(len(weights)), str(dropped), "2")]


def test_encoder_for_average_pooling_gets_a_new_norm() -> None:
    """As MAE's fine-tuning does."""
    source = timm.create_model("vit_tiny_patch16_224", num_classes=0, **TINY)
    target = timm.create_model("vit_tiny_patch16_224", num_classes=7, global_pool="avg", **TINY)
    sentence = load_weights(target, source.state_dict(), 7)
    assert "4 (fc_norm.weight, fc_norm.bias, head.weight, head.bias)" in sentence
    assert torch.equal(target.blocks[3].mlp.fc2.weight, source.blocks[3].mlp.fc2.weight)


@pytest.mark.parametrize(
    "prefix", ["encoder.", "net._orig_mod.module.", "_fsdp_wrapped_module.", "conv1."]
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
        ((r"^", "model.backbone."), (r"^model\.backbone\.fc\.", "model.head.")),
        ((r"^", "backbone."),),
        ((r"^fc\.", "fc.1."),),
    ],
)
def test_head_of_equal_size_is_loaded_from_another_place(
    rules: tuple[tuple[str, str], ...],
) -> None:
    source = timm.create_model("test_resnet", num_classes=7)
    state = renamed(source.state_dict(), *rules)
    target = timm.create_model("test_resnet", num_classes=7)
    assert "warning" not in load_weights(target, state, 7, head_may_differ=False)
    assert torch.equal(target.fc.weight, source.fc.weight)
    sentence = load_weights(target, state, 7, keep_head=False)
    assert "newly initialized 2 (fc.weight, fc.bias)" in sentence
    other = timm.create_model("test_resnet", num_classes=4)
    assert "newly initialized" in load_weights(other, state, 4)


@pytest.mark.parametrize("more", [{"encoder_q.": ""}, {"": "projector.2."}])
def test_layer_of_the_heads_size_in_a_pretraining_file_is_dropped_with_a_warning(
    more: dict[str, str],
) -> None:
    source = timm.create_model("test_resnet", num_classes=7)
    [(prefix, layer)] = more.items()
    state = prefixed(prefix, source.state_dict())
    if layer:
        state = renamed(state, (r"^fc\.", layer)) | layers("", "projector.0.weight")
    target = timm.create_model("test_resnet", num_classes=7)
    sentence = load_weights(target, state, 7)
    assert sentence.splitlines()[1].startswith("warning: ")
    assert not torch.equal(target.fc.weight, source.fc.weight)


def test_two_prefixes_that_fit_equally_are_an_error() -> None:
    state = timm.create_model("test_resnet", num_classes=7).state_dict()
    model = timm.create_model("test_resnet", num_classes=7)
    with pytest.raises(CheckpointError, match=r"net\., ema\."):
        load_weights(model, prefixed("net.", state) | prefixed("ema.", state), 7)


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
