"""Checks whether the built model accepts the config's image sizes, classes and batches."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from imagenet_cls.config.schema import Config, ModelConfig
from imagenet_cls.data import sizes_px
from imagenet_cls.errors import ConfigError, first_line, format_value
from imagenet_cls.guards.memory import out_of_memory
from imagenet_cls.models.adapt import set_training, size_remedy
from imagenet_cls.seeding import preserve_rng_state

_ERRORS = (AssertionError, RuntimeError, ValueError)


def check_model_parameters(model: nn.Module, name: str) -> None:
    """Raise ConfigError for a newly built model without parameters, or with uninitialized (lazy) ones."""
    if lazy := [parameter for parameter, tensor in model.named_parameters() if is_lazy(tensor)]:
        remedy = "call the model once on a batch of images before you return it"
        raise ConfigError([f"model.name: {name} has uninitialized parameters ({lazy[0]}); {remedy}"])
    if next(model.parameters(), None) is None:
        raise ConfigError([f"model.name: {name} has no parameters to train; name another"])


def check_model_outputs(model: nn.Module, config: Config, num_classes: int, batch_norm_images: int) -> None:
    """Raise ConfigError where the model does not map the config's image sizes to (B, num_classes).

    One forward pass in evaluation mode for each size, with one black image. batch_norm_images: images over which
    BatchNorm computes its statistics in training; with 1 its layers need more than one pixel. Leaves the model in
    training mode, frozen BatchNorm layers apart.
    """
    largest_px = config.augment.size_px
    smaller = [("augment.progressive.sizes_px", size) for size in sizes_px(config.augment) if size != largest_px]
    model.eval()
    for key, size_px in (*smaller, ("augment.size_px", largest_px), ("eval.crop_px", config.eval.crop_px)):
        try:
            outputs = _forward(model, size_px)
        except _ERRORS as error:
            if isinstance(error, RuntimeError) and out_of_memory(error) is not None:
                raise
            raise ConfigError([_size_message(model, config.model, key, size_px, error)]) from error
        shape = tuple(getattr(outputs, "shape", ())) or f"a {type(outputs).__name__}"
        if shape != (1, num_classes):
            text = f"{config.model.name} returns {shape} for one image, not {(1, num_classes)}"
            raise ConfigError([f"model.name: {text}"])
    set_training(model, config.model)
    if batch_norm_images == 1:
        _check_batch_norm(model, config)


def _check_batch_norm(model: nn.Module, config: Config) -> None:
    """One forward pass in training mode, after which the buffers are restored."""
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        with preserve_rng_state():
            _forward(model, min(sizes_px(config.augment)))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        text = "BatchNorm gets one value per channel, because a device gets one image at a time"
        remedy = "give each device 2 or more, or use larger images (augment.size_px)"
        raise ConfigError([f"train.micro_batch_size: {text}; {remedy}"]) from error
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)


def _forward(model: nn.Module, size_px: int) -> object:
    device = next(model.parameters()).device
    with torch.no_grad():
        return model(torch.zeros(1, 3, size_px, size_px, device=device))


def _size_message(model: nn.Module, cfg: ModelConfig, key: str, size_px: int, error: Exception) -> str:
    """The error for a size; for `model.kwargs` if with them the model fails on its native size, too."""
    remedy = size_remedy(model, size_px)
    native_px = ((getattr(model, "pretrained_cfg", None) or {}).get("input_size") or (3, 224, 224))[-1]
    if cfg.kwargs and not remedy and native_px != size_px:
        try:
            _forward(model, native_px)
        except _ERRORS:
            return f"model.kwargs: {cfg.name} with {format_value(cfg.kwargs)} takes no images: {first_line(error)}"
    return f"{key}: {cfg.name} does not take {size_px} px: {first_line(error)}{remedy}"
