"""A run resumed in the middle of an epoch on another number of ranks: the same samples, nearly the
same losses.

Three ranks have uneven shares. On the same number, with other data workers:
tests/engine/test_same_result.py.
"""

from pathlib import Path

import pytest
from forked_ranks import RankServer
from helpers import losses
from recording_dataset import read_until_now
from same_run import words_for

# 20 steps of 8 images in 2 epochs; the stop is in the middle of the second.
IMAGES, BATCH, STEPS, STOP = 80, 8, 20, 14


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3)])
def test_resume_on_another_number_of_ranks_reads_the_samples_that_are_left(
    rank_server: RankServer, tmp_path: Path, before: int, after: int
) -> None:
    notes = tmp_path / "notes"

    def train_to(step: int, folder: Path, ranks: int, *more: str) -> str:
        words = words_for(
            notes,
            folder,
            ranks,
            "plain",
            data__name="recording_dataset:open_set",
            data__kwargs=f"{{images: {IMAGES}}}",
            mix__mixup_alpha=0.0,
            train__epochs=2,
            train__global_batch_size=BATCH,
            train__max_steps=step,
        )
        return rank_server.train([*words, *more], ranks)

    train_to(STEPS, tmp_path / "whole", before)
    assert read_until_now(notes) == dict.fromkeys(range(IMAGES), 2), "each once an epoch"

    train_to(STOP, tmp_path / "parts", before)
    read = read_until_now(notes)
    assert read.total() == STOP * BATCH
    printed = train_to(STEPS, tmp_path / "parts", after, "--resume")
    assert read + read_until_now(notes) == dict.fromkeys(range(IMAGES), 2), (
        "by both together each once an epoch"
    )
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert f"changed since the checkpoint: ranks: {before} -> {after}" in " ".join(printed.split())
