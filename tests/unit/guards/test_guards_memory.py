"""Out-of-memory errors are explained; all other errors pass. Peak memory."""

import pytest
import torch

from imagenet_cls.errors import DataError, ResourceError, out_of_memory_line
from imagenet_cls.guards.device import explain_device_errors
from imagenet_cls.parallel.memory import peak_memory_bytes, reset_peak_memory


def test_out_of_memory_names_sizes_and_remedies() -> None:
    gpu_error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2 GiB.\nand much more"
    )
    with pytest.raises(ResourceError) as error, explain_device_errors("4 images of 224 px"):
        raise gpu_error
    first, second, third = str(error.value).splitlines()
    assert error.value.exit_code == 5 and "4 images of 224 px" in first
    assert (
        second == "CUDA out of memory. Tried to allocate 2 GiB."
        and "train.micro_batch_size" in third
    )


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
def test_out_of_memory_is_recognized_by_its_text(text: str) -> None:
    assert out_of_memory_line(RuntimeError(text))
    with pytest.raises(ResourceError) as caught, explain_device_errors():
        raise RuntimeError(text)
    detail = str(caught.value).splitlines()[1]
    assert any(part in detail for part in ("out of memory", "ALLOC_FAILED", "unable to find"))


def test_memory_of_the_host_is_named() -> None:
    with pytest.raises(ResourceError, match="can't allocate memory"), explain_device_errors():
        torch.empty(2**60, dtype=torch.uint8, device="cpu")


def test_other_errors_pass() -> None:
    for error in (RuntimeError("a bug"), DataError("x", "y")):
        with pytest.raises(type(error), match=str(error)), explain_device_errors():
            raise error


def test_peak_memory_starts_again_after_a_reset() -> None:
    block = torch.ones(300 << 20, dtype=torch.uint8)
    with_block = peak_memory_bytes()
    del block
    reset_peak_memory()
    assert peak_memory_bytes() < with_block - (200 << 20)
