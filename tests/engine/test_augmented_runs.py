"""Runs with policies, erasing, repeats, views and growing images: they learn, repeat to the bit, go on after a stop,
and say before they start what can't be."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import arguments, evaluations, losses, state_digest, train_here

from imagenet_cls.commands.program import main
from imagenet_cls.commands.train import train_command
from imagenet_cls.report.log import close_log


@pytest.fixture(autouse=True)
def log_closed() -> Iterator[None]:
    yield
    close_log()


# From 8 to 16 px over three epochs, every draw there is; 1,438 images, cut to 1,280: 5 steps of 256.
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


def test_the_same_bits_for_any_workers_and_in_two_parts(digits: Path, tmp_path: Path) -> None:
    def words(folder: str, **more: Any) -> list[str]:
        return arguments(digits, tmp_path / folder, "noisy", **(EVERYTHING | {"optimizer__lr": 0.2} | more))

    train_here(words("whole"))
    assert len(losses(tmp_path / "whole")) == 3 * 5
    train_here(words("parts", train__max_steps=7, data__num_workers=2))
    train_here([*words("parts"), "--resume", "--allow-change", "train.max_steps"])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert state_digest(tmp_path / "parts") == state_digest(tmp_path / "whole")
    assert evaluations(tmp_path / "whole")[-1]["top1_pct"] > 15  # a tenth by chance


@pytest.mark.parametrize("change", ["augment__policy", "augment__erasing", "data__repeats", "augment__progressive"])
def test_each_part_makes_another_run(digits: Path, tmp_path: Path, change: str) -> None:
    """Only the parts of batch and image differ: a key that nothing reads would leave the losses as they were."""
    without = {key: value for key, value in EVERYTHING.items() if not key.startswith(change)}
    if change == "data__repeats":
        without = {key: value for key, value in without.items() if key != "data__repeats_multiple"}
    for folder, settings in (("with", EVERYTHING), ("without", without)):
        train_here(arguments(digits, tmp_path / folder, "noisy", **(settings | {"train__max_steps": 2})))
    assert losses(tmp_path / "with") != losses(tmp_path / "without")


BAD = {
    "augment__policy=rand-m9-std0.5": "augment.policy: 'std0.5'",
    "augment__policy=randaugment": "augment.policy: unknown policy 'randaugment'; did you mean 'torchvision:rand",
    "augment__policy_kwargs__magnitude=9": "augment.policy_kwargs.magnitude: ",
    "augment__erasing__mode=noise": "augment.erasing.mode: 'noise' is not one of const, rand, pixel",
    "augment__erasing__scale=[0.5, 0.1]": "augment.erasing.scale: [0.5, 0.1] is not a list of 2 numbers",
    "augment__interpolation=area": "augment.interpolation: 'area' is not one of nearest, bilinear, bicubic, random",
    "augment__progressive__epochs=[0, 9]": "augment.progressive.sizes_px: ",
    "augment__splits=3": "augment.splits: 3 views of each image are for loss 'jsd'",
    "data__repeats=0": "data.repeats: 0 is out of range: 1 to 100",
    "data__repeats_multiple=256": "data.repeats_multiple: cuts epochs of repeated samples, and data.repeats is 1",
}


@pytest.mark.parametrize("word", BAD)
def test_what_cannot_be_is_told_with_its_key(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    key, _, value = word.partition("=")
    assert main(train_command, arguments(digits, tmp_path / "run", **{key: value})) == 2
    error = capsys.readouterr().err
    assert BAD[word] in error and len(error.splitlines()) == 1 and not (tmp_path / "run").exists()


def test_repeats_that_leave_no_batch_or_do_not_divide(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(digits, tmp_path / "run", data__repeats=3, data__repeats_multiple=2000)
    assert main(train_command, words) == 3
    assert "data.repeats_multiple" in capsys.readouterr().err
    words = arguments(
        digits, tmp_path / "run", data__repeats=3, data__repeats_multiple=256, train__global_batch_size=126
    )
    assert main(train_command, [*words, "--gpus", "3", "device=cpu"]) == 2
    assert "data.repeats_multiple: 256 samples do not divide among 3 ranks" in capsys.readouterr().err
