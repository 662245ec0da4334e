"""Changes a built model, and keeps the names of its parameters.

The changes are frozen parts, another image size, split BatchNorm and gradient checkpointing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache

import torch
from timm.layers import convert_splitbn_model
from torch import Tensor, nn

from imagenet_cls.config.schema import ModelConfig, Size, format_size, height_width
from imagenet_cls.errors import ConfigError, out_of_memory_line
from imagenet_cls.models.head import head_names
from imagenet_cls.private_names import BatchNormBase, change_class, is_in_backward
from imagenet_cls.text import first_line

SIZE_REMEDY = (
    "arguments in kwargs may allow it: img_size, dynamic_img_size=true or strict_img_size=false of "
    "timm's models, image_size of torchvision's"
)


def freeze(model: nn.Module, config: ModelConfig, num_classes: int) -> str | None:
    """Freeze parameters, in place. Returns a sentence about what is trained; None if nothing is
    frozen.

    Raises ConfigError for patterns that match nothing, a missing head or BatchNorm, and if nothing
    is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    head = head_names(model, num_classes)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, BatchNormBase)]
    problems = []
    if config.head_only and not head:
        problems.append(
            f"model.head_only: {config.name} has no recognized head; list the other layers in "
            "model.freeze"
        )
    for pattern in config.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            parts = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in names)
            problems.append(
                f"model.freeze: {pattern!r} matches no parameter of {config.name} (its parts: "
                f"{', '.join(parts)})"
            )
    if config.freeze_bn and not layers:
        problems.append(f"model.freeze_bn: {config.name} has no BatchNorm; set it to false")
    frozen = {
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in config.freeze)
        or (config.head_only and name not in head)
        or (config.freeze_bn and name.rpartition(".")[0] in layers)
    }
    if not problems and frozen and len(frozen) == len(names):
        key = "model.freeze" if config.freeze else "model.freeze_bn"
        problems.append(f"{key}: leaves no parameter of {config.name} to train; freeze less")
    if problems:
        raise ConfigError(problems)
    if not frozen:
        return None
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{trained:,} of {total:,} parameters are trained"


def set_training(model: nn.Module, config: ModelConfig) -> None:
    """`model.train()`, but frozen BatchNorm layers in evaluation mode. Dropout stays on in frozen
    parts, as in timm.
    """
    model.train()
    if config.freeze or config.head_only or config.freeze_bn:
        for layer, is_frozen in batch_norm_layers(model, config).items():
            layer.train(not is_frozen)


def batch_norm_layers(model: nn.Module, config: ModelConfig) -> dict[BatchNormBase, bool]:
    """Each BatchNorm layer, and whether its running statistics are frozen. With `model.freeze_bn`
    all are, otherwise the layers whose parameters are frozen. A layer without parameters is treated
    like the smallest module around it that has some, so it is not frozen in front of a trained
    head.
    """
    modules = dict(model.named_modules())
    frozen = {}
    for name, layer in modules.items():
        if isinstance(layer, BatchNormBase):
            owner = name
            parameters = list(layer.parameters())
            while owner and not parameters:
                owner = owner.rpartition(".")[0]
                parameters = list(modules[owner].parameters())
            is_trained = any(parameter.requires_grad for parameter in parameters)
            frozen[layer] = config.freeze_bn or (bool(parameters) and not is_trained)
    return frozen


def resize_model(model: nn.Module, size_px: Size, channels: int = 3) -> str | None:
    """Make a model take images of `size_px`, in place, by timm's `set_input_size`. Returns a
    message if the model was changed, else None. Raises ValueError with the model's message if it
    can't take this size.

    Call it before `set_training`: afterwards all layers have the mode of the model.
    """
    was_training = model.training
    model.eval()
    try:
        output_shape(model, size_px, channels)
        return None
    except ValueError:
        if not hasattr(model, "set_input_size"):
            raise
        with value_errors():
            model.set_input_size(img_size=height_width(size_px))  # type: ignore[operator]
        output_shape(model, size_px, channels)
    finally:
        model.train(was_training)
    return f"made for another size; its position embeddings were resized for {format_size(size_px)}"


@torch.no_grad()
def output_shape(model: nn.Module, size_px: Size, channels: int = 3) -> tuple[int, ...] | str:
    """The shape of the output for one image of zeros; the type of an output without a shape. Raises
    ValueError with the model's message for a size that it can't take.
    """
    device = next(model.parameters()).device
    try:
        with value_errors():
            output = model(torch.zeros(1, channels, *height_width(size_px), device=device))
    except ValueError as error:
        # timm's models for one size, and torchvision's
        if hasattr(model, "set_input_size") or hasattr(model, "image_size"):
            raise ValueError(f"{error}; {SIZE_REMEDY}") from error
        raise
    return tuple(getattr(output, "shape", ())) or type(output).__name__


@contextmanager
def value_errors() -> Iterator[None]:
    """Raise ValueError with the first line of what models raise for images of another size."""
    try:
        yield
    except (AssertionError, RuntimeError, ValueError) as error:
        # an error of the device, such as one whose memory another process has filled
        is_of_device = "CUDA error" in str(error) or "cuDNN error" in str(error)
        if is_of_device or out_of_memory_line(error) is not None:
            raise
        raise ValueError(first_line(error)) from error


def split_batch_norm(model: nn.Module, config: ModelConfig, splits: int) -> nn.Module:
    """Give every BatchNorm one layer for each of `splits` parts of a batch, if `model.split_bn` is
    on.

    By timm's conversion, in place: the first part goes through the existing layer, which evaluation
    uses too; the others through its `aux_bn` layers, which start with its weights and statistics.
    The batch must be a multiple of `splits`. Call it before freezing: it creates parameters. Raises
    ConfigError for a model without BatchNorm2d (LeViT's BatchNorm is of tokens).
    """
    if not config.split_bn:
        return model
    layers = [layer for layer in model.modules() if isinstance(layer, BatchNormBase)]
    if {isinstance(layer, nn.BatchNorm2d) for layer in layers} != {True}:
        raise ConfigError(
            [
                f"model.split_bn: {type(model).__name__} has no BatchNorm, or some of another kind "
                "than BatchNorm2d; set it to false, or use another model"
            ]
        )
    return convert_splitbn_model(model, splits)


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute activations in the backward pass (Chen et al. 2016, arXiv:1604.06174), by the
    model's own method.

    The recomputation does not update BatchNorm's running statistics a second time, as it would in
    timm's scripts, so they are the same as without it. Call it after SyncBN conversion, which
    creates layers. Raises ConfigError for a model without gradient checkpointing.
    """
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError, NotImplementedError, TypeError) as error:
        raise ConfigError(
            [
                f"train.grad_checkpointing: {type(model).__name__} has no gradient checkpointing; "
                "set it to false, and train.micro_batch_size lower if memory is short"
            ]
        ) from error
    for layer in model.modules():
        if isinstance(layer, BatchNormBase) and layer.track_running_stats:
            # mypy confuses the hash of a class with the hash of its objects
            change_class(layer, _updating_once(type(layer)))  # type: ignore[arg-type]


@cache
def _updating_once(kind: type[BatchNormBase]) -> type[BatchNormBase]:
    """A subclass whose running statistics change in the forward pass only, not when that is
    recomputed.
    """

    def forward(self: BatchNormBase, *inputs: Tensor) -> Tensor:
        output: Tensor
        # A compiled model does not recompute this.
        is_recomputing = not torch.compiler.is_compiling() and is_in_backward()
        if not (self.training and is_recomputing):
            output = kind.forward(self, *inputs)
            return output
        kept = dict(self.named_buffers(recurse=False))
        for name, buffer in kept.items():
            setattr(self, name, buffer.clone())
        try:  # torch ends a recomputation by an exception, as soon as it has what backward needs
            output = kind.forward(self, *inputs)
            return output
        finally:
            for name, buffer in kept.items():
                setattr(self, name, buffer)

    return type(kind.__name__, (kind,), {"forward": forward})
