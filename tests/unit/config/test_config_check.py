"""Ranges and rules across keys, one by one."""

from pathlib import Path
from typing import Any

import pytest

from imagenet_cls.config import keys
from imagenet_cls.config.check import FORMS, LISTS, RANGES, RULES, check
from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.schema import Config


def config_of(**dotted: Any) -> Config:
    tree: dict[str, Any] = {"optimizer": {"lr": 0.1}}
    for key, value in dotted.items():
        inner = tree
        *parents, last = key.split("__")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return config_from_dict(tree)


def keys_at_fault(**dotted: Any) -> list[str]:
    return [problem.key for problem in check(config_of(**dotted))]


def test_the_defaults_are_good() -> None:
    assert keys_at_fault() == []


def test_every_number_of_the_schema_has_a_range() -> None:
    for path, hint in keys.leaves().items():
        bare, _ = keys.split_optional(hint)
        if bare in (int, float):
            assert ".".join(path) in RANGES
        if bare == list[float]:
            assert ".".join(path) in LISTS
    known = {".".join(path) for path in keys.leaves()}
    assert {*RANGES, *LISTS, *FORMS, *(key for rule_keys, _ in RULES for key in rule_keys)} <= known


def test_views_that_data_parallel_would_cut_apart_have_no_batch_norm_of_their_own() -> None:
    views = {"model__split_bn": True, "augment__splits": 3, "loss__name": "jsd"}
    assert keys_at_fault(**views) == []
    assert keys_at_fault(**views, parallel__mode="dp") == ["model.split_bn"]


def out_of_range(path: keys.KeyPath, value: Any) -> list[str]:
    problems = check(config_of(**{"__".join(path): value}))
    return [problem.key for problem in problems if "out of range" in problem.message]


@pytest.mark.parametrize("key", RANGES)
def test_every_range_refuses_what_lies_outside_and_takes_its_ends(key: str) -> None:
    path, allowed = tuple(key.split(".")), RANGES[key]
    bare, _ = keys.split_optional(keys.leaves()[path])
    low = bare(allowed.low)
    assert (key in out_of_range(path, low)) == allowed.low_open
    assert key in out_of_range(path, low - 1)
    if allowed.high != float("inf"):
        assert (key in out_of_range(path, bare(allowed.high))) == allowed.high_open
        assert key in out_of_range(path, bare(allowed.high) * 2)
    if bare is float:
        assert key in out_of_range(path, float("nan"))
        assert key in out_of_range(path, float("inf"))


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
        ({"device": "cpu"}, {"device": "gpu"}),
        ({"parallel__init_method": "tcp://node-1:29500"}, {"parallel__init_method": "tcp://node-1"}),
        ({"parallel__init_method": "tcp://[::1]:29500"}, {"parallel__init_method": "tcp://a:70000"}),
        ({"parallel__init_method": "file:///tmp/x"}, {"parallel__init_method": "file://x"}),
        ({"parallel__init_method": "env://"}, {"parallel__init_method": "env:/"}),
        ({"imports": ["a.b"]}, {"imports": ["a/b.py"]}),
        ({"optimizer__kwargs": {"momentum": 0}}, {"optimizer__kwargs": {"momentum": 1.5}}),
        ({"optimizer__kwargs": {"betas": [0.9, 0.999]}}, {"optimizer__kwargs": {"betas": [0.9, 1.0]}}),
        ({"optimizer__kwargs": {"betas": [0.9, 0.999]}}, {"optimizer__kwargs": {"betas": [0.9]}}),
        ({"optimizer__kwargs": {"eps": 1e-8}}, {"optimizer__kwargs": {"eps": "small"}}),
        ({"model__checkpoint": "a.pth"}, {"model__checkpoint": "a.pth", "model__pretrained": True}),
        ({"data__val": None, "data__val_fraction": 0.1}, {"data__val": None}),
        ({"data__val": None, "data__name": "synthetic"}, {"data__val": None, "data__name": "digits"}),
        ({"data__val": None, "data__name": "torchvision:CIFAR10"}, {"data__val_fraction": 0.1}),
        (
            {"data__name": "list", "data__train": "a.txt", "data__val": "b.csv"},
            {"data__name": "list", "data__train": "a.txt"},
        ),
        ({"eval__resize_px": 224}, {"eval__resize_px": 223}),
        ({"train__micro_batch_size": 256}, {"train__micro_batch_size": 257}),
        ({"schedule__warmup_epochs": 90}, {"schedule__warmup_epochs": 90.5}),
        ({"device": "cuda", "parallel__backend": "nccl"}, {"device": "cpu", "parallel__backend": "nccl"}),
        ({"train__precision": "fp16"}, {"device": "cpu", "train__precision": "fp16"}),
    ],
)
def test_rules(good: dict[str, Any], wrong: dict[str, Any]) -> None:
    assert keys_at_fault(**good) == []
    (key,) = keys_at_fault(**wrong)
    assert key.replace(".", "__").startswith(tuple(wrong)) or key == "data.val"


def test_a_kwarg_of_an_own_factory_is_not_judged() -> None:
    assert keys_at_fault(optimizer__name="mine:make", optimizer__kwargs={"momentum": "much"}) == []


def test_a_rule_is_silent_where_one_of_its_keys_is_wrong_by_itself() -> None:
    assert keys_at_fault(train__global_batch_size=-1, train__micro_batch_size=8) == ["train.global_batch_size"]
    assert [problem.key for problem in check(config_of(data__val=None), skip={"data.val_fraction"})] == []


def test_messages_are_one_line_that_shows_what_was_given() -> None:
    (problem,) = check(config_of(data__val_fraction=0.25))
    assert "0.25" in problem.message
    assert "data.val" in problem.message
    assert "\n" not in problem.message


def test_check_reads_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert keys_at_fault(data__root="nowhere", model__checkpoint="nowhere.pth") == []


def test_arguments_are_finite_at_any_depth_and_told_once() -> None:
    kwargs = {"a": [1, {"b": float("nan")}], "eps": float("inf"), "c": 10**400, "d": "nan"}
    assert keys_at_fault(optimizer__kwargs=kwargs) == ["optimizer.kwargs.eps", "optimizer.kwargs.a.b"]
    assert keys_at_fault(optimizer__name="mine:make", optimizer__kwargs={"eps": float("inf")}) == [
        "optimizer.kwargs.eps"
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [(2**64, "at least 0 and less than 2^64"), (-1, "at least 0"), (float("inf"), "at least 0 and less than 2^64")],
)
def test_the_limit_of_all_ranges_is_told_to_who_crosses_it(number: float, text: str) -> None:
    (problem,) = check(config_of(optimizer__weight_decay=number))
    assert problem.message.endswith(f"out of range: {text}")


def test_alphas_are_nothing_or_numbers_that_can_be_drawn_from() -> None:
    assert keys_at_fault(mix__mixup_alpha=0.0) == keys_at_fault(mix__mixup_alpha=0.001) == []
    assert keys_at_fault(mix__mixup_alpha=1e-4) == ["mix.mixup_alpha"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train__epochs", 10**400),
        ("eval__batch_size", 10**20),
        ("augment__size_px", 10**30),
        ("eval__crop_pct", 1e-300),
        ("augment__ratio", [1e300, 1e308]),
        ("data__num_workers", 100_000),
    ],
)
def test_numbers_beyond_all_sense_are_refused_and_do_not_break_the_check(key: str, value: object) -> None:
    assert key.replace("__", ".") in keys_at_fault(**{key: value})
