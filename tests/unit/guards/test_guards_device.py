"""Errors of a device are explained, and others pass. Peak memory."""

from collections.abc import Iterator

import pytest
import torch

from imagenet_cls.errors import DataError, ResourceError, UsageError
from imagenet_cls.guards.device import explain_device_errors
from imagenet_cls.parallel.memory import peak_memory_bytes


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_operator_without_a_deterministic_kernel_exits_2(deterministic: None) -> None:
    with pytest.raises(UsageError, match="uses put_,"), explain_device_errors():
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))  # the only such operator of CPUs


def test_error_of_a_replica_names_the_operator() -> None:
    text = "pad_cuda does not have a deterministic implementation, but you set"
    with pytest.raises(UsageError, match="uses pad_cuda,"), explain_device_errors():
        raise RuntimeError(f"Caught RuntimeError in replica 1 on device 1.\nRuntimeError: {text}")


def test_failed_assertion_of_a_kernel_gets_a_note_on_how_to_find_it() -> None:
    with pytest.raises(torch.AcceleratorError) as caught, explain_device_errors():
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nand more", 710)
    assert "CUDA_LAUNCH_BLOCKING=1" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "FIND was unable to find an engine to execute this computation",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback:\n  File ...\nCUDA "
        "out of memory. Tried",
        "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2 "
        "GiB.",
        "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    ],
)
def test_out_of_memory_is_recognized_by_its_text_and_names_sizes(text: str) -> None:
    with pytest.raises(ResourceError) as caught, explain_device_errors("4 images of 224 px"):
        raise RuntimeError(text)
    first, detail, _ = str(caught.value).splitlines()
    assert caught.value.exit_code == 5 and "4 images of 224 px" in first
    assert any(part in detail for part in ("out of memory", "ALLOC_FAILED", "unable to find"))


def test_memory_of_the_host_is_named() -> None:
    with pytest.raises(ResourceError, match="\ncan't allocate memory"), explain_device_errors():
        torch.empty(2**60, dtype=torch.uint8, device="cpu")


def test_other_errors_pass() -> None:
    for error in (RuntimeError("a bug"), DataError("x", "y")):
        with pytest.raises(type(error), match=str(error)) as caught, explain_device_errors():
            raise error
        assert not hasattr(caught.value, "__notes__")


def test_peak_memory_includes_what_was_freed() -> None:
    block = torch.ones(300 << 20, dtype=torch.uint8)
    del block
    assert peak_memory_bytes() > 300 << 20
