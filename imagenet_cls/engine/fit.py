"""Does the model fit the config's images, classes and batches? Asked before anything is trained.

Owns the refusals of a model as it was built: one that has nothing to train or layers without a size, one that gives
other outputs than a number for each class, that can't take the config's sizes, or whose BatchNorm would get one value
for a channel. Refuses to guess from names: the model is run. Called by `engine.model`.
"""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from imagenet_cls.config.schema import Config, ModelConfig
from imagenet_cls.data import sizes_px
from imagenet_cls.errors import ConfigError, format_value
from imagenet_cls.guards.memory import out_of_memory
from imagenet_cls.models.build import first_line
from imagenet_cls.models.freeze import set_training
from imagenet_cls.models.resize import size_remedy
from imagenet_cls.seeding import generators_left_alone


def check_model_parameters(model: nn.Module, name: str) -> None:
    """Raise ConfigError for a freshly built model without parameters, or with some whose shape is not known yet."""
    lazy = [parameter for parameter, tensor in model.named_parameters() if is_lazy(tensor)]
    if lazy:
        remedy = "call the model once on a batch of images before it is returned"
        raise ConfigError([f"model.name: {name} has parameters without a shape ({lazy[0]}); {remedy}"])
    if next(model.parameters(), None) is None:
        raise ConfigError([f"model.name: {name} has no parameters, so there is nothing to train; name another"])


def check_model_outputs(model: nn.Module, config: Config, num_classes: int, images_at_once: int) -> None:
    """Raise ConfigError where the model can't take the config's images, gives other outputs than one for each class, or
    has BatchNorm that can't take the config's batches. Leaves the model in training mode, frozen BatchNorm apart.

    One forward pass in evaluation mode for each size, of a single black image. images_at_once: that BatchNorm is to see
    in training, over all ranks where it is synchronised.
    """
    _refuse_unfit_sizes(model, config, num_classes)
    set_training(model, config.model)
    if images_at_once == 1:
        _refuse_single_values(model, config)


def _refuse_single_values(model: nn.Module, config: Config) -> None:
    """BatchNorm of one image needs more than one pixel: one pass as in training, whose traces are wiped out."""
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        with generators_left_alone():
            _outputs_for(model, min(sizes_px(config.augment)))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        text = f"a device gets 1 image at a time (train.global_batch_size {config.train.global_batch_size})"
        remedy = "give each 2 or more, or take larger images (augment.size_px)"
        raise ConfigError(
            [f"train.micro_batch_size: {text}, which is one value for a channel to BatchNorm; {remedy}"]
        ) from error
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)


def _refuse_unfit_sizes(model: nn.Module, config: Config, num_classes: int) -> None:
    largest = config.augment.size_px
    smaller = [("augment.progressive.sizes_px", side) for side in sizes_px(config.augment) if side != largest]
    model.eval()
    for key, size_px in (*smaller, ("augment.size_px", largest), ("eval.crop_px", config.eval.crop_px)):
        try:
            outputs = _outputs_for(model, size_px)
        except (AssertionError, RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and out_of_memory(error) is not None:
                raise
            raise ConfigError([_why_not(model, config.model, key, size_px, error)]) from error
        shape = tuple(getattr(outputs, "shape", ())) or f"a {type(outputs).__name__}"
        if shape != (1, num_classes):
            expected = (1, num_classes)
            raise ConfigError([f"model.name: {config.model.name} gives {shape} for one image, not {expected}"])


def _outputs_for(model: nn.Module, size_px: int) -> object:
    device = next(model.parameters()).device
    with torch.no_grad():
        return model(torch.zeros(1, 3, size_px, size_px, device=device))


def _why_not(model: nn.Module, cfg: ModelConfig, key: str, size_px: int, error: Exception) -> str:
    """Whether it was the size, or arguments with which the model takes no image at all: one of the size that it was
    made for tells."""
    remedy = size_remedy(model, size_px)
    made_for_px = ((getattr(model, "pretrained_cfg", None) or {}).get("input_size") or (3, 224, 224))[-1]
    if cfg.kwargs and not remedy and made_for_px != size_px:
        try:
            _outputs_for(model, made_for_px)
        except (AssertionError, RuntimeError, ValueError):
            return f"model.kwargs: {cfg.name} with {format_value(cfg.kwargs)} can't take images: {first_line(error)}"
    return f"{key}: {cfg.name} can't take {size_px} px: {first_line(error)}{remedy}"
