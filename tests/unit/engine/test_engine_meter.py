"""Losses and accuracies stay on the device until they are read."""

import math
import re

import torch

from imagenet_cls.engine.meter import Meter, top1_share
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group

ALONE = Group(RankInfo(), torch.device("cpu"))


def add(m: Meter, step: int, loss: float = 1.0, skipped: bool = False) -> None:
    m.add(
        step,
        0,
        0.1,
        torch.tensor([loss, loss / 2]),
        torch.tensor(2.0 * loss),
        torch.tensor(skipped),
    )


def test_every_step_is_there_once_and_the_last_tells_the_speed() -> None:
    m = Meter(ALONE, global_batch=8)
    assert m.flush() == []
    for step in (1, 2, 3):
        add(m, step, loss=step / 4, skipped=step == 2)
    assert list(m.time_waiting(iter([1, 2]))) == [1, 2]
    records = m.flush()
    assert [(r["step"], r["loss"], r["top1_pct"], r["grad_norm"], r.get("skipped")) for r in records] == [
        (1, 0.25, 12.5, 0.5, None), (2, 0.5, 25.0, 1.0, True), (3, 0.75, 37.5, 1.5, None),
    ]  # fmt: skip
    assert [("images_per_sec" in r, r["kind"], r["epoch"], r["lr"]) for r in records] == [
        (False, "train", 0, 0.1), (False, "train", 0, 0.1), (True, "train", 0, 0.1),
    ]  # fmt: skip
    last = records[-1]
    assert (
        last["images_per_sec"] > 0 and 0 <= last["data_wait_pct"] <= 100 and last["memory_mib"] > 10
    )
    assert m.flush() == []
    assert re.fullmatch(r"3 steps in \d:\d\d:\d\d, \d+ img/s", m.describe_total())


def test_a_step_without_a_norm_has_no_grad_norm() -> None:
    m = Meter(ALONE, global_batch=8)
    m.add(1, 0, 0.1, torch.tensor([1.0, 0.5]), None, torch.tensor(False))
    add(m, 2, loss=math.nan)
    without, with_nan = m.flush()
    assert "grad_norm" not in without and (without["loss"], without["top1_pct"]) == (1.0, 50.0)
    assert math.isnan(with_nan["grad_norm"])


def test_top1_share_of_hard_and_mixed_targets_two_outputs_and_several_views() -> None:
    logits = torch.eye(4)[[0, 1, 2, 2]].requires_grad_()
    targets = torch.tensor([0, 1, 3, 2])
    mixed = 0.6 * torch.eye(4)[targets] + 0.4 * torch.eye(4)[targets.flip(0)]
    for outputs, labels in ((logits, targets), (logits, mixed), ((logits, -logits), targets)):
        assert top1_share(outputs, labels).item() == 0.75
    assert top1_share(logits, targets[:2]).item() == 1.0, "the other rows are second views"
    assert not top1_share(logits, targets).requires_grad
