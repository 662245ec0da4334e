"""Builds the model of a config's `model` section on the CPU: timm's, torchvision's, or that of the user's factory.

Nothing here draws random numbers but the initial weights: the same seed gives the same bits.
"""

from collections.abc import Collection, Sequence

import timm
import torchvision
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import CheckpointError, ResourceError, UserError, first_line
from imagenet_cls.lookup import import_factory, is_factory_name

TORCHVISION = "torchvision:"

# Arguments that a config can't give in model.kwargs: they have a key elsewhere, or the program decides them.
RESERVED = ("pretrained", "num_classes", "model_name", "checkpoint_path", "device")


def build_model(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model on the CPU, in float32 and training mode, with `num_classes` outputs.

    Published weights (`model.pretrained`) are downloaded once; a head of another size is initialised.
    `model.checkpoint` is not read: see `weights.load_weights`. Raises ResourceError where published weights can't be
    downloaded, CheckpointError where they don't fit the kwargs, UserError where the user's factory does not return a
    module.
    """
    if model.name.startswith(TORCHVISION):
        build = _build_torchvision
    elif is_factory_name(model.name):
        build = _build_from_factory
    else:
        build = _build_timm
    try:
        return build(model, num_classes)
    except Exception as error:
        if model.pretrained and _is_download_error(error):
            raise ResourceError(_download_advice(model.name, error)) from error
        if model.pretrained and isinstance(error, RuntimeError):  # load_state_dict, or torch.hub's check of the hash
            raise CheckpointError(
                f"the published weights of {model.name!r} can't be loaded: {first_line(error)}\n"
                "remove arguments that change shapes from model.kwargs, or set model.pretrained=false"
            ) from error
        raise


def _build_timm(model: ModelConfig, num_classes: int) -> nn.Module:
    return timm.create_model(model.name, pretrained=model.pretrained, num_classes=num_classes, **model.kwargs)


def _build_torchvision(model: ModelConfig, num_classes: int) -> nn.Module:
    name = model.name.removeprefix(TORCHVISION)
    if not model.pretrained:
        # Other ranks and checkpoints build this model without the weights that the run started from.
        kwargs = {key: value for key, value in model.kwargs.items() if key != "weights"}
        return torchvision.models.get_model(name, weights=None, num_classes=num_classes, **kwargs)
    # torchvision rejects another num_classes together with weights: build with the weights' head, then replace it.
    built = torchvision.models.get_model(name, **{"weights": "DEFAULT", **model.kwargs})
    replace_head(built, num_classes)
    return built


def _build_from_factory(model: ModelConfig, num_classes: int) -> nn.Module:
    built = import_factory(model.name)(num_classes=num_classes, **model.kwargs)
    if not isinstance(built, nn.Module):
        raise UserError(f"model.name: {model.name!r} returned {type(built).__name__}; return a torch.nn.Module")
    return built


def replace_head(model: nn.Module, num_classes: int) -> None:
    """Replace the last linear layer (or 1x1 convolution) by an initialised one if its size is not `num_classes`."""
    name, head = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]
    new: nn.Module
    if isinstance(head, nn.Linear):
        size, new = head.out_features, nn.Linear(head.in_features, num_classes, bias=head.bias is not None)
    else:
        size, new = head.out_channels, nn.Conv2d(head.in_channels, num_classes, head.kernel_size)  # type: ignore[arg-type]
    if size != num_classes:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)


def weights_source(model: ModelConfig, built: nn.Module, num_classes: int) -> str:
    """One sentence: where the weights of a model built by `build_model` come from, and whether its head is new."""
    is_torchvision = model.name.startswith(TORCHVISION)
    if not model.pretrained:
        by_factory = is_factory_name(model.name) and not is_torchvision
        return "starts from scratch" + (f": weights as initialised by {model.name}" if by_factory else "")
    if is_torchvision:
        name = model.name.removeprefix(TORCHVISION)
        weights = torchvision.models.get_model_weights(name)[model.kwargs.get("weights", "DEFAULT")]
        source, had = f"torchvision {name}, {weights.name}", len(weights.meta["categories"])
    else:
        cfg = getattr(built, "pretrained_cfg", None) or {}
        tagged = ".".join(filter(None, [cfg.get("architecture"), cfg.get("tag")])) or model.name
        source, had = f"timm {tagged}", cfg.get("num_classes", num_classes)
        if cfg.get("file"):
            source += f", read from {cfg['file']}"
    sentence = f"starts from published weights ({source})"
    if had != num_classes:
        sentence += f"; {new_head_note(head_names(built, num_classes), had, num_classes)}"
    return sentence


def new_head_note(head: Sequence[str], had: int, num_classes: int) -> str:
    return f"the head ({', '.join(head)}) is newly initialised: it had {had} outputs, the model has {num_classes}"


def _is_download_error(error: Exception) -> bool:
    """Whether a download failed: the libraries' network errors, which are not all OSErrors, or a truncated file."""
    libraries = {"huggingface_hub", "httpx", "httpcore", "requests", "urllib3", "safetensors_rust"}
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in libraries


def _download_advice(name: str, error: Exception) -> str:
    """Three lines: what failed, which file to download elsewhere, how to use it."""
    if name.startswith(TORCHVISION):
        where = str(torchvision.models.get_model_weights(name.removeprefix(TORCHVISION))["DEFAULT"].url)
    else:
        cfg = timm.models.get_pretrained_cfg(name)
        hub_id = getattr(cfg, "hf_hub_id", None)
        where = f"'model.safetensors' of {hub_id} on the hub" if hub_id else str(getattr(cfg, "url", None))
    return (
        f"can't download the published weights of {name!r}: {first_line(error)}\n"
        f"without a network: download {where} elsewhere and copy it here,\n"
        "then start with model.pretrained=false model.checkpoint=FILE"
    )


def model_mean_std(model: nn.Module) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel (red, green, blue), of pixels in 0..1, that the weights expect.

    timm's models have them in their config; for others ImageNet's are used, as for all torchvision classifiers.
    """
    cfg = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    return list(cfg.get("mean", IMAGENET_DEFAULT_MEAN)), list(cfg.get("std", IMAGENET_DEFAULT_STD))


def head_names(model: nn.Module, num_classes: int) -> list[str]:
    """Names of the head's parameters, such as `["fc.weight", "fc.bias"]`; empty where the model has no linear head.

    timm's models name their classifier (some have two); of others it is the last linear layer or convolution with
    `num_classes` outputs.
    """
    parameters = [name for name, _ in model.named_parameters()]
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    owners = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    names = [name for name in parameters if any(name.startswith(owner + ".") for owner in owners)]
    if names:
        return names
    for owner, module in reversed(list(model.named_modules())):
        outputs = getattr(module, "out_features", None) or getattr(module, "out_channels", None)
        if isinstance(module, nn.Linear | nn.Conv2d) and outputs == num_classes:
            return [f"{owner}.{name}" if owner else name for name, _ in module.named_parameters()]
    return []


def check_trusted(model: ModelConfig, imports: Sequence[str], trusted: Collection[str], where: str) -> None:
    """Raise CheckpointError where building a checkpoint's model would run code that the user has not named.

    Nothing is imported. model, imports: of the checkpoint's own config. trusted: the names that the user has given,
    `my_module` for an import and `my_module:my_factory` for a model; compared whole, since `my_module:os.system` is not
    code of a trusted module. where: the checkpoint, for the message.
    """
    # timm takes a name with a colon for a place to download a model from; without one it is a key of its registry.
    names = [*imports, model.name] if ":" in model.name.removeprefix(TORCHVISION) else imports
    for name in names:
        if name not in trusted:
            raise CheckpointError(
                f"{where}: its config names code to run, {name!r}; nothing was run\n"
                f"if you know and trust that code: --allow-import {name}"
            )
    for name in RESERVED:
        if name in model.kwargs:
            raise CheckpointError(
                f"{where}: its config sets model.kwargs.{name}, which no run sets; nothing was run\n"
                "use another checkpoint"
            )
