"""Folders that are not as a run left them, and commands that are started again: nothing that was there is lost."""

import os
import shutil
import socket
from pathlib import Path

import pytest
from helpers import arguments, losses, newest, state_digest, train_here

from imagenet_cls.checkpoint.format import list_checkpoints
from imagenet_cls.errors import CheckpointError, ResourceError, UsageError


def words(digits: Path, folder: Path, *more: str) -> list[str]:
    return [*arguments(digits, folder, checkpoint__every_steps=5, train__epochs=2), *more]


@pytest.fixture(scope="module")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`, and `part`, which was stopped after step 17: checkpoints 15 and 17."""
    folder = tmp_path_factory.mktemp("runs")
    train_here(words(digits, folder / "whole"))
    train_here(words(digits, folder / "part", "train.max_steps=17", "checkpoint.keep_last=3"))
    return folder


@pytest.fixture
def part(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "part", tmp_path / "part"))


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


def files(folder: Path) -> dict[str, bytes]:
    kept = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "logs")
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept if path.name != ".lock"}


@pytest.mark.usefixtures("restarted")
def test_a_restart_goes_on_with_its_own_run_only(digits: Path, part: Path) -> None:
    """Its first attempt was refused; the second has no more right to the folder."""
    before = files(part)
    with pytest.raises(UsageError, match="already holds a run"):
        train_here(words(digits, part))
    assert files(part) == before


@pytest.mark.usefixtures("restarted")
def test_a_restart_of_another_job_takes_no_run_over(digits: Path, part: Path) -> None:
    """The number of its process is the same, as in containers, and another process has it."""
    (part / ".job").write_text(f"ranks of process {os.getppid()} on {socket.gethostname()}, started at 7\n")
    with pytest.raises(UsageError, match="already holds a run"):
        train_here(words(digits, part))


@pytest.mark.usefixtures("restarted")
def test_a_restart_still_removes_what_its_first_attempt_did_not_come_to(digits: Path, part: Path, runs: Path) -> None:
    train_here(words(digits, part, "--overwrite", "seed=1"))
    assert len(losses(part)) == 22 and losses(part)[:5] != losses(runs / "whole")[:5]


def test_a_restart_of_the_same_job_goes_on(
    digits: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    train_here(words(digits, tmp_path / "run", "--overwrite", "train.max_steps=7"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train_here(words(digits, tmp_path / "run", "--overwrite"))
    assert state_digest(tmp_path / "run") == state_digest(runs / "whole")


def test_torchrun_in_a_job_that_slurm_queued_again_goes_on(
    digits: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun is another process then, and counts from 0."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setattr(os, "getppid", lambda: 1000)
    train_here(words(digits, tmp_path / "run", "train.max_steps=7"))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(os, "getppid", lambda: 2000)
    train_here(words(digits, tmp_path / "run"))
    assert state_digest(tmp_path / "run") == state_digest(runs / "whole")


@pytest.mark.parametrize("flag", ["--resume", "--overwrite", "--allow-change=seed"])
def test_checkpoints_on_a_disk_that_is_not_there(digits: Path, part: Path, tmp_path: Path, flag: str) -> None:
    (part / "checkpoints").rename(tmp_path / "disk")
    (part / "checkpoints").symlink_to(tmp_path / "unmounted")
    before = files(part)
    with pytest.raises(UsageError, match="a link that leads nowhere"):
        train_here(words(digits, part, flag))
    assert files(part) == before


def test_overwrite_and_resume_with_checkpoints_on_another_disk(
    digits: Path, part: Path, runs: Path, tmp_path: Path
) -> None:
    (part / "checkpoints").rename(tmp_path / "disk")
    (part / "checkpoints").symlink_to(tmp_path / "disk")
    with pytest.raises(UsageError, match=r"^model\.checkpoint: .* which --overwrite would remove"):
        train_here(words(digits, part, "--overwrite", f"model.checkpoint={newest(part)}"))
    train_here(words(digits, part, "--overwrite", "train.max_steps=7"))
    assert [path.name for path in list_checkpoints(tmp_path / "disk")] == ["step-0000007", "step-0000005"]
    train_here(words(digits, part, "--resume"))
    assert state_digest(part) == state_digest(runs / "whole") and (part / "checkpoints").is_symlink()


def test_a_damaged_checkpoint_pushes_no_whole_one_out(digits: Path, part: Path) -> None:
    (newest(part) / "model.safetensors").write_bytes(b"")
    (part / "checkpoints" / "step-0000099").write_text("a file")  # and no checkpoint
    (part / "checkpoints" / "step-020").mkdir()
    train_here(words(digits, part, "--resume", "train.max_steps=20"))
    assert [path.name for path in list_checkpoints(part / "checkpoints")][:2] == ["step-0000020", "step-0000015"]
    assert not (part / "checkpoints" / "step-0000017").exists()


def test_a_checkpoint_that_was_moved_and_linked_is_only_unlinked(digits: Path, part: Path, tmp_path: Path) -> None:
    oldest = list_checkpoints(part / "checkpoints")[-1]
    shutil.move(oldest, tmp_path / oldest.name)
    oldest.symlink_to(tmp_path / oldest.name)
    train_here(words(digits, part, "--resume", "checkpoint.keep_last=1", "checkpoint.every_epochs=null"))
    assert not os.path.lexists(oldest) and (tmp_path / oldest.name / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"kind": "train", "step": "abc"}', CheckpointError),
        ('{"kind": "train", "step": null}', CheckpointError),
        ('{"kind": ["x"], "step": 1}', CheckpointError),
        ("[" * 100_000, CheckpointError),
        (None, ResourceError),
    ],
)
def test_metrics_that_are_none(digits: Path, part: Path, content: str | None, error: type[Exception]) -> None:
    metrics = part / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir() if content is None else metrics.write_text(content + "\n")
    with pytest.raises(error, match=r"metrics\.jsonl") as told:
        train_here(words(digits, part, "--resume"))
    assert str(told.value).count("\n") <= 2


@pytest.mark.parametrize("gone", ["all", "some", "none"])
def test_records_that_lack_are_told(digits: Path, part: Path, gone: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on, but its curves have a gap; a whole file is told nothing of."""
    metrics = part / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    lacking = [line for line in lines if '"train"' in line and gone == "some"][3:6]
    metrics.write_text("".join(line for line in lines if line not in lacking))
    if gone == "all":
        metrics.unlink()
    train_here(words(digits, part, "--resume", "train.max_steps=18"))
    told = capsys.readouterr().out
    expected = {"all": "17 of the steps up to 17 are missing, the first is 1:", "some": "3 of the steps up to 17 are "
                "missing, the first is 4:", "none": ""}[gone]  # fmt: skip
    assert expected in told and ("are missing" in told) == (gone != "none"), told


def test_a_beginning_from_elsewhere_is_no_gap(
    digits: Path, part: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for last in (18, 19):
        more = ["--resume", "--resume-from", str(newest(part)), f"train.max_steps={last}"]
        train_here(words(digits, tmp_path / "run", *more))
    told = capsys.readouterr().out
    assert "are missing" not in told
    assert told.count(f"--resume-from {newest(part)} is not used: this folder has checkpoints of its own") == 1


def test_what_a_killed_removal_or_write_left_goes(digits: Path, part: Path) -> None:
    (part / ".tmp-gone-checkpoints" / "step-0000005").mkdir(parents=True)
    (part / ".tmp-config.yaml").write_text("half")
    train_here(words(digits, part, "--resume", "train.max_steps=18"))
    assert not list(part.glob(".tmp-*"))


def test_a_name_that_no_folder_can_have(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="can't be the run's folder: File name too long\nName another one with --work-dir"
    ):
        train_here(words(digits, tmp_path / ("x" * 300)))


def test_overwrite_only_unlinks_what_is_linked_behind_a_link(digits: Path, part: Path, tmp_path: Path) -> None:
    oldest = list_checkpoints(part / "checkpoints")[-1]
    shutil.move(oldest, tmp_path / "kept")
    oldest.symlink_to(tmp_path / "kept")
    (part / "checkpoints").rename(tmp_path / "disk")
    (part / "checkpoints").symlink_to(tmp_path / "disk")
    kept = files(tmp_path / "kept")
    train_here(words(digits, part, "--overwrite", "train.max_steps=7"))
    assert files(tmp_path / "kept") == kept and kept
    assert [path.name for path in list_checkpoints(tmp_path / "disk")] == ["step-0000007", "step-0000005"]


def test_a_checkpoint_on_a_disk_that_is_not_there_is_damaged(
    digits: Path, part: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told, and written anew when the run comes to that step again; where all are so, there is no fresh start."""
    last = newest(part)
    (part / "checkpoints" / "step-best.old").mkdir()
    shutil.rmtree(last)
    last.symlink_to(tmp_path / "unmounted")
    train_here(words(digits, part, "--resume", "train.max_steps=17"))
    assert f"{last}: not a complete checkpoint" in " ".join(capsys.readouterr().out.split())
    (part / "checkpoints" / "step-best.old").rmdir()  # no checkpoint of ours, so it is still there
    assert not last.is_symlink() and state_digest(part) == state_digest(runs / "part")
    for path in list_checkpoints(part / "checkpoints"):
        shutil.rmtree(path)
    last.symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match="all 1 checkpoints are damaged"):
        train_here(words(digits, part, "--resume"))


@pytest.mark.parametrize("step", [-(10**12), 0, 10**12])
def test_records_of_steps_that_are_none_cost_nothing(digits: Path, part: Path, step: int) -> None:
    with (part / "metrics.jsonl").open("a") as file:
        file.write(f'{{"kind": "train", "step": {step}}}\n')
    train_here(words(digits, part, "--resume", "train.max_steps=18"))


def test_what_a_kill_in_the_last_save_left_goes_at_the_next_start(digits: Path, part: Path) -> None:
    """Though that has nothing to save any more."""
    (part / "checkpoints" / ".tmp-gone-step-0000010").mkdir()
    train_here(words(digits, part, "--resume", "train.max_steps=17"))
    assert not list((part / "checkpoints").glob(".tmp-*"))


@pytest.mark.parametrize("key", ["optimzer.lr", "lr", "optimizer.lrr"])
def test_a_key_that_there_is_not_allows_nothing(digits: Path, part: Path, key: str) -> None:
    with pytest.raises(UsageError, match=f"--allow-change {key}: no such key"):
        train_here(words(digits, part, "--resume", "--allow-change", key))
