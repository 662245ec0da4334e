"""SyncBN on two ranks is BatchNorm in one process on the joined batch: outputs, gradients, running
statistics.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm.layers
import torch
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import arguments
from torch import Tensor, nn

from imagenet_cls.errors import UsageError
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.parallel.sync_bn import CpuSyncBatchNorm, is_synchronized, synchronize_batch_norm

CPU = torch.device("cpu")
TWO = RankContext(RankInfo(0, 0, 2, 2), CPU)

# What is normalized, the shape of all ranks' images together, and how many of the first dimension
# rank 0 has.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "2d": (lambda: nn.BatchNorm2d(3), (6, 3, 4, 5), 3),
    "1d, with length": (lambda: nn.BatchNorm1d(3), (4, 3, 7), 2),
    "uneven": (lambda: nn.BatchNorm2d(3), (6, 3, 2, 2), 5),
    "one value on rank 1": (lambda: nn.BatchNorm1d(3), (4, 3), 3),
    "not affine": (lambda: nn.BatchNorm2d(3, affine=False), (6, 3, 2, 2), 4),
    "no momentum": (lambda: nn.BatchNorm2d(3, momentum=None), (6, 3, 2, 2), 3),
    "no statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (6, 3, 2, 2), 3),
}


def images_of(shape: tuple[int, ...], step: int) -> Tensor:
    """Far from zero, so that sums of squares would cancel."""
    draws = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=draws, dtype=torch.float64) * 3 + 1e4


def compare(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    first: int,
    context: RankContext,
    layout: Any,
) -> None:
    """Two training steps and an evaluation of this rank's share against the same on all images at
    once.
    """
    torch.manual_seed(0)
    alone = make().double().to(memory_format=layout)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.uniform_(0.5, 1.5)
    ours = synchronize_batch_norm(copy.deepcopy(alone), context)
    assert list(ours.state_dict()) == list(alone.state_dict())
    own = slice(0, first) if context.rank == 0 else slice(first, None)
    for step in (0, 1):
        joined = images_of(shape, step).contiguous(memory_format=layout).requires_grad_()
        share = joined.detach()[own].contiguous(memory_format=layout).requires_grad_()
        expected, output = alone(joined), ours(share)
        weights = images_of(expected.shape, step + 10) - 1e4
        (expected * weights).sum().backward()
        (output * weights[own]).sum().backward()
        close(output, expected[own])
        assert output.is_contiguous(memory_format=layout)
        close(share.grad, joined.grad[own])
    for ours_parameter, parameter in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.distributed.all_reduce(ours_parameter.grad)  # DDP's part
        close(ours_parameter.grad, parameter.grad)
    for buffer, expected_buffer in zip(ours.buffers(), alone.buffers(), strict=True):
        close(buffer, expected_buffer)
    test_images = images_of(shape, 20)
    close(ours.eval()(test_images), alone.eval()(test_images))


def close(found: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def fused_layers(context: RankContext) -> None:
    """timm's BatchNormAct2d keeps its activation and dropout; a layer that is used twice stays one
    layer.
    """
    from timm.layers import BatchNormAct2d

    layer = BatchNormAct2d(3, act_layer=nn.LeakyReLU, drop_layer=nn.Identity).double()
    compare(lambda: layer, (6, 3, 4, 4), 2, context, torch.contiguous_format)
    shared = nn.BatchNorm2d(3)
    model = synchronize_batch_norm(nn.Sequential(shared, nn.ReLU(), shared), context)
    assert model[0] is model[2] and isinstance(model[0], CpuSyncBatchNorm)


def low_precision(context: RankContext) -> None:
    """bfloat16 images under float32 weights, as autocast has them, are normalized in float32."""
    layer = synchronize_batch_norm(nn.BatchNorm2d(3), context)
    images = torch.full((2, 3, 8, 8), 300.0, dtype=torch.bfloat16)
    images[:, :, ::2] = 302.0
    images.requires_grad_()
    output = layer(images)
    output.sum().backward()
    assert output.dtype is torch.bfloat16 is images.grad.dtype
    torch.testing.assert_close(output.float().abs(), torch.ones(2, 3, 8, 8))


def compare_all(rank: int, world_size: int, folder: Path) -> None:
    """On each of two ranks."""
    context = join_ranks(rank, world_size, folder / "store")
    for make, shape, first in CASES.values():
        compare(make, shape, first, context, torch.contiguous_format)
        if len(shape) == 4:
            compare(make, shape, first, context, torch.channels_last)
    fused_layers(context)
    low_precision(context)
    destroy_process_groups(context)


def test_sync_bn_on_two_ranks_equals_one_process(rank_server: RankServer, tmp_path: Path) -> None:
    rank_server.call(compare_all, 2, tmp_path)


def test_sync_bn_of_a_layer_with_its_own_forward_is_an_error() -> None:
    class Halved(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) / 2

    for layer in (Halved(3), timm.layers.SplitBatchNorm2d(4)):
        with pytest.raises(UsageError, match=type(layer).__name__):
            synchronize_batch_norm(nn.Sequential(nn.BatchNorm2d(3), layer), TWO)


def test_sync_bn_converts_every_batch_norm_of_a_timm_model() -> None:
    """This one has fused layers. The state dict's names and order stay, and the evaluation's
    bits.
    """
    model = timm.create_model("efficientnet_b0", num_classes=3).eval()
    before, images = list(model.state_dict()), torch.randn(1, 3, 64, 64)
    expected = model(images)
    count = sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    ours = synchronize_batch_norm(model, TWO)
    assert sum(is_synchronized(layer) for layer in ours.modules()) == count > 10
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in ours.modules())
    assert list(ours.state_dict()) == before and torch.equal(ours(images), expected)


def test_sync_bn_from_the_command_line_is_in_the_config(
    rank_server: RankServer, digits: Path, tmp_path: Path
) -> None:
    """The same losses as on one rank: test_world_sizes.py."""
    words = arguments(digits, tmp_path, "noisy", train__global_batch_size=24, train__max_steps=1)
    rank_server.train([*words, "--syncbn"], 2)
    assert "sync_bn: true" in (tmp_path / "config.yaml").read_text()


# ---- for tests/gpu


def ours_on_a_gpu(rank: int, world_size: int, folder: Path) -> None:
    """Two gloo ranks on one GPU: torch's layer and ours give the same. Nothing has touched it
    before the fork.
    """
    context = join_ranks(rank, world_size, folder / "store")
    gpu = torch.device("cuda", 0)
    images = images_of((6, 3, 4, 4), 0).float().sub(1e4).to(gpu)[rank * 2 : rank * 4 + 2]
    results = []
    for device in (CPU, gpu):  # the device that decides which of the two layers is taken
        layer = synchronize_batch_norm(
            nn.BatchNorm2d(3), RankContext(context.rank_info, device)
        ).to(gpu)
        share = images.clone().requires_grad_()
        output = layer(share)
        output.square().mul(torch.arange(4.0, device=gpu)).sum().backward()
        results.append(
            (
                type(layer),
                [output, share.grad, layer.weight.grad, layer.running_mean, layer.running_var],
            )
        )
    (ours, found), (torchs, expected) = results
    assert (ours, torchs) == (CpuSyncBatchNorm, nn.SyncBatchNorm)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    destroy_process_groups(context)
