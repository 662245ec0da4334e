"""A disk that is full, read-only or gone while a checkpoint is written: older checkpoints stay, and
the run ends with code 5.
"""

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    EVENTS,
    arguments,
    call,
    fails,
    losses,
    state_digest,
    train_here,
)

from imagenet_cls.checkpoint.format import list_checkpoints, read_checkpoint, step_of
from imagenet_cls.commands.train import train_command
from imagenet_cls.report.jsonl import MetricsFile, read_metrics

STEPS = 11


@pytest.fixture(autouse=True)
def no_events() -> Iterator[None]:
    yield
    EVENTS.clear()


def arguments_for(digits: Path, folder: Path, **changes: Any) -> list[str]:
    return arguments(
        digits, folder, "eventful", **({"train__epochs": 1, "checkpoint__every_steps": 2} | changes)
    )


def after_last_save(event: Callable[[], object]) -> Callable[[Any], None]:
    """An event that waits for the save in progress, and then calls `event`."""

    def wait_and_call(_: Any) -> None:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        event()

    return wait_and_call


def fill(disk: Path, left_bytes: int = 0) -> None:
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(b"\0" * (free - left_bytes))


def mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True, text=True)


def faults(disk: Path) -> dict[str, tuple[Callable[[], object], Callable[[], object], str]]:
    """By name: what breaks the disk, what repairs it, and the error."""
    run, away = disk / "run", disk / "away"

    def make_read_only() -> None:
        mount("--bind", disk, disk)
        mount("-o", "remount,bind,ro", disk)

    return {
        "full": (lambda: fill(disk, 20_000), (disk / "filler").unlink, "No space left on device"),
        "read-only": (
            make_read_only,
            lambda: subprocess.run(["umount", disk], check=True),
            "Read-only file system",
        ),
        "gone": (lambda: run.rename(away), lambda: away.rename(run), "the run folder is gone"),
    }


def assert_complete(folder: Path, *steps: int) -> None:
    """These checkpoints are complete, and nothing but the links is beside them."""
    checkpoints = list_checkpoints(folder / "checkpoints")
    assert sorted(map(step_of, checkpoints)) == list(steps)
    assert all(read_checkpoint(path) for path in checkpoints)
    assert len(
        {path.name for path in (folder / "checkpoints").iterdir()} - {"best", "last"}
    ) == len(steps)


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run's end without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_here(arguments_for(digits, folder))
    return state_digest(folder)


@pytest.mark.parametrize("fault", ["full", "read-only", "gone"])
def test_failing_disk_exits_with_5_and_the_run_resumes(
    fault: str, digits: Path, disk: Path, undisturbed: str
) -> None:
    break_disk, repair_disk, reason = faults(disk)[fault]
    EVENTS[5] = after_last_save(break_disk)
    words = arguments_for(digits, disk / "run", log__tensorboard=fault == "full")
    err = fails(5, train_command, *words)
    assert re.search(rf"{disk}/run/checkpoints.*{reason}", err), err
    if fault == "full":
        sizes = re.search(r"step-0000006: .* \(([\d,]+) bytes needed, ([\d,]+) free\)", err)
        assert sizes is not None, err
        needed, free = (int(number.replace(",", "")) for number in sizes.groups())
        assert needed > free
    repair_disk()
    assert_complete(disk / "run", 2, 4)
    EVENTS.clear()
    train_here([*words, "--resume"])
    assert len(losses(disk / "run")) == STEPS
    assert state_digest(disk / "run") == undisturbed


def test_failed_last_save_exits_with_5(digits: Path, disk: Path) -> None:
    EVENTS[9] = lambda _: fill(disk)
    words = arguments_for(
        digits, disk / "run", checkpoint__every_steps="null", log__tensorboard="true"
    )
    code, out, err = call(train_command, *words)
    assert code == 5 and "step-0000011" in err and "done" not in out
    assert_complete(disk / "run")


def test_metrics_file_on_a_full_disk_is_complete_later(disk: Path) -> None:
    metrics = MetricsFile(disk / "metrics.jsonl")
    records = [{"kind": "event", "step": step, "message": "x" * 3000} for step in range(8)]
    metrics.write(records[:1])
    fill(disk, 4096)
    refused = 0
    for record in records[1:]:
        try:
            metrics.write([record])
        except OSError:
            refused += 1
    assert refused >= 5
    (disk / "filler").unlink()
    metrics.close()
    assert read_metrics(disk / "metrics.jsonl") == records
