"""Ranges, keys without effect, and flags of keys."""

from typing import Any

import pytest
from config_files import LR, errors_of, load, nested, write

from imagenet_cls.config import keys, schema
from imagenet_cls.config.check import EVALUATED, code_names, ineffective_keys
from imagenet_cls.config.load import config_from_dict, dump_yaml, load_config
from imagenet_cls.config.reader import dump
from imagenet_cls.config.schema import Condition


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


# A condition of the schema, settings that do not meet it, and settings that do.
CONDITIONS: list[tuple[Condition, dict[str, Any], dict[str, Any]]] = [
    (schema.READS_FILES, {"data.name": "synthetic"}, {}),
    (schema.REPEATS, {}, {"data.repeats": 3}),
    (schema.HOLDS_OUT, {}, {"data.val": None, "data.fold": [0, 5]}),
    (schema.HOLDS_OUT, {}, {"data.val": None, "data.val_fraction": 0.1}),
    (schema.FOLDS_OF_IMAGES, {}, {"data.val": None, "data.fold": [0, 5]}),
    (
        schema.FOLDS_OF_IMAGES,
        {"data.val": None, "data.fold": [0, 5], "data.group": "p"},
        {"data.val": None, "data.fold": [0, 5]},
    ),
    (schema.PROGRESSIVE, {}, {"augment.progressive": {"epochs": [0], "sizes_px": [224]}}),
    (schema.CROPS_RANDOMLY, {"augment.crop": "pad_crop"}, {}),
    (schema.CROPS_RANDOMLY, {"augment.crop": "resize"}, {}),
    (schema.PADS, {}, {"augment.crop": "pad_crop"}),
    (schema.JITTERS, {}, {"augment.color_jitter.hue": 0.1}),
    (schema.ERASES, {}, {"augment.erasing.prob": 0.1}),
    (schema.MIXES, {}, {"mix.cutmix_alpha": 1.0}),
    (schema.MIXES, {}, {"mix.mixup_alpha": 0.2}),
    (
        schema.MIXES_BOTH_WAYS,
        {"mix.mixup_alpha": 0.2},
        {"mix.mixup_alpha": 0.2, "mix.cutmix_alpha": 1.0},
    ),
    (schema.DATA_PARALLEL, {}, {"parallel.mode": "dp"}),
    (schema.DISTILS, {}, {"distill.kind": "hard"}),
    (schema.DISTILS_SOFTLY, {"distill.kind": "hard"}, {"distill.kind": "soft"}),
    (schema.EFFECTIVE_WEIGHTS, {}, {"loss.class_weights": "effective"}),
    (schema.LR_SCALES, {}, {"optimizer.lr_base_batch": 512}),
    (schema.WARMS_UP, {}, {"schedule.warmup_epochs": 5}),
    (
        schema.WARMS_UP_BY_FACTOR,
        {"schedule.warmup_epochs": 5, "schedule.warmup_start_lr": 1e-6},
        {"schedule.warmup_epochs": 5},
    ),
    (schema.USES_SAM, {}, {"train.sam_rho": 0.1}),
    (schema.STOPS_EARLY, {}, {"train.early_stop.patience_evals": 3}),
    (schema.AVERAGES, {}, {"ema.decay": 0.99}),
    (schema.AVERAGES, {}, {"ema.half_life_images": 1e6}),
    (schema.RESIZES_BY_SHARE, {"eval.resize_px": 256}, {}),
]


@pytest.mark.parametrize(("condition", "unmet", "met"), CONDITIONS)
def test_keys_are_ineffective_unless_their_condition_is_met(
    condition: Condition, unmet: dict[str, Any], met: dict[str, Any]
) -> None:
    with_it = {key for key in keys.value_types() if keys.info(key).needs is condition}
    assert with_it
    assert with_it <= ineffective_keys(config_from_dict(nested(unmet))).keys()
    assert not with_it & ineffective_keys(config_from_dict(nested(met))).keys()


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


def test_end_of_mixing_after_the_run_is_a_warning() -> None:
    text = f"{LR}mix: {{mixup_alpha: 0.2, off_epoch: 90}}\n"
    assert load(text).warnings == []
    (warning,) = load(text, "train.epochs=89").warnings
    assert warning == "x.yaml:2: mix.off_epoch: 90 has no effect: train.epochs is 89"


def test_flags_of_keys() -> None:
    per_machine, free = keys.per_machine_keys(), keys.keys_without_recipe()
    assert {"data.root", "data.exclude", "expect.note", "imports"} <= per_machine
    assert {"checkpoint.keep_last", "log.plots", "train.compile", "data.exclude"} <= free
    assert {"train.early_stop.patience_evals", "eval.metrics"} <= free
    assert not {"optimizer.lr", "seed", "model.name"} & (per_machine | free)


CODE = {
    "model.name",
    "data.name",
    "augment.policy",
    "loss.name",
    "distill.teacher.name",
    "optimizer.name",
    "schedule.name",
    "log.writers",
    "eval.metrics",
}


def test_only_keys_that_take_code_name_code() -> None:
    """The arguments of components are values, too."""
    values: dict[str, Any] = {"optimizer.lr": 1.0, "imports": ["own"]}
    for key, hint in keys.value_types().items():
        if str in keys.members(hint):
            values[key] = f"{key}:f"
        elif list[str] in keys.members(hint) and key != "imports":
            values[key] = [f"{key}:f"]
        elif hint == schema.Kwargs:
            values[key] = {"a": f"{key}:f"}
    config = config_from_dict(nested(values))
    assert set(code_names(config)) == {"own", *(f"{key}:f" for key in CODE)}
    evaluated = {"own", "model.name:f", "data.name:f", "eval.metrics:f"}
    assert set(code_names(config, EVALUATED)) == evaluated


@pytest.mark.parametrize(
    ("name", "is_code"),
    [
        ("resnet18", False),
        ("torchvision:resnet18", False),
        ("hf-hub:user/model", True),
        ("hf_hub:user/model", True),
        ("local-dir:/x", True),
        ("timm:models.create_model", True),
        ("own.module:Net.build", True),
    ],
)
def test_models_that_run_code_or_download_a_model(name: str, is_code: bool) -> None:
    config = config_from_dict({"model": {"name": name}, "optimizer": {"name": "x", "lr": 1.0}})
    assert code_names(config) == [name] * is_code


@pytest.mark.parametrize(
    "values",
    [
        {"data": {"name": "torchvision:CIFAR10"}},
        {"data": {"name": "hf:cifar10"}},
        {"augment": {"policy": "torchvision:aug_mix"}},
        {"optimizer": {"name": "timm:lion", "lr": 1.0}},
    ],
)
def test_names_of_libraries_are_no_code(values: dict[str, Any]) -> None:
    assert code_names(config_from_dict({"optimizer": {"lr": 1.0}} | values)) == []
