"""Run folders that were changed by hand, and commands that a launcher restarts: nothing in the folder is lost."""

import os
import shutil
import socket
from pathlib import Path

import pytest
from helpers import arguments, losses, newest, state_digest, train_here

from imagenet_cls.checkpoint.format import list_checkpoints
from imagenet_cls.errors import CheckpointError, ResourceError, UsageError


def argv(digits: Path, folder: Path, *more: str) -> list[str]:
    return [*arguments(digits, folder, checkpoint__every_steps=5, train__epochs=2), *more]


@pytest.fixture(scope="module")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`, and `part`, which was stopped after step 17: checkpoints 15 and 17."""
    folder = tmp_path_factory.mktemp("runs")
    train_here(argv(digits, folder / "whole"))
    train_here(argv(digits, folder / "part", "train.max_steps=17", "checkpoint.keep_last=3"))
    return folder


@pytest.fixture
def part(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "part", tmp_path / "part"))


def files(folder: Path) -> dict[str, bytes]:
    kept = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "logs")
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept if path.name != ".lock"}


def names(checkpoints: Path) -> list[str]:
    return [path.name for path in list_checkpoints(checkpoints)]


# ------------------------------------------------------------------------------------------- restarts by a launcher


@pytest.mark.parametrize("job", [None, "another"])
def test_restart_in_a_folder_of_another_run_raises(
    digits: Path, part: Path, monkeypatch: pytest.MonkeyPatch, job: str | None
) -> None:
    """The first attempt was refused, or another job has the same process id, as in containers."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    if job is not None:
        (part / ".job").write_text(f"ranks of process {os.getppid()} on {socket.gethostname()}, started at 7\n")
    before = files(part)
    with pytest.raises(UsageError, match="already holds a run"):
        train_here(argv(digits, part))
    assert files(part) == before


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
    train_here(argv(digits, tmp_path / "run", "--overwrite", "train.max_steps=7"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train_here(argv(digits, tmp_path / "run", "--overwrite"))
    assert state_digest(tmp_path / "run") == state_digest(runs / "whole")


@pytest.mark.nightly
def test_torchrun_in_a_requeued_slurm_job_resumes(
    digits: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun is another process then, and counts from 0."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setattr(os, "getppid", lambda: 1000)
    train_here(argv(digits, tmp_path / "run", "train.max_steps=7"))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(os, "getppid", lambda: 2000)
    train_here(argv(digits, tmp_path / "run"))
    assert state_digest(tmp_path / "run") == state_digest(runs / "whole")


# --------------------------------------------------------------------------------------- links and other disks


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_checkpoints_behind_a_dangling_link_raises(digits: Path, part: Path, tmp_path: Path, flag: str) -> None:
    (part / "checkpoints").rename(tmp_path / "disk")
    (part / "checkpoints").symlink_to(tmp_path / "unmounted")
    before = files(part)
    with pytest.raises(UsageError):
        train_here(argv(digits, part, flag))
    assert files(part) == before


def test_overwrite_and_resume_with_checkpoints_behind_a_link(
    digits: Path, part: Path, runs: Path, tmp_path: Path
) -> None:
    oldest = list_checkpoints(part / "checkpoints")[-1]
    shutil.move(oldest, tmp_path / "kept")  # a checkpoint behind a link of its own is only unlinked
    oldest.symlink_to(tmp_path / "kept")
    kept = files(tmp_path / "kept")
    (part / "checkpoints").rename(tmp_path / "disk")
    (part / "checkpoints").symlink_to(tmp_path / "disk")
    with pytest.raises(UsageError, match=r"^model\.checkpoint: "):  # --overwrite would remove it
        train_here(argv(digits, part, "--overwrite", f"model.checkpoint={newest(part)}"))
    train_here(argv(digits, part, "--overwrite", "train.max_steps=7"))
    assert names(tmp_path / "disk") == ["step-0000007", "step-0000005"]
    assert files(tmp_path / "kept") == kept and kept
    train_here(argv(digits, part, "--resume"))
    assert state_digest(part) == state_digest(runs / "whole") and (part / "checkpoints").is_symlink()


@pytest.mark.nightly
def test_rotation_of_a_linked_checkpoint_removes_only_the_link(digits: Path, part: Path, tmp_path: Path) -> None:
    oldest = list_checkpoints(part / "checkpoints")[-1]
    shutil.move(oldest, tmp_path / oldest.name)
    oldest.symlink_to(tmp_path / oldest.name)
    train_here(argv(digits, part, "--resume", "checkpoint.keep_last=1", "checkpoint.every_epochs=null"))
    assert not os.path.lexists(oldest) and (tmp_path / oldest.name / "model.safetensors").exists()


def test_resume_with_a_checkpoint_behind_a_dangling_link_falls_back(
    digits: Path, part: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = newest(part)
    shutil.rmtree(last)
    last.symlink_to(tmp_path / "unmounted")
    train_here(argv(digits, part, "--resume", "train.max_steps=17"))
    assert str(last) in " ".join(capsys.readouterr().out.split())
    assert not last.is_symlink() and state_digest(part) == state_digest(runs / "part")  # written again
    for path in list_checkpoints(part / "checkpoints"):
        shutil.rmtree(path)
    last.symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError):  # not a fresh start
        train_here(argv(digits, part, "--resume"))


# ---------------------------------------------------------------------------------------- damaged and foreign files


def test_rotation_keeps_whole_checkpoints_before_damaged_ones(digits: Path, part: Path) -> None:
    (newest(part) / "model.safetensors").write_bytes(b"")
    (part / "checkpoints" / "step-0000099").write_text("a file")
    (part / "checkpoints" / "step-020").mkdir()
    train_here(argv(digits, part, "--resume", "train.max_steps=20"))
    assert names(part / "checkpoints")[:2] == ["step-0000020", "step-0000015"]
    assert not (part / "checkpoints" / "step-0000017").exists()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"kind": "train", "step": "abc"}', CheckpointError),
        ('{"kind": ["x"], "step": 1}', CheckpointError),
        ("[" * 100_000, CheckpointError),
        (None, ResourceError),
    ],
)
def test_resume_with_malformed_metrics_raises(
    digits: Path, part: Path, content: str | None, error: type[Exception]
) -> None:
    metrics = part / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir() if content is None else metrics.write_text(content + "\n")
    with pytest.raises(error, match=r"metrics\.jsonl"):
        train_here(argv(digits, part, "--resume"))


@pytest.mark.parametrize(("missing", "count"), [("all", "17"), ("some", "3"), ("none", None)])
def test_resume_reports_missing_records(
    digits: Path, part: Path, missing: str, count: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = part / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    removed = [line for line in lines if '"train"' in line and missing == "some"][3:6]
    metrics.write_text("".join(line for line in lines if line not in removed))
    if missing == "all":
        metrics.unlink()
    train_here(argv(digits, part, "--resume", "train.max_steps=18"))
    reports = [line for line in capsys.readouterr().out.splitlines() if "metrics.jsonl" in line and "17" in line]
    assert bool(reports) == (count is not None) and all(count in line for line in reports if count)


@pytest.mark.parametrize("step", [pytest.param(-(10**12), marks=pytest.mark.nightly), 10**12])
def test_resume_ignores_records_of_absurd_steps(digits: Path, part: Path, step: int) -> None:
    with (part / "metrics.jsonl").open("a") as file:
        file.write(f'{{"kind": "train", "step": {step}}}\n')
    train_here(argv(digits, part, "--resume", "train.max_steps=18"))


def test_resume_from_another_run_reports_no_missing_records(
    digits: Path, part: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for last in (18, 19):
        more = ["--resume", "--resume-from", str(newest(part)), f"train.max_steps={last}"]
        train_here(argv(digits, tmp_path / "run", *more))
    out = capsys.readouterr().out
    assert not [line for line in out.splitlines() if "metrics.jsonl" in line and "17" in line]
    assert out.count(f"--resume-from {newest(part)} is not used") == 1


def test_resume_removes_what_killed_writes_left(digits: Path, part: Path) -> None:
    """Even if nothing is left to train, and so to save."""
    (part / ".tmp-gone-checkpoints" / "step-0000005").mkdir(parents=True)
    (part / ".tmp-config.yaml").write_text("half")
    (part / "checkpoints" / ".tmp-gone-step-0000010").mkdir()
    train_here(argv(digits, part, "--resume", "train.max_steps=17"))
    assert not [*part.glob(".tmp-*"), *(part / "checkpoints").glob(".tmp-*")]


def test_work_dir_with_a_name_too_long_raises(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--work-dir"):
        train_here(argv(digits, tmp_path / ("x" * 300)))


def test_allow_change_of_an_unknown_key_raises(digits: Path, part: Path) -> None:
    with pytest.raises(UsageError, match=r"--allow-change optimzer\.lr"):
        train_here(argv(digits, part, "--resume", "--allow-change", "optimzer.lr"))
