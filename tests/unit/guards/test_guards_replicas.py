"""The hash that detects diverged replicas. On several ranks: tests/distributed."""

import math

import pytest
import torch
from torch import nn

from imagenet_cls.guards import replicas
from imagenet_cls.guards.replicas import model_digest, replicated_tensors, tensor_hashes, weights_of

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
DTYPES = (*FLOATS, torch.int64, torch.int8, torch.bool)


def hash_of(tensor: torch.Tensor) -> int:
    return tensor_hashes({"it": tensor})["it"]


def reference(tensor: torch.Tensor) -> int:
    """The same sum of a float32 vector in Python's whole numbers: bits times a factor of the place,
    modulo 2**64, as a signed number.
    """

    def signed(number: int) -> int:
        return (number + 2**63) % 2**64 - 2**63

    def factor(place: int) -> int:
        mixed = signed(place * 0x9E3779B97F4A7C15)
        return signed((mixed ^ (mixed >> 29)) * 0x9E3779B97F4A7C15) | 1

    total = 0
    for place, word in enumerate(tensor.view(torch.int32).tolist()):
        row, column = divmod(place, replicas._ROW)
        total += word * factor(column + 1) * factor(replicas._ROW + row + 1)
    return signed(total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hash_changes_with_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 2, dtype=dtype)
    bits = tensor.view(-1).view(torch.uint8)
    seen = {hash_of(tensor)}
    flips = range(bits.numel()) if dtype is torch.bool else range(8 * bits.numel())
    for place in flips:
        byte, bit = (place, 0) if dtype is torch.bool else divmod(place, 8)
        bits[byte] ^= 1 << bit
        seen.add(hash_of(tensor))
        bits[byte] ^= 1 << bit
    assert len(seen) == len(flips) + 1


def test_hash_changes_where_a_sum_of_values_would_not() -> None:
    """Two values that change places, changes that cancel, signs of zero, NaN."""
    a = torch.tensor([1.0, 2.0, 3.0, 0.0, math.nan])
    for b in (
        a[[1, 0, 2, 3, 4]],
        a + torch.tensor([1.0, -2.0, 1.0, 0.0, 0.0]),
        a * torch.tensor([1, 1, 1, -1, 1]),
    ):
        assert hash_of(b) != hash_of(a)
    assert hash_of(a.clone()) == hash_of(a)


def test_hash_ignores_the_memory_format() -> None:
    images = torch.randn(2, 3, 4, 5)
    assert hash_of(images.to(memory_format=torch.channels_last)) == hash_of(images)
    assert hash_of(images.transpose(0, 1).contiguous().transpose(0, 1)) == hash_of(images)
    assert hash_of(images.transpose(0, 1)) != hash_of(images)


@pytest.mark.parametrize("length", [0, 3, 4, 11, 12])
def test_hash_of_several_rows_equals_the_formula(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(replicas, "_ROW", 4)
    tensor = torch.arange(length, dtype=torch.float32)
    assert hash_of(tensor) == reference(tensor)


def test_model_digest_depends_on_names_shapes_dtypes_and_buffers() -> None:
    def model(
        name: str = "x", shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32
    ) -> nn.Module:
        made = nn.BatchNorm1d(2)
        made.register_buffer(name, torch.zeros(shape, dtype=dtype), persistent=False)
        return made

    variants = [model(), model("y"), model(shape=(3, 2)), model(dtype=torch.int32)]
    assert len({model_digest(variant) for variant in variants}) == len(variants)
    assert model_digest(model()) == model_digest(model()) and list(weights_of(model()))[-1] == "x"
    changed = model()
    changed.running_mean[1] = 1e-45
    assert model_digest(changed) != model_digest(model())


def test_replicated_tensors_leaves_out_buffers_that_are_not_synchronized() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))
    model.register_buffer("own", torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    tensors = replicated_tensors(model, model, optimizer.state)
    names = {"0.weight", "0.bias", "1.weight", "1.bias"}
    averaged = names | {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    expected = (
        averaged
        | {f"EMA of {name}" for name in averaged}
        | {f"momentum_buffer of {name}" for name in names}
    )
    assert tensors.keys() == expected and tensors["0.weight"] is model[0].weight
