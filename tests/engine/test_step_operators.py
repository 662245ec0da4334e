"""The operators of a training step beyond those of a plain loop: each is a launch on a GPU."""

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, single_rank
from torch import Tensor, nn

from imagenet_cls.engine import step

sys.path.insert(0, str(REPOSITORY))

from benchmarks.step import (
    BATCHES,
    ReferenceLoop,
    TrainingLoop,
    operators_of_steps,
    synthetic,
)

IMAGES = 32
# By case: overrides, and how many operators a step of `train()` adds at most.
CASES: dict[str, tuple[list[str], float]] = {
    "plain": ([], 14),
    "EMA": (["ema.decay=0.9"], 15),
    "clipping": (["train.clip_norm=1.0"], 12),
    "erasing": (["augment.erasing.prob=1.0"], 22),
    "fp16": ([], 14),
}


def added_operators(case: str, folder: Path) -> float:
    """The operators that `train()` adds to a step of a plain loop, for a model with as many tensors
    as a ResNet-50.
    """
    words = [*synthetic(8), "model.name=benchmarks.step:ManyTensors", *CASES[case][0]]
    words += [f"train.global_batch_size={IMAGES}", "log.every_steps=1000000"]
    ours = TrainingLoop(words, single_rank(), folder)
    parts = ours.parts
    if case == "fp16":  # on a CPU, without autocast
        parts.scaler = parts.updater.scaler = torch.amp.GradScaler("cpu")
    plain = ReferenceLoop(parts)
    ours(1)  # creates the state of the optimizer
    plain(1)
    found, again, expected = (operators_of_steps(loop) for loop in (ours, ours, plain))
    ours.close()
    assert found == again
    return (found.total() - expected.total()) / BATCHES


@pytest.mark.parametrize("case", CASES)
def test_step_adds_few_operators_to_a_plain_loop(case: str, tmp_path: Path) -> None:
    assert added_operators(case, tmp_path) <= CASES[case][1]


def norm_of_a_loop(parameters: Iterable[nn.Parameter]) -> Tensor:
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()


def test_operators_of_a_loop_over_tensors_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "gradient_norm", norm_of_a_loop)
    assert added_operators("plain", tmp_path) > CASES["plain"][1] + 100
