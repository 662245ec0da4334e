"""`train.profile`: the files, after a resume inside the range too, and the same bits."""

import gzip
import json
import re
from pathlib import Path

import pytest
from forked_ranks import RankServer
from helpers import arguments, state_digest, succeeds, train_here

from imagenet_cls.commands.train import train_command
from imagenet_cls.engine.profiler import StepProfiler


def traced_updates(run: Path, name: str) -> int:
    """How many optimizer steps a trace has."""
    with gzip.open(run / "profile" / f"{name}.json.gz") as file:
        events = json.load(file)["traceEvents"]
    return len({event["ts"] for event in events if "Optimizer.step#" in event.get("name", "")})


def test_profiled_run_has_the_same_bits_and_a_trace_of_its_steps(
    digits: Path, tmp_path: Path
) -> None:
    """Over the end of an epoch, and with a resume in the range. The images are read by a worker, so
    that the traces are small.
    """
    words = arguments(
        digits, tmp_path, train__profile="[9, 14]", ema__decay=0.5, data__num_workers=1
    )
    train_here([*words, "train.max_steps=10"])
    train_here([*words, "train.max_steps=15", "--resume"])
    profiled = state_digest(tmp_path)
    names = ["steps-0000009-0000010", "steps-0000011-0000014"]
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == sorted(f"{name}.{end}" for name in names for end in ("json.gz", "txt"))
    assert [traced_updates(tmp_path, name) for name in names] == [2, 4]
    table = (tmp_path / "profile" / f"{names[1]}.txt").read_text()
    assert 0 < len(re.findall("^ *(aten::|Optimizer|Autograd)", table, re.M)) <= 10, table
    train_here([*arguments(digits, tmp_path, ema__decay=0.5), "train.max_steps=15", "--overwrite"])
    assert state_digest(tmp_path) == profiled
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize(("steps", "warns"), [("[2, 3]", False), ("[3, 4]", True)])
def test_steps_after_the_last_one_warn(
    digits: Path, tmp_path: Path, steps: str, warns: bool
) -> None:
    words = arguments(digits, tmp_path, train__profile=steps, train__max_steps=3)
    printed = succeeds(train_command, *words, "--dry-run")
    assert ("\nwarning: train.profile" in printed) == warns


def test_rank_0_of_two_writes_the_profile(
    rank_server: RankServer, digits: Path, tmp_path: Path
) -> None:
    words = arguments(
        digits, tmp_path / "run", train__profile="[2, 3]", train__max_steps=5, log__every_steps=2
    )
    printed = rank_server.train(words, 2)
    assert traced_updates(tmp_path / "run", "steps-0000002-0000003") == 2
    assert printed.count("profile of steps 2 to 3") == 1 and "profiler_st" not in printed


def test_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    profiler = StepProfiler([1, 1], tmp_path / "missing" / "profile", "cpu")
    assert profiler.update(0) is None
    assert "warning: train.profile: could not write" in str(profiler.update(1))
    assert profiler.update(2) is None is profiler.update(3, True)
