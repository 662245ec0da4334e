"""Out-of-memory errors are explained; all other errors pass."""

import pytest
import torch

from imagenet_cls.errors import DataError, ResourceError
from imagenet_cls.guards.memory import explain_resource_errors


def test_out_of_memory_names_sizes_and_remedies() -> None:
    gpu_error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand much more")
    with pytest.raises(ResourceError) as error, explain_resource_errors(lambda error: None, "4 images of 224 px"):
        raise gpu_error
    first, second, third = str(error.value).splitlines()
    assert error.value.exit_code == 5 and "4 images of 224 px, peak" in first
    assert second == "CUDA out of memory. Tried to allocate 2 GiB." and "train.micro_batch_size" in third


def test_dead_worker_error_replaced_and_others_pass() -> None:
    with (
        pytest.raises(ResourceError, match="worker: x"),
        explain_resource_errors(lambda e: ResourceError(f"worker: {e}")),
    ):
        raise RuntimeError("x")
    for error in (RuntimeError("a bug"), DataError("x")):
        with pytest.raises(type(error), match=str(error)), explain_resource_errors(lambda e: None):
            raise error
