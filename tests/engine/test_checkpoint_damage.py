"""A checkpoint that is cut short or whose bits flip: its digest tells, the one before is used, and both are named."""

import random
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import arguments, newest, state_digest, train_here

from imagenet_cls.checkpoint.format import step_of
from imagenet_cls.checkpoint.select import load_newest
from imagenet_cls.commands.program import main
from imagenet_cls.commands.train import train_command
from imagenet_cls.report.log import close_log

TRUNCATIONS, FLIPS = 20, 200
OLDER, NEWEST = 2, 4


@pytest.fixture(autouse=True)
def log_closed() -> Iterator[None]:
    yield
    close_log()


def words_for(digits: Path, folder: Path, *more: str) -> list[str]:
    """With BatchNorm, momentum and an average; saved every other step, and evaluated at the end."""
    changes = {"ema__decay": 0.8, "checkpoint__every_steps": 2, "train__epochs": 1}
    return [*arguments(digits, folder, "noisy", **changes), *more]


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of a run that is not at its end."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    train_here(words_for(digits, folder, f"train.max_steps={NEWEST}"))
    close_log()
    assert step_of(newest(folder)) == NEWEST
    return folder


@contextmanager
def holding(file: Path, content: bytes) -> Iterator[None]:
    whole = file.read_bytes()
    assert content != whole
    file.write_bytes(content)
    yield
    file.write_bytes(whole)


def is_found(folder: Path, file: Path) -> bool:
    """Whether the checkpoint before the damaged one is found, and the damaged one named."""
    snapshot, damage = load_newest(folder / "checkpoints")
    assert snapshot is not None and snapshot.path is not None
    return step_of(snapshot.path) == OLDER and len(damage) == 1 and damage[0].startswith(f"{file.parent}: ")


def test_every_truncation_and_every_flipped_bit_is_found(run: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    files = sorted(newest(run).iterdir())
    assert len(files) == 6
    sizes = [file.stat().st_size for file in files]
    found = {"truncated": 0, "flipped": 0}
    for _ in range(TRUNCATIONS):  # anywhere in its bytes, so mostly in tensors
        file = draw.choices(files, sizes)[0]
        with holding(file, file.read_bytes()[: draw.randrange(file.stat().st_size)]):
            found["truncated"] += is_found(run, file)
    for _ in range(FLIPS):  # as many in a short file as in a long one
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        with holding(file, bytes(content)):
            found["flipped"] += is_found(run, file)
    assert found == {"truncated": TRUNCATIONS, "flipped": FLIPS}
    assert load_newest(run / "checkpoints")[1] == []


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_the_run_goes_on_from_the_one_before_and_names_both(
    run: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """And ends in the bits of a run whose checkpoints nobody touched."""
    ends = []
    for folder in (tmp_path / "touched", tmp_path / "whole"):
        shutil.copytree(run, folder)
        if folder.name == "touched":
            file = folder / "checkpoints" / f"step-{NEWEST:07d}" / name
            file.write_bytes(file.read_bytes()[:-7])
        assert main(train_command, words_for(digits, folder, "--resume")) == 0
        said = "".join(capsys.readouterr().out.splitlines())  # the console breaks lines
        checkpoints = re.escape(str(folder / "checkpoints"))
        passed_over = re.search(rf"{checkpoints}/step-0000004: (.*?); using an older checkpoint", said)
        resumed = re.search(rf"resumed from {checkpoints}/step-000000(\d) at step (\d)", said)
        assert resumed is not None
        ends.append((passed_over is not None, resumed.groups(), state_digest(folder)))
        close_log()
    touched, whole = ends
    assert touched[:2] == (True, ("2", "2")) and whole[:2] == (False, ("4", "4"))
    assert touched[2] == whole[2]


@pytest.mark.parametrize("flags", [("--resume",), ("--resume", "--resume-from", "RUN"), ("--resume-from", "RUN")])
def test_where_all_are_bad_nothing_starts_afresh(
    run: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        (checkpoint / "state.json").write_bytes(b"")
    place = folder if "--resume" in flags else tmp_path / "new"
    words = [str(folder) if flag == "RUN" else flag for flag in flags]
    assert main(train_command, words_for(digits, place, *words)) == 4
    err = capsys.readouterr().err
    assert "none of 2 checkpoints is whole" in err and "step-0000004" in err and len(err.splitlines()) <= 3
    assert not list(place.glob("metrics.jsonl")) or place == folder
