"""Ranges, rules across keys, and keys without effect."""

from pathlib import Path
from typing import Any

import pytest

from imagenet_cls.config import keys
from imagenet_cls.config.check import ineffective_keys, value_problems
from imagenet_cls.config.load import config_from_dict, dump_yaml, load_config
from imagenet_cls.config.schema import Config


def nested(dotted: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        inner = tree
        *parents, last = key.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return tree


def config_of(**dotted: Any) -> Config:
    return config_from_dict(nested({"optimizer.lr": 0.1} | {key.replace("__", "."): dotted[key] for key in dotted}))


def keys_at_fault(**dotted: Any) -> list[str]:
    return [problem.key for problem in value_problems(config_of(**dotted))]


def test_defaults_have_no_problems() -> None:
    assert keys_at_fault() == []


def test_every_number_of_the_schema_has_a_range() -> None:
    for path, hint in keys.leaves().items():
        bare, _ = keys.split_optional(hint)
        if bare in (int, float, list[float]):
            assert keys.info(path).allowed is not None, path


RANGED = [path for path in keys.leaves() if keys.info(path).allowed and keys.element_hint(keys.leaves()[path]) is Any]


@pytest.mark.parametrize("path", RANGED, ids=".".join)
def test_range_includes_its_ends_and_nothing_outside(path: keys.KeyPath) -> None:
    def is_rejected(number: float) -> bool:
        problems = value_problems(config_of(**{"__".join(path): number}))
        return any(problem.key == ".".join(path) and "out of range" in problem.message for problem in problems)

    allowed, bare = keys.info(path).allowed, keys.split_optional(keys.leaves()[path])[0]
    assert allowed is not None
    assert is_rejected(bare(allowed.low)) == allowed.low_open
    assert is_rejected(bare(allowed.low) - 1)
    if allowed.high != float("inf"):
        assert is_rejected(bare(allowed.high)) == allowed.high_open
        assert is_rejected(bare(allowed.high) * 2)
    if bare is float:
        assert is_rejected(float("nan")) and is_rejected(float("inf"))


@pytest.mark.parametrize(
    ("good", "wrong"),
    [
        ({"augment__scale": [0.5, 0.5]}, {"augment__scale": [0.5, 0.4]}),
        ({"augment__scale": [0.1, 1.0]}, {"augment__scale": [0.0, 1.0]}),
        ({"augment__ratio": [0.5, 2.0]}, {"augment__ratio": [0.5, 1.0, 2.0]}),
        ({"data__mean": [0.0, 0.5, 1.0]}, {"data__mean": [0.5]}),
        ({"data__mean": [0.0, 0.5, 1.0]}, {"data__mean": [123.7, 116.3, 103.5]}),
        ({"data__std": [0.1, 0.2, 0.3]}, {"data__std": [0.1, 0.2, 0.0]}),
        ({"device": "cuda:3"}, {"device": "cuda3"}),
        ({"parallel__init_method": "tcp://node-1:29500"}, {"parallel__init_method": "tcp://node-1"}),
        ({"parallel__init_method": "tcp://[::1]:29500"}, {"parallel__init_method": "tcp://a:0"}),
        ({"parallel__init_method": "file:///tmp/x"}, {"parallel__init_method": "file://x"}),
        ({"imports": ["a.b"]}, {"imports": ["a/b.py"]}),
        ({"mix__mixup_alpha": 0.001}, {"mix__mixup_alpha": 1e-4}),
        ({"optimizer__kwargs": {"momentum": 0}}, {"optimizer__kwargs": {"momentum": 1.5}}),
        ({"optimizer__kwargs": {"betas": [0.9, 0.999]}}, {"optimizer__kwargs": {"betas": [0.9, 1.0]}}),
        ({"optimizer__kwargs": {"betas": [0.9, 0.999]}}, {"optimizer__kwargs": {"betas": [0.9]}}),
        ({"optimizer__kwargs": {"eps": 1e-8}}, {"optimizer__kwargs": {"eps": "small"}}),
        ({"model__kwargs": {"drop_rate": None}}, {"model__kwargs": {"drop_rate": 1.0}}),
        ({"model__checkpoint": "a.pth"}, {"model__checkpoint": "a.pth", "model__pretrained": True}),
        ({"model__head_only": True}, {"model__freeze": ["a"], "model__head_only": True}),
        ({"data__val": None, "data__val_fraction": 0.1}, {"data__val": None}),
        ({"data__val": None, "data__name": "synthetic"}, {"data__val": None, "data__name": "digits"}),
        ({"data__val": None, "data__name": "torchvision:CIFAR10"}, {"data__val_fraction": 0.1}),
        (
            {"data__name": "list", "data__train": "a.txt", "data__val": "b.csv"},
            {"data__name": "list", "data__train": "a.txt"},
        ),
        ({"data__exclude": "a.json"}, {"data__exclude": "a.json", "data__name": "synthetic"}),
        ({"data__repeats": 3}, {"data__repeats": 3, "train__global_batch_size": 2}),
        ({"eval__crop_px": 224, "eval__resize_px": 224}, {"eval__crop_px": 224, "eval__resize_px": 223}),
        ({"train__micro_batch_size": 256}, {"train__micro_batch_size": 257}),
        ({"train__clip_norm": 1.0}, {"train__clip_value": 1.0, "train__clip_norm": 1.0}),
        ({"train__sam_rho": 0.1}, {"train__sam_rho": 0.1, "train__precision": "fp16"}),
        ({"ema__decay": 0.9}, {"ema__half_life_images": 9.0, "ema__decay": 0.9}),
        ({"schedule__warmup_epochs": 90}, {"schedule__warmup_epochs": 90.5}),
        ({"schedule__cooldown_epochs": 90}, {"schedule__cooldown_epochs": 90, "schedule__warmup_epochs": 1}),
        ({"device": "cuda", "parallel__backend": "nccl"}, {"parallel__backend": "nccl", "device": "cpu"}),
        ({"train__precision": "fp16"}, {"train__precision": "fp16", "device": "cpu"}),
        ({"mix__cutmix_minmax": [0.2, 0.8]}, {"mix__cutmix_minmax": [0.5, 0.501]}),
        ({"mix__mixup_alpha": 0.2}, {"mix__mixup_alpha": 0.2, "loss__name": "focal"}),
        ({"augment__splits": 3, "loss__name": "jsd"}, {"augment__splits": 3}),
        (
            {"augment__progressive": {"epochs": [0, 9], "sizes_px": [160, 224]}},
            {"augment__progressive": {"epochs": [0], "sizes_px": [160, 224]}},
        ),
        (
            {"augment__progressive": {"epochs": [0, 9], "sizes_px": [160, 224]}},
            {"augment__progressive": {"epochs": [0, 9], "sizes_px": [161, 224]}},
        ),
        (
            {"distill": {"kind": "soft", "teacher": {"name": "a", "pretrained": True}}},
            {"distill": {"kind": "soft", "teacher": {"name": "a"}}},
        ),
        (
            {"model__split_bn": True, "augment__splits": 3, "loss__name": "jsd"},
            {"model__split_bn": True, "augment__splits": 3, "loss__name": "jsd", "parallel__mode": "dp"},
        ),
        ({"parallel__device_ids": [0, 1]}, {"parallel__device_ids": [0, 0]}),
        ({"parallel__device_ids": [0, 1]}, {"parallel__device_ids": []}),
    ],
)
def test_rule_accepts_and_rejects(good: dict[str, Any], wrong: dict[str, Any]) -> None:
    assert keys_at_fault(**good) == []
    (key,) = keys_at_fault(**wrong)
    assert key.replace(".", "__").startswith(tuple(wrong)) or key in ("data.val", "mix")


def test_kwargs_of_a_factory_are_not_checked() -> None:
    assert keys_at_fault(optimizer__name="mine:make", optimizer__kwargs={"momentum": "much"}) == []


def test_rule_is_skipped_if_one_of_its_keys_is_wrong() -> None:
    assert keys_at_fault(train__global_batch_size=-1, train__micro_batch_size=8) == ["train.global_batch_size"]
    assert keys_at_fault(mix__cutmix_minmax=[0.1, 0.2, 0.3]) == ["mix.cutmix_minmax"]
    assert value_problems(config_of(data__val=None), unknown={"data.val_fraction"}) == []


def test_check_reads_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert keys_at_fault(data__root="nowhere", model__checkpoint="nowhere.pth") == []


def test_non_finite_kwarg_is_reported_once_at_any_depth() -> None:
    kwargs = {"a": [1, {"b": float("nan")}], "eps": float("inf"), "c": 10**400, "d": "nan"}
    assert sorted(keys_at_fault(optimizer__kwargs=kwargs)) == ["optimizer.kwargs.a.b", "optimizer.kwargs.eps"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train__epochs", 10**400),
        ("optimizer__weight_decay", 2.0**64),
        ("eval__crop_pct", 1e-300),
        ("augment__ratio", [1e300, 1e308]),
        ("optimizer__kwargs", {"momentum": 10**400}),
    ],
)
def test_huge_number_is_out_of_range(key: str, value: object) -> None:
    assert any(fault.startswith(key.replace("__", ".")) for fault in keys_at_fault(**{key: value}))


# --------------------------------------------------------------------------------------------- keys without effect

# A key, a value that is not its default, and what gives it an effect.
NEEDS: list[tuple[str, Any, dict[str, Any]]] = [
    ("data.repeats_multiple", 64, {"data.repeats": 3}),
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
    ("distill.alpha", 0.9, {"distill.kind": "hard"}),
    ("distill.temperature", 4.0, {"distill.kind": "soft"}),
    *((f"distill.teacher.{name}", value, {"distill.kind": "soft"}) for name, value in
      (("name", "a"), ("pretrained", True), ("checkpoint", "a"))),
    ("optimizer.lr_scaling", "sqrt", {"optimizer.lr_base_batch": 512}),
    ("schedule.warmup_start_factor", 0.1, {"schedule.warmup_epochs": 5}),
    ("schedule.warmup_start_lr", 1e-6, {"schedule.warmup_epochs": 5}),
    ("schedule.warmup_prefix", False, {"schedule.warmup_epochs": 5}),
    ("train.sam_every_steps", 5, {"train.sam_rho": 0.1}),
    ("ema.every_steps", 32, {"ema.decay": 0.99}),
    ("ema.warmup", True, {"ema.half_life_images": 1e6}),
]  # fmt: skip
# A key, a value, and what takes its effect away.
REPLACED: list[tuple[str, Any, dict[str, Any]]] = [
    ("mix.switch_prob", 0.25, {"mix.mixup_alpha": 0.2}),
    ("mix.cutmix_alpha", 1.0, {"mix.cutmix_minmax": [0.2, 0.8]}),
    ("mix.off_epoch", 91, {"mix.mixup_alpha": 0.2, "train.epochs": 90}),
    ("distill.temperature", 4.0, {"distill.kind": "hard"}),
    ("schedule.warmup_start_factor", 0.1, {"schedule.warmup_epochs": 5, "schedule.warmup_start_lr": 1e-6}),
    ("eval.crop_pct", 0.95, {"eval.resize_px": 256}),
]


def ineffective(dotted: dict[str, Any]) -> set[str]:
    return {*ineffective_keys(config_from_dict(nested({"optimizer.lr": 0.1} | dotted)))}


def test_every_condition_of_the_schema_is_tested() -> None:
    with_condition = {".".join(path) for path in keys.leaves() if keys.info(path).needs is not None}
    assert with_condition == {key for key, *_ in NEEDS + REPLACED}


@pytest.mark.parametrize(("key", "value", "others"), NEEDS)
def test_key_is_ineffective_without_what_it_needs(key: str, value: Any, others: dict[str, Any]) -> None:
    assert key in ineffective({key: value})
    assert key not in ineffective({**others, key: value})


@pytest.mark.parametrize(("key", "value", "others"), REPLACED)
def test_key_is_ineffective_beside_what_replaces_it(key: str, value: Any, others: dict[str, Any]) -> None:
    assert key in ineffective({**others, key: value})


def test_ineffective_key_is_a_warning_and_keeps_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ema = "ema: {decay: 0.99, warmup: true, every_steps: 32}"
    Path("x.yaml").write_text(f"optimizer: {{lr: 0.1}}\n{ema}\neval: {{crop_pct: 0.95}}\n")
    assert load_config("x.yaml").warnings == []
    off = load_config("x.yaml", ["ema.decay=null", "eval.resize_px=256", "mix.mode=batch"])
    assert [line.split(": ")[:2] for line in off.warnings] == [
        ["x.yaml:2", "ema.every_steps"],  # one line for all keys that need ema.decay
        ["x.yaml:3", "eval.crop_pct"],
    ]
    assert "ema.warmup" in off.warnings[0]
    assert off.config.ema.warmup and off.config.eval.crop_pct == 0.95
    Path("dump.yaml").write_text(dump_yaml(off.config))
    assert load_config("dump.yaml").config == off.config


def test_flags_of_keys() -> None:
    assert {"data.root", "data.exclude", "expect.note", "imports"} <= keys.keys_with("per_machine")
    assert {"checkpoint.keep_last", "log.plots", "train.compile", "data.exclude"} <= keys.keys_with("not_recipe")
    assert not {"optimizer.lr", "seed", "model.name"} & (keys.keys_with("per_machine") | keys.keys_with("not_recipe"))
