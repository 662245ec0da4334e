"""Ranges of single keys, and rules across keys: the second half of stage 1.

Owns every statement of what values make sense that needs no library, no file and no device to decide. Types are settled
before (`load`); names and signatures of components come after, where torch is loaded (`engine`). Pure: a config in,
problems out. Called by `load`.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from imagenet_cls.config import keys
from imagenet_cls.config.origin import show
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import Problem


@dataclass(frozen=True)
class Range:
    """Which finite numbers a key takes: low to high, the ends included unless open."""

    low: float = 0.0
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        # Whole numbers of any length get here, and `math.isfinite` can't take all of them.
        return above and below and abs(number) < 2.0**64

    def __str__(self) -> str:
        if not (self.low_open or self.high_open or self.high == math.inf):
            return f"{self.low:g} to {self.high:g}"
        low = f"more than {self.low:g}" if self.low_open else f"at least {self.low:g}"
        high = f"less than {self.high:g}" if self.high_open else f"at most {self.high:g}"
        return low if self.high == math.inf else f"{low} and {high}"


NOT_NEGATIVE = Range()
POSITIVE = Range(low_open=True)
COUNT = Range(1)
BATCH = Range(1, 10**9)
PIXELS = Range(1, 100_000)
JITTER = Range(0, 1000)
SHARE = Range(0, 1)
PERCENT = Range(0, 100)

# Every key of the schema that is a number has its range here (a test sees to it). null passes where the schema has it.
RANGES: dict[str, Range] = {
    "model.num_classes": COUNT,
    "data.val_fraction": Range(0, 1, low_open=True, high_open=True),
    "data.num_workers": Range(0, 256),  # each is a process: a slip of the finger must not take the machine down
    "data.prefetch_batches": COUNT,
    "augment.size_px": PIXELS,
    "augment.hflip_prob": SHARE,
    "augment.vflip_prob": SHARE,
    "augment.color_jitter.brightness": JITTER,
    "augment.color_jitter.contrast": JITTER,
    "augment.color_jitter.saturation": JITTER,
    "augment.color_jitter.hue": Range(0, 0.5),
    "loss.label_smoothing": SHARE,
    "optimizer.lr": NOT_NEGATIVE,  # 0 is a way to try everything but the update
    "optimizer.weight_decay": NOT_NEGATIVE,
    "schedule.warmup_epochs": NOT_NEGATIVE,
    "schedule.warmup_start_factor": SHARE,
    "train.epochs": COUNT,
    "train.max_steps": COUNT,
    "train.global_batch_size": BATCH,
    "train.micro_batch_size": BATCH,
    "train.clip_norm": POSITIVE,
    "train.max_nonfinite_steps": COUNT,
    "ema.decay": Range(0, 1, high_open=True),  # an average with decay 1 never moves
    "ema.every_steps": COUNT,
    "eval.crop_px": PIXELS,
    "eval.crop_pct": Range(0.01, 1),
    "eval.resize_px": PIXELS,
    "eval.batch_size": BATCH,
    "eval.every_epochs": COUNT,
    "parallel.output_device": NOT_NEGATIVE,
    "parallel.timeout_sec": POSITIVE,
    "checkpoint.every_epochs": COUNT,
    "checkpoint.every_steps": COUNT,
    "checkpoint.keep_last": COUNT,
    "log.every_steps": COUNT,
    "expect.claimed_top1_pct": PERCENT,
    "expect.ours_top1_pct": PERCENT,
    "seed": Range(0, 2.0**63, high_open=True),
}

# Lists of numbers: how many, the range of each, and whether they ascend.
LISTS: dict[str, tuple[int, Range, bool]] = {
    "augment.scale": (2, Range(0, 1, low_open=True), True),
    "augment.ratio": (2, Range(0.001, 1000), True),
    "data.mean": (3, SHARE, False),
    "data.std": (3, POSITIVE, False),
}

# Texts that have a form.
FORMS: dict[str, tuple[str, str]] = {
    "device": (r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda, or cuda:1 for a certain one"),
    "parallel.init_method": (
        r"env://|tcp://(\[[0-9a-fA-F:]+\]|[^:/\s]+):([1-9]\d{0,4})|file:///\S.*",
        "env://, tcp://host:port or file:///absolute/path",
    ),
}

# Keyword arguments that torch's optimizers share. What else there is, and every name, is checked against the signature.
KWARG_RANGES: dict[str, Range] = {
    "momentum": Range(0, 1, high_open=True),
    "alpha": Range(0, 1, high_open=True),
    "betas": Range(0, 1, high_open=True),
    "eps": NOT_NEGATIVE,
}


def check(config: Config, skip: Collection[str] = ()) -> list[Problem]:
    """Everything that is out of range or does not fit together, in the order of the schema.

    skip: dotted keys whose values are not to be judged, since they are known to be wrong already; rules that read one
    of them are left out.
    """
    problems = [
        problem
        for path in keys.leaves()
        if ".".join(path) not in skip
        for problem in _check_key(".".join(path), _value(config, path))
    ]
    for name, value in config.optimizer.kwargs.items():
        if name in KWARG_RANGES and ":" not in config.optimizer.name:
            problems += _check_kwarg(f"optimizer.kwargs.{name}", value, KWARG_RANGES[name])
    wrong = {*skip, *(problem.key for problem in problems)}
    for rule_keys, rule in RULES:
        if not wrong.intersection(rule_keys):
            problems += rule(config)
    return problems


def _value(config: Config, path: keys.KeyPath) -> Any:
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value


def _check_key(key: str, value: Any) -> Iterator[Problem]:
    """Range, list or form of one key."""
    if value is None:
        return
    if key in RANGES and value not in RANGES[key]:
        yield Problem(key, f"{show(value)} is out of range: {RANGES[key]}")
    elif key in LISTS:
        count, allowed, ascending = LISTS[key]
        good = len(value) == count and all(number in allowed for number in value)
        if not good or (ascending and sorted(value) != value):
            order = ", the smaller one first" if ascending else ""
            yield Problem(key, f"{show(value)} is not a list of {count} numbers, each {allowed}{order}")
    elif key in FORMS and not re.fullmatch(FORMS[key][0], value):
        yield Problem(key, f"{show(value)} is not {FORMS[key][1]}")
    elif key == "imports":
        for name in value:
            if not all(part.isidentifier() for part in name.split(".")):
                yield Problem(key, f"{show(name)} is not the name of a module, such as my_package.my_models")
    elif isinstance(value, str) and not value.strip() and key.partition(".")[0] != "expect":
        yield Problem(key, "is empty; write what it names")


def _check_kwarg(key: str, value: Any, allowed: Range) -> Iterator[Problem]:
    numbers = value if isinstance(value, list) else [value]
    is_number = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    if not is_number or not all(number in allowed for number in numbers):
        yield Problem(key, f"{show(value)} is out of range: {allowed}")


def _weights(config: Config) -> Iterator[Problem]:
    if config.model.pretrained and config.model.checkpoint is not None:
        yield Problem("model.checkpoint", "is given and model.pretrained is true; keep one source of weights")


def _validation_part(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.val is not None and data.val_fraction is not None:
        remedy = f"set data.val to null to hold out a share of data.train, or drop this to use {show(data.val)}"
        yield Problem("data.val_fraction", f"{data.val_fraction} is given and data.val is {show(data.val)}; {remedy}")
    brings_own_parts = data.name == "synthetic" or ":" in data.name
    if data.val is None and data.val_fraction is None and not brings_own_parts:
        yield Problem(
            "data.val", "is null and there is no data.val_fraction; name a folder, or say data.val_fraction: 0.1"
        )


def _list_files(config: Config) -> Iterator[Problem]:
    if config.data.name == "list":
        for key, value in (("train", config.data.train), ("val", config.data.val)):
            if value == key:  # the default, which names a folder
                yield Problem(
                    f"data.{key}", f"{show(value)} names a folder; data.name list needs a file, such as {key}.txt"
                )


def _sizes(config: Config) -> Iterator[Problem]:
    resize_px, crop_px = config.eval.resize_px, config.eval.crop_px
    if resize_px is not None and resize_px < crop_px:
        yield Problem(
            "eval.resize_px", f"{resize_px} is less than eval.crop_px {crop_px}; a crop can't be larger than its image"
        )


def _batches(config: Config) -> Iterator[Problem]:
    micro, whole = config.train.micro_batch_size, config.train.global_batch_size
    if micro is not None and micro > whole:
        yield Problem(
            "train.micro_batch_size", f"{micro} is more than train.global_batch_size {whole}; null takes all at once"
        )


def _warmup(config: Config) -> Iterator[Problem]:
    warmup, epochs = config.schedule.warmup_epochs, config.train.epochs
    if warmup > epochs:
        yield Problem(
            "schedule.warmup_epochs", f"{warmup:g} is more than train.epochs {epochs}; it is a part of the epochs"
        )


def _devices(config: Config) -> Iterator[Problem]:
    if config.device == "cpu" and config.parallel.backend == "nccl":
        yield Problem("parallel.backend", "'nccl' joins GPUs and device is 'cpu'; use gloo or auto")
    if config.device == "cpu" and config.train.precision == "fp16":
        yield Problem("train.precision", "'fp16' needs a GPU and device is 'cpu'; use fp32 or bf16")


def _data_parallel(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.mode != "dp":
        for key, value in (("device_ids", parallel.device_ids), ("output_device", parallel.output_device)):
            if value is not None:
                yield Problem(
                    f"parallel.{key}", f"{show(value)} is for parallel.mode dp; ranks take the visible GPUs in order"
                )
        return
    ids = parallel.device_ids
    if ids is not None and (not ids or min(ids) < 0 or len(set(ids)) < len(ids)):
        yield Problem("parallel.device_ids", f"{show(ids)} is not a list of different GPUs, numbered from 0")
    if ":" in config.device:
        yield Problem("device", f"{show(config.device)} is one GPU; with parallel.mode dp name parallel.device_ids")
    if config.train.compile:
        yield Problem("train.compile", "can't be used with parallel.mode dp, which copies the model in every step")
    if parallel.sync_bn:
        yield Problem("parallel.sync_bn", "synchronises ranks, and parallel.mode dp has one; use ddp and several ranks")


def _init_port(config: Config) -> Iterator[Problem]:
    port = re.fullmatch(r"tcp://.*:(\d+)", config.parallel.init_method)
    if port and int(port.group(1)) > 65535:
        yield Problem("parallel.init_method", f"port {port.group(1)} is out of range: 1 to 65535")


DATA_PARALLEL_KEYS = (
    *("device", "train.compile"),
    *("parallel.mode", "parallel.device_ids", "parallel.output_device", "parallel.sync_bn"),
)

# Each with the keys that it reads: a rule is left out where one of them is wrong by itself.
RULES: list[tuple[tuple[str, ...], Callable[[Config], Iterator[Problem]]]] = [
    (("model.pretrained", "model.checkpoint"), _weights),
    (("data.name", "data.val", "data.val_fraction"), _validation_part),
    (("data.name", "data.train", "data.val"), _list_files),
    (("eval.resize_px", "eval.crop_px"), _sizes),
    (("train.micro_batch_size", "train.global_batch_size"), _batches),
    (("schedule.warmup_epochs", "train.epochs"), _warmup),
    (("device", "parallel.backend", "train.precision"), _devices),
    (DATA_PARALLEL_KEYS, _data_parallel),
    (("parallel.init_method",), _init_port),
]
