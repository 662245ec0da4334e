"""Stage 2 of the checks for the `model` section: names, tags, published weights and kwargs, before anything is started.

Owns `model_problems`. Refuses names that neither timm nor torchvision knows, keywords that the model's own constructor
does not take or look at, torchvision models that return auxiliary outputs, and what can't be frozen, split or computed
anew in backward. Reads no data, downloads nothing. Called by `engine.check`.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import timm
import torch
import torchvision
from torch import nn

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import Problem
from imagenet_cls.lookup import (
    did_you_mean,
    import_factory,
    is_factory_name,
    keyword_names,
    kwargs_problems,
    missing_kwargs_problems,
)
from imagenet_cls.models.adapt import checkpointing_problem, splitting_problem
from imagenet_cls.models.build import TORCHVISION, first_line
from imagenet_cls.models.freeze import freeze_problems

# What a config may not put into model.kwargs, since it has a key of its own or is decided by the program.
RESERVED = ("pretrained", "num_classes", "model_name", "checkpoint_path", "device")


def model_problems(model: ModelConfig, grad_checkpointing: bool = False) -> list[Problem]:
    """Everything wrong with the section that shows without data: name, tag, weights, kwargs, what is frozen. Builds on
    the meta device, which takes no memory and about 0.1 s; the few models that can't be built there are built on the
    CPU and dropped. grad_checkpointing: `train`'s; whether the model can do it.

    The factories of timm and torchvision take `**kwargs`, so it is the trial build that says which keyword the
    constructor behind them refuses; the candidates for *did you mean* come from that constructor.
    """
    reserved = [name for name in model.kwargs if name in RESERVED]
    problems = [
        Problem(f"model.kwargs.{name}", "is set by the program itself and can't be given in model.kwargs")
        for name in reserved
    ]
    if model.name.startswith(TORCHVISION):
        built, refused = _check_torchvision(model)
    elif is_factory_name(model.name):
        return problems + _check_own(model)
    else:
        built, refused = _check_timm(model)
    problems += refused
    if built is not None:
        problems += freeze_problems(built, model, model.num_classes or 1000)
        unfit = checkpointing_problem(built) if grad_checkpointing else None
        unsplit = splitting_problem(built) if model.split_bn else None
        problems += [problem for problem in (unfit, unsplit) if problem is not None]
    return problems


def _unknown_name(name: str) -> Problem:
    candidates = [*timm.list_models(), *(TORCHVISION + other for other in _torchvision_names())]
    remedy = did_you_mean(name, candidates) or "; use a timm name, torchvision:NAME or my_module:my_factory"
    return Problem("model.name", f"unknown model {name!r}{remedy}")


def _torchvision_names() -> list[str]:
    return torchvision.models.list_models(module=torchvision.models)  # the classifiers among them


def _check_timm(model: ModelConfig) -> tuple[nn.Module | None, list[Problem]]:
    """The model, on the meta device where that works, and what is wrong with it; likewise for torchvision's."""
    architecture, _, tag = model.name.partition(".")
    if ":" in model.name or "/" in model.name or not timm.is_model(architecture):
        return None, [_unknown_name(model.name)]
    tags = [name.partition(".")[2] for name in timm.list_models(architecture, include_tags=True)]
    if tag and tags and tag not in tags:  # names that timm has renamed list no tags
        listing = ", ".join(filter(None, tags)) or "none"
        text = f"{architecture!r} has no weights tagged {tag!r}{did_you_mean(tag, tags)} (tags: {listing})"
        return None, [Problem("model.name", text)]

    def build(kwargs: dict[str, Any]) -> nn.Module:
        return timm.create_model(model.name, pretrained=False, num_classes=model.num_classes or 1000, **kwargs)

    module = sys.modules[timm.model_entrypoint(architecture).__module__]
    built, problems = _trial(model.kwargs, build, vars(module))
    cfg = getattr(built, "pretrained_cfg", None)
    if model.pretrained and cfg is not None and not any(cfg.get(key) for key in ("url", "hf_hub_id", "file")):
        tagged = timm.list_models(architecture, include_tags=True, pretrained=True)
        remedy = f"; with weights: {', '.join(tagged)}" if tagged else "; set it to false, or give model.checkpoint"
        problems.append(Problem("model.pretrained", f"no weights are published for {model.name!r}{remedy}"))
    return built, problems


def _check_torchvision(model: ModelConfig) -> tuple[nn.Module | None, list[Problem]]:
    name = model.name.removeprefix(TORCHVISION)
    if name not in _torchvision_names():
        return None, [_unknown_name(model.name)]
    kwargs = dict(model.kwargs)
    problems = []
    if "weights" in kwargs:
        published = list(torchvision.models.get_model_weights(name).__members__)
        given = kwargs.pop("weights")
        if not model.pretrained:
            problems.append(Problem("model.kwargs.weights", "has no effect without model.pretrained=true"))
        elif given not in (*published, "DEFAULT"):
            hint = did_you_mean(str(given), published)
            problems.append(
                Problem("model.kwargs.weights", f"unknown {given!r}{hint} (allowed: {', '.join(published)})")
            )

    def build(kwargs: dict[str, Any]) -> nn.Module:
        return torchvision.models.get_model(name, weights=None, num_classes=model.num_classes or 1000, **kwargs)

    module = sys.modules[torchvision.models.get_model_builder(name).__module__]
    built, refused = _trial(kwargs, build, vars(module))
    problems += refused
    if built is not None:
        problems += _swallowed(built, kwargs)
        if model.pretrained and hasattr(built, "transform_input"):
            text = "normalises its input anew with published weights only; take timm's model of that name"
            problems.append(Problem("model.pretrained", text))
        if getattr(built, "aux_logits", False):
            text = (
                "gives auxiliary outputs in training, which the loss does not know; add model.kwargs.aux_logits=false"
            )
            problems.append(Problem("model.name", f"{model.name!r} {text}"))
    return built, problems


def _check_own(model: ModelConfig) -> list[Problem]:
    """The user's factory is looked at and not called: what it does when it builds is its own affair."""
    try:
        factory = import_factory(model.name)
    except LookupError as error:
        return [Problem("model.name", str(error))]
    problems = kwargs_problems("model", factory, model.kwargs)
    problems += missing_kwargs_problems("model", factory, model.kwargs, given=("num_classes",))
    taken, takes_any = keyword_names(factory)
    if "num_classes" not in taken and not takes_any:
        problems.append(Problem("model.name", f"{model.name!r} must take the keyword num_classes"))
    if model.pretrained:
        problems.append(
            Problem("model.pretrained", "a factory of your own has no published weights; use model.checkpoint")
        )
    return [p for p in problems if p.key not in {f"model.kwargs.{name}" for name in RESERVED}]


def _trial(
    given: dict[str, Any], build: Callable[[dict[str, Any]], nn.Module], namespace: dict[str, Any]
) -> tuple[nn.Module | None, list[Problem]]:
    """Build once to see which keywords are refused: the model (None if it can't be built) and the problems.

    namespace: the module that the factory is defined in, where the class that refused a keyword is found by its name.
    """
    kwargs = {name: value for name, value in given.items() if name not in RESERVED}
    refused: dict[str, Any] = {}  # keyword -> the callable that refused it
    built, failure = None, None
    while built is None and failure is None:
        try:
            built = _build_anywhere(build, kwargs)
        except Exception as error:
            names, refuser = _refused_keywords(error, kwargs)
            refused |= dict.fromkeys(names, namespace.get(refuser))
            kwargs = {name: value for name, value in kwargs.items() if name not in names}
            if not names:
                failure = error
    built_class = [] if built is None else [type(built)]
    problems = []
    for name, refuser_object in refused.items():
        candidates = [n for n in _constructor_keywords([refuser_object, *built_class]) if n not in (*RESERVED, "cfg")]
        listing = f" (allowed: {', '.join(candidates)})" if candidates else ""
        problems.append(Problem(f"model.kwargs.{name}", f"unknown keyword{did_you_mean(name, candidates)}{listing}"))
    if failure is not None:
        key = "model.kwargs" if kwargs else "model.name"
        problems.append(Problem(key, f"the model can't be built: {first_line(failure)}"))
    return built, problems


def _build_anywhere(build: Callable[[dict[str, Any]], nn.Module], kwargs: dict[str, Any]) -> nn.Module:
    """Build on the meta device, and where that fails for whatever reason, on the CPU: only the latter's error
    counts."""
    try:
        with torch.device("meta"):
            return build(dict(kwargs))
    except Exception:
        return build(dict(kwargs))


def _refused_keywords(error: Exception, kwargs: dict[str, Any]) -> tuple[list[str], str]:
    """Which of `kwargs` a TypeError calls unexpected, and the name of the class or function that does."""
    match = re.match(r"(?:\w+\.)*?(\w+)(?:\.__init__)?\(\) got (?:an )?unexpected keyword argument(.*)", str(error))
    if not isinstance(error, TypeError) or match is None:
        return [], ""
    quoted = re.findall(r"'(\w+)'", match[2].partition("Did you mean")[0])
    return [name for name in quoted if name in kwargs], match[1]


def _constructor_keywords(objects: Iterable[Any]) -> list[str]:
    """The keywords that the constructors of `objects` take, with their bases' where a constructor passes `**kwargs`
    on."""
    names: dict[str, None] = {}
    for thing in objects:
        for owner in thing.__mro__ if isinstance(thing, type) else [thing]:
            if not callable(owner) or owner in (nn.Module, object):
                continue
            taken, takes_any = keyword_names(owner)
            names |= dict.fromkeys(taken)
            if not takes_any:
                break
    return list(names)


def _swallowed(built: nn.Module, kwargs: dict[str, Any]) -> list[Problem]:
    """Keywords that a constructor takes in its `**kwargs` and never looks at, as some of torchvision's do.

    A keyword that means something to a model is written somewhere in the source of its classes; one that is not is a
    slip.
    """
    constructors, takes_any = keyword_names(type(built))
    if not takes_any:
        return []
    modules = {sys.modules[owner.__module__] for owner in type(built).__mro__ if owner not in (object, nn.Module)}
    words = {word for module in modules for word in re.findall(r"\w+", inspect.getsource(module))}
    unknown = [name for name in kwargs if name not in RESERVED and name not in words]
    return [
        Problem(
            f"model.kwargs.{n}", f"unknown keyword{did_you_mean(n, constructors)} (allowed: {', '.join(constructors)})"
        )
        for n in unknown
    ]
