"""Who may write into a run folder."""

import json
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from imagenet_cls.engine.run_folder import RunFolder, write_whole
from imagenet_cls.errors import ResourceError, UsageError

WRITTEN = ("config.yaml", "env.json", "metrics.jsonl", "tensorboard", "checkpoints", "plots")


def fill(path: Path) -> None:
    """A run, and what somebody put beside it."""
    for name in ("checkpoints/step-0000007", "checkpoints/step-0000012", "tensorboard", "plots", "logs", "mine"):
        (path / name).mkdir(parents=True)
    for name in ("config.yaml", "env.json", "metrics.jsonl", "notes.txt", "logs/rank0.log", "mine/plot.png"):
        (path / name).write_text("old")


def contents(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.name != ".lock")


def test_a_taken_folder_is_refused_and_the_message_says_how_far_it_got(tmp_path: Path) -> None:
    fill(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=r"holds a run already \(saved up to step 12\)") as error:
        RunFolder(tmp_path).open(resume=False, overwrite=False)
    assert all(flag in str(error.value) for flag in ("--resume", "--overwrite", "--work-dir"))
    with pytest.raises(UsageError, match="contradict"):
        RunFolder(tmp_path).open(resume=True, overwrite=True)
    assert contents(tmp_path) == before and not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("name", WRITTEN)
def test_each_part_of_a_run_makes_a_folder_a_taken_one(tmp_path: Path, name: str) -> None:
    RunFolder(tmp_path).check_free(False, False)
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="holds a run already"):
        RunFolder(tmp_path).check_free(False, False)
    RunFolder(tmp_path).check_free(True, False)
    RunFolder(tmp_path).check_free(False, True)


def test_overwriting_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path)
    before = contents(tmp_path)
    folder = RunFolder(tmp_path)
    folder.open(resume=False, overwrite=True)
    assert contents(tmp_path) == before  # not before the run is known to begin
    folder.clear()
    folder.close()
    assert contents(tmp_path) == ["logs", "logs/rank0.log", "mine", "mine/plot.png", "notes.txt"]


def hold(path: Path, pipe: Connection) -> None:
    folder = RunFolder(path)
    folder.open(resume=True, overwrite=False)
    pipe.send("held")
    pipe.poll(60)


def test_a_second_process_is_kept_out_until_the_first_ends(tmp_path: Path) -> None:
    """The holder is another process, since the kernel's lock is between processes; its death frees the folder."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    held = context.Process(target=hold, args=(tmp_path, theirs), daemon=True)
    held.start()
    try:
        assert ours.poll(60) and ours.recv() == "held"
        with pytest.raises(UsageError, match=rf"in use by process {held.pid} on ") as error:
            RunFolder(tmp_path).open(resume=True, overwrite=False)
        assert error.value.exit_code == 2
    finally:
        held.kill()
        held.join(60)
    folder = RunFolder(tmp_path)
    folder.open(resume=True, overwrite=False)
    assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()
    folder.close()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        RunFolder(tmp_path / "file").open(False, False)
    for place in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(ResourceError, match=r"can't write to .*\nName another folder with --work-dir"):
            RunFolder(place).open(False, False)


def test_the_description_holds_no_variable_off_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    RunFolder(tmp_path).describe("seed: 1\n", {"torch": "9.9"})
    env = json.loads((tmp_path / "env.json").read_text())
    assert "hunter2" not in (tmp_path / "env.json").read_text() and env["variables"]["NCCL_DEBUG"] == "INFO"
    assert env["versions"]["torch"] == "9.9" and (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(ResourceError, match="Make room"):
        RunFolder(tmp_path).describe("seed: 1\n", {})


def test_a_small_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "first")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "a", "second \udcff")
    assert (tmp_path / "a").read_text() == "first"
