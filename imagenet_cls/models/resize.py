"""Position embeddings for another image size, resized by the model's library: in a state dict, or in a built model."""

import sys
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionTransformer
from torchvision.models.vision_transformer import interpolate_embeddings

from imagenet_cls.errors import first_line
from imagenet_cls.lookup import keyword_names


def resize_weights(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` as the model's library would load it: position embeddings on the model's grid, and its current names
    where a published file has the authors'. Shares the tensors that stay as they are.

    timm has a function for each such model (`checkpoint_filter_fn`), torchvision one for its ViT. A state dict of
    another model may come back changed or unchanged: compare it with the model's.
    """
    state = dict(state)
    try:
        if isinstance(model, TorchvisionTransformer):
            return interpolate_embeddings(model.image_size, model.patch_size, state)
        module = sys.modules[type(model).__module__]
        translate = getattr(module, "checkpoint_filter_fn", None)
        return dict(translate(state, model)) if translate and module.__name__.startswith("timm.") else state
    except Exception:  # these functions expect a state dict of their model, and fail in many ways on another
        return state


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
    resizes = f"{size_px}, which resizes the position embeddings of the start weights"
    remedies = {
        "dynamic_img_size": "true, which takes every size in whole patches",
        "strict_img_size": "false, which takes every size",
        "img_size": resizes,
        "image_size": resizes,
    }
    allowed = [name for owner in type(model).__mro__ if owner is not object for name in keyword_names(owner)[0]]
    return next((f"; set model.kwargs.{name} to {text}" for name, text in remedies.items() if name in allowed), "")
