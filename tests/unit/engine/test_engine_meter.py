"""Losses stay on the device until they are read."""

import torch

from imagenet_cls.engine.meter import Meter
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group

ALONE = Group(RankInfo(), torch.device("cpu"))


def add(m: Meter, step: int, loss: float = 1.0, skipped: bool = False) -> None:
    m.add(step, 0, 0.1, torch.tensor(loss), torch.tensor(2.0 * loss), torch.tensor(skipped))


def test_every_step_is_there_once_and_the_last_tells_the_speed() -> None:
    m = Meter(ALONE, global_batch=8)
    assert m.flush() == []
    for step in (1, 2, 3):
        add(m, step, loss=step / 4, skipped=step == 2)
    assert list(m.time_waiting(iter([1, 2]))) == [1, 2]
    records = m.flush()
    assert [(r["step"], r["loss"], r["grad_norm"], r.get("skipped")) for r in records] == [
        (1, 0.25, 0.5, None), (2, 0.5, 1.0, True), (3, 0.75, 1.5, None),
    ]  # fmt: skip
    assert [("images_per_sec" in r, r["kind"], r["epoch"], r["lr"]) for r in records] == [
        (False, "train", 0, 0.1), (False, "train", 0, 0.1), (True, "train", 0, 0.1),
    ]  # fmt: skip
    last = records[-1]
    assert last["images_per_sec"] > 0 and 0 <= last["data_wait_pct"] <= 100 and last["memory_mib"] > 10
    assert m.flush() == []
