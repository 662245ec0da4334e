"""Private names of torch, torchvision, timm and Python, each behind a function or a constant.

A release may rename them without notice, so each has a test that fails then
(tests/unit/test_private_names.py). This module imports torch, and other libraries where they are
used.
"""

import atexit
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

# The base class of torch's BatchNorm1d, 2d, 3d and SyncBatchNorm, and of other libraries' layers. A
# tuple of the four would miss classes that users derive from it.
BatchNormBase = _BatchNorm

# One operator for all tensors of a list: `target.lerp_(end, weight)`, `target.copy_(source)`, and
# the 2-norm.
lerp_each_ = torch._foreach_lerp_
copy_each_ = torch._foreach_copy_
norm_of_each = torch._foreach_norm

# The attribute with all targets of torchvision's datasets (Food101, Flowers102, ...). Without it
# every image would be read.
TARGETS = "_labels"


def change_class(module: nn.Module, new_class: type[nn.Module]) -> None:
    """Make a module an instance of `new_class`, which has the same attributes and another forward.

    In place, as torch's lazy layers do: names, tensors, hooks and references to the module stay. A
    new module would have to copy them all.
    """
    module.__class__ = new_class


def state_entries(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where the parameters and persistent buffers are: dictionaries and keys, as many times and in
    the order of the state dict, and those that are None.

    A module that assigns another tensor to a name changes the dictionary. Reading the entries again
    takes a tenth of the time of `state_dict`.
    """
    return [
        (owner, key)
        for _, each in module.named_modules(remove_duplicate=False)
        for owner in (each._parameters, each._buffers)
        for key in owner
        if key not in each._non_persistent_buffers_set
    ]


def is_in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread.

    torch.utils.checkpoint asks in the same way. Its public `context_fn` can't be set through timm's
    `set_grad_checkpointing`.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def base_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that timm's Lookahead wraps, which holds all state; another optimizer itself.

    Lookahead's public `load_state_dict` would change the strides of the state.
    """
    return getattr(optimizer, "_base_optimizer", optimizer)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` skips the update on the device where the attribute `found_inf` is not zero.

    The fused optimizers of torch do, and GradScaler asks in the same way. A wrapper (Lookahead)
    does not pass `found_inf` on.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_reduced_gradients(wrapped: nn.parallel.DistributedDataParallel) -> bool:
    """Whether the last backward pass has all-reduced every gradient: not after a loss that does not
    use all parameters.

    Parameters that other micro-batches of the step use have a `.grad`, which does not tell.
    """
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def run_exit_functions() -> None:
    """Run the functions that were registered with `atexit`.

    `sys.exit` runs them, too, but then frees all modules, which takes seconds.
    """
    atexit._run_exitfuncs()
