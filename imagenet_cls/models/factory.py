"""Build the model of a config's `model` section on the CPU.

With timm, torchvision or the user's factory. Checks the section before ranks start: names, tags and
published weights.

Random numbers are drawn only to initialize weights, so the same seed gives the same weights.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any

import huggingface_hub
import timm
import torchvision
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, resolve_data_config
from torch import nn

import imagenet_cls.models.cifar  # noqa: F401 (registers its models with timm)
from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import CheckpointError, ConfigError, DownloadError, Problem, UserError
from imagenet_cls.lookup import (
    NameNotFoundError,
    component,
    did_you_mean,
    import_factory,
    is_model_source,
    is_user_factory,
    kwargs_problems,
)
from imagenet_cls.models.head import head_names
from imagenet_cls.text import first_line, join_names

# timm's crop_mode for each value of `eval.mode`
CROP_MODES = {"crop": "center", "squash": "squash", "pad": "border"}
TORCHVISION = "torchvision:"
# timm's sources of a config and weights, besides its own models
HUB, FOLDER = "hf-hub:", "local-dir:"

_PROBE_SEC = 5  # how long to wait for an answer of the Hub

# Arguments that a config can't give in model.kwargs: they have a key elsewhere, or the program
# decides them.
RESERVED = ("pretrained", "num_classes", "model_name", "checkpoint_path", "device")


def build_model(
    config: ModelConfig, num_classes: int | None = None, channels: int = 3
) -> nn.Module:
    """Build the model on the CPU, in float32 and training mode, with `num_classes` outputs.

    num_classes: None: as many as the published weights have. channels: the channels of the images;
    timm's models are built for them. Published weights
    (`model.pretrained`) are downloaded once; a head of another size is initialized.
    `model.checkpoint` is not read: see `weights.load_weights`. Raises DownloadError if published
    weights can't be downloaded, CheckpointError where they don't fit the kwargs, ConfigError for
    kwargs that the library rejects and for a malformed name on the Hub, UserError where the user's
    factory does not return a module, and what this factory raises.
    """
    is_hub = config.name.startswith(HUB)
    try:
        _check_hub(config)
        return _build(config, num_classes, channels)
    except HFValidationError as error:
        raise ConfigError([f"model.name: {config.name!r}: {first_line(error)}"]) from error
    except HfHubHTTPError as error:
        if is_hub and not config.pretrained:
            raise  # the Hub has answered, so the name or the access is wrong
        raise _download_error(config, error) from error
    except Exception as error:
        if config.name.startswith(FOLDER) and isinstance(error, OSError):
            raise CheckpointError(
                f"model.name: {config.name!r}: {first_line(error)}",
                "Give the path of a folder with a model.",
            ) from error
        if (config.pretrained or is_hub) and is_download_error(error):
            raise _download_error(config, error) from error
        # from load_state_dict, or from torch.hub's check of the digest
        if config.pretrained and isinstance(error, RuntimeError):
            raise CheckpointError(
                f"The published weights of {config.name!r} can't be loaded: {first_line(error)}",
                "Remove arguments that change shapes from model.kwargs, or set "
                "model.pretrained=false.",
            ) from error
        with component("model.name", config.name, config.kwargs):
            raise


def _build(config: ModelConfig, num_classes: int | None, channels: int) -> nn.Module:
    if config.name.startswith(TORCHVISION):
        return _build_torchvision(config, num_classes)
    if is_user_factory(config.name):
        model = import_factory(config.name)(num_classes=num_classes, **config.kwargs)
        if not isinstance(model, nn.Module):
            raise UserError(
                f"model.name: {config.name!r} returned {type(model).__name__}.",
                "Return a torch.nn.Module.",
            )
        return model
    kwargs = config.kwargs if channels == 3 else {"in_chans": channels, **config.kwargs}
    return timm.create_model(
        config.name, pretrained=config.pretrained, num_classes=num_classes, **kwargs
    )


def _build_torchvision(config: ModelConfig, num_classes: int | None) -> nn.Module:
    name = config.name.removeprefix(TORCHVISION)
    if name not in torchvision.models.list_models(module=torchvision.models):
        # Models for other tasks would download a backbone that a checkpoint's config names in
        # `weights_backbone`.
        raise LookupError(f"torchvision has no classification model {name!r}")
    if config.pretrained:
        # torchvision rejects another num_classes together with weights: build with the weights'
        # head, then replace it.
        model = torchvision.models.get_model(name, **{"weights": "DEFAULT", **config.kwargs})
        if num_classes is not None:
            replace_head(model, num_classes)
    else:
        # Other ranks and checkpoints build this model without the weights that the run started
        # from.
        kwargs = {key: value for key, value in config.kwargs.items() if key != "weights"}
        if num_classes is not None:
            kwargs["num_classes"] = num_classes
        model = torchvision.models.get_model(name, weights=None, **kwargs)
    # As timm's models have it, for `model_mean_std` and `published_evaluation`.
    preset = _torchvision_weights(config).transforms()
    model.pretrained_cfg = {
        "mean": preset.mean,
        "std": preset.std,
        "input_size": (3, *(preset.crop_size * 2)),
        "resize_px": preset.resize_size[0],
        "interpolation": preset.interpolation.value,
    }
    return model


def replace_head(model: nn.Module, num_classes: int) -> None:
    """Initialize the last linear layer (or 1x1 convolution) with another size if its own is not
    `num_classes`.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    head = layers[-1]
    if len(head.weight) == num_classes:
        return
    head.weight = nn.Parameter(head.weight.new_empty(num_classes, *head.weight.shape[1:]))
    if head.bias is not None:
        head.bias = nn.Parameter(head.weight.new_empty(num_classes))
    setattr(head, "out_features" if isinstance(head, nn.Linear) else "out_channels", num_classes)
    head.reset_parameters()


def describe_initial_weights(config: ModelConfig, model: nn.Module, num_classes: int) -> str:
    """One sentence: where the weights of a model built by `build_model` come from, and whether its
    head is new.
    """
    if not config.pretrained:
        return "starts from scratch"
    source, old_outputs = published_weights(config, model)
    sentence = f"starts from published weights ({source})"
    if old_outputs != num_classes:
        sentence += f"; {new_head_note(head_names(model, num_classes), old_outputs, num_classes)}"
    return sentence


def published_weights(config: ModelConfig, model: nn.Module) -> tuple[str, int]:
    """Name of the published weights that `model` started from, and the number of their classes."""
    if config.name.startswith(TORCHVISION):
        weights = _torchvision_weights(config)
        name = config.name.removeprefix(TORCHVISION)
        return f"torchvision {name}, {weights.name}", len(weights.meta["categories"])
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    if is_model_source(config.name):
        return config.name, cfg["num_classes"]
    name = ".".join(filter(None, [cfg.get("architecture"), cfg.get("tag")]))
    return f"timm {name}", cfg["num_classes"]


def _torchvision_weights(config: ModelConfig) -> Any:
    """The published weights of torchvision that the section names."""
    published = torchvision.models.get_model_weights(config.name.removeprefix(TORCHVISION))
    return published[config.kwargs.get("weights", "DEFAULT")]


def new_head_note(head: Sequence[str], old_outputs: int, num_classes: int) -> str:
    return (
        f"the head ({', '.join(head)}) is newly initialized: it had {old_outputs} outputs, the "
        f"model has {num_classes}"
    )


def is_download_error(error: Exception) -> bool:
    """Whether a download failed: the libraries' network errors, which are not all OSErrors, or a
    truncated file.
    """
    libraries = {
        "huggingface_hub",
        "httpx",
        "httpx2",
        "httpcore",
        "requests",
        "urllib3",
        "safetensors_rust",
    }
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in libraries


def _hub_id(name: str) -> str | None:
    """The repository of a model on the Hugging Face Hub, if it is there."""
    if name.startswith(HUB):
        return name.removeprefix(HUB).partition("@")[0]
    hub_id: str | None = getattr(timm.models.get_pretrained_cfg(name), "hf_hub_id", None)
    return hub_id


def _check_hub(config: ModelConfig) -> None:
    """Raise the error of the network if the Hugging Face Hub has to be asked and does not answer.
    The Hub's library itself tries for up to a minute, which no setting shortens.
    """
    hub_id = _hub_id(config.name)
    if not hub_id or not (config.pretrained or config.name.startswith(HUB)):
        return
    files = ("model.safetensors", "pytorch_model.bin")
    is_given = config.kwargs.keys() & {"pretrained_cfg", "pretrained_cfg_overlay"}
    is_cached = any(huggingface_hub.try_to_load_from_cache(hub_id, file) for file in files)
    if is_given or is_cached or huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    if config.pretrained:
        print(f"Downloading the published weights of {config.name!r}.", flush=True)
    # In a thread, since the look-up of a name may take longer than the time limit.
    ask = huggingface_hub.get_session().head
    endpoint = huggingface_hub.constants.ENDPOINT
    ThreadPoolExecutor(1).submit(ask, endpoint, timeout=_PROBE_SEC).result(_PROBE_SEC)


def _download_error(config: ModelConfig, error: Exception) -> DownloadError:
    """The error says what failed, which files to download elsewhere and how to use them."""
    # the hub's own error only says that there was one
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    name = config.name
    source = huggingface_hub.constants.ENDPOINT
    arguments = "model.checkpoint=FILE"
    if name.startswith(HUB):
        files = "its config.json and model.safetensors into one folder"
        arguments = f"{FOLDER}FOLDER in place of {name}"
    elif name.startswith(TORCHVISION):
        files = source = _torchvision_weights(config).url
    else:
        hub_id = _hub_id(name)
        files = f"model.safetensors of {hub_id} from the Hugging Face Hub"
        if not hub_id:
            files = source = str(getattr(timm.models.get_pretrained_cfg(name), "url", None))
    return DownloadError(
        f"Can't download the model or weights of {name!r} from {source}: {first_line(error)}",
        f"Download {files} on another machine, and start with {arguments}.{_cached_models()}",
    )


def _cached_models() -> str:
    """The end of a message: the models of timm whose published weights the Hub's cache has."""
    try:
        cached = huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.CacheNotFound:
        return ""
    names = [repo.repo_id.removeprefix("timm/") for repo in cached if repo.size_on_disk]
    names = sorted(filter(timm.models.is_model_pretrained, names))
    return f" The cache has the weights of {join_names(names, 10)}." if names else ""


def model_mean_std(model: nn.Module, channels: int = 3) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel (red, green, blue), of pixels in 0..1, that the
    weights expect.

    For models of timm and torchvision they are those of the published weights; for others
    ImageNet's. For one channel: the averages of the three.
    """
    cfg = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    mean = list(cfg.get("mean", IMAGENET_DEFAULT_MEAN))
    std = list(cfg.get("std", IMAGENET_DEFAULT_STD))
    if channels == 3:
        return mean, std
    return [fmean(mean)], [fmean(std)]


def label_names(model: nn.Module) -> list[str] | None:
    """The classes that timm's config of a model in a folder or on the Hub states."""
    return ordered_names((getattr(model, "pretrained_cfg", None) or {}).get("label_names"))


def ordered_names(names: Any) -> list[str] | None:
    """The names of outputs in a list, or by their numbers as keys."""
    if isinstance(names, dict):
        names = [names[key] for key in sorted(names, key=int)]
    return names and [*map(str, names)]


def published_evaluation(model: nn.Module) -> dict[str, Any]:
    """The values of the section `eval` with which the published weights of a model were evaluated;
    for other models those of timm's defaults.
    """
    cfg = getattr(model, "pretrained_cfg", None) or {}
    data = resolve_data_config(pretrained_cfg=cfg or {"input_size": (3, 224, 224)})
    modes = {mode: ours for ours, mode in CROP_MODES.items()}
    _, height, width = data["input_size"]
    return {
        "crop_px": height if height == width else [height, width],
        "crop_pct": data["crop_pct"],
        "resize_px": cfg.get("resize_px"),
        "interpolation": data["interpolation"],
        "mode": modes[data["crop_mode"]],
    }


def model_problems(config: ModelConfig) -> list[Problem]:
    """Problems of the section that show without building the model.

    timm's and torchvision's factories take `**kwargs`, as `create_model` does, so `build_model`
    finds the unknown ones.
    """
    if is_user_factory(config.name):
        return _factory_problems(config)
    is_torchvision = config.name.startswith(TORCHVISION)
    if problem := _name_problem(config.name):
        return [problem]
    problems = kwargs_problems("model.kwargs", timm.create_model, config.kwargs, RESERVED)
    find = _torchvision_problems if is_torchvision else _timm_weights_problems
    return problems + find(config)


def _name_problem(name: str) -> Problem | None:
    """The problem of a name that the libraries don't have, or of a tag that timm doesn't have."""
    if is_model_source(name):
        return None  # building it shows
    classifiers = torchvision.models.list_models(module=torchvision.models)
    architecture, _, tag = name.partition(".")
    if name.startswith(TORCHVISION):
        is_known = name.removeprefix(TORCHVISION) in classifiers
    else:
        is_known = ":" not in name and "/" not in name and timm.is_model(architecture)
    if not is_known:
        names = [*timm.list_models(), *(TORCHVISION + other for other in classifiers)]
        forms = "; use a timm name, torchvision:NAME, hf-hub:USER/NAME or my_module:my_factory"
        text = f"unknown model {name!r}{did_you_mean(name, names) or forms}"
        return Problem("model.name", text)
    tags = [
        tagged.partition(".")[2] for tagged in timm.list_models(architecture, include_tags=True)
    ]
    if tag and tags and tag not in tags:  # names that timm has renamed list no tags
        listing = ", ".join(filter(None, tags)) or "none"
        hint = did_you_mean(tag, tags)
        text = f"{architecture!r} has no weights tagged {tag!r}{hint} (tags: {listing})"
        return Problem("model.name", text)
    return None


def _timm_weights_problems(config: ModelConfig) -> list[Problem]:
    if not config.pretrained or is_model_source(config.name):
        return []
    cfg = timm.models.get_pretrained_cfg(config.name.partition(".")[0])
    if cfg is None:  # it is unknown whether there are weights
        return []
    if cfg.architecture == "fbnetc_100" and "bn_eps" not in config.kwargs:
        text = "is 0.001 with the published weights only; set it, for other ranks and checkpoints"
        return [Problem("model.kwargs.bn_eps", text)]
    is_given = config.kwargs.keys() & {"pretrained_cfg", "pretrained_cfg_overlay"}
    if cfg.has_weights or is_given:
        return []
    text = f"no weights are published for {config.name!r}; set it to false, or use model.checkpoint"
    return [Problem("model.pretrained", text)]


def _torchvision_problems(config: ModelConfig) -> list[Problem]:
    """The problems of wrong weights, and of models that normalize their input.

    ConvNeXt and a few more ignore unknown arguments, so those are not found.
    """
    name = config.name.removeprefix(TORCHVISION)
    published = [
        member
        for member, weights in torchvision.models.get_model_weights(name).__members__.items()
        if weights.meta["categories"] is not None  # else without a classifier
    ]
    given = config.kwargs.get("weights", "DEFAULT")
    if "weights" in config.kwargs and not config.pretrained:
        text = "has no effect without model.pretrained=true"
        return [Problem("model.kwargs.weights", text)]
    if given not in (*published, "DEFAULT"):
        hint = did_you_mean(str(given), published)
        text = f"unknown {given!r}{hint} (allowed: {', '.join(published)})"
        return [Problem("model.kwargs.weights", text)]
    if not config.pretrained:
        return []
    if name in ("googlenet", "inception_v3"):
        text = (
            "normalizes its input again if it has published weights; use timm's model of that name"
        )
        return [Problem("model.pretrained", text)]
    # `image_size` of the vision transformers; the weights set it, but not on other ranks
    (size, _) = _torchvision_weights(config).meta["min_size"]
    if name.startswith("vit_") and config.kwargs.get("image_size", 224) != size:
        text = f"these published weights take {size}; set it to {size}, or use a model of timm"
        return [Problem("model.kwargs.image_size", text)]
    return []


def _factory_problems(config: ModelConfig) -> list[Problem]:
    """Problems of the user's factory, which is not called: building may be slow or need data."""
    try:
        factory = import_factory(config.name)
    except NameNotFoundError as error:
        return [Problem("model.name", str(error))]
    problems = kwargs_problems(
        "model.kwargs", factory, config.kwargs, passed=("num_classes",), reserved=RESERVED
    )
    if config.pretrained:
        problems.append(
            Problem("model.pretrained", "is not for your own factory; use model.checkpoint")
        )
    return problems
