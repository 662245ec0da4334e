"""Checks that need no library, file or device: of single values, of keys together, and of keys without effect."""

import json
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from imagenet_cls.config import keys
from imagenet_cls.config.schema import SHARE_BELOW_1, Config, height_width
from imagenet_cls.errors import Problem, format_value
from imagenet_cls.lookup import number_problem

NO_VALUE = (
    "has no value; set it in a config or on the command line (a changed name resets its section)"
)


def check_value(key: str, value: Any) -> None:
    """Raise ValueError unless a value is finite and has the range, length, order and form of its key."""
    if value is None or value in keys.choices(keys.value_types()[key]):
        return
    info, shown, items = (
        keys.info(key),
        format_value(value),
        value if isinstance(value, list) else [value],
    )
    try:
        json.dumps(
            value, allow_nan=False
        )  # finds NaN and infinity in keyword arguments, at any depth
    except ValueError:
        raise ValueError(f"{shown} is not a finite number") from None
    if info.allowed is not None and (not items or any(item not in info.allowed for item in items)):
        raise ValueError(f"{shown} is out of range: {info.allowed}")
    if isinstance(value, list) and info.count not in (None, len(items)):
        raise ValueError(f"{shown} is not a list of {info.count} numbers")
    if info.ascending and sorted(items) != items:
        raise ValueError(f"{shown} is not in ascending order")
    if info.form is not None and not all(re.fullmatch(info.form[0], item) for item in items):
        raise ValueError(f"{shown} is not {info.form[1]}")


def rule_problems(c: Config) -> Iterator[Problem]:
    """What does not fit together. A message names each key that its rule reads."""
    for key in keys.value_types():
        value, info = attrgetter(key)(c), keys.info(key)
        for other in info.excludes if value not in (None, False, []) else ():
            if attrgetter(other)(c) not in (None, False, []):
                yield Problem(key, f"is given and {other} too; keep one")
        most = attrgetter(info.at_most)(c) if info.at_most else None
        if (
            value is not None
            and most is not None
            and (max(value) if isinstance(value, list) else value) > most
        ):
            yield Problem(
                key, f"{format_value(value)} is more than {info.at_most} {format_value(most)}"
            )
        for name in info.shares:
            is_factory = ":" in attrgetter(key.replace(".kwargs", ".name"))(
                c
            )  # it may give the name another meaning
            if not is_factory and (text := number_problem(value.get(name) or 0, SHARE_BELOW_1)):
                yield Problem(f"{key}.{name}", text)
    for key, message in (*_data_rules(c), *_training_rules(c), *_device_rules(c)):
        yield Problem(key, message)


def _data_rules(c: Config) -> Iterator[tuple[str, str]]:
    data, growth, size_px = c.data, c.augment.progressive, c.augment.size_px
    has_files = data.name != "synthetic" and ":" not in data.name
    if has_files and data.val is None and data.val_fraction is None and data.fold is None:
        yield (
            "data.val",
            "is null like data.val_fraction and data.fold; name a folder, or set data.val_fraction: 0.1",
        )
    for key, part, folder in (("data.train", data.train, "train"), ("data.val", data.val, "val")):
        if data.name == "list" and part == folder:  # the default
            yield key, f"{part!r} is a folder; data.name list needs a file, such as {part}.txt"
    if data.fold is not None and data.fold[0] >= data.fold[1]:
        yield (
            "data.fold",
            f"{format_value(data.fold)} is not a fold and the number of folds, such as [0, 5]",
        )
    if isinstance(data.classes, list) and len(set(data.classes)) != max(len(data.classes), 1):
        yield (
            "data.classes",
            f"{format_value(data.classes)} lists no class, or one twice; list each class once",
        )
    if data.classes is not None and data.name == "synthetic":
        yield "data.classes", "is for images; use data.kwargs.num_classes with data.name synthetic"
    if data.group is not None:
        try:
            re.compile(data.group)
        except re.error as error:
            yield "data.group", f"{format_value(data.group)} is not a regular expression: {error}"
        if not has_files:
            yield (
                "data.group",
                f"is searched in paths, and data.name {data.name!r} has none; set it to null",
            )
    if data.name == "synthetic" and data.fraction < 1:
        yield (
            "data.fraction",
            "is for images; use data.kwargs.train_images with data.name synthetic",
        )
    if not has_files and data.exclude is not None:
        yield (
            "data.exclude",
            f"excludes image files, and data.name {data.name!r} has none; set it to null",
        )

    if data.channels == 2:
        yield "data.channels", "2 is neither 1 nor 3"
    for key, values in (("data.mean", data.mean), ("data.std", data.std)):
        if values is not None and len(values) != data.channels:
            yield (
                key,
                f"{format_value(values)} is not one number for each of data.channels {data.channels}, or null",
            )
    if data.channels != 3 and c.distill.kind != "none":
        yield "data.channels", f"{data.channels} can't be used with distill.kind; a teacher gets 3"
    if growth.epochs is not None and isinstance(size_px, list):
        yield (
            "augment.progressive.epochs",
            f"is for squares, and augment.size_px is {format_value(size_px)}",
        )
    elif (
        growth.epochs is not None
        and growth.sizes_px is not None
        and len(growth.epochs) == len(growth.sizes_px)
    ):
        if growth.epochs[-1] > c.train.epochs:
            yield (
                "augment.progressive.epochs",
                f"{growth.epochs[-1]:g} is more than train.epochs {c.train.epochs}",
            )
        if any(size % growth.multiple_px for size in growth.sizes_px):
            yield (
                "augment.progressive.sizes_px",
                "has other than multiples of augment.progressive.multiple_px",
            )
        if max(growth.sizes_px) != size_px:
            yield "augment.progressive.sizes_px", f"the largest is not augment.size_px {size_px}"
    elif growth.epochs != growth.sizes_px:
        yield (
            "augment.progressive.sizes_px",
            "needs one size for each of augment.progressive.epochs",
        )
    smallest_px = min([*height_width(size_px), *(growth.sizes_px or [])])
    if c.augment.crop == "pad_crop" and c.augment.pad_px >= smallest_px:
        yield (
            "augment.pad_px",
            f"{c.augment.pad_px} is not less than the {smallest_px} pixels of augment.size_px",
        )
    if c.mix.cutmix_minmax is not None:
        smallest, largest = (int(smallest_px * share) for share in c.mix.cutmix_minmax)
        if smallest >= largest:
            yield "mix.cutmix_minmax", "differ by less than a pixel in images of augment.size_px"


def _training_rules(c: Config) -> Iterator[tuple[str, str]]:
    splits, loss, mode, teacher = c.augment.splits, c.loss.name, c.parallel.mode, c.distill.teacher
    if c.mix.is_on and loss in ("focal", "jsd"):
        yield (
            "mix",
            f"makes soft targets, which loss.name {loss!r} does not take; use cross_entropy or bce",
        )
    if c.mix.is_on and splits > 1:
        yield (
            "augment.splits",
            "compares views of one image, and mix joins different images; use one of both",
        )
    if loss == "jsd" and splits < 2:
        yield (
            "loss.name",
            f"'jsd' compares views, and augment.splits is {splits}; use 3, as AugMix does",
        )
    if loss != "jsd" and ":" not in loss and splits > 1:
        yield (
            "augment.splits",
            f"{splits} views of each image are for loss.name 'jsd', not {loss!r}",
        )
    if c.model.split_bn and splits < 2:
        yield "model.split_bn", f"is true and augment.splits is {splits}; use 2 or more splits"
    if c.model.split_bn and c.parallel.sync_bn:
        yield "model.split_bn", "can't be synchronized over ranks; set parallel.sync_bn to false"
    if c.model.split_bn and mode == "dp":
        yield "model.split_bn", "needs whole batches, and parallel.mode dp divides them; use ddp"

    if c.distill.kind != "none":
        if splits > 1:
            yield "distill.kind", "can't be used with augment.splits"
        if teacher.name is None:
            yield (
                "distill.teacher.name",
                f"is null, and distill.kind is {c.distill.kind!r}; name a model",
            )
        elif ":" not in teacher.name.removeprefix("torchvision:") and not (
            teacher.pretrained or teacher.checkpoint
        ):
            yield (
                "distill.teacher.checkpoint",
                "is null, and distill.teacher.pretrained false: it needs weights",
            )

    warmup, cooldown, epochs = c.schedule.warmup_epochs, c.schedule.cooldown_epochs, c.train.epochs
    if warmup <= epochs < warmup + cooldown:
        yield (
            "schedule.cooldown_epochs",
            f"{cooldown:g} and schedule.warmup_epochs are more than train.epochs {epochs}",
        )
    if c.train.sam_rho is not None and c.train.precision == "fp16":
        yield (
            "train.sam_rho",
            "needs gradients without a loss scale; use train.precision bf16 or fp32",
        )


def _device_rules(c: Config) -> Iterator[tuple[str, str]]:
    mode, ids = c.parallel.mode, c.parallel.device_ids
    if c.device == "cpu" and c.parallel.backend == "nccl":
        yield "parallel.backend", "'nccl' needs GPUs and device is 'cpu'; use gloo or auto"
    if c.device == "cpu" and c.train.precision == "fp16":
        yield "train.precision", "'fp16' needs a GPU and device is 'cpu'; use fp32 or bf16"
    if ids is not None and len(set(ids)) < len(ids):
        yield "parallel.device_ids", f"{format_value(ids)} lists a GPU twice"
    if (":" in c.device or c.device == "mps") and (ids is not None or mode == "dp"):
        yield "device", f"{c.device!r} is one GPU; list the GPUs in parallel.device_ids instead"
    if mode == "dp" and c.train.compile:
        yield (
            "train.compile",
            "can't be used with parallel.mode dp, which copies the model in every step",
        )
    if mode == "dp" and c.parallel.sync_bn:
        yield (
            "parallel.sync_bn",
            "synchronizes ranks, and parallel.mode dp has one; use ddp and several ranks",
        )
    if mode != "dp" and c.parallel.output_device is not None:
        yield (
            "parallel.output_device",
            f"{c.parallel.output_device} is for parallel.mode dp; set it to null",
        )


def ineffective_keys(config: Config) -> dict[str, str]:
    """The keys that have no effect in this config, whatever their values, and what each would need."""
    needs = {key: keys.info(key).needs for key in keys.value_types()}
    return {
        key: need.text
        for key, need in needs.items()
        if need is not None and not need.is_met(config)
    }


def unused_values(config: Config) -> list[Problem]:
    """A problem for each unmet condition: the keys that are not at their defaults and have no effect without it."""
    by_need: dict[str, list[str]] = {}
    for key, need in ineffective_keys(config).items():
        if attrgetter(key)(config) != keys.default_of(key):
            by_need.setdefault(need, []).append(key)
    return [
        Problem(
            key,
            f"has no effect; it needs {need}"
            + (f" (likewise {', '.join(others)})" if others else ""),
        )
        for need, (key, *others) in by_need.items()
    ]
