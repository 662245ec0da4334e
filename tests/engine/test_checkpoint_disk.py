"""A disk that is full, read-only or gone while a checkpoint is written: older checkpoints stay, and the run ends with
code 5 or continues (`checkpoint.on_error`).
"""

import os
import re
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import arguments, losses, plain, state_digest, train_here
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import list_checkpoints, read_checkpoint, step_of
from imagenet_cls.commands.program import main
from imagenet_cls.commands.train import train_command
from imagenet_cls.errors import ResourceError
from imagenet_cls.report.jsonl import MetricsFile, read_metrics
from imagenet_cls.report.log import close_log

STEPS = 11
DISK_BYTES = 1_000_000  # a checkpoint of the network takes a tenth
# Called in the forward pass of a step.
EVENTS: dict[int, Callable[[], object]] = {}


class Eventful(nn.Module):
    """Returns the images. First waits for the last save and calls what `EVENTS` has for this step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, images: Tensor) -> Tensor:
        self.step += self.training
        if self.training and self.step in EVENTS:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            EVENTS[self.step]()
        return images


def net(num_classes: int) -> nn.Module:
    return nn.Sequential(Eventful(), *plain(num_classes))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    EVENTS.clear()
    yield
    close_log()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", place)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a small file system (root, mount): {getattr(error, 'stderr', '') or error}")
    try:
        yield place
    finally:
        for _ in range(2):  # a test may have mounted it twice
            subprocess.run(["umount", "-l", place], capture_output=True)


def mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True, text=True)


def arguments_for(digits: Path, folder: Path, **changes: Any) -> list[str]:
    settings = {"model__name": "test_checkpoint_disk:net", "train__epochs": 1, "checkpoint__every_steps": 2} | changes
    return arguments(digits, folder, **settings)


def fill(disk: Path, left_bytes: int = 0) -> None:
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(b"\0" * (free - left_bytes))


def faults(disk: Path) -> dict[str, tuple[Callable[[], object], Callable[[], object], str]]:
    """By name: what breaks the disk, what repairs it, and the error."""
    run, away = disk / "run", disk / "away"

    def make_read_only() -> None:
        mount("--bind", disk, disk)
        mount("-o", "remount,bind,ro", disk)

    return {
        "full": (lambda: fill(disk, 50_000), (disk / "filler").unlink, "No space left on device"),
        "read-only": (make_read_only, lambda: subprocess.run(["umount", disk], check=True), "Read-only file system"),
        "gone": (lambda: run.rename(away), lambda: away.rename(run), r"the run folder is gone \(removed, moved or"),
    }


def assert_all_whole(folder: Path, *steps: int) -> None:
    """These checkpoints verify, and nothing else lies beside them."""
    checkpoints = folder / "checkpoints"
    assert sorted(step_of(path) for path in list_checkpoints(checkpoints)) == list(steps)
    assert all(read_checkpoint(path) for path in list_checkpoints(checkpoints))
    assert len(list(checkpoints.iterdir())) == len(steps)


def needed_and_free(line: str) -> tuple[int, int]:
    match = re.search(r"\(([\d,]+) bytes needed, ([\d,]+) free\)", line)
    assert match is not None, line
    return int(match[1].replace(",", "")), int(match[2].replace(",", ""))


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run's end without a fault."""
    EVENTS.clear()
    folder = tmp_path_factory.mktemp("undisturbed")
    train_here(arguments_for(digits, folder))
    close_log()
    return state_digest(folder)


FAULTS = [pytest.param(name, marks=pytest.mark.nightly) for name in ("full", "read-only", "gone")]


@pytest.mark.parametrize("fault", ["full", *FAULTS[1:]])
def test_failing_disk_on_error_stop_ends_with_5_and_the_run_resumes(
    fault: str, digits: Path, disk: Path, undisturbed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    break_disk, repair_disk, text = faults(disk)[fault]
    EVENTS[5] = break_disk
    words = arguments_for(digits, disk / "run", log__tensorboard=fault == "full")
    assert main(train_command, words) == 5
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert re.match(rf"could not write {disk}/run/checkpoints.*{text}", lines[0]), lines
    if fault == "full":
        needed, free = needed_and_free(lines[0])
        assert needed > free and lines[0].startswith(f"could not write {disk}/run/checkpoints/step-0000006: ")
    repair_disk()
    assert_all_whole(disk / "run", 2, 4)
    EVENTS.clear()
    train_here([*words, "--resume"])
    assert len(losses(disk / "run")) == STEPS
    assert state_digest(disk / "run") == undisturbed


@pytest.mark.parametrize("fault", [*FAULTS[:2], "gone"])
def test_failing_disk_on_error_continue_trains_on_and_saves_the_next_time(
    fault: str, digits: Path, disk: Path, undisturbed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    break_disk, repair_disk, text = faults(disk)[fault]
    EVENTS.update({5: break_disk, 7: lambda: assert_all_whole(disk / ("away" if fault == "gone" else "run"), 2, 4)})
    EVENTS[9] = repair_disk
    folder = disk / "run"
    train_here(arguments_for(digits, folder, checkpoint__on_error="continue", log__tensorboard=fault == "full"))
    out, err = capfd.readouterr()
    assert err == ""
    reported = [line for line in out.splitlines() if "training continues (checkpoint.on_error)" in line]
    assert len(reported) == 2 and all(re.search(text, line) for line in reported), out  # the saves of steps 6 and 8
    assert_all_whole(folder, 10, 11)
    assert len(losses(folder)) == STEPS  # of the steps in between, too
    assert state_digest(folder) == undisturbed


@pytest.mark.nightly
def test_failed_last_save_on_error_continue_ends_with_5(
    digits: Path, disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    EVENTS[9] = lambda: fill(disk)
    words = arguments_for(digits, disk / "run", checkpoint__on_error="continue", log__tensorboard="true")
    assert main(train_command, words) == 5
    out, err = capfd.readouterr()
    assert re.match(r"could not write .*/step-0000011: No space left on device", err) and err.count("\n") == 2, err
    assert out.count("step-0000010: No space left on device") == 1 and "done" not in out
    # Of what else could not be written, too, there is a line each, and not one for every step.
    assert out.count("can't write") == len({line for line in out.splitlines() if "can't write" in line}) <= 2, out
    assert_all_whole(disk / "run", 6, 8)


@pytest.mark.nightly
def test_file_size_limit_ends_with_5(digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    EVENTS[3] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert main(train_command, arguments_for(digits, tmp_path)) == 5
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and "step-0000004: File too large (" in lines[0], lines
    assert needed_and_free(lines[0])[0] > 20_000
    assert_all_whole(tmp_path, 2)


@pytest.mark.nightly
def test_too_little_disk_space_is_reported_at_the_start(
    digits: Path, disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints that are there already count as space: they are removed for new ones."""

    def start(max_steps: int, *flags: str) -> str:
        words = arguments_for(digits, disk / "run", train__max_steps=max_steps, checkpoint__keep_last=3)
        train_here([*words, *flags])
        return "\n".join(line for line in capfd.readouterr().out.splitlines() if "three checkpoints" in line)

    fill(disk, 240_000)
    match = re.fullmatch(
        rf"{disk}/run has ([\d,]+) bytes free, but three .* need ([\d,]+) more: saving may fail", start(2)
    )
    assert match is not None
    free, needed = (int(number.replace(",", "")) for number in match.groups())
    weights = sum(parameter.nbytes for parameter in net(10).parameters())
    assert 200_000 < free <= 240_000 < needed == 3 * 2 * weights  # weights and momentum
    (disk / "filler").unlink()
    assert start(2, "--overwrite") == ""
    fill(disk, 3 * 2 * weights - 60_000)
    assert start(4, "--resume") == ""


def test_metrics_file_on_a_full_disk_is_complete_later(disk: Path) -> None:
    metrics = MetricsFile(disk / "metrics.jsonl")
    records = [{"kind": "event", "step": step, "message": "x" * 3000} for step in range(8)]
    metrics.write(records[0])
    metrics.sync()
    fill(disk, 4096)
    refused = 0
    for record in records[1:]:
        metrics.write(record)
        try:
            metrics.flush()
        except ResourceError:
            refused += 1
    assert refused >= 5
    (disk / "filler").unlink()
    metrics.close()
    assert read_metrics(disk / "metrics.jsonl") == records
