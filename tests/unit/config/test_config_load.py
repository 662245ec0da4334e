"""Loading: layers, bases, resets, overrides, interpolation, origins, dictionaries, and removed keys."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from imagenet_cls.config import keys
from imagenet_cls.config.load import Loaded, config_from_dict, config_to_dict, dump_yaml, load_config
from imagenet_cls.errors import ConfigError, UsageError

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def load(text: str, *overrides: str) -> Loaded:
    return load_config(write("x.yaml", text), overrides)


LR = "optimizer: {lr: 0.1}\n"


def test_load_returns_plain_dataclasses_with_defaults() -> None:
    loaded = load(LR)
    assert (loaded.name, loaded.path) == ("x", Path("x.yaml"))
    for path, section in keys.sections().items():
        value = loaded.config
        for part in path:
            value = getattr(value, part)
        assert type(value) is section
    assert type(loaded.config.augment.scale) is list
    assert type(loaded.config.optimizer.kwargs) is dict
    assert loaded.config.optimizer.kwargs == {"momentum": 0.9}  # sgd's own default
    json.dumps(config_to_dict(loaded.config))


def test_bases_merge_depth_first() -> None:
    write("sub/a0.yaml", "seed: 1\ntrain: {epochs: 1, global_batch_size: 8}\naugment: {scale: [0.1, 0.2]}\n")
    write("sub/a.yaml", "_base_: a0.yaml\nseed: 2\naugment: {scale: [0.3, 0.4]}\n")
    write("b.yaml", "seed: 3\noptimizer: {lr: 0.5, kwargs: {nesterov: true}}\n")
    config = load("_base_: [sub/a.yaml, b.yaml]\ntrain: {epochs: 7}\n").config
    assert config.seed == 3
    assert (config.train.epochs, config.train.global_batch_size) == (7, 8)
    assert config.augment.scale == [0.3, 0.4]
    assert config.optimizer.kwargs == {"momentum": 0.9, "nesterov": True}


def test_base_reached_twice_counts_once() -> None:
    write("root.yaml", LR + "seed: 1\n")
    write("a.yaml", "_base_: root.yaml\nseed: 2\n")
    write("b.yaml", "_base_: root.yaml\nlog: {every_steps: 3}\n")
    assert load("_base_: [a.yaml, b.yaml]\n").config.seed == 2


def test_merge_without_reset_equals_omegaconf() -> None:
    texts = [
        "optimizer: {lr: 0.3, kwargs: {a: {b: 1, c: [1, 2]}}}\nseed: 4\n",
        "optimizer: {kwargs: {a: {b: 2, d: 5}}}\n",
    ]
    write("base.yaml", texts[0])
    ours = load("_base_: base.yaml\n" + texts[1]).config
    theirs = OmegaConf.merge(
        OmegaConf.structured(type(ours)), {"optimizer": {"kwargs": {"momentum": 0.9}}}, *map(OmegaConf.create, texts)
    )
    assert config_to_dict(ours) == OmegaConf.to_container(theirs)


def test_changed_name_resets_its_section_only() -> None:
    write(
        "base.yaml",
        "optimizer: {lr: 0.1, weight_decay: 1e-4, kwargs: {nesterov: true}}\nschedule: {warmup_epochs: 3}\n",
    )
    config = load("_base_: base.yaml\noptimizer: {name: adamw, lr: 0.001}\n").config
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.kwargs) == (0.001, 0.0, {})
    assert config.schedule.warmup_epochs == 3
    back = load("_base_: base.yaml\noptimizer: {name: adamw, lr: 1}\n", "optimizer.lr=2", "optimizer.name=sgd").config
    assert back.optimizer.kwargs == {"momentum": 0.9}


def test_same_name_resets_nothing() -> None:
    write("base.yaml", "optimizer: {name: sgd, lr: 0.1, kwargs: {nesterov: true}}\n")
    config = load("_base_: base.yaml\noptimizer: {name: sgd, weight_decay: 0.1}\n").config
    assert (config.optimizer.lr, config.optimizer.kwargs) == (0.1, {"momentum": 0.9, "nesterov": True})


def test_changed_policy_or_teacher_resets_its_kwargs() -> None:
    write(
        "base.yaml",
        LR
        + "augment: {size_px: 96, policy: torchvision:rand_augment, policy_kwargs: {magnitude: 7, fill: [1, 2, 3]}}\n"
        + "distill: {teacher: {name: my:teacher, kwargs: {depth: 3}}, kind: soft}\n",
    )
    kept = load("_base_: base.yaml\naugment: {policy: torchvision:rand_augment, policy_kwargs: {num_ops: 1}}\n").config
    assert kept.augment.policy_kwargs == {"magnitude": 7, "fill": [1, 2, 3], "num_ops": 1}
    assert kept.distill.teacher.kwargs == {"depth": 3}
    none = load("_base_: base.yaml\n", "augment.policy=null", "distill.teacher.name=my:other").config
    assert (none.augment.policy_kwargs, none.augment.size_px) == ({}, 96)
    assert (none.distill.teacher.kwargs, none.distill.kind) == ({}, "soft")
    other = load("_base_: base.yaml\naugment: {policy: torchvision:aug_mix, policy_kwargs: {severity: 2}}\n").config
    assert other.augment.policy_kwargs == {"severity": 2}


def test_names_in_kwargs_keep_dots_and_order() -> None:
    write("base.yaml", 'optimizer: {lr: 0.1, lr_scales: {"head.*": 10, "*.bias": 2, "*": 1}}\n')
    config = load("_base_: base.yaml\n", 'optimizer.lr_scales={"*.bias": 3}').config
    assert list(config.optimizer.lr_scales.items()) == [("head.*", 10), ("*.bias", 3), ("*", 1)]
    assert load("_base_: base.yaml\n", "optimizer.name=adamw", "optimizer.lr=1").config.optimizer.lr_scales == {}


def test_changed_data_name_resets_root() -> None:
    assert load(LR + "data: {root: /elsewhere}\n", "data.name=digits", "data.val=v").config.data.root == "data/imagenet"


def test_changed_optimizer_without_lr_is_an_error() -> None:
    write("base.yaml", LR)
    with pytest.raises(ConfigError) as caught:
        load("_base_: base.yaml\noptimizer:\n  name: adamw\n")
    (line,) = caught.value.lines
    assert line.startswith("x.yaml:3: optimizer.lr: has no value")


def test_missing_lr_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.lr: has no value"):
        load("seed: 1\n")


def test_overrides_have_no_order() -> None:
    overrides = [
        "optimizer.kwargs.eps=1e-8",
        "optimizer.name=adamw",
        "optimizer.lr=1e-3",
        "optimizer.kwargs={betas: [0.9, 0.95]}",
    ]
    forth, back = load(LR, *overrides).config, load(LR, *reversed(overrides)).config
    assert forth.optimizer == back.optimizer
    assert forth.optimizer.kwargs == {"eps": 1e-8, "betas": [0.9, 0.95]}


@pytest.mark.parametrize("words", [["seed=1", "seed=2"], ["model.kwargs.a=1", "model.kwargs={a: {b: 1}}"]])
def test_key_given_twice_in_overrides_is_an_error(words: list[str]) -> None:
    for order in (words, words[::-1]):
        with pytest.raises(ConfigError, match=f"is given twice: command line '{order[0]}'".replace("{", "[{]")):
            load(LR, *order)


def test_values_of_overrides_are_yaml() -> None:
    data = load(
        LR, "data.val=", "data.val_fraction=0.25", "data.train=no", "data.kwargs.flag=no", "data.kwargs.n=1_000"
    ).config.data
    assert (data.val, data.val_fraction, data.train) == (None, 0.25, "no")
    assert data.kwargs == {"flag": False, "n": 1000}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("010", "010"),
        ("0x10", 16),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("on", True),
        ("n", "n"),
        ("~", None),
        ("'1e-4'", "1e-4"),
        ("1e", "1e"),
    ],
)
def test_scalars_in_kwargs(text: str, value: object) -> None:
    (found,) = load(f"{LR}model: {{kwargs: {{a: {text}}}}}\n").config.model.kwargs.values()
    assert found == value
    assert type(found) is type(value)


def test_text_keys_keep_text_as_written() -> None:
    data = load(LR + "data: {train: no, root: 1e3}\nexpect: {note: 2020-01-01}\nimports: [on, a.b]\n")
    assert (data.config.data.train, data.config.data.root) == ("no", "1e3")
    assert data.config.expect.note == "2020-01-01"
    assert data.config.imports == ["on", "a.b"]


def test_numbers_convert_to_type_of_key() -> None:
    config = load("optimizer: {lr: 1}\ndata: {mean: [0, 1, 0.5]}\n", "train.clip_norm=1e-1").config
    for number in (config.optimizer.lr, config.train.clip_norm, *(config.data.mean or [])):
        assert type(number) is float


def test_interpolation_uses_merged_values_and_keeps_types() -> None:
    write("base.yaml", LR + "train: {epochs: 5}\nschedule: {kwargs: {t: '${train.epochs}', l: ['${seed}', 1]}}\n")
    loaded = load(
        "_base_: base.yaml\nexpect: {note: 'lr ${optimizer.lr} seed ${seed}'}\n",
        "train.epochs=9",
        "seed=${log.every_steps}",
    )
    assert loaded.config.schedule.kwargs == {"t": 9, "l": [50, 1]}
    assert loaded.config.expect.note == "lr 0.1 seed 50"
    assert loaded.config.seed == 50


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${oc.env:HOME}", "not allowed"),
        ("a ${oc.decode:x} b", "not allowed"),
        ("${oc.env:${data.root}}", "not allowed"),
        ("${${data.root}}", "not allowed"),
        ("${train.epoch}", "did you mean 'train.epochs'"),
        ("${train}", "is a section"),
        ("${expect.note}", "refers back to itself"),
        (r"\${train.epochs}", "not allowed"),
        ("${train.epochs", "not allowed"),
    ],
)
def test_interpolation_in_other_form_is_an_error(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^x.yaml:3: expect.note: .*{message}"):
        load(f"{LR}expect:\n  note: '{value}'\n")


def test_resolver_built_from_pieces_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    with pytest.raises(ConfigError, match=r"model.kwargs.e") as caught:
        load(LR + "model: {kwargs: {d: '$', e: '${model.kwargs.d}{oc.env:SECRET}'}}\n")
    assert "hunter2" not in str(caught.value)


def test_interpolation_that_expands_or_loops_is_an_error() -> None:
    steps = "".join(f"    a{i}: '${{model.kwargs.a{i + 1}}}${{model.kwargs.a{i + 1}}}'\n" for i in range(18))
    lists = "".join(f"    a{i}: ['${{model.kwargs.a{i + 1}}}', '${{model.kwargs.a{i + 1}}}']\n" for i in range(18))
    for lines in (steps, lists):
        with pytest.raises(ConfigError, match="expands to more than"):
            load(f"{LR}model:\n  kwargs:\n{lines}    a18: '{'x' * 50}'\n")
    with pytest.raises(ConfigError, match="refers back to itself"):
        load(LR + "model: {kwargs: {a: '${model.kwargs.b}${model.kwargs.b}', b: '${model.kwargs.a}'}}\n")


def test_interpolated_component_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match="can't be interpolated"):
        load(LR + "model: {name: '${data.root}'}\n")


def test_question_marks_require_a_later_value() -> None:
    write("base.yaml", LR + "data:\n  root: ???\n")
    assert load("_base_: base.yaml\n", "data.root=here").config.data.root == "here"
    with pytest.raises(ConfigError, match=r"^base.yaml:3: data.root: has no value"):
        load("_base_: base.yaml\n")


def test_origins_name_layer_file_and_line() -> None:
    write("sub/base.yaml", "# a comment\noptimizer:\n  lr: 0.1\n  kwargs:\n    nesterov: true\n")
    origins = load("_base_: sub/base.yaml\n\nseed: 3\n", "log.every_steps=5").origins
    where = {key: str(origins[key]) for key in origins}
    assert where["optimizer.lr"] == "sub/base.yaml:3"
    assert where["optimizer.kwargs.nesterov"] == "sub/base.yaml:5"
    assert where["optimizer.kwargs.momentum"] == "default of sgd"
    assert where["seed"] == "x.yaml:3"
    assert where["log.every_steps"] == "command line 'log.every_steps=5'"
    assert where["train.epochs"] == "default"
    assert where["optimizer"] == "sub/base.yaml:2"
    assert (origins["seed"].file, origins["seed"].line) == (Path("x.yaml"), 3)
    for path in keys.leaves():
        assert ".".join(path) in origins or keys.is_kwargs(keys.leaves()[path])


def test_missing_file_suggests_similar_name() -> None:
    assert load_config(None, ["seed=7"]).config.seed == 7
    assert load_config(None).name == "demo"
    write("configs/resnet50.yaml", LR)
    with pytest.raises(UsageError, match=r"no config configs/resnet5O.yaml; did you mean 'configs/resnet50.yaml'"):
        load_config("configs/resnet5O.yaml")


def test_config_from_dict_restores_and_fills_defaults() -> None:
    config = load(LR, "model.kwargs.x=[1, {y: null}]", "data.mean=[0.1, 0.2, 0.3]").config
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert config_from_dict({"optimizer": {"name": "adamw", "lr": 1}}).optimizer.kwargs == {}
    for wrong in ({}, {"optimizer": {"lr": "x"}}, {"optimizer": {"lr": 1}, "sed": 1}, {"seed": object()}):
        with pytest.raises(ConfigError):
            config_from_dict(wrong)


def test_config_from_dict_skips_ranges() -> None:
    config = dataclasses.replace(load(LR).config, seed=-1)
    assert config_from_dict(config_to_dict(config)) == config


def test_config_imports_no_torch() -> None:
    code = (
        "import sys; from imagenet_cls.config.load import load_config; load_config('configs/demo.yaml');"
        "assert not {'torch', 'numpy', 'torchvision', 'timm'} & set(sys.modules), 'a heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True, env={**os.environ, "PYTHONPATH": str(REPO)})


@pytest.mark.parametrize(
    ("overrides", "exclude"),
    [
        (["data.on_bad_image=exclude", "data.root=/images"], "/images/verified_images.json"),
        (["data.on_bad_image=exclude", "data.manifest=a.json"], "a.json"),
        (["data.on_bad_image=error", "data.manifest=a.json"], None),
        (["data.on_bad_image=exclude", "data.exclude=b.json"], "b.json"),
    ],
)
def test_removed_keys_are_read_with_a_warning(overrides: list[str], exclude: str | None) -> None:
    loaded = load(LR, *overrides)
    assert loaded.config.data.exclude == exclude
    old = [override for override in overrides if "on_bad_image" in override or "manifest" in override]
    assert [line.partition(": ")[0] for line in loaded.warnings] == [f"command line {override!r}" for override in old]
    stored = {"optimizer": {"lr": 1}, "data": {"on_bad_image": "exclude", "manifest": None, "root": "/images"}}
    assert config_from_dict(stored).data.exclude == "/images/verified_images.json"


def test_dump_loads_as_equal_config() -> None:
    config = load(LR, "model.kwargs.eps='1e-4'", "model.kwargs.no='no'", "expect.note='null'", "data.train='~'").config
    assert load_config(write("dump.yaml", dump_yaml(config))).config == config
