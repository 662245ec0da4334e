"""Keys for random draws: a run is a pure function of its config and its data.

Every draw has a key, made where it is used: `(seed, epoch, index, view)` for a sample, `(seed, step, micro_batch,
rank)` for a batch. Keys are hashed, never added, so that neighbouring keys share nothing and no two uses collide. No
generator state is saved, shipped or restored anywhere. Called by `data` (samples, permutations) and `engine` (initial
weights, dropout).
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def hash_key(purpose: str, *parts: int | str) -> int:
    """A 63-bit number for a key. `purpose` separates uses: `sample`, `batch`, `permutation`, `init`, ...

    The same on every machine and Python version, unlike `hash`.
    """
    text = "\x1f".join([purpose, *map(str, parts)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(key: int, *devices: torch.device) -> None:
    """Seed the default generators of torch, `random` and numpy on the CPU, and of each of `devices` that is a GPU.

    Several GPUs of one process draw differently: the first by `key`, the others by keys hashed from it.

    All three, since timm's transforms draw from the latter two: seeding only torch leaves them unseeded. About 7 us.
    Not `torch.manual_seed`: it formats a stack trace for every GPU back end that is not yet in use (106 us measured),
    which is more than some samples take.
    """
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    for place, device in enumerate(devices):
        if device.type == "cuda":
            own_key = hash_key("device", key, place) if place else key
            torch.cuda.default_generators[device.index or 0].manual_seed(own_key)


def generator(purpose: str, *parts: int | str) -> torch.Generator:
    """A CPU generator of its own for one key."""
    return torch.Generator().manual_seed(hash_key(purpose, *parts))


@contextmanager
def generators_left_alone() -> Iterator[None]:
    """Whatever is seeded and drawn within, the default CPU generators of torch, `random` and numpy go on as before."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
