"""A truncated or flipped checkpoint file is found by its digest, and the run resumes from the checkpoint before."""

import random
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import arguments, newest, state_digest, train_here

from imagenet_cls.checkpoint.format import step_of
from imagenet_cls.checkpoint.select import load_newest
from imagenet_cls.commands.program import main
from imagenet_cls.commands.train import train_command
from imagenet_cls.report.log import close_log

OLDER, NEWEST = 2, 4


@pytest.fixture(autouse=True)
def log_closed() -> Iterator[None]:
    yield
    close_log()


def arguments_for(digits: Path, folder: Path, *more: str) -> list[str]:
    """With BatchNorm, momentum and EMA; saved at every other step, and evaluated at the end."""
    changes = {"ema__decay": 0.8, "checkpoint__every_steps": 2, "train__epochs": 1}
    return [*arguments(digits, folder, "noisy", **changes), *more]


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of a run that is not at its end."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    train_here(arguments_for(digits, folder, f"train.max_steps={NEWEST}"))
    close_log()
    assert step_of(newest(folder)) == NEWEST
    return folder


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.nightly)])
def test_random_damage_is_found(run: Path, times: int) -> None:
    """Each time one file is truncated, or one of its bits flipped: the checkpoint before it is used."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    files = sorted(newest(run).iterdir())
    assert len(files) == 6
    for number in range(times):
        file = draw.choice(files)
        whole = file.read_bytes()
        # The manifest's digest of itself is for older versions, and not verified.
        length = whole.index(b'"sha256"') if file.name == "manifest.json" else len(whole)
        content, position = bytearray(whole), draw.randrange(length)
        if number % 4 == 0:
            del content[position:]
        else:
            content[position] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
        snapshot, damage = load_newest(run / "checkpoints")
        file.write_bytes(whole)
        assert snapshot is not None and snapshot.path is not None and step_of(snapshot.path) == OLDER, (file, position)
        assert len(damage) == 1 and damage[0].startswith(f"{file.parent}: ")
    assert load_newest(run / "checkpoints")[1] == []


@pytest.mark.parametrize("name", ["model.safetensors", pytest.param("manifest.json", marks=pytest.mark.nightly)])
def test_resume_with_a_damaged_checkpoint_ends_in_the_same_bits(
    run: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    ends = []
    for folder in (tmp_path / "damaged", tmp_path / "whole"):
        shutil.copytree(run, folder)
        if folder.name == "damaged":
            file = folder / "checkpoints" / f"step-{NEWEST:07d}" / name
            file.write_bytes(file.read_bytes()[:-7])
        assert main(train_command, arguments_for(digits, folder, "--resume")) == 0
        output = "".join(capsys.readouterr().out.splitlines())  # the console breaks lines
        checkpoints = re.escape(str(folder / "checkpoints"))
        skipped = re.search(rf"{checkpoints}/step-0000004: (.*?); using an older checkpoint", output)
        resumed = re.search(rf"resumed from {checkpoints}/step-000000(\d) at step (\d)", output)
        assert resumed is not None
        ends.append((skipped is not None, resumed.groups(), state_digest(folder)))
        close_log()
    damaged, whole = ends
    assert damaged[:2] == (True, ("2", "2")) and whole[:2] == (False, ("4", "4"))
    assert damaged[2] == whole[2]


@pytest.mark.parametrize("flags", [("--resume",), ("--resume-from", "RUN")])
def test_all_checkpoints_damaged_is_an_error_not_a_fresh_start(
    run: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        (checkpoint / "state.json").write_bytes(b"")
    place = folder if "--resume" in flags else tmp_path / "new"
    words = [str(folder) if flag == "RUN" else flag for flag in flags]
    assert main(train_command, arguments_for(digits, place, *words)) == 4
    err = capsys.readouterr().err
    assert "step-0000004" in err and len(err.splitlines()) <= 3
    assert not list(place.glob("metrics.jsonl")) or place == folder
