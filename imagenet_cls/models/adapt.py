"""Changes to a built model that keep its weights: a BatchNorm for each split of a batch, and less memory.

Owns `model.split_bn` and `train.grad_checkpointing`. Refuses models that can't keep fewer activations, and models whose
BatchNorm can't be split. Called by `engine.model`: `split_batch_norm` once the weights are loaded and before anything
is frozen, since it makes new parameters; `checkpoint_activations` last, just before ranks are joined, since SyncBN may
put new layers in. `models.check` asks beforehand, on a model without memory (`splitting_problem`,
`checkpointing_problem`).
"""

from functools import cache

import torch
from timm.layers import convert_splitbn_model
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import ConfigError, Problem


def split_batch_norm(model: nn.Module, cfg: ModelConfig, splits: int) -> nn.Module:
    """Give every BatchNorm one layer for each of `splits` parts of a batch, where `model.split_bn` asks for it.

    The conversion is timm's: the first part goes through the layer that was there, which is also what evaluation uses;
    the others through `aux_bn` layers below it, which start with its weights and statistics. Changes the model in place
    and returns it. The batch must be a multiple of `splits`. Raises ConfigError for what `splitting_problem` names.
    """
    if not cfg.split_bn:
        return model
    problem = splitting_problem(model)
    if problem is not None:
        raise ConfigError([f"{problem.key}: {problem.message}"])
    return convert_splitbn_model(model, splits)


def splitting_problem(model: nn.Module) -> Problem | None:
    """What keeps a model's BatchNorm from being split: there is none, or not of images only (LeViT's is of tokens)."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    others = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, nn.BatchNorm2d)})
    if layers and not others:
        return None
    has = f"has {', '.join(others)}, and only BatchNorm2d can be split" if layers else "has no BatchNorm to split"
    return Problem("model.split_bn", f"{type(model).__name__} {has}; set it to false, or take another model")


def checkpoint_activations(model: nn.Module) -> None:
    """Let the model keep few activations and compute the others anew in backward (Chen et al. 2016, arXiv:1604.06174),
    in place, by its own `set_grad_checkpointing`.

    A BatchNorm that is computed anew sees the same images again: unlike in timm's and torchvision's scripts it does not
    count them twice, so statistics, and with them evaluations, are the same as without. Raises ConfigError where the
    model has no such method, or says that it can't.
    """
    problem = checkpointing_problem(model)
    if problem is not None:
        raise ConfigError([f"{problem.key}: {problem.message}"])
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            # In place: names, buffers and checkpoints stay. (mypy takes the hash of a class for that of its objects.)
            layer.__class__ = _counting_once(type(layer))  # type: ignore[arg-type]


def checkpointing_problem(model: nn.Module) -> Problem | None:
    """Switch checkpointing on, where the model can; else what is wrong."""
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError, NotImplementedError, TypeError):
        text = f"{type(model).__name__} can't compute activations anew; set it to false, and train.micro_batch_size"
        return Problem("train.grad_checkpointing", f"{text} lower where memory is short")
    return None


def _is_recomputing() -> bool:
    """Whether this forward pass runs within a backward pass. torch.utils.checkpoint asks the same way.

    A compiled model computes anew without coming here.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@cache
def _counting_once(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    """A subclass whose running statistics change in the forward pass alone, not when that is computed anew."""

    def forward(self: _BatchNorm, *inputs: Tensor) -> Tensor:
        output: Tensor
        if not (self.training and _is_recomputing()):
            output = kind.forward(self, *inputs)
            return output
        kept = dict(self._buffers)
        self._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in kept.items()})
        try:  # a recomputation ends by an exception, as soon as it has what backward needs
            output = kind.forward(self, *inputs)
            return output
        finally:
            self._buffers.update(kept)

    return type(kind.__name__, (kind,), {"forward": forward})
