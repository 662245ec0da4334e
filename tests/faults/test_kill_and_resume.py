"""Law 3: a run that was killed goes on with --resume and ends in the bits of one that nobody touched."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bed import (
    DIST_TRAIN,
    REPOSITORY,
    TRAIN,
    arguments,
    environment,
    is_alive,
    losses,
    ranks_of,
    run,
    state_digest,
    steps_done,
    wait_for,
)

STEPS_PER_EPOCH, STEPS = 11, 22
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer.name": "sgd", "optimizer.lr": 0.03},  # fused, under channels-last weights
    "lamb": {"optimizer.name": "lamb", "optimizer.lr": 0.01},  # timm's, with a step count in its groups
}


def words_for(digits: Path, folder: Path, optimizer: str, ranks: int) -> list[str]:
    """BatchNorm, dropout, EMA, accumulation 2; a checkpoint every 4 steps; steps slow enough to be hit."""
    return arguments(
        digits, folder, "noisy", model__kwargs__pause_sec=0.05, ema__decay=0.9, train__micro_batch_size=64 // ranks,
        checkpoint__every_steps=4, **OPTIMIZERS[optimizer],
    )  # fmt: skip


def command_for(words: list[str], ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable, TRAIN, *words]
    return ["bash", DIST_TRAIN, words[0], str(ranks), *words[1:]]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_sigkill_in_the_second_epoch(digits: Path, tmp_path: Path, optimizer: str, ranks: int) -> None:
    def command(name: str) -> list[str]:
        return command_for(words_for(digits, tmp_path / name, optimizer, ranks), ranks)

    undisturbed = run(command("whole"))
    assert undisturbed.returncode == 0, undisturbed.stderr

    folder = tmp_path / "killed"
    at_step, victim = random.randrange(STEPS_PER_EPOCH + 2, STEPS - 2), random.randrange(ranks)
    print(f"SIGKILL to rank {victim} after step {at_step}")
    with subprocess.Popen(
        command("killed"),
        env=environment(),
        cwd=REPOSITORY,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    ) as started:
        try:
            wait_for(lambda: steps_done(folder) >= at_step or started.poll() is not None, f"step {at_step}")
            pids = ranks_of(folder)
            assert len(pids) == ranks
            os.kill(pids[victim], signal.SIGKILL)
            _, errors = started.communicate(timeout=30)
        finally:
            started.kill()
    assert started.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), errors
    if ranks > 1:
        assert f"rank {victim} was killed by SIGKILL" in errors
        assert len(errors.strip().splitlines()) <= 3, errors
    wait_for(lambda: not any(map(is_alive, pids.values())), "the other ranks to end", 10)
    assert steps_done(folder) < STEPS

    resumed = run([*command("killed"), "--resume"])
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from" in resumed.stdout
    assert losses(folder) == losses(tmp_path / "whole")
    assert state_digest(folder) == state_digest(tmp_path / "whole")


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_at_the_same_step_on_all_ranks(digits: Path, tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "run"
    command = command_for(words_for(digits, folder, "sgd", ranks), ranks)
    with subprocess.Popen(
        command, env=environment(), cwd=REPOSITORY, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as started:
        try:
            wait_for(lambda: steps_done(folder) >= 5 or started.poll() is not None, "step 5")
            started.send_signal(signal.SIGTERM)
            _, errors = started.communicate(timeout=30)
        finally:
            started.kill()
    assert started.returncode == 128 + signal.SIGTERM, errors
    assert "stopped by SIGTERM" in errors and "--resume" in errors
    assert len(errors.strip().splitlines()) <= 3, errors
    wait_for(lambda: not any(map(is_alive, ranks_of(folder).values())), "the ranks to end", 5)
    saved = steps_done(folder)
    assert (folder / "checkpoints" / f"step-{saved:07d}" / "manifest.json").is_file()

    resumed = run([*command, "--resume"])
    assert resumed.returncode == 0, resumed.stderr
    assert len(losses(folder)) == STEPS
