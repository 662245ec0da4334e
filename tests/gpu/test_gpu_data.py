"""Batches on a GPU: copies ahead of their use, and random erasing."""

import pytest
import torch
from test_data_device_prefetch import batches
from test_data_erasing import MODES, boxes_for

from imagenet_cls.config.schema import ErasingConfig
from imagenet_cls.data.device import DevicePrefetch, erase

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", MODES)
def test_erase_on_a_gpu_fills_the_same_boxes(mode: str) -> None:
    keys = list(range(16))
    boxes = boxes_for(keys, ErasingConfig(prob=0.5, max_count=2), 32)
    there, again = (
        erase(torch.full((16, 3, 32, 32), 7.0, device="cuda"), boxes, torch.tensor(keys), mode)
        for _ in range(2)
    )
    here = erase(torch.full((16, 3, 32, 32), 7.0), boxes, torch.tensor(keys), mode)
    assert torch.equal(there, again) and torch.equal((there != 7).cpu(), here != 7)


def test_on_a_gpu_batches_are_copied_in_order_without_a_synchronization() -> None:
    device, sums = torch.device("cuda", torch.cuda.current_device()), []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in DevicePrefetch(device)(batches(20, [], pin=True)):
            assert batch.images.device == batch.targets.device == device
            assert batch.images.is_contiguous(memory_format=torch.channels_last)
            busy = torch.randn(500, 500, device=device)
            for _ in range(20):  # later copies must not overwrite what is still in use
                busy = busy @ busy / 500
            sums.append(batch.images.float().mean() + batch.targets.float().mean() + 0 * busy.sum())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(sums).tolist() == [2.0 * number for number in range(20)]
