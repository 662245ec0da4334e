"""Saving in the background of a run: what a save holds, and which checkpoints stay.

On a disk that is full, read-only or gone while a checkpoint is written, older checkpoints stay, and
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
import torch
from helpers import (
    EVENTS,
    arguments,
    fails,
    losses,
    state_digest,
    train_here,
)
from torch import nn

from imagenet_cls.checkpoint import saver
from imagenet_cls.checkpoint.format import Snapshot, list_checkpoints, read_checkpoint, step_of
from imagenet_cls.commands.train import train_command
from imagenet_cls.engine import state
from imagenet_cls.errors import NonFiniteError
from imagenet_cls.report.jsonl import MetricsFile, read_metrics

STEPS = 11  # in an epoch
LONG_SEC = 240.0  # only ends what hangs


@pytest.fixture(autouse=True)
def no_events() -> Iterator[None]:
    yield
    EVENTS.clear()


def arguments_for(digits: Path, folder: Path, **changes: Any) -> list[str]:
    settings = {"train__epochs": 1, "ema__decay": 0.8, "checkpoint__every_steps": 4}
    return arguments(digits, folder, "eventful", **(settings | changes))


def saved(folder: Path) -> list[int]:
    """The steps of the checkpoints; asserts that all are complete, and nothing but the links is
    beside them.
    """
    checkpoints = list_checkpoints(folder / "checkpoints")
    assert all(read_checkpoint(path) for path in checkpoints)
    names = {path.name for path in (folder / "checkpoints").iterdir()} - {"best", "last"}
    assert names == {path.name for path in checkpoints}
    return sorted(step_of(path) for path in checkpoints)


def test_slow_write_delays_no_step_and_holds_the_state_of_its_step(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of step 4 begins after three more steps, and holds the bits of step 4; the last one
    is waited for.
    """
    keep_all = {"checkpoint__keep_last": "null"}
    train_here(arguments_for(digits, tmp_path / "plain", **keep_all))
    release, in_time, write = threading.Event(), [], saver.write_checkpoint
    EVENTS[7] = lambda _: release.set()

    def write_late(folder: Path, snapshot: Snapshot) -> Path:
        in_time.append(release.wait(LONG_SEC))
        return write(folder, snapshot)

    monkeypatch.setattr(saver, "write_checkpoint", write_late)
    train_here(arguments_for(digits, tmp_path / "late", **keep_all))
    assert in_time == [True] * 3
    assert saved(tmp_path / "late") == saved(tmp_path / "plain") == [4, 8, STEPS]
    for late in (tmp_path / "late" / "checkpoints").glob("*/*.safetensors"):
        plain = tmp_path / "plain" / late.relative_to(tmp_path / "late")
        assert late.read_bytes() == plain.read_bytes()
    assert losses(tmp_path / "late") == losses(tmp_path / "plain")


def test_nan_weights_are_not_saved_and_the_run_resumes_from_before(
    digits: Path, tmp_path: Path
) -> None:
    changes = {"train__epochs": 2, "train__max_nonfinite_steps": 99}
    words = arguments_for(digits, tmp_path / "run", **changes)
    EVENTS[10] = lambda network: nn.init.constant_(next(network.parameters()), torch.nan)
    with pytest.raises(NonFiniteError, match="after step 22"):
        train_here(words)
    assert saved(tmp_path / "run") == [4, 8]
    EVENTS.clear()
    train_here([*words, "--resume"])
    train_here(arguments_for(digits, tmp_path / "whole", **changes))
    assert state_digest(tmp_path / "run") == state_digest(tmp_path / "whole")


def test_lost_rank_in_the_broadcast_is_no_error_of_the_checkpoint(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = arguments(digits, tmp_path, train__max_steps=2)
    train_here(words)

    def lose_rank(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(state, "broadcast_tensors", lose_rank)
    with pytest.raises(RuntimeError, match="closed by peer"):
        train_here([*words, "--resume"])


# ---- failing disks

# A checkpoint takes about a tenth of the disk.
EVERY_TWO_STEPS = {"ema__decay": "null", "checkpoint__every_steps": 2}


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


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run's end without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_here(arguments_for(digits, folder, **EVERY_TWO_STEPS))
    return state_digest(folder)


@pytest.mark.parametrize("fault", ["full", "read-only", "gone"])
def test_failing_disk_exits_with_5_and_the_run_resumes(
    fault: str, digits: Path, disk: Path, undisturbed: str
) -> None:
    """The save of step 6 fails in the background, and the run ends at the next step."""
    break_disk, repair_disk, reason = faults(disk)[fault]
    reached: list[Any] = []
    EVENTS.update(
        {5: after_last_save(break_disk), 7: after_last_save(lambda: None), 8: reached.append}
    )
    words = arguments_for(digits, disk / "run", log__tensorboard=fault == "full", **EVERY_TWO_STEPS)
    err = fails(5, train_command, *words)
    assert re.search(rf"{disk}/run/checkpoints.*{reason}", err), err
    assert fault != "full" or re.search(r"step-0000006: .* bytes needed, .* free\)", err), err
    assert reached == []
    repair_disk()
    assert saved(disk / "run") == [2, 4]
    EVENTS.clear()
    train_here([*words, "--resume"])
    assert len(losses(disk / "run")) == STEPS
    assert state_digest(disk / "run") == undisturbed


def test_failed_last_save_exits_with_5(digits: Path, disk: Path) -> None:
    EVENTS[9] = lambda _: fill(disk)
    words = arguments_for(
        digits, disk / "run", checkpoint__every_steps="null", log__tensorboard="true"
    )
    assert "step-0000011" in fails(5, train_command, *words)
    assert saved(disk / "run") == []


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
