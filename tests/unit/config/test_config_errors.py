"""Wrong configs that are found without torch: each kind of error, in a file, in an override, and
between keys. All are reported at once, with file and line; hostile YAML is rejected.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from config_files import LR, errors_of, load, nested, write

from imagenet_cls.config import keys
from imagenet_cls.config.load import format_problems, load_config
from imagenet_cls.config.reader import dump
from imagenet_cls.errors import ConfigError, Problem


def places_of(lines: list[str]) -> list[list[str]]:
    """Place and key of each line."""
    return [line.split(": ")[:2] for line in lines]


def test_all_problems_are_reported_at_once_with_place_and_suggestion() -> None:
    lines = errors_of(
        "optimizer:\n  lr: many\nmodle: {}\ntrain:\n  epochs: 0\n  precision: fp31\nseed: 1.5\n",
        "augment.hflip_prob=2",
        "log.every_step=3",
    )
    assert sorted(places_of(lines)) == [
        ["command line 'augment.hflip_prob=2'", "augment.hflip_prob"],
        ["command line 'log.every_step=3'", "log.every_step"],
        ["x.yaml:2", "optimizer.lr"],
        ["x.yaml:3", "modle"],
        ["x.yaml:5", "train.epochs"],
        ["x.yaml:6", "train.precision"],
        ["x.yaml:7", "seed"],
    ]
    for suggestion in ("'model'", "'log.every_steps'", "'fp32' or 'fp16'"):
        assert any(f"did you mean {suggestion}?" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {epochs: null}", "x.yaml:2: train.epochs: null "),
        ("train: {compile: 1}", "x.yaml:2: train.compile: 1 "),
        ("augment: {scale: 0.5}", "x.yaml:2: augment.scale: 0.5 "),
        ("augment: {scale: [0.5, x]}", "x.yaml:2: augment.scale: [0.5, 'x'] "),
        ("augment: {size_px: {a: 1}}", "x.yaml:2: augment.size_px: {a: 1} "),
        ("data: {root: [a]}", "x.yaml:2: data.root: ['a'] "),
        (
            "model: resnet18",
            "x.yaml:2: model: 'resnet18' is given for a section of keys; give one of them, such as "
            "model.name",
        ),
        ("model:", "x.yaml:2: model: null "),
        ("model: {kwargs: 3}", "x.yaml:2: model.kwargs: 3 "),
        ("lr: 1", "x.yaml:2: lr: unknown key; did you mean 'optimizer.lr'?"),
        ("loss.name: a", "x.yaml:2: loss.name: unknown key; dots are for the command line"),
        (
            "model: {xyzzy: 1}",
            "x.yaml:2: model.xyzzy: unknown key; further arguments belong in model.kwargs",
        ),
        ("model:\n  kwargs: {a: 1,\n    a: 2}", "x.yaml:4: key 'a' is given twice"),
        ("model:\n\tname: x", "x.yaml:3: "),
        ("a: !!python/object/apply:os.system ['touch pwned']", "x.yaml:2: the tag "),
        ("model: {kwargs: {a: [!!set {b}]}}", "x.yaml:2: the tag !!set "),
        ("data: &d {root: a}\nmodel: *d", "x.yaml:3: aliases "),
        ("data: {<<: {root: a}}", "x.yaml:2: merge keys "),
        ("model: {kwargs: {[1]: 2}}", "x.yaml:2: a key "),
        ("seed: " + "9" * 5000, "x.yaml:2: seed: "),
        ("train: {clip_norm: .inf}", "x.yaml:2: train.clip_norm: inf "),
        ("_base_: 3", "x.yaml:2: _base_: 3: No such file"),
        ("_base_: {a: b}", "x.yaml:2: _base_: {a: 'b'} "),
    ],
)
def test_error_in_file_names_line_and_key(text: str, line: str) -> None:
    (found,) = errors_of(f"{LR}{text}\n")
    assert found.startswith(line)
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("train.epochs=", "train.epochs: null "),
        ("train.epochs.x=3", "train.epochs: {x: 3} "),
        ("model.kwargs.x=a: b: c", ""),
        ("seed=1 #2", "seed: '1 #2' is not a whole number"),
        ("model.freeze=[a, b] #c", ""),
        ("data.root='a' #b", ""),
        ("data.root='a", ""),
        ("data.labels=single #b", "data.labels: "),
        ("model.kwargs.x=&a b", ""),
        ("model.kwargs.x=a:", ""),
        ("model.kwargs.x=- a", ""),
        ("model.kwargs.x=a\nb", ""),
        ("model.freeze=conv1.*", "model.freeze: 'conv1.*' is not a list of texts; write [conv1.*]"),
        ("data.path=/x", "data.path: unknown key; did you mean 'data.root'?"),
        (
            "data.num_workers=atuo",
            "data.num_workers: 'atuo' is not a whole number or auto or null; did you mean 'auto'?",
        ),
        ("data.num_workers=true", "data.num_workers: true is not a whole number or auto or null"),
        ("data.num_workers=-1", "data.num_workers: -1 is out of range: 0 to 256"),
        (
            "model.num_classes=9223372036854775808",
            "model.num_classes: 9223372036854775808 is out of",
        ),
        ("_base_=x.yaml", "_base_: unknown key"),
    ],
)
def test_error_in_override_names_argument_and_key(override: str, line: str) -> None:
    (found,) = errors_of(LR, override)
    assert found.startswith(f"command line {override!r}: {line}")


def keys_at_fault(dotted: dict[str, Any]) -> list[str]:
    """The key of each problem of a config."""
    try:
        load(dump(nested(dotted)))
    except ConfigError as error:
        return [line.split(": ")[1] for line in error.lines]
    return []


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
        ({"ema.decay": 0.0}, {"ema.half_life_images": 9.0, "ema.decay": 0.0}),
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
        ({"augment.size_px": [192, 256]}, {"augment.size_px": [192, 0]}),
        (
            {"eval.crop_px": [192, 224], "eval.resize_px": 224},
            {"eval.crop_px": [192, 256], "eval.resize_px": 224},
        ),
        ({"eval.crop_px": [192, 256]}, {"eval.crop_px": [192, 256, 3]}),
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


def test_rules_are_skipped_if_a_key_is_wrong() -> None:
    wrong = {
        "train.global_batch_size": -1,
        "train.micro_batch_size": 512,
        "augment.scale": [0.1, 0.2, 0.3],
    }
    assert keys_at_fault(wrong) == ["train.global_batch_size", "augment.scale"]
    assert len(errors_of(LR + "data: {val: null, val_fracton: 0.1}\n")) == 1


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.batch_size=8", "train.global_batch_size"),
        ("mixup=true", "mix.mixup_alpha"),
        ("optimizer.backbone_lr=0.1", "optimizer.lr_scales"),
        ("model.freeze_backbone=true", "model.head_only"),
        ("amp=true", "train.precision"),
    ],
)
def test_key_of_another_project_names_ours(override: str, key: str) -> None:
    (line,) = errors_of(LR, override)
    assert key in line


def test_names_of_other_projects_stand_for_keys_of_the_schema() -> None:
    names = " ".join(keys._OTHER_NAMES.values()).split()
    assert len(names) == len(keys.ALIASES)  # none twice
    assert not keys.ALIASES.keys() & {*keys.value_types(), *keys.ADVICE}
    meant = {setting.partition("=")[0] for setting in keys.ALIASES.values()}
    assert meant <= keys.value_types().keys()
    assert {name for name in keys.ADVICE if "." in name} <= meant


def test_all_errors_of_yaml_form_are_reported_at_once() -> None:
    lines = errors_of(LR + "seed: !!int 1\nseed: 2\ndata: {<<: {root: a}}\n", "train.epoch=[")
    places = {line.split(": ")[0] for line in lines}
    assert places == {"x.yaml:2", "x.yaml:3", "x.yaml:4", "command line 'train.epoch=['"}


def test_error_in_a_base_names_both_files() -> None:
    write("a.yaml", "_base_: b.yaml\n")
    write("b.yaml", "seed: [\n")
    assert errors_of("_base_: a.yaml\n")[0].startswith("a.yaml:1: _base_: b.yaml:2: ")


def test_unreadable_file_names_file() -> None:
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("secret.yaml").symlink_to("/proc/self/mem")  # unreadable at its beginning, also for root
    write("configs/resnet50.yaml", LR)
    for name in ("folder", "pipe", "secret.yaml", "nowhere.yaml"):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            load_config(name)
    with pytest.raises(
        ConfigError,
        match=r"^configs/resnet5O.yaml: .*; did you mean "
        r"'configs/resnet50.yaml'",
    ):
        load_config("configs/resnet5O.yaml")
    for text in (
        LR.encode("utf-16"),
        b"a: \xff\n",
        "a: b\x07\n",
        "- a\n- b\n",
        "just words\n",
        "#" * (2 << 20),
    ):
        assert errors_of(text)[0].startswith("x.yaml: ")


def test_format_problems_uses_nearest_written_place() -> None:
    write("x.yaml", "optimizer:\n  lr: 0.1\n  kwargs:\n    momentun: 0.9\n")
    origins = load_config("x.yaml", ["model.kwargs.dorp=1"]).origins
    places = {
        "optimizer.kwargs.momentun": "x.yaml:4: ",
        "optimizer.kwargs.momentum": "x.yaml:4: ",
        "optimizer.name": "x.yaml:2: ",
        "optimizer.lr": "x.yaml:2: ",
        "model.name": "",
        "data.root": "",
    }
    assert format_problems([Problem(key, "no") for key in places], origins) == [
        f"{place}{key}: no" for key, place in places.items()
    ]


def test_problem_of_an_argument_is_at_its_component_and_not_at_a_neighbor() -> None:
    write("x.yaml", "optimizer: {lr: 0.1}\n")
    overrides = ["data.root=a", "data.name=json:dumps", "data.num_workers=0"]
    origins = load_config("x.yaml", overrides).origins
    for key in ("data.name", "data.kwargs", "data.kwargs.root"):
        (line,) = format_problems([Problem(key, "no")], origins)
        assert line.startswith("command line 'data.name=json:dumps': ")
    assert format_problems([Problem("data.train", "no")], origins) == ["data.train: no"]


def test_one_letter_typo_of_a_key_suggests_it() -> None:
    """Deletion, doubling and swap at every place of every key."""
    every = [key for key in [*keys.value_types(), *keys.sections()] if key]
    right, missed = 0, []
    for key in every:
        section, dot, name = key.rpartition(".")
        for i in range(len(name)):
            head, letter, tail = name[:i], name[i], name[i + 1 :]
            for wrong in (
                head + tail,
                head + letter * 2 + tail,
                head + tail[:1] + letter + tail[1:],
            ):
                typo = f"{section}{dot}{wrong}"
                if wrong and typo not in every:
                    is_suggested = repr(key) in keys.unknown_key(typo)
                    right += is_suggested
                    missed += [] if is_suggested else [typo]
    assert right > 1500 and len(missed) < right / 20, missed


def test_typo_of_a_required_key_is_reported_once() -> None:
    assert len(errors_of("optimizer: {l: 0.1}\n")) == 1
    assert len(errors_of("optimizr: {lr: 0.1}\n")) == 1
