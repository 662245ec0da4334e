"""A save that fails on rank 0: all ranks end, one reports it, and the run can be resumed."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import RankServer
from helpers import noisy, state_digest
from same_run import ACCUMULATION, STEPS, checkpoints, records, words_for
from torch import nn

RANKS = 2
LIMIT_BYTES = 20_000  # the weights of a checkpoint take more, the records of all steps less
_SETTLING_PASSES = 2  # that DDP's buckets take before the first step

Folder = Callable[[int], Path]


class Limited(nn.Sequential):
    """Between two steps, which the environment names, rank 0 may write small files only."""

    def __init__(self, num_classes: int):
        super().__init__(*noisy(num_classes))
        first, last = map(int, os.environ.get("LIMITED_STEPS", "0 0").split())
        self.limited, self.passes = range(first, last + 1), -_SETTLING_PASSES

    def forward(self, images: Any) -> Any:
        self.passes += self.training
        step = -(-self.passes // ACCUMULATION)
        if self.training and os.environ["RANK"] == "0":
            most_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES if step in self.limited else most_bytes, most_bytes))
        return super().forward(images)


def arguments(few_images: Folder, folder: Path, on_error: str) -> list[str]:
    changes = {"checkpoint__on_error": on_error, "log__tensorboard": "false"}
    return [
        word.replace("helpers:noisy", f"{Path(__file__).stem}:Limited")
        for word in words_for(few_images(RANKS), folder, RANKS, **changes)
    ]


def text_of(output: Path) -> str:
    return "".join(output.read_text().splitlines())  # the console breaks lines


IN_THE_MIDDLE = ("12 999", 15, [5, 10])
AT_THE_END = (f"{STEPS - 2} 999", STEPS, [30, 35])


@pytest.mark.parametrize(
    ("limited", "at", "left"), [IN_THE_MIDDLE, pytest.param(*AT_THE_END, marks=pytest.mark.nightly)]
)
def test_failed_save_ends_all_ranks_and_the_run_resumes(
    rank_server: RankServer,
    few_images: Folder,
    undisturbed: Folder,
    tmp_path: Path,
    limited: str,
    at: int,
    left: list[int],
) -> None:
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    codes = rank_server.run(arguments(few_images, folder, "stop"), output, RANKS, LIMITED_STEPS=limited)
    assert codes[0] == 5 and codes[1] != 0, codes
    if at == STEPS:
        assert codes == [5, 5]
    assert text_of(output).count(f"step-{at:07d}: File too large (") == 1, text_of(output)
    assert "Traceback" not in text_of(output)
    steps = [record["step"] for record in records(folder) if record["kind"] == "train"]
    assert at <= len(steps) <= at + 5
    assert checkpoints(folder)[-2:] == left
    assert rank_server.run([*arguments(few_images, folder, "stop"), "--resume"], output, RANKS) == [0] * RANKS
    assert f"at step {left[-1]}" in text_of(output)
    assert state_digest(folder) == state_digest(undisturbed(RANKS))
    assert records(folder) == records(undisturbed(RANKS))


@pytest.mark.nightly
def test_failed_save_with_on_error_continue_trains_on(
    rank_server: RankServer, few_images: Folder, undisturbed: Folder, tmp_path: Path
) -> None:
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    arguments_continue = arguments(few_images, folder, "continue")
    assert rank_server.run(arguments_continue, output, RANKS, LIMITED_STEPS="12 17") == [0] * RANKS, text_of(output)
    assert text_of(output).count("training continues (checkpoint.on_error)") == 1  # the save of step 15
    assert state_digest(folder) == state_digest(undisturbed(RANKS))
    assert records(folder) == records(undisturbed(RANKS))
    assert checkpoints(folder) == checkpoints(undisturbed(RANKS))
    last = [*arguments(few_images, tmp_path / "last", "continue")]
    assert rank_server.run(last, output, RANKS, LIMITED_STEPS=f"{STEPS - 2} 999") == [5] * RANKS
