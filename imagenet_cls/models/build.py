"""From a config's `model` section to a module on the CPU.

Owns the three origins of a model (timm, torchvision, the user's own factory), and three facts that others need of a
finished model: where its weights come from, the pixel statistics that they were made with, and which parameters are its
head. Refuses nothing that `check` has let pass but published weights that can't be fetched or don't fit. Called by
`engine.model`.

Nothing here draws a random number beyond the initial weights: the caller seeds, and the same seed gives the same bits.
"""

import timm
import torchvision
from torch import nn

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import CheckpointError, ResourceError, UserError
from imagenet_cls.lookup import import_factory, is_factory_name

TORCHVISION = "torchvision:"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def build_model(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model on the CPU, in float32 and training mode, with `num_classes` outputs.

    num_classes: outputs of the head; the caller has settled it from `model.num_classes` and the data set. Published
    weights (`model.pretrained`) are downloaded once; a head of another size is initialised anew, which
    `origin_of_weights` tells. `model.checkpoint` is not looked at: see `weights.load_weights`. Raises ResourceError
    where published weights can't be fetched, CheckpointError where they don't fit the kwargs, UserError where the
    user's factory does not return a module.
    """
    if model.name.startswith(TORCHVISION):
        build = _build_torchvision
    elif is_factory_name(model.name):
        build = _build_own
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
                "take the keywords that change its shapes out of model.kwargs, or set model.pretrained=false"
            ) from error
        raise


def _build_timm(model: ModelConfig, num_classes: int) -> nn.Module:
    return timm.create_model(model.name, pretrained=model.pretrained, num_classes=num_classes, **model.kwargs)


def _build_torchvision(model: ModelConfig, num_classes: int) -> nn.Module:
    name = model.name.removeprefix(TORCHVISION)
    if not model.pretrained:
        # Which published weights a run began with is no matter once they are its own (other ranks, checkpoints).
        kwargs = {key: value for key, value in model.kwargs.items() if key != "weights"}
        return torchvision.models.get_model(name, weights=None, num_classes=num_classes, **kwargs)
    # torchvision refuses another num_classes together with weights: build with the weights' own head, then replace it.
    built = torchvision.models.get_model(name, **{"weights": "DEFAULT", **model.kwargs})
    _replace_head(built, num_classes)
    return built


def _build_own(model: ModelConfig, num_classes: int) -> nn.Module:
    built = import_factory(model.name)(num_classes=num_classes, **model.kwargs)
    if not isinstance(built, nn.Module):
        raise UserError(f"model.name: {model.name!r} returned {type(built).__name__}; let it return a torch.nn.Module")
    return built


def _replace_head(built: nn.Module, num_classes: int) -> None:
    """Put a freshly initialised head in place of the last linear layer (or 1x1 convolution) if its size is another."""
    name, head = [(n, m) for n, m in built.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]
    fresh: nn.Module
    if isinstance(head, nn.Linear):
        size, fresh = head.out_features, nn.Linear(head.in_features, num_classes, bias=head.bias is not None)
    else:
        size, fresh = head.out_channels, nn.Conv2d(head.in_channels, num_classes, head.kernel_size)  # type: ignore[arg-type]
    if size != num_classes:
        parent, _, leaf = name.rpartition(".")
        setattr(built.get_submodule(parent), leaf, fresh)


def origin_of_weights(model: ModelConfig, built: nn.Module, num_classes: int) -> str:
    """Where the weights of what `build_model` has built come from, in one sentence for the user.

    It names the published weights, the tag that timm chose included, and a head that could not be taken over.
    """
    of_torchvision = model.name.startswith(TORCHVISION)
    if not model.pretrained:
        own = is_factory_name(model.name) and not of_torchvision
        return "starts from scratch" + (f": the weights are those that {model.name} makes" if own else "")
    if of_torchvision:
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
        head = ", ".join(head_names(built, num_classes))
        sentence += f"; the head ({head}) is initialised anew: it had {had} outputs, the model has {num_classes}"
    return sentence


def _is_download_error(error: Exception) -> bool:
    """Whether fetching a file failed: the libraries' network errors, which are not all OSErrors, or a broken file."""
    libraries = {"huggingface_hub", "httpx", "httpcore", "requests", "urllib3", "safetensors_rust"}
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in libraries


def _download_advice(name: str, error: Exception) -> str:
    """Three lines: what failed, which file to fetch by hand, how to name it."""
    if name.startswith(TORCHVISION):
        where = str(torchvision.models.get_model_weights(name.removeprefix(TORCHVISION))["DEFAULT"].url)
    else:
        cfg = timm.models.get_pretrained_cfg(name)
        hub_id = getattr(cfg, "hf_hub_id", None)
        where = f"'model.safetensors' of {hub_id} on the hub" if hub_id else str(getattr(cfg, "url", None))
    return (
        f"can't get the published weights of {name!r}: {first_line(error)}\n"
        f"without a network: fetch {where} elsewhere and copy it here,\n"
        "then start with model.pretrained=false model.checkpoint=FILE"
    )


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def model_mean_std(model: nn.Module) -> tuple[list[float], list[float]]:
    """Per channel (red, green, blue) mean and standard deviation, of pixels in 0..1, that the model's weights expect.

    timm's models say it; for all others ImageNet's are taken, which is what every classifier of torchvision was trained
    with.
    """
    cfg = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    return list(cfg.get("mean", IMAGENET_MEAN)), list(cfg.get("std", IMAGENET_STD))


def head_names(model: nn.Module, num_classes: int) -> list[str]:
    """Names of the head's parameters, such as `["fc.weight", "fc.bias"]`; empty where the model has no linear head.

    timm's models name their classifier (some have two); for others it is the last linear layer or convolution that has
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
