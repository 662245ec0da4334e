"""Keys of random draws.

Before each draw the generators are seeded with a hash of a key, such as `(seed, epoch, index,
repeat)`.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def hash_key(purpose: str, *parts: int | str) -> int:
    """A 63-bit number for a key, the same on every machine. purpose: `sample`, `init` etc.; no two
    uses share one.
    """
    text = "\x1f".join([purpose, *map(str, parts)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(key: int, *devices: torch.device) -> None:
    """Seed the default CPU generators of torch, `random` and numpy, and the generator of each GPU
    in `devices`.

    Several GPUs of one process draw differently. (`torch.manual_seed` formats stack traces, which
    is slow.)
    """
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    for position, device in enumerate(devices):
        if device.type == "cuda":
            device_key = hash_key("device", key, position) if position else key
            torch.cuda.default_generators[device.index or 0].manual_seed(device_key)
        elif device.type == "mps":
            torch.mps.manual_seed(key)


def generator(purpose: str, *parts: int | str) -> torch.Generator:
    """A new CPU generator for one key."""
    return torch.Generator().manual_seed(hash_key(purpose, *parts))


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the default CPU generators of torch, `random` and numpy on exit."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
