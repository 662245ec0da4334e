"""Laws 1 and 2, on runs of one rank: the result depends on the config and the data, and on nothing else."""

from itertools import product
from pathlib import Path

import pytest
from helpers import arguments, evaluations, losses, newest, state_digest, train_here


@pytest.fixture(scope="module")
def noisy_run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with BatchNorm, dropout, EMA and accumulation that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train_here(arguments(digits, folder, "noisy", ema__decay=0.9, train__micro_batch_size=64))
    return folder


@pytest.mark.parametrize("workers", [0, 3])
def test_same_bits_again_for_any_number_of_workers(noisy_run: Path, digits: Path, tmp_path: Path, workers: int) -> None:
    words = arguments(
        digits, tmp_path / "run", "noisy", ema__decay=0.9, train__micro_batch_size=64, data__num_workers=workers
    )
    train_here(words)
    assert state_digest(tmp_path / "run") == state_digest(noisy_run)


def test_another_seed_gives_other_bits(noisy_run: Path, digits: Path, tmp_path: Path) -> None:
    """Else the test above could not fail."""
    train_here(arguments(digits, tmp_path / "run", "noisy", ema__decay=0.9, train__micro_batch_size=64, seed=1))
    assert state_digest(tmp_path / "run") != state_digest(noisy_run)


def test_losses_do_not_depend_on_accumulation(digits: Path, tmp_path: Path) -> None:
    curves = []
    for micro in (128, 64, 32):
        folder = tmp_path / str(micro)
        train_here(arguments(digits, folder, train__micro_batch_size=micro))
        curves.append(losses(folder))
    assert len(curves[0]) == 22
    assert curves[0][-1] < 0.95 * curves[0][0]  # it learns, so the comparison is about something
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "stop_at"),
    [
        ("sgd", 4),
        ("lamb", 11),
        ("adamw", 15),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in product(["sgd", "lamb", "adamw"], [4, 11, 15])),
        pytest.param("timm:lookahead_adamw", 15, marks=pytest.mark.nightly),  # synchronizes every 6 steps
    ],
)
def test_a_run_in_two_parts_ends_in_the_same_bits(digits: Path, tmp_path: Path, optimizer: str, stop_at: int) -> None:
    """Stopped in the first epoch, between the epochs, in the second; fused, channels-last optimizers and timm's."""

    def words(folder: str, **more: object) -> list[str]:
        common = {"optimizer.name": optimizer, "optimizer.lr": 0.01, "ema.decay": 0.9, "train.micro_batch_size": 64}
        return arguments(digits, tmp_path / folder, "noisy", **common, **more)

    train_here(words("whole"))
    train_here(words("parts", train__max_steps=stop_at))
    train_here([*words("parts"), "--resume"])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    # The cut adds an evaluation of its own, which changes no weight; so leave `best` out and compare tensors.
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "optimizer.json"):
        whole, parts = newest(tmp_path / "whole") / name, newest(tmp_path / "parts") / name
        assert parts.read_bytes() == whole.read_bytes(), name


def test_every_image_counts_once(noisy_run: Path) -> None:
    records = evaluations(noisy_run)
    assert [(r["weights"], r["step"], r["images"]) for r in records] == [
        ("raw", 11, 359), ("ema", 11, 359), ("raw", 22, 359), ("ema", 22, 359),
    ]  # fmt: skip
