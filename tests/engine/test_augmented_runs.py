"""Runs with policies, erasing, repeated samples and progressive sizes."""

from pathlib import Path
from typing import Any

import pytest
from helpers import arguments, losses, state_digest, train_here

# All random augmentations, 8 to 16 px over three epochs; 1,438 images, cut to 1,280: 5 steps of
# 256.
EVERYTHING: dict[str, Any] = {
    "augment__policy": "rand-m5-mstd0.5-inc1",
    "augment__interpolation": "random",
    "augment__color_jitter__prob": 0.5,
    "augment__color_jitter__brightness": 0.3,
    "augment__grayscale_prob": 0.1,
    "augment__erasing__prob": 0.4,
    "augment__erasing__mode": "pixel",
    "augment__erasing__max_count": 2,
    "augment__progressive": "{epochs: [0, 2], sizes_px: [8, 16], multiple_px: 4}",
    "data__repeats": 3,
    "data__repeats_multiple": 256,
    "train__epochs": 3,
    "train__global_batch_size": 256,
    "train__micro_batch_size": 128,
}


@pytest.mark.nightly
def test_resume_with_other_workers_gives_the_same_bits(digits: Path, tmp_path: Path) -> None:
    def words(folder: str, **more: Any) -> list[str]:
        return arguments(
            digits, tmp_path / folder, "noisy", **(EVERYTHING | {"optimizer__lr": 0.2} | more)
        )

    train_here(words("whole"))
    assert len(losses(tmp_path / "whole")) == 3 * 5
    train_here(words("parts", train__max_steps=7, data__num_workers=2))
    train_here([*words("parts"), "--resume", "--allow-change", "train.max_steps"])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert state_digest(tmp_path / "parts") == state_digest(tmp_path / "whole")


@pytest.mark.parametrize(
    "change",
    [
        "augment__policy",
        *(
            pytest.param(key, marks=pytest.mark.nightly)
            for key in ("augment__erasing", "data__repeats", "augment__progressive")
        ),
    ],
)
def test_each_augmentation_changes_the_losses(digits: Path, tmp_path: Path, change: str) -> None:
    """A key that nothing reads would not change the losses."""
    without = {key: value for key, value in EVERYTHING.items() if not key.startswith(change)}
    if change == "data__repeats":
        without = {key: value for key, value in without.items() if key != "data__repeats_multiple"}
    for folder, settings in (("with", EVERYTHING), ("without", without)):
        train_here(
            arguments(digits, tmp_path / folder, "noisy", **(settings | {"train__max_steps": 2}))
        )
    assert losses(tmp_path / "with") != losses(tmp_path / "without")
