"""What torch says when the machine gives out, in words."""

import pytest
import torch

from imagenet_cls.errors import DataError, ResourceError
from imagenet_cls.guards.memory import explain_resource_errors


def test_memory_that_runs_out_is_named() -> None:
    expected = r"(?s)you tried to allocate \d+ bytes.*train.micro_batch_size"
    with pytest.raises(ResourceError, match=expected) as error, explain_resource_errors():
        torch.empty(1 << 45)
    assert error.value.exit_code == 5 and str(error.value).count("\n") < 3
    with pytest.raises(ResourceError, match="CUDA out of memory"), explain_resource_errors():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand much more")


def test_a_dead_worker_is_named_and_all_else_passes() -> None:
    with pytest.raises(ResourceError, match="data worker"), explain_resource_errors():
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    with pytest.raises(RuntimeError, match="a bug"), explain_resource_errors():
        raise RuntimeError("a bug")
    with pytest.raises(DataError), explain_resource_errors():
        raise DataError("x")
