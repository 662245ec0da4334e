"""Ranges, rules across keys, and keys without effect."""

from typing import Any

import pytest
from config_files import LR, errors_of, load, write

from imagenet_cls.config import keys
from imagenet_cls.config.check import ineffective_keys
from imagenet_cls.config.load import config_from_dict, dump_yaml, load_config
from imagenet_cls.config.reader import dump
from imagenet_cls.errors import ConfigError


def nested(dotted: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"optimizer": {"lr": 0.1}}
    for key, value in dotted.items():
        inner = tree
        *parents, last = key.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return tree


def keys_at_fault(dotted: dict[str, Any]) -> list[str]:
    try:
        load(dump(nested(dotted)))
    except ConfigError as error:
        return [line.split(": ")[1] for line in error.lines]
    return []


def test_every_number_of_the_schema_has_a_range() -> None:
    for key, hint in keys.value_types().items():
        bare, _ = keys.split_optional(hint)
        assert (
            bare not in (int, float, list[float], list[int]) or keys.info(key).allowed is not None
        ), key


RANGED = [
    key for key, hint in keys.value_types().items() if keys.split_optional(hint)[0] in (int, float)
]


@pytest.mark.parametrize("key", RANGED)
def test_range_includes_its_ends_and_nothing_outside(key: str) -> None:
    allowed, bare = keys.info(key).allowed, keys.split_optional(keys.value_types()[key])[0]
    assert allowed is not None
    ends = {allowed.low: allowed.low_open, allowed.low - 1: True}
    if allowed.high != float("inf"):
        ends |= {allowed.high: allowed.high_open, allowed.high * 2: True}
    values = {bare(number): is_out for number, is_out in ends.items()}
    values |= dict.fromkeys(
        [float("nan"), float("inf"), 2.0**64] if bare is float else [10**400], True
    )
    for value, is_out in values.items():
        lines = errors_of(dump(nested({key: value, "seed ": 1})))  # which is an error in any case
        assert (
            any(f": {key}: " in line and ("range" in line or "finite" in line) for line in lines)
            == is_out
        ), value


GROWTH = {"augment.progressive.epochs": [0, 9], "augment.progressive.sizes_px": [160, 224]}
PAD_CROP = {"augment.crop": "pad_crop", "augment.size_px": 32, "augment.pad_px": 31}
FOLD = {"data.val": None, "data.fold": [4, 5]}
TEACHER = {"distill.kind": "soft", "distill.teacher.name": "a", "distill.teacher.pretrained": True}
SPLIT_BN = {"model.split_bn": True, "augment.splits": 3, "loss.name": "jsd"}


@pytest.mark.parametrize(
    ("good", "wrong"),
    [
        ({"augment.scale": [0.5, 0.5]}, {"augment.scale": [0.5, 0.4]}),
        ({"augment.scale": [0.1, 1.0]}, {"augment.scale": [0.0, 1.0]}),
        ({"augment.ratio": [0.5, 2.0]}, {"augment.ratio": [0.5, 1.0, 2.0]}),
        ({"data.mean": [0.0, 0.5, 1.0]}, {"data.mean": [0.5]}),
        ({"data.mean": [0.0, 0.5, 1.0]}, {"data.mean": [123.7, 116.3, 103.5]}),
        ({"data.std": [0.1, 0.2, 0.3]}, {"data.std": [0.1, 0.2, 0.0]}),
        ({"device": "cuda:3"}, {"device": "cuda3"}),
        ({"parallel.init_method": "tcp://node-1:29500"}, {"parallel.init_method": "tcp://node-1"}),
        ({"parallel.init_method": "tcp://[::1]:29500"}, {"parallel.init_method": "tcp://a:0"}),
        ({"parallel.init_method": "file:///tmp/x"}, {"parallel.init_method": "file://x"}),
        ({"imports": ["a.b"]}, {"imports": ["a/b.py"]}),
        ({"mix.mixup_alpha": 0.001}, {"mix.mixup_alpha": 1e-4}),
        ({"optimizer.kwargs": {"momentum": 0}}, {"optimizer.kwargs": {"momentum": 1.5}}),
        (
            {"optimizer.name": "mine:make", "optimizer.kwargs": {"momentum": 2}},
            {"optimizer.kwargs": {"momentum": "2"}},
        ),
        ({"model.kwargs": {"drop_rate": None}}, {"model.kwargs": {"drop_rate": 1.0}}),
        (
            {"model.kwargs": {"a": 10**400, "b": "nan"}},
            {"model.kwargs": {"a": [1, {"b": float("nan")}]}},
        ),
        ({"model.checkpoint": "a.pth"}, {"model.checkpoint": "a.pth", "model.pretrained": True}),
        ({"model.head_only": True}, {"model.freeze": ["a"], "model.head_only": True}),
        ({"data.val": None, "data.val_fraction": 0.1}, {"data.val": None}),
        ({"data.classes": ["b", "a"]}, {"data.classes": ["a", "b", "a"]}),
        ({"data.classes": "a.txt"}, {"data.classes": []}),
        ({"data.classes": "a.txt"}, {"data.classes": "a.txt", "data.name": "synthetic"}),
        ({"loss.class_weights": "balanced"}, {"loss.class_weights": "equal"}),
        ({"loss.class_weights": [1, 2.5]}, {"loss.class_weights": [1, -2.5]}),
        (FOLD, FOLD | {"data.fold": [5, 5]}),
        (FOLD, FOLD | {"data.fold": [-1, 5]}),
        (FOLD, FOLD | {"data.fold": [1, 5, 7]}),
        (FOLD, FOLD | {"data.val": "val"}),
        (FOLD, FOLD | {"data.val_fraction": 0.1}),
        (FOLD | {"data.group": "[^_]*"}, FOLD | {"data.group": "[^_*"}),
        (
            FOLD | {"data.group": "[^_]*"},
            FOLD | {"data.group": "a", "data.name": "torchvision:CIFAR10"},
        ),
        ({"data.fraction": 1.0}, {"data.fraction": 0.0}),
        ({"data.fraction": 0.5}, {"data.fraction": 0.5, "data.name": "synthetic"}),
        ({"data.val": None, "data.name": "synthetic"}, {"data.val": None, "data.name": "digits"}),
        ({"data.val": None, "data.name": "torchvision:CIFAR10"}, {"data.val_fraction": 0.1}),
        (
            {"data": {"name": "list", "train": "a.txt", "val": "b.csv"}},
            {"data": {"name": "list", "train": "a.txt"}},
        ),
        ({"data.exclude": "a.json"}, {"data.exclude": "a.json", "data.name": "synthetic"}),
        ({"data.repeats": 3}, {"data.repeats": 3, "train.global_batch_size": 2}),
        (
            {"eval.crop_px": 224, "eval.resize_px": 224},
            {"eval.crop_px": 224, "eval.resize_px": 223},
        ),
        ({"train.micro_batch_size": 256}, {"train.micro_batch_size": 257}),
        ({"train.clip_norm": 1.0}, {"train.clip_value": 1.0, "train.clip_norm": 1.0}),
        ({"train.sam_rho": 0.1}, {"train.sam_rho": 0.1, "train.precision": "fp16"}),
        ({"ema.decay": 0.9}, {"ema.half_life_images": 9.0, "ema.decay": 0.9}),
        ({"schedule.warmup_epochs": 90}, {"schedule.warmup_epochs": 90.5}),
        (
            {"schedule.cooldown_epochs": 90},
            {"schedule.cooldown_epochs": 90, "schedule.warmup_epochs": 1},
        ),
        (
            {"device": "cuda", "parallel.backend": "nccl"},
            {"parallel.backend": "nccl", "device": "cpu"},
        ),
        ({"train.precision": "fp16"}, {"train.precision": "fp16", "device": "cpu"}),
        ({"mix.cutmix_minmax": [0.2, 0.8]}, {"mix.cutmix_minmax": [0.5, 0.501]}),
        ({"mix.mixup_alpha": 0.2}, {"mix.mixup_alpha": 0.2, "loss.name": "focal"}),
        ({"augment.splits": 3, "loss.name": "jsd"}, {"augment.splits": 3}),
        (GROWTH, GROWTH | {"augment.progressive.epochs": [0]}),
        ({"augment.size_px": [160, 224]}, GROWTH | {"augment.size_px": [160, 224]}),
        (GROWTH, GROWTH | {"augment.progressive.sizes_px": [161, 224]}),
        (GROWTH, GROWTH | {"augment.progressive.epochs": [0, 91]}),
        (GROWTH, GROWTH | {"augment.size_px": 256}),
        (
            {"data.channels": 1, "data.mean": [0.5], "data.std": [0.5]},
            {"data.channels": 1, "data.mean": [0.5, 0.5, 0.5]},
        ),
        ({"data.channels": 1}, {"data.channels": 2}),
        ({"data.std": None}, {"data.std": []}),
        (TEACHER, TEACHER | {"data.channels": 1}),
        (PAD_CROP, PAD_CROP | {"augment.pad_px": 32}),
        (PAD_CROP | {"augment.size_px": [32, 40]}, PAD_CROP | {"augment.size_px": [40, 31]}),
        ({"augment.size_px": [192, 256]}, {"augment.size_px": [192]}),
        ({"augment.size_px": [192, 256]}, {"augment.size_px": [192, 0]}),
        (
            {"eval.crop_px": [192, 224], "eval.resize_px": 224},
            {"eval.crop_px": [192, 256], "eval.resize_px": 224},
        ),
        ({"eval.crop_px": [192, 256]}, {"eval.crop_px": [192, 256, 3]}),
        (PAD_CROP, PAD_CROP | {"augment.pad_px": -1}),
        ({"augment.size_px": 4}, {"augment.size_px": 4, "augment.crop": "pad_crop"}),
        (TEACHER, TEACHER | {"distill.teacher.pretrained": False}),
        (TEACHER, TEACHER | {"distill.teacher.name": None}),
        (SPLIT_BN, SPLIT_BN | {"parallel.mode": "dp"}),
        (SPLIT_BN, SPLIT_BN | {"parallel.sync_bn": True}),
        ({"parallel.device_ids": [0, 1]}, {"parallel.device_ids": [0, 0]}),
        ({"parallel.device_ids": [1, 0], "device": "cuda"}, {"parallel.device_ids": []}),
        (
            {"parallel": {"mode": "dp", "device_ids": [1, 2, 0]}},
            {"parallel": {"mode": "dp", "device_ids": [0, -1]}},
        ),
        (
            {"parallel": {"mode": "dp", "output_device": 0}},
            {"parallel": {"mode": "ddp", "output_device": 0}},
        ),
        (
            {"parallel": {"mode": "ddp", "sync_bn": True}},
            {"parallel": {"mode": "dp", "sync_bn": True}},
        ),
        (
            {"parallel.mode": "ddp", "train.compile": True},
            {"parallel.mode": "dp", "train.compile": True},
        ),
        ({"parallel.mode": "ddp", "device": "cuda:1"}, {"parallel.mode": "dp", "device": "cuda:1"}),
        (
            {"parallel.mode": "dp", "device": "cpu"},
            {"device": "cuda:1", "parallel.device_ids": [1, 0]},
        ),
    ],
)
def test_rule_accepts_and_rejects(good: dict[str, Any], wrong: dict[str, Any]) -> None:
    assert keys_at_fault(good) == []
    (key,) = keys_at_fault(wrong)
    assert key.partition(".")[0] in {name.partition(".")[0] for name in wrong}


def test_rule_is_skipped_if_one_of_its_keys_is_wrong() -> None:
    wrong = {
        "train.global_batch_size": -1,
        "train.micro_batch_size": 512,
        "mix.cutmix_minmax": [0.1, 0.2, 0.3],
    }
    assert keys_at_fault(wrong) == ["train.global_batch_size", "mix.cutmix_minmax"]
    assert len(errors_of(LR + "data: {val: null, val_fracton: 0.1}\n")) == 1


# --------------------------------------------------------------------------------------------- keys without effect

# A key, a value that is not its default, and what gives it an effect.
NEEDS: list[tuple[str, Any, dict[str, Any]]] = [
    ("data.repeats_multiple", 64, {"data.repeats": 3}),
    ("data.group", "a", {"data.val": None, "data.fold": [0, 5]}),
    ("augment.progressive.multiple_px", 16, {"augment.progressive": {"epochs": [0, 9], "sizes_px": [112, 224]}}),
    ("augment.color_jitter.prob", 0.5, {"augment.color_jitter.hue": 0.1}),
    ("augment.erasing.mode", "pixel", {"augment.erasing.prob": 0.1}),
    ("augment.erasing.max_count", 3, {"augment.erasing.prob": 0.1}),
    ("augment.erasing.scale", [0.1, 0.2], {"augment.erasing.prob": 0.1}),
    ("augment.erasing.ratio", [0.5, 2.0], {"augment.erasing.prob": 0.1}),
    ("mix.prob", 0.5, {"mix.cutmix_minmax": [0.2, 0.8]}),
    ("mix.mode", "pair", {"mix.cutmix_alpha": 1.0}),
    ("mix.switch_prob", 0.25, {"mix.mixup_alpha": 0.2, "mix.cutmix_alpha": 1.0}),
    ("mix.off_epoch", 3, {"mix.mixup_alpha": 0.2}),
    ("augment.pad_px", 8, {"augment.crop": "pad_crop"}),
    ("augment.pad_mode", "reflect", {"augment.crop": "pad_crop"}),
    ("distill.alpha", 0.9, {"distill.kind": "hard"}),
    ("distill.temperature", 4.0, {"distill.kind": "soft"}),
    *((f"distill.teacher.{name}", value, {"distill.kind": "soft"}) for name, value in
      (("name", "a"), ("pretrained", True), ("checkpoint", "a"))),
    ("loss.effective_beta", 0.99, {"loss.class_weights": "effective"}),
    ("optimizer.lr_scaling", "sqrt", {"optimizer.lr_base_batch": 512}),
    ("schedule.warmup_start_factor", 0.1, {"schedule.warmup_epochs": 5}),
    ("schedule.warmup_start_lr", 1e-6, {"schedule.warmup_epochs": 5}),
    ("schedule.warmup_prefix", False, {"schedule.warmup_epochs": 5}),
    ("train.sam_every_steps", 5, {"train.sam_rho": 0.1}),
    ("train.early_stop.metric", "loss", {"train.early_stop.patience_evals": 3}),
    ("train.early_stop.min_delta", 0.1, {"train.early_stop.patience_evals": 3}),
    ("ema.every_steps", 32, {"ema.decay": 0.99}),
    ("ema.warmup", True, {"ema.half_life_images": 1e6}),
]  # fmt: skip
# A key, a value, and what takes its effect away.
REPLACED: list[tuple[str, Any, dict[str, Any]]] = [
    ("data.min_decoded_px", 224, {"data.name": "synthetic"}),
    ("mix.switch_prob", 0.25, {"mix.mixup_alpha": 0.2}),
    ("mix.cutmix_alpha", 1.0, {"mix.cutmix_minmax": [0.2, 0.8]}),
    ("mix.off_epoch", 91, {"mix.mixup_alpha": 0.2, "train.epochs": 90}),
    ("distill.temperature", 4.0, {"distill.kind": "hard"}),
    (
        "schedule.warmup_start_factor",
        0.1,
        {"schedule.warmup_epochs": 5, "schedule.warmup_start_lr": 1e-6},
    ),
    ("eval.crop_pct", 0.95, {"eval.resize_px": 256}),
    ("data.exif", "apply", {"data.name": "synthetic"}),
    ("data.min_decoded_px", 224, {"data.name": "synthetic"}),
    ("augment.scale", [0.5, 1.0], {"augment.crop": "pad_crop"}),
    ("augment.ratio", [1.0, 1.0], {"augment.crop": "resize"}),
]


def ineffective(dotted: dict[str, Any]) -> set[str]:
    return {*ineffective_keys(config_from_dict(nested(dotted)))}


def test_every_condition_of_the_schema_is_tested() -> None:
    with_condition = {key for key in keys.value_types() if keys.info(key).needs is not None}
    assert with_condition == {key for key, *_ in NEEDS + REPLACED}


@pytest.mark.parametrize(("key", "value", "others"), NEEDS)
def test_key_is_ineffective_without_what_it_needs(
    key: str, value: Any, others: dict[str, Any]
) -> None:
    assert key in ineffective({key: value})
    assert key not in ineffective({**others, key: value})


@pytest.mark.parametrize(("key", "value", "others"), REPLACED)
def test_key_is_ineffective_beside_what_replaces_it(
    key: str, value: Any, others: dict[str, Any]
) -> None:
    assert key in ineffective({**others, key: value})


def test_ineffective_key_is_a_warning_and_keeps_its_value() -> None:
    text = f"{LR}ema: {{decay: 0.99, warmup: true, every_steps: 32}}\neval: {{crop_pct: 0.95}}\n"
    assert load(text).warnings == []
    off = load(text, "ema.decay=null", "eval.resize_px=256", "mix.mode=batch")
    assert [line.split(": ")[:2] for line in off.warnings] == [
        ["x.yaml:2", "ema.every_steps"],  # one line for all keys that need ema.decay
        ["x.yaml:3", "eval.crop_pct"],
    ]
    assert "ema.warmup" in off.warnings[0]
    assert off.config.ema.warmup and off.config.eval.crop_pct == 0.95
    assert load_config(write("dump.yaml", dump_yaml(off.config))).config == off.config


def test_flags_of_keys() -> None:
    per_machine, free = keys.keys_with("per_machine", True), keys.keys_with("recipe", False)
    assert {"data.root", "data.exclude", "expect.note", "imports"} <= per_machine
    assert {"checkpoint.keep_last", "log.plots", "train.compile", "data.exclude"} <= free
    assert {"train.early_stop.patience_evals", "eval.metrics"} <= free
    assert not {"optimizer.lr", "seed", "model.name"} & (per_machine | free)
