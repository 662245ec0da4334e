"""What torch says when the machine gives out, in words."""

import pytest
import torch

from imagenet_cls.engine.resources import naming_what_gave_out
from imagenet_cls.errors import DataError, ResourceError


def test_memory_that_runs_out_is_named() -> None:
    expected = r"(?s)you tried to allocate \d+ bytes.*train.micro_batch_size"
    with pytest.raises(ResourceError, match=expected) as error, naming_what_gave_out():
        torch.empty(1 << 45)
    assert error.value.exit_code == 5 and str(error.value).count("\n") < 3
    with pytest.raises(ResourceError, match="CUDA out of memory"), naming_what_gave_out():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand much more")


def test_a_dead_worker_is_named_and_all_else_passes() -> None:
    with pytest.raises(ResourceError, match="data worker"), naming_what_gave_out():
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    with pytest.raises(RuntimeError, match="a bug"), naming_what_gave_out():
        raise RuntimeError("a bug")
    with pytest.raises(DataError), naming_what_gave_out():
        raise DataError("x")
