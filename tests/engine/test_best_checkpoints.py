"""Which checkpoints stay where the raw weights and the EMA are best at different steps."""

from pathlib import Path

import torch
from helpers import arguments, evaluations, noisy, train_here
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import list_checkpoints, read_checkpoint, step_of

STEPS = 11  # in an epoch


class Reversed(nn.Sequential):
    """From the last step of the second epoch on, the classifier's weight is negated.

    The EMA with a decay of 0.8 hardly changes at that step, and is negated four steps later.
    """

    def __init__(self, num_classes: int):
        super().__init__(*noisy(num_classes))
        self.steps, self.turned = 0, torch.zeros(0)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            head = self[-1]
            assert isinstance(head, nn.Linear)
            if self.steps == 2 * STEPS:
                self.turned = -head.weight.detach().clone()
            if self.steps >= 2 * STEPS:
                with torch.no_grad():
                    head.weight.copy_(self.turned)
        return super().forward(images)


def test_best_checkpoint_of_each_kind_stays(digits: Path, tmp_path: Path) -> None:
    settings = {"train__epochs": 3, "ema__decay": 0.8, "checkpoint__keep_last": 1, "checkpoint__every_steps": 4}
    train_here(
        arguments(
            digits, tmp_path, model__name=f"{Path(__file__).stem}:Reversed", eval__every_epochs=1, optimizer__lr=0.1,
            **settings,
        )
    )  # fmt: skip
    best = {}
    for kind in ("raw", "ema"):
        results = {record["step"]: record["top1_pct"] for record in evaluations(tmp_path) if record["weights"] == kind}
        best[kind] = max(results, key=lambda step: results[step])
    assert best == {"raw": STEPS, "ema": 2 * STEPS}, "the premise of this test"
    stay = list_checkpoints(tmp_path / "checkpoints")
    assert sorted(map(step_of, stay)) == [STEPS, 2 * STEPS, 3 * STEPS]
    assert all(read_checkpoint(path) for path in stay)
