"""The kernels of a run."""

import torch

from imagenet_cls.engine.precision import set_deterministic


def test_gradient_of_indexing_is_deterministic_on_several_threads() -> None:
    # as many rows that the threads overlap, also on a busy machine
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(169, 24, requires_grad=True)
    index = torch.randint(0, 169, (240_100,), generator=generator)
    gradient = torch.randn(240_100, 24, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        set_deterministic(False, torch.device("cpu"))
        found = [torch.autograd.grad(table[index], table, gradient)[0] for _ in range(30)]
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, found[0]) for one in found)
