"""Checks the `model` section before ranks start: names, tags, published weights and kwargs. Downloads nothing."""

import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
import torchvision
from torch import nn

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import Problem, first_line
from imagenet_cls.lookup import (
    did_you_mean,
    import_factory,
    is_factory_name,
    keyword_names,
    kwargs_problems,
)
from imagenet_cls.models.adapt import checkpointing_problems, freeze_problems, split_bn_problems
from imagenet_cls.models.build import RESERVED, TORCHVISION


def model_problems(model: ModelConfig, grad_checkpointing: bool = False) -> list[Problem]:
    """All problems of the section that can be found without data. grad_checkpointing: `train`'s.

    Builds on the meta device, which takes no memory and about 0.1 s; the few models that can't be built there are built
    on the CPU. timm's and torchvision's factories take `**kwargs`, so only this trial shows which argument the
    constructor rejects.
    """
    if is_factory_name(model.name) and not model.name.startswith(TORCHVISION):
        return _factory_problems(model)
    library = _try_torchvision if model.name.startswith(TORCHVISION) else _try_timm
    reserved = [name for name in model.kwargs if name in RESERVED]
    problems = [Problem(f"model.kwargs.{name}", "is set by the program; remove it") for name in reserved]
    kwargs = {name: value for name, value in model.kwargs.items() if name not in RESERVED}
    built, found = library(model, kwargs)
    problems += found
    if built is not None:
        problems += freeze_problems(built, model, model.num_classes or 1000)
        problems += checkpointing_problems(built) if grad_checkpointing else []
        problems += split_bn_problems(built) if model.split_bn else []
    return problems


def _unknown_name(name: str) -> Problem:
    candidates = [*timm.list_models(), *(TORCHVISION + other for other in _torchvision_names())]
    remedy = did_you_mean(name, candidates) or "; use a timm name, torchvision:NAME or my_module:my_factory"
    return Problem("model.name", f"unknown model {name!r}{remedy}")


def _torchvision_names() -> list[str]:
    """torchvision's classifiers."""
    return torchvision.models.list_models(module=torchvision.models)


def _try_timm(model: ModelConfig, kwargs: dict[str, Any]) -> tuple[nn.Module | None, list[Problem]]:
    """The model, on the meta device where possible, and its problems."""
    architecture, _, tag = model.name.partition(".")
    if ":" in model.name or "/" in model.name or not timm.is_model(architecture):
        return None, [_unknown_name(model.name)]
    tags = [name.partition(".")[2] for name in timm.list_models(architecture, include_tags=True)]
    if tag and tags and tag not in tags:  # names that timm has renamed list no tags
        listing = ", ".join(filter(None, tags)) or "none"
        text = f"{architecture!r} has no weights tagged {tag!r}{did_you_mean(tag, tags)} (tags: {listing})"
        return None, [Problem("model.name", text)]
    build = partial(timm.create_model, model.name, pretrained=False, num_classes=model.num_classes or 1000)
    built, problems = _try_build(build, kwargs, timm.model_entrypoint(architecture))
    cfg = getattr(built, "pretrained_cfg", None)
    if model.pretrained and cfg is not None and not any(cfg.get(key) for key in ("url", "hf_hub_id", "file")):
        tagged = timm.list_models(architecture, include_tags=True, pretrained=True)
        remedy = f"; with weights: {', '.join(tagged)}" if tagged else "; set it to false, or use model.checkpoint"
        problems.append(Problem("model.pretrained", f"no weights are published for {model.name!r}{remedy}"))
    return built, problems


def _try_torchvision(model: ModelConfig, kwargs: dict[str, Any]) -> tuple[nn.Module | None, list[Problem]]:
    name = model.name.removeprefix(TORCHVISION)
    if name not in _torchvision_names():
        return None, [_unknown_name(model.name)]
    problems = []
    if "weights" in kwargs:
        published = list(torchvision.models.get_model_weights(name).__members__)
        given = kwargs.pop("weights")
        if not model.pretrained:
            problems.append(Problem("model.kwargs.weights", "has no effect without model.pretrained=true"))
        elif given not in (*published, "DEFAULT"):
            text = f"unknown {given!r}{did_you_mean(str(given), published)} (allowed: {', '.join(published)})"
            problems.append(Problem("model.kwargs.weights", text))
    build = partial(torchvision.models.get_model, name, weights=None, num_classes=model.num_classes or 1000)
    built, rejected = _try_build(build, kwargs, torchvision.models.get_model_builder(name))
    problems += rejected
    if built is not None:
        problems += [_unknown_argument(n, [type(built)]) for n in _ignored_arguments(built, kwargs)]
        if model.pretrained and hasattr(built, "transform_input"):
            text = "normalises its input again if it has published weights; use timm's model of that name"
            problems.append(Problem("model.pretrained", text))
        if getattr(built, "aux_logits", False):
            text = f"{model.name!r} has auxiliary outputs in training; add model.kwargs.aux_logits=false"
            problems.append(Problem("model.name", text))
    return built, problems


def _factory_problems(model: ModelConfig) -> list[Problem]:
    """Of the user's factory, which is not called here: building may be slow or need data."""
    try:
        factory = import_factory(model.name)
    except LookupError as error:
        return [Problem("model.name", str(error))]
    problems = kwargs_problems("model.kwargs", factory, model.kwargs, passed=("num_classes",), reserved=RESERVED)
    names, takes_any = keyword_names(factory)
    if "num_classes" not in names and not takes_any:
        problems.append(Problem("model.name", f"{model.name!r} must take the argument num_classes"))
    if model.pretrained:
        problems.append(Problem("model.pretrained", "is not for your own factory; use model.checkpoint"))
    return problems


def _try_build(
    build: Callable[..., nn.Module], kwargs: dict[str, Any], factory: Callable[..., Any]
) -> tuple[nn.Module | None, list[Problem]]:
    """The model without the arguments that its constructor rejects (None if it can't be built), and the problems.

    factory: of the library; the class that rejects an argument is looked up in its module.
    """
    kwargs = dict(kwargs)
    rejected: dict[str, Any] = {}  # argument -> the callable that rejects it
    built, problems = None, []
    while built is None:
        try:
            built = _build_on_meta_or_cpu(build, kwargs)
        except Exception as error:
            names, owner = _rejected_arguments(error, kwargs)
            rejected |= dict.fromkeys(names, vars(sys.modules[factory.__module__]).get(owner))
            kwargs = {name: value for name, value in kwargs.items() if name not in names}
            if not names:
                text = f"the model can't be built: {type(error).__name__}: {first_line(error)}"
                problems.append(Problem("model.kwargs" if kwargs else "model.name", text))
                break
    owners = [] if built is None else [type(built)]
    return built, [*(_unknown_argument(name, [owner, *owners]) for name, owner in rejected.items()), *problems]


def _build_on_meta_or_cpu(build: Callable[..., nn.Module], kwargs: dict[str, Any]) -> nn.Module:
    """Build on the meta device, and where that fails on the CPU, whose error counts."""
    try:
        with torch.device("meta"):
            return build(**kwargs)
    except Exception:
        return build(**kwargs)


def _rejected_arguments(error: Exception, kwargs: dict[str, Any]) -> tuple[list[str], str]:
    """Which of `kwargs` a TypeError calls unexpected, and the name of the class or function that raised it."""
    match = re.match(r"(?:\w+\.)*?(\w+)(?:\.__init__)?\(\) got (?:an )?unexpected keyword argument(.*)", str(error))
    if not isinstance(error, TypeError) or match is None:
        return [], ""
    quoted = re.findall(r"'(\w+)'", match[2].partition("Did you mean")[0])
    return [name for name in quoted if name in kwargs], match[1]


def _unknown_argument(name: str, owners: list[Any]) -> Problem:
    """owners: callables whose signatures have the allowed arguments; of a class with `**kwargs`, its bases' too."""
    allowed: dict[str, None] = {}
    for owner in owners:
        for function in owner.__mro__ if isinstance(owner, type) else [owner]:
            if not callable(function) or function in (nn.Module, object):
                continue
            names, takes_any = keyword_names(function)
            allowed |= dict.fromkeys(n for n in names if n not in (*RESERVED, "cfg"))
            if not takes_any:
                break
    listing = f" (allowed: {', '.join(allowed)})" if allowed else ""
    return Problem(f"model.kwargs.{name}", f"unknown argument{did_you_mean(name, allowed)}{listing}")


def _ignored_arguments(built: nn.Module, kwargs: dict[str, Any]) -> list[str]:
    """Arguments that the constructor takes by `**kwargs` and never uses, as some of torchvision's do.

    One that is used appears as a word somewhere in the source of the model's classes.
    """
    if not keyword_names(type(built))[1]:
        return []
    modules = {sys.modules[owner.__module__] for owner in type(built).__mro__ if owner not in (object, nn.Module)}
    words = {word for module in modules for word in re.findall(r"\w+", inspect.getsource(module))}
    return [name for name in kwargs if name not in words]
