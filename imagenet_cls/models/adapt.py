"""Changes to a built model that keep its weights: split BatchNorm (`model.split_bn`), gradient checkpointing."""

from functools import cache

import torch
from timm.layers import convert_splitbn_model
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import ConfigError, Problem


def split_batch_norm(model: nn.Module, cfg: ModelConfig, splits: int) -> nn.Module:
    """Give every BatchNorm one layer for each of `splits` parts of a batch, if `model.split_bn` is on.

    By timm's conversion, in place: the first part goes through the existing layer, which evaluation uses too; the
    others through its `aux_bn` layers, which start with its weights and statistics. The batch must be a multiple of
    `splits`. Call it before freezing: it creates parameters. Raises ConfigError for what `split_bn_problem` finds.
    """
    if not cfg.split_bn:
        return model
    _raise_problem(split_bn_problem(model))
    return convert_splitbn_model(model, splits)


def split_bn_problem(model: nn.Module) -> Problem | None:
    """A model without BatchNorm, or whose BatchNorm is not of images (LeViT's is of tokens)."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    others = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, nn.BatchNorm2d)})
    if layers and not others:
        return None
    has = f"has {', '.join(others)}, and only BatchNorm2d can be split" if layers else "has no BatchNorm to split"
    return Problem("model.split_bn", f"{type(model).__name__} {has}; set it to false, or use another model")


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute activations in the backward pass (Chen et al. 2016, arXiv:1604.06174), by the model's own
    `set_grad_checkpointing`, in place.

    Unlike in timm's and torchvision's scripts, the recomputation does not update BatchNorm's running statistics a
    second time, so that they are the same as without. Call it after SyncBN conversion, which creates layers. Raises
    ConfigError for what `checkpointing_problem` finds.
    """
    _raise_problem(checkpointing_problem(model))
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            # In place: names, buffers and checkpoints stay. (mypy takes the hash of a class for that of its objects.)
            layer.__class__ = _updating_once(type(layer))  # type: ignore[arg-type]


def checkpointing_problem(model: nn.Module) -> Problem | None:
    """A model that has no gradient checkpointing. Switches it on where there is."""
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError, NotImplementedError, TypeError):
        text = f"{type(model).__name__} has no gradient checkpointing; set it to false, and train.micro_batch_size"
        return Problem("train.grad_checkpointing", f"{text} lower if memory is short")
    return None


def _raise_problem(problem: Problem | None) -> None:
    if problem is not None:
        raise ConfigError([f"{problem.key}: {problem.message}"])


def _is_recomputing() -> bool:
    """Whether this forward pass runs within a backward pass; torch.utils.checkpoint asks the same way.

    The recomputation of a compiled model does not call this.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@cache
def _updating_once(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    """A subclass whose running statistics change in the forward pass only, not when that is recomputed."""

    def forward(self: _BatchNorm, *inputs: Tensor) -> Tensor:
        output: Tensor
        if not (self.training and _is_recomputing()):
            output = kind.forward(self, *inputs)
            return output
        kept = dict(self._buffers)
        self._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in kept.items()})
        try:  # torch ends a recomputation by an exception, as soon as it has what backward needs
            output = kind.forward(self, *inputs)
            return output
        finally:
            self._buffers.update(kept)

    return type(kind.__name__, (kind,), {"forward": forward})
