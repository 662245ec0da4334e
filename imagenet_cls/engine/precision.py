"""Precision and determinism of the kernels."""

from contextlib import AbstractContextManager, nullcontext

import torch

from imagenet_cls.config.schema import TrainConfig
from imagenet_cls.errors import UsageError


def choose_precision(train: TrainConfig, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast, or None for fp32. `auto` is fp32 on a CPU, where bf16 was slower for
    ResNet-50. Raises UsageError for fp16 on a CPU, and for bf16 on a GPU that only emulates it.
    """
    if train.precision == "auto":
        return auto_dtype(train, device) if device.type == "cuda" else None
    if train.precision == "fp16" and device.type == "cpu":
        raise UsageError(
            "train.precision=fp16 needs a GPU.",
            "On a CPU use train.precision=fp32 (or auto, or bf16).",
        )
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if train.precision == "bf16" and not has_bf16:
        raise UsageError(
            "train.precision=bf16 needs a GPU of compute capability 8.0 (Ampere) or higher.",
            "Use train.precision=auto, fp16 or fp32.",
        )
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[train.precision]


def auto_dtype(train: TrainConfig, device: torch.device) -> torch.dtype | None:
    """The dtype that `train.precision=auto` stands for on a GPU.

    GPUs before Ampere (compute capability 8.0) only emulate bf16, and cuDNN has no convolutions for
    it there. From Volta (7.0) on they have fast fp16, whose loss scale SAM can't use.
    """
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    has_fp16 = torch.cuda.get_device_capability(device) >= (7, 0)
    return torch.float16 if has_fp16 and train.sam_rho is None else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager:
    """The context of forward and loss."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def set_deterministic(deterministic: bool, device: torch.device) -> None:
    """Choose deterministic kernels on a CPU, and on a GPU with `deterministic`. Without it, cuDNN
    chooses the fastest kernels (benchmark mode).
    """
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time and only matters for bugs
    if device.type == "cpu":
        # By default `index_put_(accumulate=True)` adds in a random order on several threads. It is
        # the backward pass of `table[index]`, such as Swin's relative position bias. With
        # `warn_only` an operator without a deterministic kernel is no error.
        torch.use_deterministic_algorithms(True, warn_only=True)
    elif device.type == "cuda":
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = not deterministic
