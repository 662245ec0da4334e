"""One process, several GPUs: torch.nn.DataParallel, for `parallel.mode: dp`.

Owns which GPUs take part, and what DataParallel leaves to its users: autocast inside the replicas. Refuses GPUs that
are not there. DistributedDataParallel (`wrap`) is faster; this needs no launcher. Called by `engine.build`, and by
`engine.run` for the device that a run has its parameters on.

What to expect of it: each replica normalises with its own images, and BatchNorm's running statistics are those of the
first GPU's; the other replicas' are dropped with them after each forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.errors import UsageError


@dataclass(frozen=True)
class Devices:
    """What one process computes on.

    all: the first one holds parameters and running statistics. output: where logits are joined and the loss is
    computed. note: what a user should know about this choice; "" for nothing.
    """

    all: tuple[torch.device, ...]
    output: torch.device
    note: str = ""


def choose_devices(device: str, ids: Sequence[int] | None, output_id: int | None, visible: int) -> Devices:
    """The GPUs of a DataParallel run. A pure function; `visible` GPUs are numbered as CUDA_VISIBLE_DEVICES orders them.

    device: `cpu`, or anything else for GPUs. ids: in any order, the first holds the parameters; None: all that are
    visible. output_id: None for the first. With fewer than two visible GPUs the run takes what there is.

    Raises UsageError for GPUs that are not there.
    """
    if device == "cpu" or visible == 0:
        cpu = torch.device("cpu")
        return Devices((cpu,), cpu, "parallel.mode=dp: no GPU takes part, so the model runs on the CPU, undivided")
    if visible == 1:
        only = torch.device("cuda", 0)
        return Devices((only,), only, "parallel.mode=dp: one GPU is visible, so the model runs on it, undivided")
    chosen = list(range(visible)) if ids is None else list(ids)
    output = chosen[0] if output_id is None else output_id
    absent = sorted({index for index in (*chosen, output) if index >= visible})
    if absent:
        key = "device_ids" if set(absent) & set(chosen) else "output_device"
        raise UsageError(
            f"parallel.{key} names GPU {_listing(absent)}, but {visible} are visible here: 0 to {visible - 1}.\n"
            "Name GPUs by their place among those that CUDA_VISIBLE_DEVICES leaves, from 0."
        )
    note = (
        f"parallel.mode=dp: DataParallel on GPUs {_listing(chosen)} of one process. DistributedDataParallel is faster: "
        f"leave parallel.mode at auto and start with `bash scripts/dist_train.sh CONFIG {len(chosen)}`"
        if len(chosen) > 1
        else f"parallel.mode=dp: only GPU {chosen[0]} is named, so the model runs on it, undivided"
    )
    return Devices(tuple(torch.device("cuda", index) for index in chosen), torch.device("cuda", output), note)


def spread(model: nn.Module, devices: Devices) -> nn.Module:
    """`model`, whose tensors are on the first device, run on all of them; the model itself where there is one only.

    For forward and backward, in training and in evaluation. Checkpoints take the model itself, so that no name carries
    a `module.`.
    """
    return model if len(devices.all) < 2 else Replicas(model, devices)


class Replicas(nn.DataParallel):
    """torch's DataParallel with the caller's autocast in every replica.

    Takes a batch (B, ...) on any device, B at best a multiple of the devices; gives logits (B, classes) on the output
    device.
    """

    def __init__(self, model: nn.Module, devices: Devices):
        super().__init__(model, device_ids=list(devices.all), output_device=devices.output)
        self.training = model.training  # that a wrapper was made changes no mode

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        return super().parallel_apply([as_called_here(replica, "cuda") for replica in replicas], inputs, kwargs)


def as_called_here(replica: Callable[..., Tensor], device_type: str) -> Any:
    """`replica`, to be called in another thread as if it were called in this one.

    Autocast belongs to a thread. torch's DataParallel tells the replicas' threads whether it is on, but not the dtype:
    without this, bfloat16 would become float16 in them, unseen and without a loss scale.
    """
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def forward(*arguments: Any, **keywords: Any) -> Tensor:
        with torch.autocast(device_type, dtype, enabled=enabled):
            return replica(*arguments, **keywords)

    return forward


def _listing(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))
