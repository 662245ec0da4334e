"""Split BatchNorm is BatchNorm for each split; gradient checkpointing changes memory and nothing
else; image sizes.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import ConfigError
from imagenet_cls.models.adapt import (
    checkpoint_activations,
    resize_model,
    split_batch_norm,
)

SPLIT = ModelConfig(split_bn=True)


def images_of(step: int, count: int = 6) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(step))


# ---- split BatchNorm


def test_split_batch_norm_equals_one_layer_per_split() -> None:
    """Against three BatchNorm layers by hand: outputs and statistics; evaluation is the first
    one's.
    """
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3)
    layer(torch.randn(8, 3, 4, 4) * 2 + 1)
    own = [copy.deepcopy(layer) for _ in range(3)]
    split = split_batch_norm(nn.Sequential(layer), SPLIT, 3)
    images = torch.randn(6, 3, 4, 4)
    expected = torch.cat([norm(part) for norm, part in zip(own, images.split(2), strict=True)])
    torch.testing.assert_close(split.train()(images), expected, rtol=0, atol=0)
    state = split.state_dict()
    for prefix, norm in zip(("0.", "0.aux_bn.0.", "0.aux_bn.1."), own, strict=True):
        assert all(
            torch.equal(state[prefix + name], value) for name, value in norm.state_dict().items()
        )
    assert torch.equal(split.eval()(images), own[0].eval()(images))


def test_split_batch_norm_of_tokens_is_an_error() -> None:
    """A model without BatchNorm: tests/engine/test_bad_recipes.py."""
    with pytest.raises(ConfigError, match=r"^model\.split_bn: "):
        split_batch_norm(timm.create_model("levit_128s"), SPLIT, 3)


# ---- gradient checkpoints


def trained(model: nn.Module, autocast: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps with accumulation, and the state at the end. Dropout draws by key, as in
    the loop.
    """
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    losses = []
    for step in range(2):
        for micro in range(2):
            torch.manual_seed(10 * step + micro)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model.train()(images_of(10 * step + micro)).square().mean() / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def bytes_for_backward(model: nn.Module) -> int:
    """What a forward pass keeps for backward, parameters aside."""
    parameters = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.train()(images_of(0))
    assert output.requires_grad
    return sum(size for pointer, size in kept.items() if pointer not in parameters)


@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        ("test_efficientnet", False),
        pytest.param("test_convnext", True, marks=pytest.mark.nightly),
    ],
)
def test_checkpointing_gives_the_same_bits_with_less_memory(name: str, autocast: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return timm.create_model(name, num_classes=5, drop_rate=0.2, drop_path_rate=0.2)

    plain, checkpointed = make(), make()
    checkpoint_activations(checkpointed)
    assert bytes_for_backward(checkpointed) < 0.8 * bytes_for_backward(plain)
    assert_same_training(make, autocast)


def assert_same_training(make: Callable[[], nn.Module], autocast: bool = False) -> None:
    checkpointed = make()
    checkpoint_activations(checkpointed)
    losses, state = trained(make(), autocast)
    assert trained(checkpointed, autocast)[0] == losses and len(set(losses)) == len(losses)
    for key, value in checkpointed.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_checkpointing_with_split_batch_norm_gives_the_same_bits() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return split_batch_norm(timm.create_model("test_efficientnet", num_classes=5), SPLIT, 3)

    assert_same_training(make)


class UserModel(nn.Module):
    """With the method that timm's models have."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum))
        self.head = nn.Linear(4, 5)
        self.grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def forward(self, images: Tensor) -> Tensor:
        features = (
            checkpoint(self.body, images, use_reentrant=False)
            if self.grad_checkpointing
            else self.body(images)
        )
        return self.head(features.mean((2, 3)))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_checkpointing_updates_statistics_once(momentum: float | None) -> None:
    """torch alone updates them twice."""

    def statistics(prepare: Callable[[Any], object]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = UserModel(momentum)
        prepare(model)
        trained(model)
        return dict(model.body[1].named_buffers())

    plain = statistics(lambda model: None)
    ours = statistics(checkpoint_activations)
    bare = statistics(lambda model: model.set_grad_checkpointing())
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert (plain["num_batches_tracked"], bare["num_batches_tracked"]) == (4, 8)


@pytest.mark.nightly
def test_checkpointing_of_a_compiled_model() -> None:
    """The compiler recomputes by itself, and updates once."""
    torch.manual_seed(0)
    model = UserModel()
    losses, state = trained(copy.deepcopy(model))
    checkpoint_activations(model)
    model.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(trained(model), (losses, state), rtol=1e-5, atol=1e-6)


def test_model_without_checkpointing_is_an_error() -> None:
    for model in (timm.create_model("vgg11"), nn.Sequential(nn.Linear(3, 3))):
        with pytest.raises(ConfigError, match=r"^train\.grad_checkpointing: "):
            checkpoint_activations(model)


# ---- image sizes

TINY_VIT = {"depth": 1, "embed_dim": 24, "num_heads": 2, "img_size": 64}


def test_resize_model_without_support_raises_and_keeps_the_mode() -> None:
    fixed = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 5))
    assert resize_model(fixed, 16) is None
    with pytest.raises(ValueError):
        resize_model(fixed, 32)
    assert fixed.training


def test_resize_model_keeps_embedding_frozen() -> None:
    """The resized values: tests/parity."""
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=5, **TINY_VIT)
    vit.pos_embed.requires_grad_(False)
    resize_model(vit, 96)
    assert vit.pos_embed.shape[1] == 37 and not vit.pos_embed.requires_grad
