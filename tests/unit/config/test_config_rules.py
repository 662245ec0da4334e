"""Keys without effect, flags of keys, and names that stand for code."""

import pytest
from config_files import LR, load

from imagenet_cls.config import keys
from imagenet_cls.config.load import dump_yaml
from imagenet_cls.config.rules import EVALUATED, code_names, ineffective_keys


def test_every_number_of_the_schema_has_a_range() -> None:
    numbers = (int, float, list[float], list[int])
    for key, hint in keys.value_types().items():
        bare, _ = keys.split_optional(hint)
        assert bare not in numbers or keys.info(key).allowed is not None, key


FOLD = "data.val=null data.fold=[0,5]"
TEACHER = "distill.teacher.name=a distill.teacher.checkpoint=b"


@pytest.mark.parametrize(
    ("key", "without", "with_effect"),
    [
        ("data.group", "", "data.val=null data.val_fraction=0.1"),
        ("data.group", "", FOLD),
        ("data.stratify", "", FOLD),
        ("data.stratify", f"{FOLD} data.group=p", FOLD),
        (
            "augment.progressive.multiple_px",
            "",
            "augment.progressive.epochs=[0] augment.progressive.sizes_px=[224]",
        ),
        ("augment.scale", "augment.crop=pad_crop", ""),
        ("augment.pad_px", "", "augment.crop=pad_crop"),
        ("augment.color_jitter.prob", "", "augment.color_jitter.hue=0.1"),
        ("augment.erasing.mode", "", "augment.erasing.prob=0.1"),
        ("mix.prob", "", "mix.cutmix_alpha=1"),
        ("mix.mode", "", "mix.mixup_alpha=0.2"),
        ("mix.switch_prob", "mix.mixup_alpha=0.2", "mix.mixup_alpha=0.2 mix.cutmix_alpha=1"),
        ("distill.alpha", "", f"distill.kind=hard {TEACHER}"),
        (
            "distill.temperature",
            f"distill.kind=hard {TEACHER}",
            f"distill.kind=soft {TEACHER}",
        ),
        ("loss.effective_beta", "", "loss.class_weights=effective"),
        ("schedule.warmup_prefix", "", "schedule.warmup_epochs=5"),
        (
            "schedule.warmup_start_factor",
            "schedule.warmup_epochs=5 schedule.warmup_start_lr=1e-6",
            "schedule.warmup_epochs=5",
        ),
        ("train.sam_every_steps", "", "train.sam_rho=0.1"),
        ("train.early_stop.metric", "", "train.early_stop.patience_evals=3"),
        ("ema.warmup", "", "ema.decay=0.99"),
        ("ema.every_steps", "", "ema.half_life_images=1e6"),
        ("eval.crop_pct", "eval.resize_px=256", ""),
    ],
)
def test_key_is_ineffective_unless_its_condition_is_met(
    key: str, without: str, with_effect: str
) -> None:
    assert key in ineffective_keys(load(LR, *without.split()).config)
    assert key not in ineffective_keys(load(LR, *with_effect.split()).config)


def test_ineffective_key_is_a_warning_and_keeps_its_value() -> None:
    text = f"{LR}ema: {{decay: 0.99, warmup: true, every_steps: 32}}\neval: {{crop_pct: 0.95}}\n"
    assert load(text).warnings == []
    off = load(text, "ema.decay=null", "eval.resize_px=256", "mix.mode=batch")
    assert [line.split(": ")[:2] for line in off.warnings] == [
        ["x.yaml:2", "ema.every_steps"],  # one line for all keys that need ema.decay
        ["x.yaml:3", "eval.crop_pct"],
    ]
    assert "ema.warmup" in off.warnings[0]
    assert load(dump_yaml(off.config)).config == off.config


def test_flags_of_a_key_or_its_section_are_those_of_the_key() -> None:
    per_machine, free = keys.per_machine_keys(), keys.keys_without_recipe()
    assert {"data.root", "expect.note", "imports"} <= per_machine
    assert {"checkpoint.keep_last", "train.compile", "train.early_stop.patience_evals"} <= free
    assert not {"optimizer.lr", "seed", "model.name"} & (per_machine | free)


def test_keys_that_take_code() -> None:
    assert [key for key in keys.value_types() if keys.info(key).code is not None] == [
        "model.name",
        "data.name",
        "augment.policy",
        "loss.name",
        "distill.teacher.name",
        "optimizer.name",
        "schedule.name",
        "train.step",
        "eval.metrics",
        "log.writers",
    ]


def test_names_of_code_are_those_of_the_used_sections() -> None:
    """The arguments of components are values."""
    words = ["imports=[a]", "model.name=b:f", "model.kwargs.x=c:f", "data.root=d:f"]
    config = load(LR, *words, "loss.name=e:f", "eval.metrics=[g:f,h:f]").config
    assert code_names(config) == ["a", "b:f", "e:f", "g:f", "h:f"]
    assert code_names(config, EVALUATED) == ["a", "b:f", "g:f", "h:f"]


@pytest.mark.parametrize(
    ("setting", "is_code"),
    [
        ("model.name=resnet18", False),
        ("model.name=torchvision:resnet18", False),
        ("model.name=hf-hub:user/model", True),
        ("model.name=hf_hub:user/model", True),
        ("model.name=local-dir:/x", True),
        ("model.name=timm:models.create_model", True),
        ("model.name=own.module:Net.build", True),
        ("data.name=torchvision:CIFAR10", False),
        ("data.name=hf:cifar10", False),
        ("augment.policy=torchvision:aug_mix", False),
        ("optimizer.name=timm:lion", False),
    ],
)
def test_name_is_code_unless_its_library_is_known(setting: str, is_code: bool) -> None:
    config = load("", setting, "optimizer.lr=1").config
    assert code_names(config) == [setting.partition("=")[2]] * is_code
