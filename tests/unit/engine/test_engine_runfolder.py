"""The run folder: an existing run is protected, and a second process is locked out."""

import multiprocessing
import os
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import Config
from imagenet_cls.engine.run_folder import RunFolder, RunOptions
from imagenet_cls.errors import ResourceError, Stopped, UsageError

WRITTEN = (
    "config.yaml",
    "env.json",
    "metrics.jsonl",
    "tensorboard",
    "wandb",
    "mlflow",
    "writers",
    "checkpoints",
    "plots",
)


def fill(path: Path) -> None:
    """A run, and files of the user."""
    for name in ("checkpoints/step-0000007", "checkpoints/step-0000012", "plots", "logs", "mine"):
        (path / name).mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "notes.txt", "logs/rank0.log", "mine/plot.png"):
        (path / name).write_text("old")


def contents(path: Path) -> list[str]:
    return sorted(
        str(entry.relative_to(path)) for entry in path.rglob("*") if entry.name != ".lock"
    )


def open_folder(path: Path, **options: Any) -> RunFolder:
    folder = RunFolder(path)
    folder.open(Config(), RunOptions(path, **options))
    return folder


@pytest.mark.parametrize("name", WRITTEN)
def test_open_folder_with_any_part_of_a_run_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    for options in ({}, {"resume": True, "overwrite": True}):
        with pytest.raises(UsageError, match="--overwrite"):
            open_folder(tmp_path, **options)
    assert contents(tmp_path) == [name] and not (tmp_path / ".lock").exists()
    for option in ("resume", "overwrite"):
        with open_folder(tmp_path, **{option: True}):
            pass


def test_open_checkpoints_of_a_run_as_a_run_folder_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "checkpoints" / "step-0000012" / "manifest.json").touch()
    for name in ("checkpoints", "checkpoints/step-0000012"):
        with pytest.raises(UsageError):
            open_folder(tmp_path / name, resume=True)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model.checkpoint", ""),
        ("model.checkpoint", "plots/weights.pth"),
        ("distill.teacher.checkpoint", "checkpoints"),
        ("--resume-from", "checkpoints/step-0000012"),
    ],
)
def test_overwrite_weights_in_the_run_is_an_error(tmp_path: Path, key: str, name: str) -> None:
    fill(tmp_path)

    def check(source: Path) -> None:
        is_option = key.startswith("--")
        words = [] if is_option else [f"{key}={source}"]
        options = RunOptions(tmp_path, overwrite=True, resume_from=source if is_option else None)
        RunFolder(tmp_path).check_usable(load_config(None, words).config, options)

    check(tmp_path / "mine" / "x.pth")
    with pytest.raises(UsageError, match=f"^{key}: "):
        check(tmp_path / name)


def test_clear_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path)
    before = contents(tmp_path)
    with open_folder(tmp_path, overwrite=True) as folder:
        assert contents(tmp_path) == before  # not before the new run is known to begin
        folder.clear()
    assert contents(tmp_path) == ["logs", "logs/rank0.log", "mine", "mine/plot.png", "notes.txt"]


def hold(path: Path, pipe: Connection) -> None:
    with open_folder(path, resume=True):
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
            open_folder(tmp_path, resume=True)
        assert error.value.exit_code == 2
    finally:
        holder.kill()
        holder.join(60)
    with open_folder(tmp_path, resume=True):
        assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()


def test_open_unwritable_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError):
        open_folder(tmp_path / "file")
    for place in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(ResourceError):
            open_folder(place)


def test_exit_before_the_start_of_the_run_removes_only_what_open_created(tmp_path: Path) -> None:
    with open_folder(tmp_path / "a" / "b"):
        pass
    assert contents(tmp_path) == []
    fill(tmp_path)
    before = contents(tmp_path)
    with open_folder(tmp_path, resume=True):
        pass
    assert contents(tmp_path) == before and not (tmp_path / ".lock").exists()
    with open_folder(tmp_path, resume=True) as folder:
        folder.mark_started(Progress(), resumed=True)
    with open_folder(tmp_path, resume=True):
        pass
    assert (tmp_path / ".lock").exists()


@pytest.mark.parametrize(
    ("error", "step", "resumed", "is_cleared"),
    [
        (ValueError(), 0, False, True),
        (UsageError("a", "b"), 0, False, True),
        (ValueError(), 1, False, False),
        (ValueError(), 0, True, False),
        (Stopped("a", "b", 15), 0, False, False),
        (KeyboardInterrupt(), 0, False, False),
        (None, 0, False, False),
    ],
)
def test_exit_clears_a_new_run_that_failed_before_its_first_step(
    tmp_path: Path, error: BaseException | None, step: int, resumed: bool, is_cleared: bool
) -> None:
    """It may begin at a later step, with --resume-from."""
    progress = Progress(step=500)
    with suppress(type(error) if error else ()), open_folder(tmp_path) as folder:
        folder.mark_started(progress, resumed)
        (tmp_path / "config.yaml").write_text("new")
        progress.step += step
        if error:
            raise error
    assert contents(tmp_path) == ([] if is_cleared else ["config.yaml"])


def test_check_present_moved_folder_is_an_error(tmp_path: Path) -> None:
    with open_folder(tmp_path / "run") as folder:
        folder.check_present()
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        with pytest.raises(ResourceError):
            folder.check_present()
