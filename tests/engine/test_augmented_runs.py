"""Runs with policies, erasing, repeated samples and progressive sizes."""

from pathlib import Path
from typing import Any

import pytest
from helpers import arguments, assert_resumes, losses, train_here

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
def test_resume_gives_the_same_bits(digits: Path, tmp_path: Path) -> None:
    workers = {"data__num_workers": 2, "optimizer__lr": 0.2}
    assert_resumes(digits, tmp_path, 7, "noisy", **EVERYTHING, **workers)
    assert len(losses(tmp_path / "whole")) == 3 * 5


@pytest.mark.nightly
def test_each_augmentation_changes_the_losses(digits: Path, tmp_path: Path) -> None:
    """A key that nothing reads would not change the losses."""

    def losses_without(*keys: str) -> list[float]:
        settings = {key: value for key, value in EVERYTHING.items() if not key.startswith(keys)}
        folder = tmp_path / "-".join(keys)
        train_here(arguments(digits, folder, "noisy", **settings, train__max_steps=2))
        return losses(folder)

    everything = losses_without("none")
    for change in ("augment__policy", "augment__erasing", "data__repeats", "augment__progressive"):
        assert losses_without(change) != everything
