"""Asynchronous saving in a run: what a save holds, when its error ends the run, and which checkpoints stay."""

import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import arguments, evaluations, losses, noisy, state_digest, train_here
from torch import Tensor, nn

from imagenet_cls.checkpoint import saver
from imagenet_cls.checkpoint.format import Snapshot, list_checkpoints, read_checkpoint, step_of
from imagenet_cls.errors import NonFiniteError, ResourceError
from imagenet_cls.report.log import close_log

STEPS = 11
LONG_SEC = 20.0
# Called with the network, in the forward pass of a step.
EVENTS: dict[int, Callable[[nn.Module], object]] = {}


class Eventful(nn.Sequential):
    def __init__(self, num_classes: int):
        super().__init__(*noisy(num_classes))
        self.step = 0

    def forward(self, images: Tensor) -> Tensor:
        self.step += self.training
        if self.training and self.step in EVENTS:
            EVENTS[self.step](self)
        return super().forward(images)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    EVENTS.clear()
    yield
    EVENTS.clear()
    close_log()


@pytest.fixture
def file_limit() -> Iterator[Callable[[], None]]:
    """Call it, and no file may be larger than 20,000 bytes: less than the weights."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def arguments_for(digits: Path, folder: Path, **changes: Any) -> list[str]:
    settings = {"model__name": f"{Path(__file__).stem}:Eventful", "train__epochs": 1, "ema__decay": 0.8}
    return arguments(digits, folder, **(settings | {"checkpoint__every_steps": 4} | changes))


def saved(folder: Path) -> list[int]:
    return sorted(step_of(path) for path in list_checkpoints(folder / "checkpoints"))


def join_writer(_: object) -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(LONG_SEC)


def zero(network: nn.Module) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.0)


def test_slow_write_delays_no_step_and_holds_the_state_of_its_step(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of step 4 begins after three more steps, and holds the bits of step 4; the last one is waited for."""
    keep_all = {"checkpoint__keep_last": "null"}
    train_here(arguments_for(digits, tmp_path / "plain", **keep_all))
    close_log()
    release, in_time, write = threading.Event(), [], saver.write_checkpoint
    EVENTS[7] = lambda _: release.set()

    def late(folder: Path, snapshot: Snapshot) -> Path:
        in_time.append(release.wait(LONG_SEC))
        time.sleep(0.1)
        return write(folder, snapshot)

    monkeypatch.setattr(saver, "write_checkpoint", late)
    train_here(arguments_for(digits, tmp_path / "late", **keep_all))
    assert in_time == [True] * 3
    assert not any(thread.name == "checkpoint" for thread in threading.enumerate())
    assert saved(tmp_path / "late") == saved(tmp_path / "plain") == [4, 8, STEPS]
    for step in (4, 8, STEPS):
        for name in ("model", "ema", "optimizer"):
            file = Path("checkpoints", f"step-{step:07d}", f"{name}.safetensors")
            assert (tmp_path / "late" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert losses(tmp_path / "late") == losses(tmp_path / "plain")


def test_failed_save_ends_the_run_at_the_next_step(
    digits: Path, tmp_path: Path, file_limit: Callable[[], None]
) -> None:
    reached = []
    EVENTS[3] = lambda _: file_limit()
    EVENTS[5] = join_writer
    EVENTS[6] = reached.append
    with pytest.raises(ResourceError, match=r"step-0000004: File too large \(.* bytes needed"):
        train_here(arguments_for(digits, tmp_path))
    assert reached == [] and saved(tmp_path) == []


def make_nan(network: nn.Module) -> None:
    with torch.no_grad():
        next(network.parameters()).fill_(torch.nan)


def test_nan_weights_are_not_saved_and_the_run_resumes_from_before(digits: Path, tmp_path: Path) -> None:
    changes = {"train__epochs": 2, "train__max_nonfinite_steps": 99}
    words = arguments_for(digits, tmp_path / "run", **changes)
    EVENTS[10] = make_nan
    with pytest.raises(NonFiniteError, match="after step 22"):
        train_here(words)
    close_log()
    assert saved(tmp_path / "run") == [4, 8]
    EVENTS.clear()
    train_here([*words, "--resume"])
    train_here(arguments_for(digits, tmp_path / "whole", **changes))
    assert state_digest(tmp_path / "run") == state_digest(tmp_path / "whole")


@pytest.mark.parametrize("keep_last", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_newest_and_best_checkpoints_stay(digits: Path, tmp_path: Path, keep_last: int) -> None:
    """From step 25 on the weights are zero, so the best ones are old."""
    EVENTS.update(dict.fromkeys(range(25, 3 * STEPS + 1), zero))
    train_here(arguments_for(digits, tmp_path, train__epochs=3, checkpoint__keep_last=keep_last, optimizer__lr=0.1))
    best = {}
    for kind in ("raw", "ema"):
        results = [record for record in evaluations(tmp_path) if record["weights"] == kind]
        best[kind] = max(results, key=lambda record: record["top1_pct"])["step"]  # the first of equals
    assert max(best.values()) < 3 * STEPS
    written = [4, 8, 11, 12, 16, 20, 22, 24, 28, 32, 33]
    assert saved(tmp_path) == sorted({*written[-keep_last:], *best.values()})
    assert all(read_checkpoint(path) for path in list_checkpoints(tmp_path / "checkpoints"))


def test_best_checkpoint_not_saved_keeps_the_best_before_it(
    digits: Path, tmp_path: Path, file_limit: Callable[[], None]
) -> None:
    """The save of step 22, the best, fails: the one of step 11 stays, also in the resumed run."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def recover(network: nn.Module) -> None:
        join_writer(network)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    EVENTS.update(dict.fromkeys(range(25, 3 * STEPS + 1), zero))
    EVENTS[21] = lambda _: file_limit()
    EVENTS[23] = recover
    changes = {"checkpoint__keep_last": 1, "checkpoint__on_error": "continue", "ema__decay": "null"}
    train_here(arguments_for(digits, tmp_path, train__epochs=3, train__max_steps=28, **changes))
    assert saved(tmp_path) == [11, 28]
    EVENTS.update(dict.fromkeys(range(5), zero))
    train_here([*arguments_for(digits, tmp_path, train__epochs=3, **changes), "--resume"])
    results = {record["step"]: record["top1_pct"] for record in evaluations(tmp_path)}
    assert results[22] > results[11] > results[33]
    assert saved(tmp_path) == [11, 33]
