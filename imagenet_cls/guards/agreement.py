"""Do all ranks run the same thing? Each machine has its own code, command line and data folder, and they may differ.

Ranks that differ would train different recipes into one model, or call different collectives and hang. Called by
`engine.run` (code and configs, before anything is built), `engine.build` (images, before the model is) and
`engine.train` (what the ranks hold).
"""

import hashlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import PIL
import safetensors
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import imagenet_cls
from imagenet_cls.checkpoint.optimizer_state import state_holder
from imagenet_cls.config.load import config_to_dict
from imagenet_cls.config.schema import Config
from imagenet_cls.data import DataSets
from imagenet_cls.errors import ConfigError, DataError, UsageError
from imagenet_cls.guards.replicas import weights_of
from imagenet_cls.lookup import import_from_here, is_factory_name
from imagenet_cls.parallel.collectives import find_differences
from imagenet_cls.parallel.environment import name_ranks
from imagenet_cls.parallel.process_group import Group, reported_by_main

# What may differ from machine to machine.
_LOCAL = {
    "data.root", "data.exclude", "data.num_workers", "data.prefetch_batches", "data.timeout_sec", "device", "expect",
    "imports", "log.tensorboard", "log.plots",
    "model.checkpoint", "model.pretrained", "distill.teacher.checkpoint", "distill.teacher.pretrained",
    "parallel.init_method", "parallel.timeout_sec",
}  # fmt: skip


def check_same_code(config: Config, group: Group) -> None:
    """Raise UsageError on every rank unless all run the same code: of this package, of the modules that the config
    names, and the same versions of what computes. A collective.

    Before the configs are compared: another version may have other keys.
    """
    if group.control is None:
        return
    own = {"Python": "{}.{}".format(*sys.version_info), **versions()}
    sources = {"imagenet_cls": Path(imagenet_cls.__file__).parent} | user_modules(config)
    code = {f"the code of {name}": digest_of_sources(path) for name, path in sources.items()}
    if different := find_differences(own | code, group):
        ranks = sorted({rank for listed in different.values() for rank in listed})
        known = [f"{name} {own[name]}" if name in own else name for name in different]
        raise reported_by_main(
            UsageError(
                f"not the same on {name_ranks(ranks)} of {group.world_size} as here, on rank 0: {', '.join(known)}\n"
                "Give every machine the same code and the same environment, and start again."
            ),
            group,
        )


def user_modules(config: Config) -> dict[str, Path]:
    """Where the modules lie that a config names, in `imports` or as `my_module:my_factory`: a file, or a folder.

    One that can't be imported is left out; the checks of names have words for it.
    """
    texts = [value for value in flatten(config_to_dict(config)).values() if isinstance(value, str)]
    names = {text.partition(":")[0] for text in texts if is_factory_name(text)} | set(config.imports)
    found = {}
    for name in sorted(names - {"torch", "torchvision", "timm"}):
        with suppress(Exception):
            path = Path(str(import_from_here(name).__file__))
            found[name] = path.parent if path.name == "__init__.py" else path
    return found


def digest_of_sources(path: Path) -> str:
    """Over the names and bytes of all Python files below a folder, or of one file."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        digest.update(file.relative_to(path.parent).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Of the libraries whose arithmetic ends up in the weights, and of this package."""
    libraries = (imagenet_cls, torch, torchvision, timm, safetensors, numpy, PIL)
    return {module.__name__: module.__version__ for module in libraries}


def check_same_config(config: Config, group: Group) -> None:
    """Raise ConfigError on every rank unless all have the same config, but for a machine's own keys. A collective."""
    own = {key: repr(value) for key, value in settings_of(config).items()}
    own = {key: value for key, value in own.items() if key not in _LOCAL and key.partition(".")[0] not in _LOCAL}
    lines = [
        f"{key}: not the same on {name_ranks(ranks)} as on rank 0; start every rank with the same config and changes"
        for key, ranks in find_differences(own, group).items()
    ]
    if lines:
        raise reported_by_main(ConfigError(lines), group)


def check_same_data(data: DataSets, group: Group) -> None:
    """Raise DataError on every rank unless all see the same images. A collective."""
    assert data.train is not None and data.val is not None
    own = {"training images": data.train.digest(), "validation images": data.val.digest()}
    for name, ranks in find_differences(own, group).items():
        raise reported_by_main(
            DataError(
                f"the {name} on {name_ranks(ranks)} are not those of rank 0: other files, or other classes.\n"
                "Give every machine the same data set; its place (data.root) may differ."
            ),
            group,
        )


def tensors_held(model: nn.Module, ema: nn.Module | None, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that a step changes and that is the same on every rank, by name: weights, BatchNorm's statistics, their
    average, optimizer state.

    model, ema: themselves, no wrappers. Buffers of a model's own are each rank's, and not among them. The tensors are
    the real ones, not copies.
    """
    own = own_buffers(model)
    tensors = {name: tensor for name, tensor in weights_of(model).items() if name not in own}
    if ema is not None:
        tensors |= {f"the average's {name}": tensor for name, tensor in weights_of(ema).items() if name not in own}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in state_holder(optimizer).state.items():
        name = names[id(parameter)]
        tensors |= {f"{key} of {name}": value for key, value in state.items() if isinstance(value, Tensor)}
    return tensors


def own_buffers(model: nn.Module) -> set[str]:
    """The names of all buffers that are not BatchNorm's: nobody makes them agree (`parallel.wrap`)."""
    modules = [(name, module) for name, module in model.named_modules() if not isinstance(module, _BatchNorm)]
    return {f"{name}.{key}".lstrip(".") for name, module in modules for key, _ in module.named_buffers(recurse=False)}


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key, and the order of `optimizer.lr_scales`: the first pattern that fits counts."""
    return flatten(config_to_dict(config)) | {"optimizer.lr_scales": list(config.optimizer.lr_scales)}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
