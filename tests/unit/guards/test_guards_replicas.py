"""The hash that detects diverged replicas. On several ranks: tests/distributed."""

import math

import pytest
import torch
from torch import nn

from imagenet_cls.guards import replicas
from imagenet_cls.guards.replicas import model_digest, replicated_tensors, tensor_hashes

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8)


def hash_of(tensor: torch.Tensor) -> int:
    return tensor_hashes({"it": tensor})["it"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hash_changes_with_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 2, dtype=dtype)
    bits = tensor.view(-1).view(torch.uint8)
    seen = {hash_of(tensor)}
    for place in range(8 * len(bits)):
        byte, bit = divmod(place, 8)
        bits[byte] ^= 1 << bit
        seen.add(hash_of(tensor))
        bits[byte] ^= 1 << bit
    assert len(seen) == 8 * len(bits) + 1


@pytest.mark.parametrize("row", [3, replicas._ROW])
def test_hash_changes_where_a_sum_of_values_would_not(
    monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    """Two values that change places, changes that cancel, signs of zero, NaN; in one row or in
    several.
    """
    monkeypatch.setattr(replicas, "_ROW", row)
    a = torch.tensor([1.0, 2.0, 3.0, 0.0, math.nan])
    variants = [
        a,
        a[[1, 0, 2, 3, 4]],
        a[[3, 1, 2, 0, 4]],
        a + torch.tensor([1.0, -2.0, 1.0, 0.0, 0.0]),
        a * torch.tensor([1, 1, 1, -1, 1]),
    ]
    assert len(set(map(hash_of, variants))) == len(variants)
    # the factors are odd, so that the highest bit counts in every place
    assert all(hash_of(place) % 2 for place in torch.eye(5, dtype=torch.int32))


def test_hash_ignores_the_memory_format() -> None:
    images = torch.randn(2, 3, 4, 5)
    assert hash_of(images.to(memory_format=torch.channels_last)) == hash_of(images)
    assert hash_of(images.transpose(0, 1).contiguous().transpose(0, 1)) == hash_of(images)
    assert hash_of(images.transpose(0, 1)) != hash_of(images)


def test_model_digest_depends_on_names_shapes_dtypes_and_buffers() -> None:
    def digest(
        name: str = "x",
        shape: tuple[int, ...] = (2, 3),
        dtype: torch.dtype = torch.float32,
        mean: float = 0.0,
    ) -> str:
        model = nn.BatchNorm1d(2)
        model.register_buffer(name, torch.zeros(shape, dtype=dtype), persistent=False)
        model.running_mean[1] = mean
        return model_digest(model)

    variants = {
        digest(),
        digest("y"),
        digest(shape=(3, 2)),
        digest(dtype=torch.int32),
        digest(mean=1e-45),
    }
    assert len(variants) == 5 and digest() in variants


def test_replicated_tensors_leaves_out_buffers_that_are_not_synchronized() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))
    model.register_buffer("own", torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    tensors = replicated_tensors(model, model, optimizer.state)
    ours = {"1.running_var", "EMA of 1.running_var", "momentum_buffer of 0.weight"}
    assert ours < tensors.keys() and tensors["0.weight"] is model[0].weight
    assert not {"own", "EMA of own"} & tensors.keys()
