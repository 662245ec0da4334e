"""Errors in configs: reported all at once, with file and line; hostile YAML is rejected."""

import os
from pathlib import Path

import pytest
from config_files import LR, errors_of, write

from imagenet_cls.config import keys
from imagenet_cls.config.load import format_problems, load_config
from imagenet_cls.errors import ConfigError, Problem


def places_of(lines: list[str]) -> list[list[str]]:
    """Place and key of each line."""
    return [line.split(": ")[:2] for line in lines]


def test_all_problems_are_reported_at_once_with_place_and_suggestion() -> None:
    lines = errors_of(
        "optimizer:\n  lr: many\nmodle: {}\ntrain:\n  epochs: 0\n  precision: fp31\nseed: 1.5\n",
        "augment.hflip_prob=2",
        "log.every_step=3",
        "train.clip_norm=1",
        "train.clip_value=1",
    )
    assert sorted(places_of(lines)) == [
        ["command line 'augment.hflip_prob=2'", "augment.hflip_prob"],
        ["command line 'log.every_step=3'", "log.every_step"],
        ["command line 'train.clip_value=1'", "train.clip_value"],
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
        ("data: {root: }", "x.yaml:2: data.root: null "),
        (
            "model: resnet18",
            "x.yaml:2: model: 'resnet18' is given for a section of keys, such as model.name",
        ),
        ("model:", "x.yaml:2: model: null "),
        ("model: {kwargs: 3}", "x.yaml:2: model.kwargs: 3 "),
        ("lr: 1", "x.yaml:2: lr: unknown key; did you mean 'optimizer.lr'?"),
        ("loss.name: a", "x.yaml:2: loss.name: unknown key; dots are for the command line"),
        (
            "model: {xyzzy: 1}",
            "x.yaml:2: model.xyzzy: unknown key; further arguments belong in model.kwargs",
        ),
        ("seed: 1\nseed: 2", "x.yaml:3: key 'seed' is given twice"),
        ("model:\n  kwargs: {a: 1,\n    a: 2}", "x.yaml:4: key 'a' is given twice"),
        ("seed: 1\n  x: 2", "x.yaml:3: "),
        ("model:\n\tname: x", "x.yaml:3: "),
        ("seed: 'a", "x.yaml:3: "),
        ("a: !!python/object/apply:os.system ['touch pwned']", "x.yaml:2: the tag "),
        ("model: {kwargs: {a: [!!set {b}]}}", "x.yaml:2: the tag !!set "),
        ("model: !!python/name:os.system {}", "x.yaml:2: the tag "),
        ("data: &d {root: a}\nmodel: *d", "x.yaml:3: aliases "),
        ("data: {<<: {root: a}}", "x.yaml:2: merge keys "),
        ("model: {kwargs: {[1]: 2}}", "x.yaml:2: a key "),
        ("seed: " + "9" * 5000, "x.yaml:2: seed: "),
        ("seed: !!int abc", "x.yaml:2: the tag "),
        ("train: {clip_norm: .inf}", "x.yaml:2: train.clip_norm: inf "),
        ("_base_: 3", "x.yaml:2: _base_: 3: No such file"),
        ("_base_: {a: b}", "x.yaml:2: _base_: {a: 'b'} "),
        ("_base_: x.yaml", "x.yaml:2: _base_: a circle: x.yaml -> x.yaml"),
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
        ("optimzer.lr=1", "optimzer: unknown key; did you mean 'optimizer'?"),
        ("train.epochs=many", "train.epochs: 'many' "),
        ("train.epochs=", "train.epochs: null "),
        ("train.epochs.x=3", "train.epochs: {x: 3} "),
        ("expect.note=a: b: c", "mapping values are not allowed"),
        ("model=resnet18", "model: 'resnet18' "),
        ("data.path=/x", "data.path: unknown key; did you mean 'data.root'?"),
        ("data.on_bad_image=skip", "data.on_bad_image: 'skip' "),
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


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.batch_size=8", "train.global_batch_size"),
        ("train.accumulate=8", "train.micro_batch_size"),
        ("mixup=true", "mix.mixup_alpha"),
        ("optimizer.backbone_lr=0.1", "optimizer.lr_scales"),
        ("model.freeze_backbone=true", "model.head_only"),
        ("early_stopping.patience=3", "train.early_stop.patience_evals"),
        ("amp=true", "train.precision"),
        ("wandb.project=x", "log.writers"),
        ("workers=3", "data.num_workers"),
    ],
)
def test_key_of_another_project_names_ours(override: str, key: str) -> None:
    (line,) = errors_of(LR, override)
    assert key in line


def test_names_of_other_projects_stand_for_keys_of_the_schema() -> None:
    names = [name for listed in keys._OTHER_NAMES.values() for name in listed.split()]
    assert len(set(names)) == len(names) and not {*names} & keys.value_types().keys()
    for text in keys._OTHER_NAMES:
        match = keys._KEY_AND_REMARK.fullmatch(text)
        assert match is None or match[1] in keys.value_types()
        assert match is not None or "." not in text.partition(" ")[0]


def test_all_errors_of_yaml_form_are_reported_at_once() -> None:
    lines = errors_of(LR + "seed: !!int 1\nseed: 2\ndata: {<<: {root: a}}\n", "train.epoch=[")
    places = {line.split(": ")[0] for line in lines}
    assert places == {"x.yaml:2", "x.yaml:3", "x.yaml:4", "command line 'train.epoch=['"}


def test_error_in_a_base_names_both_files() -> None:
    write("a.yaml", "_base_: b.yaml\n")
    write("b.yaml", "seed: 1\n_base_: [a.yaml]\n")
    assert errors_of("_base_: a.yaml\n")[0].endswith(
        "b.yaml:2: _base_: a circle: a.yaml -> b.yaml -> a.yaml"
    )
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
        ConfigError, match=r"^configs/resnet5O.yaml: .*; did you mean 'resnet50.yaml'"
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
        "model.name": "command line 'model.kwargs.dorp=1': ",
        "data.root": "",
    }
    assert format_problems([Problem(key, "no") for key in places], origins) == [
        f"{place}{key}: no" for key, place in places.items()
    ]


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
                    _, suggestions = keys.unknown_key(typo)
                    right += key in suggestions
                    missed += [] if key in suggestions else [typo]
    assert right > 1500 and len(missed) < right / 20, missed


def test_typo_of_a_required_key_is_reported_once() -> None:
    assert len(errors_of("optimizer: {xyz: 0.1}\n")) == 2  # not recognized as lr
    assert len(errors_of("optimizer: {l: 0.1}\n")) == 1
    assert len(errors_of("optimizr: {lr: 0.1}\n")) == 1
