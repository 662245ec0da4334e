"""Errors that torch raises on some devices only."""

from collections.abc import Iterator

import pytest
import torch

from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.guards.device import explain_device_errors


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_operator_without_a_deterministic_kernel_exits_2(deterministic: None) -> None:
    with (
        pytest.raises(UsageError, match=r"train\.deterministic=true.* uses put_,") as caught,
        explain_device_errors(),
    ):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))  # the only such operator of CPUs
    assert caught.value.exit_code == 2 and len(str(caught.value).splitlines()) <= 3


def test_error_of_a_replica_names_the_operator() -> None:
    text = (
        "reflection_pad2d_backward_cuda does not have a deterministic implementation, but you set"
    )
    with (
        pytest.raises(UsageError, match="uses reflection_pad2d_backward_cuda,"),
        explain_device_errors(),
    ):
        raise RuntimeError(f"Caught RuntimeError in replica 1 on device 1.\nRuntimeError: {text}")


def test_failed_assertion_of_a_kernel_gets_a_note_on_how_to_find_it() -> None:
    with pytest.raises(torch.AcceleratorError) as caught, explain_device_errors():
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nand more", 710)
    (note,) = caught.value.__notes__
    assert "CUDA_LAUNCH_BLOCKING=1" in note


def test_memory_that_ran_out_exits_5_and_other_errors_pass() -> None:
    with pytest.raises(ResourceError), explain_device_errors("4 images"):
        raise RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="a bug") as caught, explain_device_errors():
        raise RuntimeError("a bug")
    assert not hasattr(caught.value, "__notes__")
