"""Changes to a built model that keep its parameters' names: frozen parts, another image size, split BatchNorm, and
gradient checkpointing.

Frozen parameters lose `requires_grad`, frozen BatchNorm is put into evaluation mode.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache

import torch
from timm.layers import convert_splitbn_model
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import ConfigError, Problem, first_line
from imagenet_cls.lookup import did_you_mean_part, keyword_names
from imagenet_cls.models.build import head_names


def freeze(model: nn.Module, cfg: ModelConfig, num_classes: int) -> str | None:
    """Freeze parameters as the config says, in place. Returns a sentence about what is trained; None if nothing is
    frozen.

    num_classes: outputs of the head, to find it. Raises ConfigError for what `freeze_problems` finds.
    """
    _raise_problems(freeze_problems(model, cfg, num_classes))
    frozen = _frozen_names(model, cfg, num_classes)
    if not frozen:
        return None
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layers = sum(frozen_batch_norm(model, cfg).values())
    sentence = f"{trained:,} of {total:,} parameters are trained"
    return sentence + (f"; {layers} BatchNorm layers keep their running statistics" if layers else "")


def set_training(model: nn.Module, cfg: ModelConfig) -> None:
    """`model.train()`, but frozen BatchNorm layers in evaluation mode. Dropout and drop-path stay on in frozen parts,
    as in timm."""
    model.train()
    if not (cfg.freeze or cfg.head_only or cfg.freeze_bn):
        return
    for layer, is_frozen in frozen_batch_norm(model, cfg).items():
        layer.train(not is_frozen)


def frozen_batch_norm(model: nn.Module, cfg: ModelConfig) -> dict[_BatchNorm, bool]:
    """For each BatchNorm layer whether its running statistics are frozen: with `model.freeze_bn` all are, else those
    whose parameters are.

    A layer without weight and bias follows the smallest module around it that has parameters: it is not frozen in front
    of a trained head.
    """
    modules = dict(model.named_modules())
    frozen = {}
    for name, layer in modules.items():
        if isinstance(layer, _BatchNorm):
            owner, parameters = name, list(layer.parameters())
            while owner and not parameters:
                owner = owner.rpartition(".")[0]
                parameters = list(modules[owner].parameters())
            is_trained = any(parameter.requires_grad for parameter in parameters)
            frozen[layer] = cfg.freeze_bn or (bool(parameters) and not is_trained)
    return frozen


def freeze_problems(model: nn.Module, cfg: ModelConfig, num_classes: int) -> list[Problem]:
    """What is wrong with `model.freeze`, `model.head_only` and `model.freeze_bn` for this model, on any device."""
    names = [name for name, _ in model.named_parameters()]
    if cfg.head_only and not head_names(model, num_classes):
        return [Problem("model.head_only", f"{cfg.name} has no recognised head; list the other layers in model.freeze")]
    problems = []
    for pattern in cfg.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            parts = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in names)
            hint = did_you_mean_part(pattern, names) or f" (its parts: {', '.join(parts)})"
            problems.append(Problem("model.freeze", f"{pattern!r} matches no parameter of {cfg.name}{hint}"))
    if cfg.freeze_bn and not frozen_batch_norm(model, cfg):
        problems.append(Problem("model.freeze_bn", f"{cfg.name} has no BatchNorm; set it to false"))
    if not problems and names and _frozen_names(model, cfg, num_classes) >= set(names):
        key = "model.freeze" if cfg.freeze else "model.freeze_bn"
        problems.append(Problem(key, f"leaves no parameter of {cfg.name} to train; freeze less"))
    return problems


def _frozen_names(model: nn.Module, cfg: ModelConfig, num_classes: int) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    frozen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in cfg.freeze)}
    if cfg.head_only:
        frozen |= set(names) - set(head_names(model, num_classes))
    if cfg.freeze_bn:
        layers = [name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
        frozen |= {name for name in names if name.rpartition(".")[0] in layers}
    return frozen


def resize_model(model: nn.Module, size_px: int) -> str | None:
    """Make a model that was built for one size take square images of `size_px`, in place, on the CPU.

    Returns None where it takes them already, else a sentence about what was done. Raises ValueError, with the model's
    error, where it can't. timm's `set_input_size` resamples position embeddings as its loading does (and scales Swin's
    windows with the image).
    """
    error = _forward_error(model, size_px)
    if error is None:
        return None
    if hasattr(model, "set_input_size"):
        try:
            model.set_input_size(img_size=(size_px, size_px))  # type: ignore[operator]
            error = _forward_error(model, size_px)
        except Exception as raised:
            error = raised
    if error is not None:
        raise ValueError(first_line(error)) from error
    return f"made for another size; its position embeddings were resized for {size_px} px"


@torch.no_grad()
def _forward_error(model: nn.Module, size_px: int) -> Exception | None:
    """The error that the model raises for one black image in evaluation mode, if any."""
    was_training = model.training
    try:
        model.eval()(torch.zeros(1, 3, size_px, size_px, device=next(model.parameters()).device))
    except (AssertionError, RuntimeError, ValueError) as error:
        return error
    finally:
        model.train(was_training)
    return None


def size_remedy(model: nn.Module, size_px: int) -> str:
    """Which of `model.kwargs` lets the model take images of `size_px`, as a clause of a message; "" if none does."""
    resizes = f"{size_px}, which resizes the position embeddings of the initial weights"
    remedies = {
        "dynamic_img_size": "true, which takes every size in whole patches",
        "strict_img_size": "false, which takes every size",
        "img_size": resizes,
        "image_size": resizes,
    }
    allowed = [name for owner in type(model).__mro__ if owner is not object for name in keyword_names(owner)[0]]
    return next((f"; set model.kwargs.{name} to {text}" for name, text in remedies.items() if name in allowed), "")


def split_batch_norm(model: nn.Module, cfg: ModelConfig, splits: int) -> nn.Module:
    """Give every BatchNorm one layer for each of `splits` parts of a batch, if `model.split_bn` is on.

    By timm's conversion, in place: the first part goes through the existing layer, which evaluation uses too; the
    others through its `aux_bn` layers, which start with its weights and statistics. The batch must be a multiple of
    `splits`. Call it before freezing: it creates parameters. Raises ConfigError for what `split_bn_problems` finds.
    """
    if not cfg.split_bn:
        return model
    _raise_problems(split_bn_problems(model))
    return convert_splitbn_model(model, splits)


def split_bn_problems(model: nn.Module) -> list[Problem]:
    """A model without BatchNorm, or whose BatchNorm is not of images (LeViT's is of tokens)."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    others = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, nn.BatchNorm2d)})
    if layers and not others:
        return []
    has = f"has {', '.join(others)}, and only BatchNorm2d can be split" if layers else "has no BatchNorm to split"
    return [Problem("model.split_bn", f"{type(model).__name__} {has}; set it to false, or use another model")]


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute activations in the backward pass (Chen et al. 2016, arXiv:1604.06174), by the model's own
    `set_grad_checkpointing`, in place.

    Unlike in timm's and torchvision's scripts, the recomputation does not update BatchNorm's running statistics a
    second time, so that they are the same as without. Call it after SyncBN conversion, which creates layers. Raises
    ConfigError for what `checkpointing_problems` finds.
    """
    _raise_problems(checkpointing_problems(model))
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            # In place: names, buffers and checkpoints stay. (mypy takes the hash of a class for that of its objects.)
            layer.__class__ = _updating_once(type(layer))  # type: ignore[arg-type]


def checkpointing_problems(model: nn.Module) -> list[Problem]:
    """A model that has no gradient checkpointing. Switches it on where there is."""
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError, NotImplementedError, TypeError):
        text = f"{type(model).__name__} has no gradient checkpointing; set it to false, and train.micro_batch_size"
        return [Problem("train.grad_checkpointing", f"{text} lower if memory is short")]
    return []


def _raise_problems(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError([f"{problem.key}: {problem.message}" for problem in problems])


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
