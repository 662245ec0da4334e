"""Copies of the next batch to a GPU while the current one is used."""

from collections.abc import Iterator

import torch

from imagenet_cls.data.device import DevicePrefetch
from imagenet_cls.data.loader import TrainBatch


def batches(count: int, read: list[int], pin: bool = False) -> Iterator[TrainBatch]:
    for number in range(count):
        read.append(number)
        images = torch.full((4, 3, 64, 64), number, dtype=torch.uint8).to(
            memory_format=torch.channels_last
        )
        targets = torch.full((4,), number)
        yield (
            TrainBatch(images.pin_memory(), targets.pin_memory())
            if pin
            else TrainBatch(images, targets)
        )


def test_on_a_cpu_batches_are_unchanged_and_read_when_needed() -> None:
    read: list[int] = []
    ahead = DevicePrefetch(torch.device("cpu"))(batches(3, read))
    assert next(ahead).images[0, 0, 0, 0] == 0 and read == [0]
    assert [int(batch.targets[0]) for batch in ahead] == [1, 2]
