"""What docs/parallel.md says that one process can show: samplers, places, names in files, and (gpu) DataParallel.

The other half of test_lessons.py, which says how page and tests hold together.
"""

import argparse
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from imagenet_cls.commands.train import train_parser
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.errors import UsageError
from imagenet_cls.models.weights import read_weights
from imagenet_cls.parallel.data_parallel import Devices, spread
from imagenet_cls.parallel.environment import RankInfo, find_rank_info
from imagenet_cls.parallel.process_group import choose_device

IMAGES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))


# ------------------------------------------------------------------------------------------------ samplers


def torchs(length: int, ranks: int, epoch: int | None = None, **options: Any) -> list[list[int]]:
    """What torch's DistributedSampler gives each rank."""
    samplers = [DistributedSampler(range(length), ranks, rank, **options) for rank in range(ranks)]  # type: ignore[var-annotated,arg-type]
    for sampler in samplers:
        if epoch is not None:
            sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def test_without_set_epoch_every_epoch_has_one_order() -> None:
    assert torchs(50, 2) == torchs(50, 2) == torchs(50, 2, epoch=0)
    assert torchs(50, 2, epoch=1) != torchs(50, 2)
    ours = EpochSampler(50, 10, 0, 2, seed=0)
    orders = []
    for epoch in range(2):
        ours.set_epoch(epoch)
        orders.append([index for _, index, _ in ours])
    assert orders[0] != orders[1]


def test_without_a_distributed_sampler_every_rank_reads_everything() -> None:
    """A DataLoader shuffles on each rank for itself; with equal seeds they even agree."""
    orders = []
    for _ in range(2):
        torch.manual_seed(0)
        orders.append([int(i) for i in RandomSampler(range(50))])
    assert orders[0] == orders[1] and sorted(orders[0]) == list(range(50))


def test_a_sampler_seeded_by_rank_overlaps() -> None:
    shares = [torchs(50, 2, seed=rank)[rank] for rank in range(2)]
    assert set(shares[0]) & set(shares[1])
    alike = torchs(50, 2, seed=3)
    assert not set(alike[0]) & set(alike[1])


def test_a_loader_with_a_sampler_takes_no_shuffle() -> None:
    sampler: DistributedSampler = DistributedSampler(range(50), 2, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        DataLoader(range(50), sampler=sampler, shuffle=True)  # type: ignore[arg-type,var-annotated]
    assert len(DataLoader(range(50), sampler=sampler)) == 25  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "repeated"), [(2, 1), (3, 2), (4, 3)])
def test_torchs_sampler_repeats_images_to_pad(ranks: int, repeated: int) -> None:
    """361 images; so a model that is right about image 0 alone scores higher on several ranks than on one."""
    read = [index for shard in torchs(361, ranks, shuffle=False) for index in shard]
    assert len(read) == 361 + repeated and set(read) == set(range(361))
    assert read.count(0) / len(read) > 1 / 361


# ---------------------------------------------------------------------------------- places and launchers


def place_of(rank: int, local_rank: int) -> RankInfo | None:
    env = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4}
    return find_rank_info({name: str(value) for name, value in env.items()})


def test_the_wrong_formula_gives_two_processes_one_rank() -> None:
    """Two machines (nodes = 2) with four GPUs each (gpus = 4)."""
    processes = [(node_rank, local_rank) for node_rank in range(2) for local_rank in range(4)]
    right = [node_rank * 4 + local_rank for node_rank, local_rank in processes]
    wrong = [2 * 4 + local_rank for _, local_rank in processes]
    assert right == list(range(8)) and len(set(wrong)) == 4
    for rank, (_, local_rank) in zip(right, processes, strict=True):
        assert place_of(rank, local_rank) == RankInfo(rank, local_rank, 8, 4, "pytorch")
    with pytest.raises(UsageError, match="RANK=8 with WORLD_SIZE=8: ranks count from 0"):
        place_of(wrong[0], 0)


def test_local_ranks_count_from_0_on_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    devices = [choose_device("cuda", RankInfo(4 + local_rank, local_rank, 8, 4)) for local_rank in range(4)]
    assert [device.index for device in devices] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match=r"rank 4 \(local rank 4\) wants GPU 4, but 4 are visible"):
        choose_device("cuda", RankInfo(4, 4, 8, 8))


@pytest.mark.parametrize(
    ("value", "gpus"), [("2,3", [2, 3]), ("1, 2, 0", [1, 2, 0]), ("[2,3]", []), ("2,2", []), ("2,-1,3", [2]), ("", [])]
)
def test_brackets_hide_every_gpu(monkeypatch: pytest.MonkeyPatch, value: str, gpus: list[int]) -> None:
    """By torch's own reading of the variable, which is CUDA's: it ends at the first thing that is no number."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setattr(torch.version, "hip", None)
    assert torch.cuda._parse_visible_devices() == gpus


def test_a_script_that_knows_one_spelling_of_local_rank_ends() -> None:
    """torch.distributed.launch passes --local-rank; before torch 2.0 it was --local_rank; torchrun passes neither."""
    old = argparse.ArgumentParser()
    old.add_argument("--local_rank", type=int, default=-1)
    assert old.parse_known_args(["--local-rank=1"]) == (argparse.Namespace(local_rank=-1), ["--local-rank=1"])
    for spelling in ("--local_rank=1", "--local-rank=1"):
        assert train_parser().parse_args([spelling]).local_rank == 1


def test_env_needs_an_address_that_spawn_does_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR expected, but not set"):
        dist.init_process_group("gloo", init_method="env://", rank=0, world_size=2)


def test_on_cpus_torch_takes_gloo_and_mpi_only_where_it_was_built_in() -> None:
    defaults = dist.Backend.default_device_backend_map
    assert (defaults["cpu"], defaults["cuda"]) == ("gloo", "nccl") and dist.is_gloo_available()
    if not dist.is_mpi_available():  # as in the public wheels
        with pytest.raises(RuntimeError, match="MPI"):
            dist.init_process_group("mpi")


# ---------------------------------------------------------------------------------------- names in files


def renaming_loop(model: nn.Module, state: dict[str, Tensor]) -> None:
    """The tutorials' way: take `module.NAME` from the file for each NAME of the model."""
    own = model.state_dict()
    for name in own:
        own[name] = state[f"module.{name}"]
    model.load_state_dict(own)


def wrapped_network() -> nn.Module:
    """Names as DataParallel and DistributedDataParallel give them; on a CPU the former needs no ranks."""
    return nn.DataParallel(network(seed=1))


def test_a_renaming_loop_serves_one_case_of_four(tmp_path: Path) -> None:
    """Plain or wrapped model, plain or wrapped file. What this repository reads with fits both kinds of file."""
    files = {"plain": network(seed=1).state_dict(), "wrapped": wrapped_network().state_dict()}
    renaming_loop(network(), files["wrapped"])
    for model, kind in ((network(), "plain"), (wrapped_network(), "plain"), (wrapped_network(), "wrapped")):
        with pytest.raises(KeyError):
            renaming_loop(model, files[kind])
    for kind, state in files.items():
        torch.save(state, tmp_path / f"{kind}.pth")
        network().load_state_dict(read_weights(tmp_path / f"{kind}.pth"))


def test_not_strict_loads_nothing_and_says_nothing() -> None:
    model = network(seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(wrapped_network().state_dict())
    model.load_state_dict(wrapped_network().state_dict(), strict=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---------------------------------------------------------------------------------------------- replicas


class Counting(nn.Module):
    """Counts its forwards in an attribute, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count, self.listed = nn.Linear(4, 3), 0, []  # type: ignore[var-annotated]

    def forward(self, images: Tensor) -> Tensor:
        self.count += 1
        self.listed.append(1)
        return self.linear(images)


def test_what_dp_sets_on_a_replica_is_lost() -> None:
    """As torch copies each module for a replica; the copies' tensors, which need GPUs, are left out."""
    model = Counting()
    model(IMAGES)
    assert model.count == len(model.listed) == 1
    for _ in range(2):
        replica = model._replicate_for_data_parallel()
        replica.linear = model.linear
        replica(IMAGES)
        assert replica.count == 2
    assert model.count == 1 and len(model.listed) == 3, "a list is the same for all"


# ------------------------------------------------------------------------------------------- on real GPUs


class Watching(nn.Module):
    """Notes which process and thread each forward runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 3), []  # type: ignore[var-annotated]

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append((os.getpid(), threading.current_thread().name))
        return self.linear(images)


@pytest.mark.gpu
def test_dp_is_one_process_whose_threads_hold_copies_made_in_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    model, copies = Watching().to(gpu), []
    wrapped = spread(model, Devices((gpu, gpu), gpu))
    replicate = wrapped.replicate  # type: ignore[operator,union-attr]
    monkeypatch.setattr(wrapped, "replicate", lambda *given: copies.append(1) or replicate(*given))
    for _ in range(3):
        wrapped(IMAGES.to(gpu)).sum().backward()
    assert len(copies) == 3 and {process for process, _ in model.seen} == {os.getpid()}
    assert len({thread for _, thread in model.seen[:2]}) == 2


@pytest.mark.gpu
def test_dp_refuses_parameters_that_are_not_on_its_first_device() -> None:
    wrapped = nn.DataParallel(network(), device_ids=[0, 0])
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device cuda:0"):
        wrapped(IMAGES.cuda())


@pytest.mark.gpu
def test_the_output_device_joins_outputs_and_holds_no_gradient() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    model = network().to(first)
    logits = spread(model, Devices((first, second), second))(IMAGES.to(first))
    logits.square().mean().backward()
    assert logits.device == second and {p.grad.device for p in model.parameters() if p.grad is not None} == {first}


@pytest.mark.gpu
def test_a_file_loads_where_it_was_saved_unless_told_otherwise(tmp_path: Path) -> None:
    torch.save(network().cuda().state_dict(), tmp_path / "weights.pth")
    loaded = torch.load(tmp_path / "weights.pth", weights_only=True)
    assert {value.device for value in loaded.values()} == {torch.device("cuda", 0)}
    assert {value.device.type for value in read_weights(tmp_path / "weights.pth").values()} == {"cpu"}
