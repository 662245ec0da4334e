"""Ranges of single keys, and then the rules across keys: the second half of stage 1.

Owns what each key may be by itself; what fits together is in `rules`, what does nothing in `idle`. None of it needs a
library, a file or a device to decide. Types are settled before (`load`); names and signatures of components come after,
where torch is loaded (`engine`). Pure: a config in, problems out. Called by `load`.
"""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from imagenet_cls.config import keys
from imagenet_cls.config.idle import Heights, idle_problems, ineffective_keys
from imagenet_cls.config.rules import RULES
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import Problem, format_value

__all__ = ["RANGES", "Range", "check", "ineffective_keys"]

# Beyond it no range goes: such numbers overflow in float32 or in someone's 64 bits.
_TOO_LARGE = 2.0**64


@dataclass(frozen=True)
class Range:
    """Which finite numbers a key takes: low to high, the ends included unless open.

    or_zero: 0 as well, where low is more. Where high is infinite, numbers from 2^64 on are refused all the same.
    """

    low: float = 0.0
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    or_zero: bool = False

    def __contains__(self, number: float) -> bool:
        if self.or_zero and number == 0:
            return True
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        # Whole numbers of any length get here, and `math.isfinite` can't take all of them.
        return above and below and abs(number) < _TOO_LARGE

    def limits_for(self, number: float) -> str:
        """The range in words, for someone who gave this number: the limit of all ranges only where it was crossed."""
        return f"{self} and less than 2^64" if self.high == math.inf and number >= _TOO_LARGE else str(self)

    def __str__(self) -> str:
        if not (self.low_open or self.high_open or self.high == math.inf):
            high = f"{self.high:,}" if isinstance(self.high, int) else f"{self.high:g}"
            return f"{'0, or ' if self.or_zero else ''}{self.low:g} to {high}"
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
ALPHA = Range(0.001, 1000, or_zero=True)  # of a beta distribution: from tiny ones numpy draws NaN

# Every key of the schema that is a number has its range here (a test sees to it). null passes where the schema has it.
RANGES: dict[str, Range] = {
    "model.num_classes": COUNT,
    "data.val_fraction": Range(0, 1, low_open=True, high_open=True),
    "data.num_workers": Range(0, 256),  # each is a process: a slip of the finger must not take the machine down
    "data.prefetch_batches": COUNT,
    "data.timeout_sec": Range(0, 86_400, low_open=True),
    "data.repeats": Range(1, 100),
    "data.repeats_multiple": COUNT,
    "augment.size_px": PIXELS,
    "augment.hflip_prob": SHARE,
    "augment.vflip_prob": SHARE,
    "augment.progressive.multiple_px": PIXELS,
    "augment.color_jitter.prob": SHARE,
    "augment.color_jitter.brightness": JITTER,
    "augment.color_jitter.contrast": JITTER,
    "augment.color_jitter.saturation": JITTER,
    "augment.color_jitter.hue": Range(0, 0.5),
    "augment.grayscale_prob": SHARE,
    "augment.erasing.prob": SHARE,
    "augment.erasing.max_count": Range(1, 100),
    "augment.splits": Range(1, 10),
    "mix.mixup_alpha": ALPHA,
    "mix.cutmix_alpha": ALPHA,
    "mix.prob": SHARE,
    "mix.switch_prob": SHARE,
    "mix.off_epoch": NOT_NEGATIVE,
    "loss.label_smoothing": Range(0, 1, high_open=True),  # 1 would leave nothing of the target
    "distill.alpha": SHARE,
    "distill.temperature": Range(0.01, 1000),  # logits are divided by it, and the loss times its square
    "optimizer.lr": NOT_NEGATIVE,  # 0 is a way to try everything but the update
    "optimizer.lr_base_batch": BATCH,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.norm_weight_decay": NOT_NEGATIVE,
    "optimizer.bias_weight_decay": NOT_NEGATIVE,
    "optimizer.token_weight_decay": NOT_NEGATIVE,
    "optimizer.scale_weight_decay": NOT_NEGATIVE,
    "optimizer.layer_decay": Range(0, 1, low_open=True),
    "schedule.warmup_epochs": NOT_NEGATIVE,
    "schedule.warmup_start_factor": SHARE,
    "schedule.warmup_start_lr": NOT_NEGATIVE,
    "schedule.cooldown_epochs": NOT_NEGATIVE,
    "train.epochs": Range(1, 10**6),  # the side of the images is looked up for each before anything begins
    "train.max_steps": COUNT,
    "train.global_batch_size": BATCH,
    "train.micro_batch_size": BATCH,
    "train.clip_norm": POSITIVE,
    "train.clip_value": POSITIVE,
    "train.clip_agc": POSITIVE,
    "train.sam_rho": POSITIVE,
    "train.sam_every_steps": COUNT,
    "train.max_nonfinite_steps": COUNT,
    "ema.decay": Range(0, 1, high_open=True),  # an average with decay 1 never moves
    "ema.half_life_images": POSITIVE,
    "ema.every_steps": COUNT,
    "eval.crop_px": PIXELS,
    "eval.crop_pct": Range(0.01, 1),
    "eval.resize_px": PIXELS,
    "eval.batch_size": BATCH,
    "eval.every_epochs": COUNT,
    "parallel.output_device": NOT_NEGATIVE,
    "parallel.timeout_sec": Range(0, 7 * 86_400, low_open=True),  # clocks of sockets end somewhere
    "parallel.check_every_steps": COUNT,
    "checkpoint.every_epochs": COUNT,
    "checkpoint.every_steps": COUNT,
    "checkpoint.keep_last": COUNT,
    "log.every_steps": COUNT,
    "expect.claimed_top1_pct": PERCENT,
    "expect.ours_top1_pct": PERCENT,
    "seed": Range(0, 2.0**63, high_open=True),
}

# Lists of numbers: how many (None: any number), the range of each, and whether they ascend.
LISTS: dict[str, tuple[int | None, Range, bool]] = {
    "augment.scale": (2, Range(0, 1, low_open=True), True),
    "augment.ratio": (2, Range(0.001, 1000), True),
    "augment.erasing.scale": (2, Range(0, 1, low_open=True), True),
    "augment.erasing.ratio": (2, Range(0.001, 1000), True),
    "augment.progressive.epochs": (None, NOT_NEGATIVE, True),
    "mix.cutmix_minmax": (2, SHARE, True),
    "loss.class_weights": (None, NOT_NEGATIVE, False),
    "data.mean": (3, SHARE, False),
    "data.std": (3, Range(0.001, 1000), False),
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

# Keyword arguments that timm's models share.
MODEL_KWARG_RANGES: dict[str, Range] = {
    f"{name}_rate": Range(0, 1, high_open=True)
    for name in ("drop", "drop_path", "drop_block", "attn_drop", "proj_drop", "pos_drop", "patch_drop")
}


def check(config: Config, skip: Collection[str] = (), heights: Heights | None = None) -> list[Problem]:
    """Everything that is out of range or does not fit together, in the order of the schema.

    skip: dotted keys whose values are not to be judged, since they are known to be wrong already; rules that read one
    of them are left out. heights: the layers of the values; without them what is written above what is not told apart.
    """
    problems = [
        problem
        for path in keys.leaves()
        if ".".join(path) not in skip
        for problem in _check_key(".".join(path), keys.value_of(config, path))
    ]
    for name, value in config.optimizer.kwargs.items():
        if name in KWARG_RANGES and ":" not in config.optimizer.name:
            problems += _check_kwarg(f"optimizer.kwargs.{name}", value, KWARG_RANGES[name])
            if name == "betas" and not (isinstance(value, list) and len(value) == 2):
                problems.append(
                    Problem("optimizer.kwargs.betas", f"{format_value(value)} is not a list of two numbers")
                )
    for name, value in config.model.kwargs.items():
        if name in MODEL_KWARG_RANGES and ":" not in config.model.name and value is not None:
            problems += _check_kwarg(f"model.kwargs.{name}", value, MODEL_KWARG_RANGES[name])
    told = {problem.key for problem in problems}
    for path, hint in keys.leaves().items():
        if keys.is_kwargs(hint) and ".".join(path) not in skip:
            found = _not_finite(".".join(path), keys.value_of(config, path))
            problems += [problem for problem in found if problem.key not in told]
    wrong = {*skip, *(problem.key for problem in problems)}
    for rule_keys, rule in RULES:
        if not wrong.intersection(rule_keys):
            problems += rule(config)
    return [*problems, *idle_problems(config, heights or {}, wrong)]


def _check_key(key: str, value: Any) -> Iterator[Problem]:
    """Range, list or form of one key."""
    if value is None:
        return
    if key in RANGES and value not in RANGES[key]:
        yield Problem(key, f"{format_value(value)} is out of range: {RANGES[key].limits_for(value)}")
    elif key in LISTS:
        count, allowed, ascending = LISTS[key]
        good = len(value) == (count or max(1, len(value))) and all(number in allowed for number in value)
        if not good or (ascending and sorted(value) != value):
            order = ", the smaller one first" if ascending else ""
            limits = allowed.limits_for(max(value, default=0))
            yield Problem(
                key, f"{format_value(value)} is not a list of {count or 'at least 1'} numbers, each {limits}{order}"
            )
    elif key in FORMS and not re.fullmatch(FORMS[key][0], value):
        yield Problem(key, f"{format_value(value)} is not {FORMS[key][1]}")
    elif key == "imports":
        for name in value:
            if not all(part.isidentifier() for part in name.split(".")):
                yield Problem(key, f"{format_value(name)} is not the name of a module, such as my_package.my_models")
    elif isinstance(value, str) and not value.strip() and key.partition(".")[0] != "expect":
        yield Problem(key, "is empty; write what it names")


def _check_kwarg(key: str, value: Any, allowed: Range) -> Iterator[Problem]:
    numbers = value if isinstance(value, list) else [value]
    is_number = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    if not is_number or not all(number in allowed for number in numbers):
        limits = allowed.limits_for(max(numbers, default=0)) if is_number else allowed
        yield Problem(key, f"{format_value(value)} is out of range: {limits}")


def _not_finite(key: str, value: Any) -> Iterator[Problem]:
    """Numbers within free arguments that are none: whoever is given them, no sum over them is one."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _not_finite(f"{key}.{name}" if isinstance(value, dict) else key, inner)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(key, f"{format_value(value)} is not a finite number; write one, or leave it out")
