"""The keys of the schema by their dotted names: types, defaults and metadata."""

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Literal

from imagenet_cls.config.schema import Config, KeyInfo, Kwargs
from imagenet_cls.lookup import nearest
from imagenet_cls.text import command_line

_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Kwargs: "a mapping",
    list[int]: "a list of whole numbers",
    list[float]: "a list of numbers",
    list[int | float]: "a list of numbers",
    list[str]: "a list of texts",
}

# Short keys of arguments, and the keys of the config that they stand for.
SHORT_KEYS = {
    "model": ("model.name",),
    "epochs": ("train.epochs",),
    "size": ("augment.size_px", "eval.crop_px"),
    "lr": ("optimizer.lr",),
}

# Our keys, perhaps with a value, and their names in timm, torchvision, pytorch/examples, mmpretrain
# and ultralytics.
_OTHER_NAMES = {
    "train.epochs": "epochs epoch num_epochs max_epochs total_epochs",
    "train.global_batch_size": "b batch batch_size samples_per_gpu",
    "train.micro_batch_size": (
        "accumulate accum_steps accumulation_steps grad_accum_steps gradient_accumulation_steps "
        "accumulate_grad_batches"
    ),
    "train.precision=fp16": "amp fp16 bf16 mixed_precision use_amp",
    "train.clip_norm": "clip_grad clip_grad_norm grad_clip max_norm",
    "optimizer.lr": "lr lr0 learning_rate base_lr",
    "optimizer.lr_base_batch=256": "auto_scale_lr",
    "optimizer.lr_scales": "backbone_lr head_lr lr_mult paramwise_cfg",
    "optimizer.name": "opt optim optimizer",
    "optimizer.weight_decay": "wd weight_decay",
    "schedule.name": "sched scheduler lr_scheduler",
    "schedule.warmup_epochs": "warmup lr_warmup_epochs",
    "model.name": "a arch architecture backbone model",
    "model.checkpoint": "load_from initial_checkpoint finetune",
    "model.head_only=true": "freeze_backbone frozen_stages linear_probe",
    "mix.mixup_alpha": "mixup",
    "mix.cutmix_alpha": "cutmix cutmix_minmax",
    "loss.label_smoothing": "smoothing",
    "augment.size_px": "imgsz img_size image_size input_size train_crop_size",
    "augment.policy": "aa auto_augment autoaugment randaugment",
    "augment.erasing.prob": "reprob random_erase random_erasing",
    "eval.mode": "crop_mode",
    "ema.decay": "model_ema model_ema_decay",
    "data.root": "data_path data_dir data_root path",
    "data.num_workers": "j workers",
    "eval.every_epochs=1000000": "no_validate no_val",
    "parallel.device_ids=[0]": "gpu_id gpu_ids",
    "log.every_steps": "p print_freq log_interval",
    "log.writers=[jsonl,tensorboard,wandb]": "wandb log_wandb use_wandb",
    "train.early_stop.patience_evals": "early_stopping early_stop patience",
}
ALIASES = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}
# What to do instead of other options and keys.
ADVICE = {
    **dict.fromkeys(["config", "cfg"], "give the config as an argument, without an option"),
    **dict.fromkeys(["dropout", "drop"], "a model of timm takes model.kwargs.drop_rate"),
    "data": "give only the path of the dataset, or data.root=PATH",
    **dict.fromkeys(
        ["test_only", "eval_only", "e", "evaluate", "validate"],
        f"use {command_line('test')} CONFIG CHECKPOINT",
    ),
    "_delete_": "a new name resets its section; set other keys one by one",
    **dict.fromkeys(["output", "output_dir", "out_dir", "save_dir"], "use --work-dir"),
}
# Keys of earlier versions: the former default, and what to do now. Where the default is set, such a
# key is ignored.
REMOVED_KEYS: dict[str, tuple[Any, str]] = {
    "data.on_bad_image": ("error", "list bad images with data.exclude"),
    "data.manifest": (None, "list bad images with data.exclude"),
    "data.min_decoded_px": (None, "shrink large photographs with tools/pack.py --max-px"),
    "mix.cutmix_minmax": (None, "use mix.cutmix_alpha"),
    "log.grad_norm": ("step", "metrics.jsonl has the norm of every step"),
    "checkpoint.on_error": ("stop", "a failed save ends the run, and --resume continues it"),
    "eval.real_labels": (None, "use examples/real_labels.py"),
    "parallel.uneven": ("allow", "any number of ranks is allowed"),
    "parallel.output_device": (None, "the first of parallel.device_ids has the outputs"),
    "data.prefetch_batches": (2, "each worker prepares two batches ahead"),
    "optimizer.lr_scaling": ("linear", "set optimizer.lr without optimizer.lr_base_batch"),
    "train.profile": (None, "profile the process: py-spy, nsys, or torch.profiler in a script"),
}


@cache
def _fields() -> dict[str, Field[Any]]:
    """Every section and key, in the order of the schema."""

    def walk(section: Any, prefix: str) -> Iterator[tuple[str, Field[Any]]]:
        for field in fields(section):
            yield prefix + field.name, field
            if is_dataclass(field.type):
                yield from walk(field.type, f"{prefix}{field.name}.")

    return dict(walk(Config, ""))


@cache
def sections() -> dict[str, Any]:
    """The dataclass of every section; "" is the whole config."""
    return {"": Config} | {
        key: field.type for key, field in _fields().items() if is_dataclass(field.type)
    }


@cache
def value_types() -> dict[str, Any]:
    """The type of every key that holds a value."""
    return {key: field.type for key, field in _fields().items() if not is_dataclass(field.type)}


def info(key: str) -> KeyInfo:
    """The metadata of a key or section."""
    return _fields()[key].metadata.get("info", KeyInfo())


def default_of(key: str) -> Any:
    """The schema's default of a key; `REQUIRED` for `optimizer.lr`, which has none."""
    field = _fields()[key]
    return field.default_factory() if field.default_factory is not MISSING else field.default


@cache
def per_machine_keys() -> frozenset[str]:
    """The keys in which the machines of a run may differ."""
    return frozenset(key for key in value_types() if any(part.per_machine for part in _infos(key)))


@cache
def keys_without_recipe() -> frozenset[str]:
    """The keys that do not decide what is computed, so that they may change on resume."""
    return frozenset(key for key in value_types() if not all(part.recipe for part in _infos(key)))


def _infos(key: str) -> Iterator[KeyInfo]:
    """The metadata of a key, and of the sections that hold it."""
    return map(info, accumulate(key.split("."), "{}.{}".format))  # a, a.b, a.b.c


@cache
def exclusive_with(key: str) -> frozenset[str]:
    """The keys that may not be set beside this one; none for a key that the schema lacks."""
    pairs = [(name, other) for name in value_types() for other in info(name).excludes]
    others = {other for pair in pairs if key in pair for other in pair}
    return frozenset(others & value_types().keys() - {key})


def members(hint: Any) -> tuple[Any, ...]:
    """The types of a union; for any other type, the type itself."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def split_optional(hint: Any) -> tuple[Any, bool]:
    """The first type of a union, and whether None is another one."""
    first, *others = members(hint)
    return first, type(None) in others


def choices(hint: Any) -> tuple[str, ...]:
    """The values that a `Literal` type, or a union with one, allows; empty for other types."""
    literals = [member for member in members(hint) if typing.get_origin(member) is Literal]
    return tuple(value for literal in literals for value in typing.get_args(literal))


def is_text(hint: Any) -> bool:
    """Whether a key holds text or texts, so that scalars are kept as written (`no`, `1e3`)."""
    bare, _ = split_optional(hint)
    return bare in (str, list[str]) or bool(choices(bare))


def describe_type(hint: Any) -> str:
    """A type as text for an error: `a number`, `one of auto, fp32`, `a whole number or auto or
    null`.
    """
    bare, optional = split_optional(hint)
    if choices(bare):
        names = [f"one of {', '.join(choices(bare))}"]
    else:
        names = [_TYPE_NAMES[member] for member in members(hint) if member in _TYPE_NAMES]
        names += choices(hint)
    if optional:
        names.append("null")
    return " or ".join(names)


def instead_of_option(option: str) -> str | None:
    """What to write instead of an unknown command-line option: `write optimizer.lr=VALUE` for
    `--lr`, or None.
    """
    name = option.lstrip("-").replace("-", "_")
    same_name = [key for key in value_types() if name in (key, key.rpartition(".")[2])]
    setting = ALIASES.get(name) or next(iter(same_name), None)
    if setting is None:
        return ADVICE.get(name)
    if "=" not in setting:
        setting += "=true" if value_types()[setting] is bool else "=VALUE"
    return f"write {setting}"


def unknown_key(key: str) -> str:
    """The message for a key that its section does not have."""
    section, _, name = key.rpartition(".")
    name = name.replace("-", "_")
    if key in _fields() or section not in sections():
        return "unknown key; dots are for the command line, in a file write nested sections"
    if alias := ALIASES.get(name):
        return f"unknown key; did you mean {alias.partition('=')[0]!r}?"
    if advice := ADVICE.get(name):
        return f"unknown key; {advice}"
    beside = {
        other.rpartition(".")[2]: other
        for other in _fields()
        if other.rpartition(".")[0] == section
    }
    found = [other for other in _fields() if other.rpartition(".")[2] == name][:3]
    found = found or [beside[near] for near in nearest(name, beside)]
    if found:
        return f"unknown key; did you mean {' or '.join(map(repr, found))}?"
    if "kwargs" in beside:
        return f"unknown key; further arguments belong in {section}.kwargs"
    short_keys = "" if section else "; also epochs, size and lr"
    return f"unknown key (allowed: {', '.join(beside)}{short_keys})"
