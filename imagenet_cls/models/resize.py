"""Models and weights whose position embeddings belong to another image size than is asked for.

Owns the three ways to another size: weights resized as they are loaded into a model that was built for it
(`resize_weights`), a finished model resized (`resize_model`), and the words about what to put into a config
(`size_remedy`). The interpolation is the model library's own. Refuses nothing: what comes out is compared by who
called. Called by `models.weights`, `engine.inference` and `engine.model`.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionTransformer
from torchvision.models.vision_transformer import interpolate_embeddings

from imagenet_cls.lookup import keyword_names
from imagenet_cls.models.build import first_line


def resize_weights(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` as the model's library would load it: position embeddings and tables on the model's grid, and names as
    they are now, where the published file has its authors'. Shares the tensors that stay as they are.

    timm has a function beside each such model (`checkpoint_filter_fn`), torchvision one for its ViT. A state dict that
    is not of this model at all comes back as it is, or changed in any way: compare it with the model's.
    """
    state = dict(state)
    try:
        if isinstance(model, TorchvisionTransformer):
            return interpolate_embeddings(model.image_size, model.patch_size, state)
        module = sys.modules[type(model).__module__]
        translate = getattr(module, "checkpoint_filter_fn", None)
        return dict(translate(state, model)) if translate and module.__name__.startswith("timm.") else state
    except Exception:  # whatever a foreign state dict does to a function that expects this model's
        return state


def resize_model(model: nn.Module, size_px: int) -> str | None:
    """Let a model that was built for one size take square images of `size_px`, in place, on the CPU.

    None where it takes them as it is; else a sentence about what was done. Raises ValueError, with what the model said,
    where it can't. timm's `set_input_size` resamples position embeddings as its own loading does (and scales the
    windows of Swin and its kin with the image).
    """
    refusal = _refusal(model, size_px)
    if refusal is None:
        return None
    if not hasattr(model, "set_input_size"):
        raise ValueError(first_line(refusal)) from refusal
    try:
        model.set_input_size(img_size=(size_px, size_px))  # type: ignore[operator]
    except Exception as error:
        raise ValueError(first_line(error)) from error
    refusal = _refusal(model, size_px)
    if refusal is not None:
        raise ValueError(first_line(refusal)) from refusal
    return f"made for another size; its position embeddings were resized for {size_px} px"


@torch.no_grad()
def _refusal(model: nn.Module, size_px: int) -> Exception | None:
    """What a model says to one black image, in evaluation mode."""
    was_training = model.training
    try:
        model.eval()(torch.zeros(1, 3, size_px, size_px, device=next(model.parameters()).device))
    except (AssertionError, RuntimeError, ValueError) as error:
        return error
    finally:
        model.train(was_training)
    return None


def size_remedy(model: nn.Module, size_px: int) -> str:
    """What to put into `model.kwargs` for images of `size_px`, as a clause behind a message; "" where nothing helps."""
    remedies: dict[str, Any] = {
        "dynamic_img_size": "true, which takes every size in whole patches",
        "strict_img_size": "false, which takes every size",
        "img_size": f"{size_px}, which resizes the position embeddings of the weights that it starts from",
        "image_size": f"{size_px}, which resizes the position embeddings of the weights that it starts from",
    }
    taken = [name for owner in type(model).__mro__ if owner is not object for name in keyword_names(owner)[0]]
    return next((f"; set model.kwargs.{name} to {text}" for name, text in remedies.items() if name in taken), "")
