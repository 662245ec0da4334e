"""Saving in the background of a run: what a save holds, when its error ends the run, and which
checkpoints stay.
"""

import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    EVENTS,
    arguments,
    evaluations,
    losses,
    state_digest,
    succeeds,
    train_here,
)
from torch import nn

from imagenet_cls.checkpoint import saver
from imagenet_cls.checkpoint.format import Snapshot, list_checkpoints, read_checkpoint, step_of
from imagenet_cls.commands.train import train_command
from imagenet_cls.engine import state
from imagenet_cls.errors import NonFiniteError, ResourceError

STEPS = 11  # in an epoch
LONG_SEC = 240.0  # only ends what hangs


@pytest.fixture(autouse=True)
def no_events() -> Iterator[None]:
    yield
    EVENTS.clear()


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[Any], None]]:
    """An event from which on no file may be larger than 20,000 bytes, which is less than the
    weights.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def arguments_for(digits: Path, folder: Path, **changes: Any) -> list[str]:
    settings = {"train__epochs": 1, "ema__decay": 0.8, "checkpoint__every_steps": 4}
    return arguments(digits, folder, "eventful", **(settings | changes))


def saved(folder: Path) -> list[int]:
    """The steps of the checkpoints; asserts that all are complete."""
    checkpoints = list_checkpoints(folder / "checkpoints")
    assert all(read_checkpoint(path) for path in checkpoints)
    return sorted(step_of(path) for path in checkpoints)


def join_writer(_: object) -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(LONG_SEC)


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


def test_failed_save_ends_the_run_at_the_next_step(
    digits: Path, tmp_path: Path, limit_file_size: Callable[[Any], None]
) -> None:
    reached: list[nn.Module] = []
    EVENTS.update({3: limit_file_size, 5: join_writer, 6: reached.append})
    with pytest.raises(ResourceError, match=r"step-0000004: File too large \(.* bytes needed"):
        train_here(arguments_for(digits, tmp_path))
    assert reached == [] and saved(tmp_path) == []


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


def test_newest_and_best_checkpoints_of_both_kinds_of_weights_stay(
    digits: Path, tmp_path: Path
) -> None:
    """From the last step of the second epoch on, the classifier's weight is negated.

    The EMA with a decay of 0.8 hardly changes at that step, and is negated four steps later.
    """
    negated: list[torch.Tensor] = []

    def negate(network: nn.Module) -> None:
        weight = list(network.parameters())[-2]
        negated[:] = negated or [-weight.detach().clone()]
        with torch.no_grad():
            weight.copy_(negated[0])

    EVENTS.update(dict.fromkeys(range(2 * STEPS, 3 * STEPS + 1), negate))
    train_here(
        arguments_for(digits, tmp_path, train__epochs=3, checkpoint__keep_last=2, optimizer__lr=0.1)
    )
    best = {}
    for kind in ("raw", "ema"):
        results = [record for record in evaluations(tmp_path) if record["weights"] == kind]
        best[kind] = max(results, key=lambda record: record["top1_pct"])["step"]
    assert best == {"raw": STEPS, "ema": 2 * STEPS}, "the premise of this test"
    assert saved(tmp_path) == [STEPS, 2 * STEPS, 32, 33]


def test_resume_says_that_metrics_are_missing(digits: Path, tmp_path: Path) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    train_here(arguments(digits, run, train__max_steps=3))

    def said(folder: Path, *words: str) -> bool:
        out = succeeds(train_command, *arguments(digits, folder), "--dry-run", *words)
        return any("metrics.jsonl" in line and "3 steps" in line for line in out.splitlines())

    assert not said(run, "--resume")
    metrics = run / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    for left in (lines[:1], lines[2:], []):
        metrics.write_bytes(b"".join(left))
        assert said(run, "--resume")
    metrics.unlink()
    assert said(run, "--resume")
    assert not said(new, "--resume-from", str(run))


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
