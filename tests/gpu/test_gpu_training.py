"""Training on a GPU: no waits, overflow in half precision, and real out-of-memory errors."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import arguments, assert_resumes, records, train_here
from test_host_synchronizations import reads_after_first_step
from torch import Tensor, nn
from torch.nn import functional

from imagenet_cls.errors import ResourceError

pytestmark = pytest.mark.gpu

TINY = {
    "data__name": "synthetic",
    "data__kwargs": "{train_images: 88, val_images: 20, num_classes: 10, size_px: 16}",
    "train__global_batch_size": 8,
    "train__epochs": 2,
    "device": "cuda",
}


def steep() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss whose gradient times the initial loss scale overflows in half precision."""
    return lambda logits, targets: 1000 * functional.cross_entropy(logits, targets)


def greedy(num_classes: int) -> nn.Module:
    class Greedy(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            if self.training:
                torch.empty(1 << 45, dtype=torch.uint8, device=images.device)
            return super().forward(images.flatten(1))

    return Greedy(768, num_classes)


@pytest.mark.parametrize("words", [[], ["train.clip_norm=1.0"], ["mix.mixup_alpha=0.2"]])
def test_steps_on_a_gpu_do_not_synchronize(words: list[str]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reads_after_first_step(device, "model.name=helpers:noisy", *words)


def test_fp16_overflow_resumes_to_the_same_bits(tmp_path: Path) -> None:
    changes = TINY | {
        "train__precision": "fp16",
        "train__deterministic": "true",
        "optimizer__lr": 1e-5,
    }
    changes |= {
        "loss__name": f"{__name__}:steep",
        "train__max_nonfinite_steps": 1,
        "checkpoint__every_steps": 3,
    }
    # A run of which every step is skipped is an error.
    assert_resumes(tmp_path, tmp_path, 11, "noisy", **changes)
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        steps = records(folder, "train")
        assert steps[0].get("skipped") and not steps[-1].get("skipped") and len(steps) == 22
        assert not any("NaN" in event["message"] for event in records(folder, "event"))


def test_out_of_memory_error_states_batch_size_and_memory(tmp_path: Path) -> None:
    with pytest.raises(ResourceError) as error:
        train_here(
            arguments(tmp_path, tmp_path / "run", **TINY, **{"model.name": f"{__name__}:greedy"})
        )
    first, second, third = str(error.value).splitlines()
    sizes = r"8 images at once of 16 px \(\d+ of 16 px in evaluation\)"
    assert re.fullmatch(rf"Out of memory with {sizes}\.", first)
    assert "CUDA out of memory" in second and "train.micro_batch_size" in third
