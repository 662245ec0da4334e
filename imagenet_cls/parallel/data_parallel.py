"""One process, several GPUs: torch.nn.DataParallel, for `parallel.mode: dp`.

DistributedDataParallel (`wrap`) is faster; this needs no launcher. Each replica normalises with its own images, and
BatchNorm's running statistics are the first GPU's; the other replicas' are discarded after each forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.errors import UsageError


@dataclass(frozen=True)
class Devices:
    """The devices of one process.

    all: the first one holds parameters and running statistics. output: where logits are gathered and the loss is
    computed. note: a message for the user about this choice, or "".
    """

    all: tuple[torch.device, ...]
    output: torch.device
    note: str = ""


def choose_devices(device: str, ids: Sequence[int] | None, output_id: int | None, visible: int) -> Devices:
    """The devices of a DataParallel run, numbered as CUDA_VISIBLE_DEVICES orders the `visible` GPUs.

    device: `cpu`, or anything else for GPUs. ids: in any order, the first holds the parameters; None: all visible.
    output_id: None for the first. With fewer than two visible GPUs the model runs on one device.

    Raises UsageError for missing GPUs.
    """
    if device == "cpu" or visible == 0:
        cpu = torch.device("cpu")
        return Devices((cpu,), cpu, "parallel.mode=dp: no GPU is used, so the model runs on the CPU")
    if visible == 1:
        only = torch.device("cuda", 0)
        return Devices((only,), only, "parallel.mode=dp: one GPU is visible, so the model runs on it")
    chosen = list(range(visible)) if ids is None else list(ids)
    output = chosen[0] if output_id is None else output_id
    absent = sorted({index for index in (*chosen, output) if index >= visible})
    if absent:
        key = "device_ids" if set(absent) & set(chosen) else "output_device"
        raise UsageError(
            f"parallel.{key} names GPU {_listing(absent)}, but {visible} are visible here: 0 to {visible - 1}.\n"
            "Number GPUs from 0 in the order of CUDA_VISIBLE_DEVICES."
        )
    note = (
        f"parallel.mode=dp: DataParallel on GPUs {_listing(chosen)} of one process. DistributedDataParallel is faster: "
        f"leave parallel.mode at auto and start with `bash scripts/dist_train.sh CONFIG {len(chosen)}`"
        if len(chosen) > 1
        else f"parallel.mode=dp: only GPU {chosen[0]} is named, so the model runs on it"
    )
    return Devices(tuple(torch.device("cuda", index) for index in chosen), torch.device("cuda", output), note)


def wrap_data_parallel(model: nn.Module, devices: Devices) -> nn.Module:
    """`model`, whose tensors are on the first device, replicated on all devices; the model itself if there is one.

    For forward and backward, in training and in evaluation. Checkpoints use the model itself.
    """
    return model if len(devices.all) < 2 else AutocastDataParallel(model, devices)


class AutocastDataParallel(nn.DataParallel):
    """torch's DataParallel with the caller's autocast in every replica.

    Takes a batch (B, ...) on any device and returns logits (B, classes) on the output device.
    """

    def __init__(self, model: nn.Module, devices: Devices):
        super().__init__(model, device_ids=list(devices.all), output_device=devices.output)
        self.training = model.training  # a new module is in training mode

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        return super().parallel_apply([with_callers_autocast(replica, "cuda") for replica in replicas], inputs, kwargs)


def with_callers_autocast(replica: Callable[..., Tensor], device_type: str) -> Any:
    """`replica`, for a call in another thread with this thread's autocast.

    Autocast is thread-local. torch's DataParallel passes on whether it is enabled, but not the dtype: bfloat16 would
    become float16, without a loss scale.
    """
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def forward(*arguments: Any, **keywords: Any) -> Tensor:
        with torch.autocast(device_type, dtype, enabled=enabled):
            return replica(*arguments, **keywords)

    return forward


def _listing(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))
