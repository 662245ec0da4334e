"""What docs/parallel.md says about DDP: what is sent and when, and what each of two ranks has in
the end.
"""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forked_ranks import RankServer, destroy_group, join_group
from helpers import DEMO
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from imagenet_cls.commands import distributed
from imagenet_cls.commands.train import load_for_training, run_options, train_parser
from imagenet_cls.engine.run_training import run_training
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.wrap import BatchNormStatistics, wrap_model

pytestmark = pytest.mark.nightly

IMAGES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def gradient(model: nn.Module, images: Tensor) -> Tensor:
    """Of the mean over `images`, all parameters in one tensor."""
    model.zero_grad()
    model(images).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def collectives(action: Callable[[], object]) -> list[str]:
    """What gloo did meanwhile, by torch's profiler: `all_reduce`, `broadcast`, ..."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        action()
    return sorted(
        {
            event.name.removeprefix("gloo:")
            for event in profile.events()
            if event.name.startswith("gloo:")
        }
    )


def gather(tensor: Tensor) -> list[Tensor]:
    """The tensor of each rank."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def ddp_averages_gradients(rank: int, world_size: int, folder: Path) -> None:
    """Equal halves, then uneven shares: five images and one."""
    join_group(rank, world_size, folder / "store")
    model = network(seed=rank)
    assert "broadcast" in collectives(lambda: DistributedDataParallel(model))
    assert torch.equal(weights(model), weights(network(seed=0)))
    wrapped = DistributedDataParallel(model)
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in model.state_dict()]
    half = IMAGES[3 * rank :][:3]
    assert collectives(lambda: gradient(wrapped, half)) == ["all_reduce"]
    reduced = gradient(wrapped, half)
    torch.testing.assert_close(reduced, gradient(network(), IMAGES))
    assert all(torch.equal(reduced, other) for other in gather(reduced))
    uneven = gradient(wrapped, IMAGES[5 * rank :][:5])
    mean_of_means = (gradient(network(), IMAGES[:5]) + gradient(network(), IMAGES[5:])) / 2
    torch.testing.assert_close(uneven, mean_of_means)
    assert not torch.allclose(uneven, gradient(network(), IMAGES), rtol=1e-2)
    with wrapped.no_sync():
        assert collectives(lambda: gradient(wrapped, half)) == []
        torch.testing.assert_close(gradient(wrapped, half), gradient(network(), half))


def running_statistics(rank: int, world_size: int, folder: Path) -> None:
    """Running means after two steps on each rank's own images; torch's default broadcasts rank
    0's.
    """
    group = join_group(rank, world_size, folder / "store")

    def train(wrapped: nn.Module, after_step: Callable[[], None] = lambda: None) -> None:
        for step in range(2):
            wrapped(IMAGES.roll(step, 0)[3 * rank :][:3])
            after_step()

    plain, by_default, averaged, alone = (nn.BatchNorm1d(4) for _ in range(4))
    train(DistributedDataParallel(plain, broadcast_buffers=False))
    train(DistributedDataParallel(by_default))
    statistics = BatchNormStatistics(averaged, group)
    train(wrap_model(averaged, group, "ddp"), lambda: statistics.sync(torch.tensor(False)))
    train(alone)
    layers = {"plain": plain, "by default": by_default, "averaged": averaged, "alone": alone}
    means = {name: gather(layer.running_mean) for name, layer in layers.items()}
    assert not torch.allclose(means["plain"][0], means["plain"][1], rtol=1e-2)
    assert torch.equal(means["by default"][0], means["alone"][0]), "only rank 0's images count"
    by_rank = means["by default"]
    assert not torch.allclose(by_rank[0], by_rank[1], rtol=1e-2), "after the last step"
    assert torch.equal(*means["averaged"])
    torch.testing.assert_close(means["averaged"][0], sum(means["alone"]) / 2)


class Drawing(nn.Module):
    """Draws in each training step, as dropout does, and keeps what it drew."""

    drawn: ClassVar[list[Tensor]] = []

    def __init__(self, num_classes: int):
        super().__init__()
        self.linear = nn.Linear(3, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.drawn.append(torch.rand(3))
        return self.linear(images.mean((2, 3)))


def whole_run(rank: int, world_size: int, folder: Path) -> None:
    """Two steps of train.py: ranks draw differently, and only rank 0 saves and looks at what it has
    saved.
    """
    settings = {
        "model.name": "test_ddp_behavior:Drawing",
        "data.name": "synthetic",
        "data.kwargs": "{train_images: 8, val_images: 3, num_classes: 2, size_px: 8}",
        "train.global_batch_size": 4,
        "train.epochs": 1,
        "device": "cpu",
        "parallel.init_method": f"file://{folder}/store",
    }
    own = folder / f"run{rank}"
    words = [DEMO, *(f"{name}={value}" for name, value in settings.items()), "--work-dir", str(own)]
    arguments = train_parser().parse_intermixed_args(words)
    loaded = load_for_training(arguments)
    group = distributed.join_group(loaded, RankInfo(rank, rank, world_size, world_size))
    with mock.patch("imagenet_cls.engine.run_training.final_message", return_value="") as message:
        run_training(loaded, run_options(arguments, loaded), group)
    assert message.called == (rank == 0)
    drawn = gather(torch.stack(Drawing.drawn[-2:]))
    assert len(torch.cat(drawn).unique(dim=0)) == 4, "two steps on two ranks, all different"
    if rank == 0:
        (file,) = own.glob("checkpoints/step-*/model.safetensors")
        with safe_open(file, "pt") as tensors:
            assert sorted(tensors.keys()) == ["linear.bias", "linear.weight"]
    else:
        assert [path.name for path in own.iterdir()] == ["logs"]
    destroy_group(group)


@pytest.mark.parametrize("statement", [ddp_averages_gradients, running_statistics, whole_run])
def test_statements_about_ddp_hold_on_two_ranks(
    rank_server: RankServer, tmp_path: Path, statement: Callable[[int, int, Path], None]
) -> None:
    rank_server.call(statement, 2, tmp_path)
