"""Run folders with damaged, moved or foreign files, and commands that a launcher restarts: no work
is lost.
"""

import os
import re
import shutil
import socket
from pathlib import Path

import pytest
from helpers import arguments, fails, losses, newest, state_digest, succeeds, train_here
from test_bad_input import contents

from imagenet_cls.checkpoint.format import list_checkpoints
from imagenet_cls.commands.train import train_command
from imagenet_cls.errors import CheckpointError, UsageError


def argv(digits: Path, folder: Path, *more: str) -> list[str]:
    """22 steps in 2 epochs, with BatchNorm, momentum and EMA."""
    return [*arguments(digits, folder, "noisy", checkpoint__every_steps=5, ema__decay=0.8), *more]


@pytest.fixture(scope="module")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`, and `part`, which was stopped after step 17: checkpoints 11, 15 and 17."""
    folder = tmp_path_factory.mktemp("runs")
    train_here(argv(digits, folder / "whole"))
    train_here(argv(digits, folder / "part", "train.max_steps=17", "checkpoint.keep_last=3"))
    return folder


@pytest.fixture
def part(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "part", tmp_path / "part"))


def names(checkpoints: Path) -> list[str]:
    return [path.name for path in list_checkpoints(checkpoints)]


# ---- restarts by a launcher


@pytest.mark.parametrize("job", [None, "another"])
def test_restart_in_a_folder_of_another_run_raises(
    digits: Path, part: Path, monkeypatch: pytest.MonkeyPatch, job: str | None
) -> None:
    """The first attempt was refused, or another job has the same process id, as in containers."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    if job is not None:
        (part / ".job").write_text(
            f"ranks of process {os.getppid()} on {socket.gethostname()}, started at 7\n"
        )
    before = contents(part)
    with pytest.raises(UsageError, match="already holds a run"):
        train_here(argv(digits, part))
    assert contents(part) == before


def test_restart_with_overwrite_before_anything_was_removed_overwrites(
    digits: Path, part: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train_here(argv(digits, part, "--overwrite", "seed=1"))
    assert len(losses(part)) == 22 and losses(part)[:5] != losses(runs / "whole")[:5]


def test_restart_of_the_same_job_resumes(
    digits: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    train_here(argv(digits, tmp_path, "--overwrite", "train.max_steps=7"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train_here(argv(digits, tmp_path, "--overwrite"))
    assert state_digest(tmp_path) == state_digest(runs / "whole")


def test_requeued_slurm_job_resumes(
    digits: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun is then another process, and counts from 0."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    words = argv(digits, tmp_path)
    train_here([*words, "train.max_steps=7"])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(os, "getppid", lambda: 2000)
    train_here(words)
    assert state_digest(tmp_path) == state_digest(runs / "whole")


# ---- links and other disks


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_checkpoints_behind_a_dangling_link_raises(
    digits: Path, part: Path, tmp_path: Path, flag: str
) -> None:
    (part / "checkpoints").rename(tmp_path / "disk")
    (part / "checkpoints").symlink_to(tmp_path / "unmounted")
    before = contents(part)
    with pytest.raises(UsageError):
        train_here(argv(digits, part, flag))
    assert contents(part) == before


def test_overwrite_and_resume_with_checkpoints_behind_a_link(
    digits: Path, part: Path, runs: Path, tmp_path: Path
) -> None:
    oldest = list_checkpoints(part / "checkpoints")[-1]
    shutil.move(oldest, tmp_path / "kept")  # a checkpoint behind a link of its own is only unlinked
    oldest.symlink_to(tmp_path / "kept")
    kept = contents(tmp_path / "kept")
    (part / "checkpoints").rename(tmp_path / "disk")
    (part / "checkpoints").symlink_to(tmp_path / "disk")
    with pytest.raises(UsageError, match=r"^model\.checkpoint: "):  # --overwrite would remove it
        train_here(argv(digits, part, "--overwrite", f"model.checkpoint={newest(part)}"))
    train_here(argv(digits, part, "--overwrite", "train.max_steps=7"))
    assert names(tmp_path / "disk") == ["step-0000007", "step-0000005"]
    assert contents(tmp_path / "kept") == kept and kept
    train_here(argv(digits, part, "--resume"))
    assert (part / "checkpoints").is_symlink()
    assert state_digest(part) == state_digest(runs / "whole")


def test_resume_with_a_checkpoint_behind_a_dangling_link_falls_back(
    digits: Path, part: Path, runs: Path, tmp_path: Path
) -> None:
    last = newest(part)
    shutil.rmtree(last)
    last.symlink_to(tmp_path / "unmounted")
    out = succeeds(train_command, *argv(digits, part, "--resume", "train.max_steps=17"))
    assert str(last) in out
    # written again
    assert not last.is_symlink() and state_digest(part) == state_digest(runs / "part")
    for path in list_checkpoints(part / "checkpoints"):
        shutil.rmtree(path)
    last.symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError):  # not a fresh start
        train_here(argv(digits, part, "--resume"))


# ---- damaged and foreign files


def test_resume_with_a_damaged_checkpoint_ends_in_the_same_bits(
    digits: Path, part: Path, runs: Path
) -> None:
    file = newest(part) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    out = succeeds(train_command, *argv(digits, part, "--resume"))
    assert re.search("step-0000017: .*\nresumed from .*step-0000015 at step 15", out)
    assert state_digest(part) == state_digest(runs / "whole")


def test_all_checkpoints_damaged_exits_with_4_and_does_not_start_from_scratch(
    digits: Path, part: Path, tmp_path: Path
) -> None:
    for checkpoint in (part / "checkpoints").glob("step-*"):
        (checkpoint / "state.json").write_bytes(b"")
    before = contents(part)
    new = tmp_path / "new"
    for words in (argv(digits, part, "--resume"), argv(digits, new, "--resume-from", str(part))):
        assert "step-0000017" in fails(4, train_command, *words)
    assert contents(part) == before and not (new / "metrics.jsonl").exists()


def test_rotation_keeps_whole_checkpoints_before_damaged_ones(digits: Path, part: Path) -> None:
    (newest(part) / "model.safetensors").write_bytes(b"")
    (part / "checkpoints" / "step-0000099").write_text("a file")
    (part / "checkpoints" / "step-020").mkdir()
    train_here(argv(digits, part, "--resume", "train.max_steps=20"))
    assert names(part / "checkpoints")[:2] == ["step-0000020", "step-0000015"]
    assert not (part / "checkpoints" / "step-0000017").exists()


def test_resume_from_in_a_run_with_checkpoints_is_not_used(
    digits: Path, part: Path, tmp_path: Path
) -> None:
    words = argv(digits, tmp_path / "run", "--resume", "--resume-from", str(newest(part)))
    note = f"--resume-from {newest(part)} is not used"
    assert note not in succeeds(train_command, *words, "train.max_steps=18")
    assert note in succeeds(train_command, *words, "train.max_steps=19")


def test_resume_removes_what_killed_writes_left(digits: Path, part: Path) -> None:
    """Even if nothing is left to train, and so to save."""
    (part / ".tmp-gone-checkpoints" / "step-0000005").mkdir(parents=True)
    (part / ".tmp-config.yaml").write_text("half")
    (part / "checkpoints" / ".tmp-gone-step-0000010").mkdir()
    train_here(argv(digits, part, "--resume", "train.max_steps=17"))
    assert not [*part.glob(".tmp-*"), *(part / "checkpoints").glob(".tmp-*")]
