"""Several ranks with frozen parts, activations that are recomputed, and accumulation: one
process on all images.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from torch import nn

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.models.adapt import checkpoint_activations, freeze, set_training
from imagenet_cls.parallel.sync_bn import synchronize_batch_norm
from imagenet_cls.parallel.wrap import (
    BatchNormStatistics,
    gradient_sync,
    rebuild_ddp_buckets,
    wrap_ddp,
)

FROZEN = ModelConfig(freeze=["conv1.*", "layer1.*"], freeze_bn=True)
TRAINED = ModelConfig(freeze=["conv1.*"])
IMAGES = 12


def network() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=5, zero_init_last=False).double()
    with torch.no_grad():
        model.train()(
            torch.randn(8, 3, 32, 32, dtype=torch.float64) * 2 + 1
        )  # statistics that are not those of a start
    return model


def steps(
    model: nn.Module,
    forward: nn.Module,
    cfg: ModelConfig,
    shares: list[slice],
    settle: Callable[[], None],
) -> list[float]:
    """Three steps, each over `shares` of the images in turn. Returns the mean loss of each."""
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.9
    )
    losses = []
    for step in range(3):
        images = torch.randn(
            IMAGES, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
        )
        set_training(model, cfg)
        loss = torch.zeros((), dtype=torch.float64)
        for number, share in enumerate(shares):
            with gradient_sync(forward, number == len(shares) - 1):
                part_of_loss = forward(images[share]).square().mean() / len(shares)
                part_of_loss.backward()
            loss += part_of_loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        settle()
        losses.append(loss.item())
    return losses


def compare(rank: int, world_size: int, folder: Path, cfg: ModelConfig, accumulation: int) -> None:
    context = join_ranks(rank, world_size, folder / "store")
    alone = network()
    freeze(alone, cfg, 5)
    model = copy.deepcopy(alone)
    if cfg is TRAINED:
        model = synchronize_batch_norm(model, context)
    checkpoint_activations(model)
    set_training(model, cfg)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    wrapped = wrap_ddp(model, context, "ddp")
    rebuild_ddp_buckets(
        wrapped, lambda: wrapped(torch.zeros(2, 3, 32, 32, dtype=torch.float64)).mean().backward()
    )
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    statistics = BatchNormStatistics(model, context)

    at_once = IMAGES // world_size // accumulation
    starts = [number * world_size * at_once + rank * at_once for number in range(accumulation)]
    shares = [slice(start, start + at_once) for start in starts]
    losses = torch.tensor(
        steps(model, wrapped, cfg, shares, lambda: statistics.sync(torch.tensor(False))),
        dtype=torch.float64,
    )
    torch.distributed.all_reduce(losses)
    expected = torch.tensor(
        steps(alone, alone, cfg, [slice(None)], lambda: None), dtype=torch.float64
    )
    torch.testing.assert_close(losses / world_size, expected, rtol=0, atol=1e-9)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-9, msg=name)
    if cfg is FROZEN:  # to the bit, on three ranks too
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        assert not statistics.flat
    destroy_process_groups(context)


def frozen(rank: int, world_size: int, folder: Path) -> None:
    compare(rank, world_size, folder, FROZEN, accumulation=2)


def synchronized(rank: int, world_size: int, folder: Path) -> None:
    """BatchNorm over all ranks, recomputed: its collectives run within backward, between those
    of the gradients.
    """
    compare(rank, world_size, folder, TRAINED, accumulation=1)


def test_frozen_layers_on_ranks_train_as_one_process(
    rank_server: RankServer, tmp_path: Path
) -> None:
    rank_server.call(frozen, 3, tmp_path)


def test_checkpointed_sync_bn_trains_as_one_process(
    rank_server: RankServer, tmp_path: Path
) -> None:
    rank_server.call(synchronized, 2, tmp_path)
