"""Out-of-memory errors are explained; all other errors pass."""

import pytest
import torch

from imagenet_cls.config.schema import Config
from imagenet_cls.errors import DataError, ResourceError
from imagenet_cls.guards.memory import explain_resource_errors, out_of_memory


def test_host_out_of_memory_is_a_resource_error() -> None:
    expected = r"(?s)\d+ bytes.*train.micro_batch_size"
    with pytest.raises(ResourceError, match=expected) as error, explain_resource_errors(out_of_memory):
        torch.empty(1 << 45)
    assert error.value.exit_code == 5 and str(error.value).count("\n") < 3


def test_gpu_out_of_memory_names_sizes_and_remedies() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand much more")
    explained = out_of_memory(error, Config(), 4)
    assert explained is not None and len(lines := str(explained).splitlines()) == 3
    assert "4 images at once of 224 px" in lines[0] and "Tried to allocate 2 GiB" in lines[1]
    assert "train.micro_batch_size=2 " in lines[2]


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="a bug"), explain_resource_errors(out_of_memory):
        raise RuntimeError("a bug")
    with pytest.raises(DataError), explain_resource_errors(out_of_memory):
        raise DataError("x")


def test_first_explanation_is_raised() -> None:
    explanations = (lambda error: None, lambda error: ResourceError(f"second: {error}"))
    with pytest.raises(ResourceError, match="second: x"), explain_resource_errors(*explanations):
        raise RuntimeError("x")
