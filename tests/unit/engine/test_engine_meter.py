"""Losses and accuracies stay on the device until they are read."""

import re
from typing import Any

import pytest
import torch
from helpers import single_rank
from sklearn.metrics import f1_score
from torch import nn

from imagenet_cls.engine.meter import Meter, StepResult
from imagenet_cls.engine.model_with_loss import ModelWithLoss
from imagenet_cls.tasks.multi_label import MultiLabel
from imagenet_cls.tasks.single_label import SingleLabel

ALONE = single_rank()
NOT_SKIPPED = torch.tensor(False)


def add(m: Meter, step: int, loss: float = 1.0, skipped: bool = False) -> None:
    loss_and_metric, norm = torch.tensor([loss, loss / 2]), torch.tensor(2.0 * loss)
    m.add(StepResult(step, 0, 0.1, loss_and_metric, norm, torch.tensor(skipped)))


def test_every_step_is_there_once_and_the_last_tells_the_speed() -> None:
    m = Meter(ALONE, global_batch=8)
    assert m.flush() == []
    for step in (1, 2, 3):
        add(m, step, loss=step / 4, skipped=step == 2)
    records = m.flush()
    common = {"kind": "train", "epoch": 0, "lr": 0.1}
    *first, last = records
    assert first == [
        {**common, "step": 1, "loss": 0.25, "top1_pct": 12.5, "grad_norm": 0.5},
        {**common, "step": 2, "loss": 0.5, "top1_pct": 25.0, "grad_norm": 1.0, "skipped": True},
    ]
    assert (last["step"], last["loss"]) == (3, 0.75) and "skipped" not in last
    assert last["images_per_sec"] > 0 and last["memory_mib"] > 10
    assert 0 <= last["data_wait_pct"] <= 100
    assert m.flush() == []


def test_speed_is_without_evaluations_and_the_duration_is_that_of_the_process() -> None:
    """The last line of a run: ten minutes, of which 100 seconds were steps and waiting."""
    m = Meter(ALONE, global_batch=1000)
    for step in (1, 2, 3):
        add(m, step)
    m.created_at -= 600.0
    m.started_at -= 100.0
    m.waited_sec += 25.0
    last = m.flush()[-1]
    assert last["images_per_sec"] == pytest.approx(30, rel=0.05)
    assert last["data_wait_pct"] == pytest.approx(25, rel=0.05)
    m.started_at -= 500.0
    m.restart_clock()  # after an evaluation of 500 seconds
    add(m, 4)
    add(m, 5)
    m.started_at -= 200.0 / 3
    m.flush()
    assert re.fullmatch(r"5 steps in 0:10:0\d, (29|30) img/s", m.describe_total())


def test_means_of_an_epoch_are_of_its_steps_in_this_process() -> None:
    m = Meter(ALONE, global_batch=8)
    assert m.describe_epoch(steps=4) == ""  # resumed before an evaluation
    add(m, 3, loss=0.8)
    m.flush()
    add(m, 4, loss=0.4)
    m.flush()
    assert m.describe_epoch(steps=4) == "train loss 0.6000, 30.0 % in 2 steps"
    for step in (5, 6, 7, 8):
        m.add(StepResult(step, 1, 0.1, torch.tensor([step / 8, 0.5]), torch.ones(()), NOT_SKIPPED))
        m.flush()
    assert m.describe_epoch(steps=4) == "train loss 0.8125, 50.0 %"
    assert m.flush() == [] and m.describe_epoch(steps=4) == "train loss 0.8125, 50.0 %"


def share_of(outputs: Any, targets: torch.Tensor) -> float:
    """The metric of a model with these outputs."""
    module = ModelWithLoss(nn.Module(), lambda *_: torch.tensor(0.0), SingleLabel().step_metric)
    module.model.forward = lambda _: outputs
    _, loss_and_metric = module(torch.empty(0), targets)
    assert not loss_and_metric.requires_grad
    return loss_and_metric[1].item()


def test_top1_accuracy_of_hard_and_mixed_targets_two_outputs_and_several_views() -> None:
    logits = torch.eye(4)[[0, 1, 2, 2]].requires_grad_()
    targets = torch.tensor([0, 1, 3, 2])
    mixed = 0.6 * torch.eye(4)[targets] + 0.4 * torch.eye(4)[targets.flip(0)]
    for outputs, labels in ((logits, targets), (logits, mixed), ((logits, -logits), targets)):
        assert share_of(outputs, labels) == 0.75
    assert share_of(logits, targets[:2]) == 1.0, "the other rows are second views"


def test_f1_of_images_is_that_of_scikit_learn() -> None:
    logits = torch.randn(50, 4)
    targets = (torch.rand(50, 4) < 0.3).float()
    found = MultiLabel(0.4).step_metric(logits, targets)
    predicted = logits.sigmoid() >= 0.4
    expected = f1_score(targets, predicted, average="samples", zero_division=1)
    assert found.item() == pytest.approx(expected)
