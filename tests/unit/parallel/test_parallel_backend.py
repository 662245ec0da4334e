"""Which transport ranks may ask for: one that torch has, and that fits what started them. Refused before they meet."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import arguments

from imagenet_cls.commands.program import main
from imagenet_cls.commands.train import train_command
from imagenet_cls.errors import UsageError
from imagenet_cls.parallel.process_group import check_backend

without_mpi = pytest.mark.skipif(dist.is_mpi_available(), reason="needs a torch without MPI")


@pytest.mark.parametrize("launcher", ["none", "pytorch", "spawn", "slurm", "mpi"])
def test_auto_and_gloo_go_with_every_launcher(launcher: str) -> None:
    check_backend("auto", launcher)
    check_backend("gloo", launcher)


@without_mpi
@pytest.mark.parametrize("launcher", ["pytorch", "spawn", "mpi"])
def test_a_backend_that_torch_was_built_without(launcher: str) -> None:
    with pytest.raises(UsageError, match=r"backend=mpi: torch .* was built without it.\nUse parallel.backend=auto"):
        check_backend("mpi", launcher)


def test_nccl_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that was built with it is on many machines that have none."""
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match=r"backend=nccl needs GPUs.*none here\.\nUse parallel\.backend=auto"):
        check_backend("nccl", "none")


def test_mpi_goes_with_its_own_launchers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a torch that was built with MPI, which no public wheel is."""
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    for launcher in ("mpi", "slurm", "none"):
        check_backend("mpi", launcher)
    for launcher in ("spawn", "pytorch"):
        with pytest.raises(UsageError, match=f"with --launcher {launcher}.\nStart ranks with `mpirun"):
            check_backend("mpi", launcher)


@without_mpi
@pytest.mark.parametrize("how", [["--gpus", "2"], ["--launcher", "pytorch", "--gpus", "2"]])
def test_it_is_refused_before_ranks_start(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    words = arguments(digits, tmp_path / "run", parallel__backend="mpi", device="cpu")
    assert main(train_command, [*words, *how]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert not (tmp_path / "run").exists()


@without_mpi
def test_a_rank_that_something_else_started_refuses_it_too(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank under mode ddp, which would make a process group of its own."""
    words = arguments(digits, tmp_path / "run", parallel__backend="mpi", parallel__mode="ddp")
    assert main(train_command, words) == 2
    assert "parallel.backend=mpi" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
