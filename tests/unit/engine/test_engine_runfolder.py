"""The run folder: an existing run is protected, and a second process is locked out."""

import json
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from imagenet_cls.engine.run_folder import RunFolder
from imagenet_cls.errors import ResourceError, UsageError

WRITTEN = ("config.yaml", "env.json", "metrics.jsonl", "tensorboard", "checkpoints", "plots")


def fill(path: Path) -> None:
    """A run, and files of the user."""
    for name in ("checkpoints/step-0000007", "checkpoints/step-0000012", "tensorboard", "plots", "logs", "mine"):
        (path / name).mkdir(parents=True)
    for name in ("config.yaml", "env.json", "metrics.jsonl", "notes.txt", "logs/rank0.log", "mine/plot.png"):
        (path / name).write_text("old")


def contents(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.name != ".lock")


def test_open_folder_with_a_run_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="step 12") as error:
        RunFolder(tmp_path).open(resume=False, overwrite=False)
    assert all(flag in str(error.value) for flag in ("--resume", "--overwrite", "--work-dir"))
    with pytest.raises(UsageError, match="--overwrite"):
        RunFolder(tmp_path).open(resume=True, overwrite=True)
    assert contents(tmp_path) == before and not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("name", WRITTEN)
def test_check_free_any_part_of_a_run_is_an_error(tmp_path: Path, name: str) -> None:
    RunFolder(tmp_path).check_free(False, False)
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError):
        RunFolder(tmp_path).check_free(False, False)
    RunFolder(tmp_path).check_free(True, False)
    RunFolder(tmp_path).check_free(False, True)


def test_clear_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path)
    before = contents(tmp_path)
    folder = RunFolder(tmp_path)
    folder.open(resume=False, overwrite=True)
    assert contents(tmp_path) == before  # not before the new run is known to begin
    folder.clear()
    folder.close()
    assert contents(tmp_path) == ["logs", "logs/rank0.log", "mine", "mine/plot.png", "notes.txt"]


def hold(path: Path, pipe: Connection) -> None:
    folder = RunFolder(path)
    folder.open(resume=True, overwrite=False)
    pipe.send("held")
    pipe.poll(60)


def test_open_locked_folder_is_an_error_until_the_holder_dies(tmp_path: Path) -> None:
    """The holder is another process: the lock is between processes."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    holder = context.Process(target=hold, args=(tmp_path, theirs), daemon=True)
    holder.start()
    try:
        assert ours.poll(60) and ours.recv() == "held"
        with pytest.raises(UsageError, match=rf"process {holder.pid} on ") as error:
            RunFolder(tmp_path).open(resume=True, overwrite=False)
        assert error.value.exit_code == 2
    finally:
        holder.kill()
        holder.join(60)
    folder = RunFolder(tmp_path)
    folder.open(resume=True, overwrite=False)
    assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()
    folder.close()


def test_open_unwritable_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--work-dir"):
        RunFolder(tmp_path / "file").open(False, False)
    for place in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(ResourceError, match="--work-dir"):
            RunFolder(place).open(False, False)


def test_begin_records_only_listed_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    folder = RunFolder(tmp_path)
    assert not folder.was_started_by(["slurm 7"])
    folder.write_metadata(["slurm 7", "torchrun x"], "seed: 1\n", {"torch": "9.9"})
    assert folder.was_started_by(["torchrun x"]) and not folder.was_started_by(["slurm 8"])
    env = json.loads((tmp_path / "env.json").read_text())
    assert "hunter2" not in (tmp_path / "env.json").read_text() and env["variables"]["NCCL_DEBUG"] == "INFO"
    assert env["versions"]["torch"] == "9.9" and (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(ResourceError):
        folder.write_metadata([], "seed: 1\n", {})


def test_check_present_folder_moved_is_an_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open(False, False)
    folder.check_present()
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(ResourceError, match="--resume"):
        folder.check_present()
    (tmp_path / "run").mkdir()
    with pytest.raises(ResourceError):
        folder.check_present()
    folder.close()


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/step-0000012", "plots/weights.pth"])
def test_check_removable_weights_in_the_run_are_an_error(tmp_path: Path, name: str) -> None:
    fill(tmp_path)
    folder = RunFolder(tmp_path)
    folder.check_removable({"model.checkpoint": tmp_path / "mine" / "x.pth", "--resume-from": None})
    with pytest.raises(UsageError, match=r"model\.checkpoint"):
        folder.check_removable({"model.checkpoint": tmp_path / name})
