"""What docs/parallel.md says about DDP: what is sent and when, and what each of two ranks has in the end."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import RankServer, destroy_group, join_group
from helpers import DEMO
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from imagenet_cls.commands.train import load_for_training, train_here, train_parser
from imagenet_cls.engine import start
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.wrap import BatchNormStatistics, wrap_model

pytestmark = pytest.mark.nightly

RANKS = 2
PAUSE_SEC = 1.0
IMAGES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))


def gradient(model: nn.Module, images: Tensor) -> list[float]:
    """Of the mean over `images`, all parameters in one list."""
    model.zero_grad()
    model(images).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).tolist()


def collectives(action: Callable[[], object]) -> list[str]:
    """What gloo did meanwhile, by torch's own profiler: `all_reduce`, `broadcast`, ..."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        action()
    return sorted({event.name.removeprefix("gloo:") for event in profile.events() if event.name.startswith("gloo:")})


# -------------------------------------------------------------------------------------------- on two ranks


def gradients(rank: int) -> dict[str, Any]:
    """Each rank starts from weights of its own; equal halves, then uneven shares: five images and one."""
    model = network(seed=rank)
    found: dict[str, Any] = {"on construction": collectives(lambda: DistributedDataParallel(model))}
    found["weights"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    wrapped = DistributedDataParallel(model)
    half, uneven = IMAGES[3 * rank :][:3], IMAGES[5 * rank :][:5]
    found["alone"] = gradient(network(), half)
    found["in a step"] = collectives(lambda: found.update(reduced=gradient(wrapped, half)))
    found["uneven"] = gradient(wrapped, uneven)
    with wrapped.no_sync():
        found["under no_sync"] = collectives(lambda: found.update(kept=gradient(wrapped, half)))
    return found


def names(rank: int) -> dict[str, Any]:
    return {"wrapper": list(DistributedDataParallel(network()).state_dict()), "module": list(network().state_dict())}


def drift(group: Group) -> dict[str, Any]:
    """Running means after two steps, each rank on images of its own: without care, by torch's default, and by ours."""

    def train(wrapped: nn.Module, after_step: Callable[[], None] = lambda: None) -> None:
        for step in range(2):
            wrapped(IMAGES.roll(step, 0)[3 * group.rank :][:3])
            after_step()

    layers = {name: nn.BatchNorm1d(4) for name in ("left alone", "broadcast", "averaged", "by itself")}
    train(DistributedDataParallel(layers["left alone"], broadcast_buffers=False))
    train(DistributedDataParallel(layers["broadcast"]))
    statistics = BatchNormStatistics(layers["averaged"], group)
    train(wrap_model(layers["averaged"], group, "ddp"), lambda: statistics.sync(torch.tensor(False)))
    train(layers["by itself"])
    return {name: layer.running_mean.tolist() for name, layer in layers.items()}  # type: ignore[union-attr]


class Drawing(nn.Module):
    """Draws in each training step, as dropout does, and keeps what it drew."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.linear, self.drawn = nn.Linear(3, num_classes), []  # type: ignore[var-annotated]
        MADE.append(self)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.drawn.append(torch.rand(3).tolist())
        return self.linear(images.mean((2, 3)))


MADE: list[Drawing] = []


def whole_run(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Two steps of the real program: what was drawn in them, and what this rank has left in its folder."""
    torch.manual_seed(0)
    found: dict[str, Any] = {"after the same seed": torch.rand(3).tolist()}
    settings = {
        "model.name": "test_lessons:Drawing",
        "data.name": "synthetic",
        "data.kwargs": "{train_images: 8, val_images: 3, num_classes: 2, size_px: 8}",
        "train.global_batch_size": 4,
        "train.epochs": 1,
        "device": "cpu",
        "parallel.init_method": f"file://{folder}/meeting",
        "parallel.timeout_sec": 30,
    }
    words = [DEMO, *(f"{name}={value}" for name, value in settings.items()), "--work-dir", str(folder / f"run{rank}")]
    arguments = train_parser().parse_intermixed_args(words)
    loaded = load_for_training(arguments)
    group = start.join_group(loaded, RankInfo(rank, rank, world_size, world_size))
    train_here(arguments, loaded, group)
    destroy_group(group)
    found["drawn"] = MADE[-1].drawn[-2:]
    found["left"] = sorted(path.name for path in (folder / f"run{rank}").iterdir())
    for path in (folder / f"run{rank}").glob("checkpoints/step-*/model.safetensors"):
        with safe_open(path, "pt") as file:
            found["saved"] = sorted(file.keys())
    return found


def waiting(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 starts its step late. Returns whether it had started when this rank's step was done."""
    wrapped = DistributedDataParallel(network())
    dist.barrier()
    if rank == 1:
        time.sleep(PAUSE_SEC)
        (folder / "slowest_started").touch()
    gradient(wrapped, IMAGES)
    return {"waited": (folder / "slowest_started").exists(), "process": os.getpid()}


def all_lessons(rank: int, world_size: int, folder: Path) -> None:
    group = join_group(rank, world_size, folder / "store")
    found = {"gradients": gradients(rank), "names": names(rank), "drift": drift(group)}
    found["waiting"] = waiting(rank, folder)
    destroy_group(group)
    found["run"] = whole_run(rank, world_size, folder)
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def seen(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """A lesson's findings, one for each rank."""
    folder = tmp_path_factory.mktemp("lessons")
    rank_server.call(all_lessons, RANKS, folder)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return lambda lesson: [found[lesson] for found in ranks]


Seen = Callable[[str], list[dict[str, Any]]]


def test_ddp_starts_all_ranks_from_rank_0s_weights(seen: Seen) -> None:
    first, second = seen("gradients")
    expected = torch.cat([p.detach().reshape(-1) for p in network(seed=0).parameters()]).tolist()
    assert first["weights"] == second["weights"] == expected
    assert "broadcast" in first["on construction"]


def test_every_rank_ends_its_backward_with_the_mean_gradient(seen: Seen) -> None:
    joined = gradient(network(), IMAGES)
    first, second = seen("gradients")
    assert first["reduced"] == second["reduced"] == pytest.approx(joined, rel=1e-5, abs=1e-7)
    assert first["alone"] != pytest.approx(joined, rel=1e-2) != second["alone"]


def test_gradients_are_reduced_by_all_and_broadcast_by_none(seen: Seen) -> None:
    assert [rank["in a step"] for rank in seen("gradients")] == [["all_reduce"]] * RANKS


def test_under_no_sync_nothing_is_sent_and_each_rank_keeps_its_own(seen: Seen) -> None:
    for rank in seen("gradients"):
        assert rank["under no_sync"] == [] and rank["kept"] == pytest.approx(rank["alone"], rel=1e-5)


def test_uneven_shares_give_the_mean_of_means(seen: Seen) -> None:
    by_rank = torch.tensor([gradient(network(), IMAGES[:5]), gradient(network(), IMAGES[5:])])
    joined = gradient(network(), IMAGES)
    for rank in seen("gradients"):
        assert rank["uneven"] == pytest.approx(by_rank.mean(0).tolist(), rel=1e-5, abs=1e-7)
        assert rank["uneven"] != pytest.approx(joined, rel=1e-2)


def test_the_wrapper_adds_module_to_every_name(seen: Seen) -> None:
    for rank in seen("names"):
        assert rank["wrapper"] == [f"module.{name}" for name in rank["module"]]


def test_running_statistics_drift_unless_somebody_cares(seen: Seen) -> None:
    """torch's default hands out rank 0's before each forward: the other ranks' images never count."""
    first, second = seen("drift")
    assert first["left alone"] != pytest.approx(second["left alone"], rel=1e-2)
    assert first["broadcast"] == first["by itself"], "what rank 0 alone has seen"
    assert first["broadcast"] != pytest.approx(second["broadcast"], rel=1e-2), "after the last step"
    assert first["averaged"] == second["averaged"]
    mean = torch.tensor([first["by itself"], second["by itself"]]).mean(0).tolist()
    assert first["averaged"] == pytest.approx(mean, rel=1e-5, abs=1e-7)


def test_the_same_seed_draws_the_same_on_every_rank_and_a_run_does_not(seen: Seen) -> None:
    first, second = seen("run")
    assert first["after the same seed"] == second["after the same seed"]
    drawn = [tuple(draw) for rank in (first, second) for draw in rank["drawn"]]
    assert len(drawn) == len(set(drawn)) == 4, "two steps on two ranks, all different"


def test_one_rank_writes_and_no_name_carries_module(seen: Seen) -> None:
    first, second = seen("run")
    assert second["left"] == ["logs"] and "checkpoints" in first["left"]
    assert first["saved"] == ["linear.bias", "linear.weight"]


def test_each_rank_is_a_process_and_all_wait_for_the_slowest(seen: Seen) -> None:
    first, second = seen("waiting")
    assert first["process"] != second["process"]
    assert first["waited"], "rank 0 itself was ready at once"
