"""Checks of a config that need no library, file or device.

Of single values, of keys together, and of keys without effect.
"""

import json
import re
from collections.abc import Collection, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from imagenet_cls.config import keys
from imagenet_cls.config.metrics import METRICS
from imagenet_cls.config.reader import dump_inline
from imagenet_cls.config.schema import SHARE_BELOW_1, Config, height_width
from imagenet_cls.entry_points import DATA_OPENERS, data_opener
from imagenet_cls.errors import CheckpointError, Problem
from imagenet_cls.lookup import number_problem
from imagenet_cls.text import format_value


def check_value(key: str, value: Any) -> None:
    """Raise ValueError unless a value is finite and has the range, length, order and form of its
    key.
    """
    if value is None or value in keys.choices(keys.value_types()[key]):
        return
    info = keys.info(key)
    shown = format_value(value)
    items = value if isinstance(value, list) else [value]
    try:
        # finds NaN and infinity in keyword arguments, at any depth
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError(f"{shown} is not a finite number") from None
    if info.allowed is not None and (not items or any(item not in info.allowed for item in items)):
        raise ValueError(f"{shown} is out of range: {info.allowed}")
    if isinstance(value, list) and info.count is not None and len(value) != info.count:
        raise ValueError(f"{shown} is not a list of {info.count} numbers")
    if info.ascending and sorted(items) != items:
        raise ValueError(f"{shown} is not in ascending order")
    if info.form is not None and not all(re.fullmatch(info.form[0], item) for item in items):
        raise ValueError(f"{shown} is not {info.form[1]}")


def rule_problems(c: Config) -> Iterator[Problem]:
    """What does not fit together."""
    for key in keys.value_types():
        yield from _schema_rules(c, key)
    yield from _data_rules(c)
    yield from _label_rules(c)
    yield from _image_rules(c)
    yield from _training_rules(c)
    yield from _device_rules(c)


def _schema_rules(c: Config, key: str) -> Iterator[Problem]:
    """The rules that the schema states beside the key: `excludes`, `at_most`, `shares`."""
    value = attrgetter(key)(c)
    info = keys.info(key)
    for other in info.excludes:
        if value != keys.default_of(key) and is_met(c, other):
            yield Problem(key, f"can't be combined with {other}; keep one of them")
    limit = attrgetter(info.at_most)(c) if info.at_most else None
    if value is not None and limit is not None:
        largest = max(value) if isinstance(value, list) else value
        if largest > limit:
            shown = format_value(value)
            yield Problem(key, f"{shown} is more than {info.at_most} {format_value(limit)}")
    for name in info.shares:
        component = key.replace(".kwargs", ".name")
        problem = number_problem(value.get(name) or 0, SHARE_BELOW_1)
        # a factory may give the name another meaning
        if problem is not None and ":" not in attrgetter(component)(c):
            yield Problem(f"{key}.{name}", problem)


def _data_rules(c: Config) -> Iterator[Problem]:
    data = c.data
    opener = data_opener(data.name)
    has_paths = opener is not None and opener.has_paths
    if data.val is None and data.val_fraction is None and data.fold is None:
        remedy = "name a part, or set data.val_fraction: 0.1"
        yield Problem("data.val", f"is null like data.val_fraction and data.fold; {remedy}")
    if data.fold is not None and data.fold[0] >= data.fold[1]:
        shown = format_value(data.fold)
        yield Problem("data.fold", f"{shown} is not a fold and the number of folds, such as [0, 5]")
    classes = data.classes
    if isinstance(classes, list) and (not classes or len(set(classes)) < len(classes)):
        shown = format_value(classes)
        yield Problem("data.classes", f"{shown} lists no class, or one twice; list each class once")
    if data.group is not None:
        try:
            re.compile(data.group)
        except re.error as error:
            shown = format_value(data.group)
            yield Problem("data.group", f"{shown} is not a regular expression: {error}")
    for key in ("data.group", "data.exclude"):
        if not has_paths and attrgetter(key)(c) is not None:
            yield Problem(
                key,
                f"works only for datasets of files, and data.name is {data.name!r}; set it to null",
            )
    if data.channels == 1 and c.model.name.startswith("torchvision:"):
        yield Problem("data.channels", "1 needs a model of timm or your own; torchvision's take 3")
    if data.channels == 2:
        yield Problem("data.channels", "2 is neither 1 nor 3")
    for key, values in (("data.mean", data.mean), ("data.std", data.std)):
        if values is not None and len(values) != data.channels:
            text = f"needs as many numbers as data.channels ({data.channels}), not {len(values)}"
            yield Problem(key, text)


def _label_rules(c: Config) -> Iterator[Problem]:
    """The rules of `data.labels`."""
    is_multi = c.data.labels == "multi"
    metrics = {
        "checkpoint.best": c.checkpoint.best,
        "train.early_stop.metric": c.train.early_stop.metric,
    }
    if c.train.early_stop.patience_evals is None:
        del metrics["train.early_stop.metric"]
    of_labels = METRICS[c.data.labels]
    for key, metric in metrics.items():
        if metric not in of_labels:
            text = f"{metric!r} does not go with data.labels {c.data.labels}"
            yield Problem(key, f"{text}; use {next(iter(of_labels))}")
    if not is_multi:
        return
    opener = data_opener(c.data.name)
    if opener is not None and not opener.supports_multilabel:
        forms = [form for form, other in DATA_OPENERS.items() if other.supports_multilabel]
        allowed = ", ".join(forms)
        yield Problem("data.labels", f"'multi' is for data.name {allowed}, not {c.data.name!r}")


def _image_rules(c: Config) -> Iterator[Problem]:
    size_px = c.augment.size_px
    growth = c.augment.progressive
    epochs = growth.epochs or []
    sizes_px = growth.sizes_px or []
    smallest_px = min([*height_width(size_px), *sizes_px])
    if c.augment.crop == "pad_crop" and c.augment.pad_px >= smallest_px:
        yield Problem(
            "augment.pad_px",
            f"{c.augment.pad_px} is not less than the {smallest_px} pixels of augment.size_px",
        )
    if len(epochs) != len(sizes_px):
        yield Problem(
            "augment.progressive.sizes_px", "needs one size for each of augment.progressive.epochs"
        )
    elif epochs and isinstance(size_px, list):
        yield Problem(
            "augment.progressive.epochs",
            f"is for squares, and augment.size_px is {format_value(size_px)}",
        )
    elif epochs:
        if epochs[-1] > c.train.epochs:
            yield Problem(
                "augment.progressive.epochs",
                f"{epochs[-1]:g} is more than train.epochs {c.train.epochs}",
            )
        if any(size % growth.multiple_px for size in sizes_px):
            yield Problem(
                "augment.progressive.sizes_px",
                "must be multiples of augment.progressive.multiple_px",
            )
        if max(sizes_px) != size_px:
            yield Problem(
                "augment.progressive.sizes_px", f"the largest is not augment.size_px {size_px}"
            )


def _training_rules(c: Config) -> Iterator[Problem]:
    splits = c.augment.splits
    loss = c.loss.name
    if loss == "jsd" and splits < 2:
        yield Problem(
            "loss.name",
            f"'jsd' compares splits, and augment.splits is {splits}; use 3, as AugMix does",
        )
    if loss != "jsd" and ":" not in loss and splits > 1:
        yield Problem(
            "augment.splits",
            f"{splits} splits of each image are for loss.name 'jsd', not {loss!r}",
        )
    if c.model.split_bn and splits < 2:
        yield Problem(
            "model.split_bn", f"is true and augment.splits is {splits}; use 2 or more splits"
        )
    if c.distill.kind != "none":
        yield from _distillation_rules(c)
    warmup_epochs = c.schedule.warmup_epochs
    cooldown_epochs = c.schedule.cooldown_epochs
    epochs = c.train.epochs
    if warmup_epochs <= epochs < warmup_epochs + cooldown_epochs:
        yield Problem(
            "schedule.cooldown_epochs",
            f"{cooldown_epochs:g} and schedule.warmup_epochs are more than train.epochs {epochs}",
        )


def _distillation_rules(c: Config) -> Iterator[Problem]:
    teacher = c.distill.teacher
    if teacher.name is None:
        yield Problem(
            "distill.teacher.name", f"is null, and distill.kind is {c.distill.kind!r}; name a model"
        )
        return
    is_factory = ":" in teacher.name.removeprefix("torchvision:")  # it may load weights itself
    if not (is_factory or teacher.pretrained or teacher.checkpoint):
        yield Problem(
            "distill.teacher.checkpoint",
            "is null, and distill.teacher.pretrained false: it needs weights",
        )


def _device_rules(c: Config) -> Iterator[Problem]:
    ids = c.parallel.device_ids
    if c.device == "cpu" and c.parallel.backend == "nccl":
        yield Problem("parallel.backend", "'nccl' needs GPUs and device is 'cpu'; use gloo or auto")
    if ids is not None and len(set(ids)) < len(ids):
        yield Problem("parallel.device_ids", f"{format_value(ids)} lists a GPU twice")
    if (":" in c.device or c.device == "mps") and (ids is not None or c.parallel.mode == "dp"):
        yield Problem(
            "device", f"{c.device!r} is one GPU; list the GPUs in parallel.device_ids instead"
        )


EVALUATED = ("model.", "data.", "eval.")  # the sections that an evaluation uses


def code_names(config: Config, sections: tuple[str, ...] = ("",)) -> list[str]:
    """What a config names to run or to download: the modules of `imports`, and in these sections
    `my_module:my_factory` and models such as `hf-hub:USER/NAME`.
    """
    names = list(config.imports)
    for key in keys.value_types():
        libraries = keys.info(key).code
        if libraries is not None and key.startswith(sections):
            value = attrgetter(key)(config) or []
            texts = [value] if isinstance(value, str) else value
            names += [name for name in texts if ":" in name and not name.startswith(libraries)]
    return names


def check_trusted(
    config: Config, sections: tuple[str, ...], trusted: Collection[str], where: Path | None
) -> None:
    """Raise CheckpointError if the config of a checkpoint or run names code that the user has not
    named, in the sections that are used. Nothing is imported.

    trusted: the names that the user has given, compared whole, since `my_module:os.system` is not
    code of a trusted module. where: the checkpoint or run.
    """
    code = [name for name in code_names(config, sections) if name not in trusted]
    if code:
        options = " ".join(f"--allow-import {name}" for name in code)
        names = ", ".join(map(repr, code))
        raise CheckpointError(
            f"{where}: its config names code to run or a model to download, {names}; nothing was "
            "run.",
            f"If you know and trust it: {options}",
        )


def ineffective_keys(config: Config) -> dict[str, str]:
    """The keys that have no effect in this config, whatever their values, and what each would
    need.
    """
    needs = {key: keys.info(key).needs for key in keys.value_types()}
    return {key: need for key, need in needs.items() if need and not is_met(config, need)}


def is_met(config: Config, needs: str) -> bool:
    """Whether a condition of `KeyInfo.needs` is met."""
    return any(
        all(
            dump_inline(attrgetter(key)(config)) == value if equals else attrgetter(key)(config)
            for key, equals, value in (term.partition("=") for term in terms.split(" and "))
        )
        for terms in needs.split(" or ")
    )


def unused_values(config: Config) -> Iterator[Problem]:
    """A problem for each unmet condition: the keys that are not at their defaults and have no
    effect without it.
    """
    by_need: dict[str, list[str]] = {}
    for key, need in ineffective_keys(config).items():
        if attrgetter(key)(config) != keys.default_of(key):
            by_need.setdefault(need, []).append(key)
    for need, (first, *others) in by_need.items():
        likewise = f" (likewise {', '.join(others)})" if others else ""
        yield Problem(first, f"has no effect; it needs {need}{likewise}")
