"""Each private name of torch, timm and Python in `imagenet_cls.private_names` exists and does what
the package needs.
"""

import atexit
import inspect
import os
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision import datasets

from imagenet_cls import private_names


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norm_base_is_the_base_of_each_kind(kind: type[nn.Module]) -> None:
    assert issubclass(kind, private_names.BatchNormBase)
    assert not issubclass(nn.InstanceNorm2d, private_names.BatchNormBase)


class _Negated(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return -super().forward(input)


def test_change_class_keeps_parameters_and_changes_the_forward() -> None:
    layer, input = nn.Linear(2, 2), torch.ones(1, 2)
    parameters, output = list(layer.parameters()), layer(input)
    private_names.change_class(layer, _Negated)
    assert layer(input).equal(-output)
    assert all(a is b for a, b in zip(parameters, layer.parameters(), strict=True))


def test_state_entries_are_those_of_the_state_dict_also_after_an_assignment() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("empty", None)
    norm.register_buffer("temporary", torch.ones(1), persistent=False)
    model = nn.Sequential(norm, nn.Linear(2, 2, bias=False), norm)
    entries = private_names.state_entries(model)
    norm.running_mean = torch.ones(2)
    tensors = [owner[key] for owner, key in entries if owner[key] is not None]
    expected = model.state_dict(keep_vars=True).values()
    assert all(a is b for a, b in zip(tensors, expected, strict=True))
    assert len(entries) == len(tensors) + 3  # two of `empty`, and the bias


def test_operators_for_each_tensor_are_those_of_a_loop() -> None:
    zeros = [torch.zeros(2), torch.zeros((), dtype=torch.int64)]
    private_names.copy_each_(zeros, [torch.tensor([3.0, 4.0]), torch.tensor(7)])
    assert zeros[0].tolist() == [3, 4] and zeros[1].item() == 7
    private_names.lerp_each_(zeros[:1], [torch.ones(2)], 0.5)
    assert zeros[0].tolist() == [2, 2.5]
    assert [norm.item() for norm in private_names.norm_of_each([torch.tensor([3.0, 4.0])])] == [5]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_is_in_backward_only_while_activations_are_recomputed(use_reentrant: bool) -> None:
    seen = []

    def record(input: torch.Tensor) -> torch.Tensor:
        seen.append(private_names.is_in_backward())
        return input * input

    input = torch.ones(2, requires_grad=True)
    checkpoint(record, input, use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]


def test_base_optimizer_of_lookahead_holds_the_state() -> None:
    parameter = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    assert private_names.base_optimizer(timm.optim.Lookahead(sgd)) is sgd
    assert private_names.base_optimizer(sgd) is sgd


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_fused_optimizers_skip_where_found_inf_is_set(kind: Any) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    fused = kind([parameter], lr=0.1, fused=True)
    assert private_names.skips_on_device(fused)
    assert not private_names.skips_on_device(kind([parameter], lr=0.1))
    assert not private_names.skips_on_device(timm.optim.Lookahead(fused))
    fused.found_inf = torch.ones(())
    fused.step()
    assert torch.equal(parameter, torch.ones(3))


def test_reducer_tells_whether_it_has_finished() -> None:
    """On ranks: tests/distributed/test_ranks_agree.py."""
    check = nn.parallel.DistributedDataParallel._check_reducer_finalized
    assert "self.reducer._check_reducer_finalized()" in inspect.getsource(check)


@pytest.mark.parametrize("kind", [datasets.Food101, datasets.Flowers102, datasets.FGVCAircraft])
def test_datasets_keep_their_targets_in_the_private_attribute(kind: type) -> None:
    assert f"self.{private_names.TARGETS}" in inspect.getsource(kind)


def test_run_exit_functions_runs_them() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        atexit._clear()
        atexit.register(os.write, write, b"called")
        private_names.run_exit_functions()
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    assert os.read(read, 100) == b"called"
    os.close(read)
