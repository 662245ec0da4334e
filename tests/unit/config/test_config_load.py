"""Loading: layers, bases, resets, overrides, interpolation, origins, dictionaries, and removed
keys.
"""

from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from config_files import LR, errors_of, load, write

from imagenet_cls.config import keys
from imagenet_cls.config.layers import CONFIGS, find_config, shipped_configs
from imagenet_cls.config.load import (
    config_from_dict,
    dump_yaml,
    load_config,
    values_by_key,
)
from imagenet_cls.errors import ConfigError


def test_load_returns_plain_dataclasses_with_defaults() -> None:
    loaded = load(LR)
    assert loaded.name == "x"
    for key, section in keys.sections().items():
        assert type(attrgetter(key)(loaded.config) if key else loaded.config) is section
    assert type(loaded.config.augment.scale) is list
    assert loaded.config.optimizer.kwargs == {"momentum": 0.9}  # sgd's own default


def test_bases_merge_depth_first_and_count_once() -> None:
    write(
        "root.yaml",
        "seed: 1\ntrain: {epochs: 1, global_batch_size: 8}\naugment: {scale: [0.1, 0.2]}\n",
    )
    write("sub/a.yaml", "_base_: ../root.yaml\nseed: 2\naugment: {scale: [0.3, 0.4]}\n")
    write("b.yaml", "_base_: root.yaml\noptimizer: {lr: 0.5, kwargs: {nesterov: true}}\n")
    config = load("_base_: [sub/a.yaml, b.yaml]\ntrain: {epochs: 7}\n").config
    assert (config.seed, config.augment.scale) == (2, [0.3, 0.4])
    assert (config.train.epochs, config.train.global_batch_size) == (7, 8)
    assert config.optimizer.kwargs == {"momentum": 0.9, "nesterov": True}


def test_file_that_includes_itself_counts_once() -> None:
    write("a.yaml", "_base_: x.yaml\nseed: 1\ntrain: {epochs: 2}\n")
    config = load(f"_base_: a.yaml\n{LR}seed: 3\n").config
    assert (config.seed, config.train.epochs) == (3, 2)


def test_config_of_more_files_than_the_limit_is_an_error() -> None:
    for number in range(800):
        write(f"{number}.yaml", f"_base_: {number + 1}.yaml\n")
    write("800.yaml", LR)
    assert len(errors_of("_base_: 0.yaml\n")) == 1
    assert load("_base_: 710.yaml\n").config.optimizer.lr > 0


def test_mappings_in_kwargs_merge_and_lists_are_replaced() -> None:
    write(
        "base.yaml",
        "optimizer: {lr: 0.3, kwargs: {a: {b: 1, c: [1, 2]}, e: {}}}\nmodel: {kwargs: {f: 1}}\n",
    )
    kwargs = load(
        "_base_: base.yaml\noptimizer: {kwargs: {a: {b: 2, c: [3], d: 5}, e: 6}}\n",
        "model.kwargs={}",
    ).config
    assert kwargs.optimizer.kwargs == {"momentum": 0.9, "a": {"b": 2, "c": [3], "d": 5}, "e": 6}
    assert kwargs.model.kwargs == {"f": 1}


def test_changed_name_resets_its_section_only() -> None:
    section = "{lr: 0.1, weight_decay: 1e-4, kwargs: {nesterov: true}}"
    write(
        "base.yaml",
        f"optimizer: {section}\nschedule: {{warmup_epochs: 3}}\ndata: {{root: /elsewhere}}\n",
    )
    config = load("_base_: base.yaml\noptimizer: {name: adamw, lr: 0.001}\n").config
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.kwargs) == (
        0.001,
        0.0,
        {},
    )
    assert (config.schedule.warmup_epochs, config.data.root) == (3, "/elsewhere")
    back = load(
        "_base_: base.yaml\noptimizer: {name: adamw, lr: 1}\n",
        "optimizer.lr=2",
        "optimizer.name=sgd",
    ).config
    assert back.optimizer.kwargs == {"momentum": 0.9}
    same = load("_base_: base.yaml\noptimizer: {name: sgd}\n", "data.name=digits").config
    assert (same.optimizer.lr, same.optimizer.kwargs) == (0.1, {"momentum": 0.9, "nesterov": True})
    assert same.data.root == "data/imagenet"


def test_changed_name_warns_of_each_removed_value_and_its_place() -> None:
    write("base.yaml", "model: {pretrained: true, split_bn: false, kwargs: {a: 1, b: [x y]}}\n")
    text = (
        f"_base_: base.yaml\n{LR}data:\n  val: null\n  val_fraction: 0.2\n  mean: [0.5, 0.5, 0.5]\n"
    )
    assert load(text).warnings == []
    model = ["model.name=my:model", "model.kwargs.a=2"]
    (of_model,) = load(text, *model).warnings
    assert of_model.startswith("command line 'model.name=my:model': model.name: ")
    assert (
        "model.pretrained (base.yaml:1)" in of_model and "model.kwargs.b (base.yaml:1)" in of_model
    )
    assert "split_bn" not in of_model and "kwargs.a" not in of_model  # the default, and given again
    data = ["data.name=my:dataset", "data.mean=[0.4, 0.4, 0.4]"]
    (of_data,) = load(text, *data).warnings
    assert "data.val (x.yaml:4), data.val_fraction (x.yaml:5);" in of_data
    again = ["data.val=", "data.val_fraction=0.2"]
    assert load(text, *data, *again).warnings == []


def test_name_of_a_later_file_warns_unless_the_reset_is_explicit() -> None:
    write("base.yaml", "optimizer: {lr: 0.3, weight_decay: 0.1, kwargs: {momentum: 0.8}}\n")
    changed = "_base_: base.yaml\noptimizer: {name: rmsproptf, lr: 0.1"
    (warning,) = load(changed + "}\n").warnings
    assert warning.startswith("x.yaml:2: optimizer.name: ") and "optimizer.lr " not in warning
    for key in ("optimizer.weight_decay", "optimizer.kwargs.momentum"):
        assert f"{key} (base.yaml:1)" in warning
    assert load(changed + ", _delete_: true}\n").warnings == []
    assert load(changed + ", weight_decay: 0.0, kwargs: {momentum: 0.9}}\n").warnings == []
    assert config_from_dict(asdict(load(changed + "}\n").config)) == load(changed + "}\n").config


def test_changed_policy_or_teacher_resets_its_kwargs() -> None:
    write(
        "base.yaml",
        LR
        + (
            "augment: {size_px: 96, policy: torchvision:rand_augment, policy_kwargs: {magnitude: "
            "7, "
            "fill: [1, 2, 3]}}\n"
        )
        + "distill: {teacher: {name: my:teacher, kwargs: {depth: 3}}, kind: soft}\n",
    )
    kept = load(
        "_base_: base.yaml\naugment: {policy: torchvision:rand_augment, policy_kwargs: "
        "{num_ops: 1}}\n"
    ).config
    assert kept.augment.policy_kwargs == {"magnitude": 7, "fill": [1, 2, 3], "num_ops": 1}
    assert kept.distill.teacher.kwargs == {"depth": 3}
    none = load(
        "_base_: base.yaml\n", "augment.policy=null", "distill.teacher.name=my:other"
    ).config
    assert (none.augment.policy_kwargs, none.augment.size_px) == ({}, 96)
    assert (none.distill.teacher.kwargs, none.distill.kind) == ({}, "soft")
    other = load(
        "_base_: base.yaml\naugment: {policy: torchvision:aug_mix, policy_kwargs: {severity: 2}}\n"
    ).config
    assert other.augment.policy_kwargs == {"severity": 2}


def test_names_in_kwargs_keep_dots_and_order() -> None:
    write("base.yaml", 'optimizer: {lr: 0.1, lr_scales: {"head.*": 10, "*.bias": 2, "*": 1}}\n')
    config = load("_base_: base.yaml\n", 'optimizer.lr_scales={"*.bias": 3}').config
    assert list(config.optimizer.lr_scales.items()) == [("head.*", 10), ("*.bias", 3), ("*", 1)]
    assert (
        load(
            "_base_: base.yaml\n", "optimizer.name=adamw", "optimizer.lr=1"
        ).config.optimizer.lr_scales
        == {}
    )


def test_missing_lr_is_an_error() -> None:
    write("base.yaml", LR)
    (line,) = errors_of("_base_: base.yaml\noptimizer:\n  name: adamw\n")
    assert line.startswith("x.yaml:3: optimizer.lr: has no value")
    assert errors_of("seed: 1\n")[0].startswith("optimizer.lr: has no value")


def test_overrides_have_no_order() -> None:
    overrides = [
        "optimizer.kwargs.eps=1e-8",
        "optimizer.name=adamw",
        "optimizer.lr=1",
        "optimizer.kwargs={a: [1]}",
    ]
    forth, back = load(LR, *overrides).config, load(LR, *reversed(overrides)).config
    assert forth.optimizer == back.optimizer
    assert forth.optimizer.kwargs == {"eps": 1e-8, "a": [1]}


@pytest.mark.parametrize(
    "words", [["model.kwargs={a: 1}", "model.kwargs.a=2"], ["model={name: a}", "model.name=b"]]
)
def test_section_beside_its_key_in_overrides_is_an_error(words: list[str]) -> None:
    for order in (words, words[::-1]):
        assert f"is given twice: command line '{order[0]}'" in errors_of(LR, *order)[0]


def test_last_of_equal_overrides_counts_and_the_others_are_not_read() -> None:
    loaded = load(LR, "seed={", "seed=1", "seed =2", "seed=2")
    assert loaded.config.seed == 2
    assert [note.partition(" ")[0] for note in loaded.notes] == ["seed={", "seed=1", "seed"]


@pytest.mark.parametrize(
    "text",
    ["a #b", "#", "a: b", "a:", "a\tb", "a\nb", " a ", "- a", "? a", "([^_]+)", "%a", "---"]
    + [f"{mark}a b" for mark in "&*!@`|>"],
)
def test_text_of_an_argument_is_taken_as_it_is(text: str) -> None:
    loaded = load(LR, f"data.root={text}", f"data.classes=x{text}")
    assert (loaded.config.data.root, loaded.config.data.classes) == (text, f"x{text}")
    assert load(dump_yaml(loaded.config)).config == loaded.config


def test_arguments_have_no_comments() -> None:
    config = load(
        LR,
        "data.classes=[a, b #c]",
        "data.kwargs={a: b #c, 'd #e': 1}",
        "model.kwargs.x=/a #b",
        'expect.note="a #b"',
    ).config
    assert config.data.classes == ["a", "b #c"]
    assert config.data.kwargs == {"a": "b #c", "d #e": 1}
    assert config.model.kwargs == {"x": "/a #b"}
    assert config.expect.note == "a #b"


def test_scalars_have_the_type_of_their_key() -> None:
    text = (
        "data: {train: no, root: 1e3, mean: [0, 1, 0.5]}\nexpect: {note: 2020-01-01}\nimports: "
        "[on, a.b]\n"
    )
    config = load(
        LR + text,
        "train.clip_norm=1",
        "data.val=",
        "data.val_fraction='0.25'",
        "data.kwargs.flag=no",
    ).config
    assert (config.data.train, config.data.root, config.data.val) == ("no", "1e3", None)
    assert (config.expect.note, config.imports) == ("2020-01-01", ["on", "a.b"])
    assert (config.data.val_fraction, config.data.kwargs) == (0.25, {"flag": False})
    assert {type(number) for number in (config.train.clip_norm, *(config.data.mean or []))} == {
        float
    }


def test_scalars_in_kwargs_have_the_type_that_they_look_like() -> None:
    values = {
        "1e-4": 1e-4,
        "1E5": 1e5,
        ".5": 0.5,
        "1.": 1.0,
        "-.5": -0.5,
        "0x10": 16,
        "1_000": 1000,
        "on": True,
    }
    values |= {"~": None, "'1e-4'": "1e-4"} | {
        text: text for text in ("010", "1:30", "2020-01-01", "n", "1e")
    }
    found = load(f"{LR}model: {{kwargs: {{a: [{', '.join(values)}]}}}}\n").config.model.kwargs["a"]
    assert found == list(values.values())
    assert [type(value) for value in found] == [type(value) for value in values.values()]


def test_home_folder_in_a_path_of_weights_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load(
        f"{LR}distill: {{kind: soft, teacher: {{name: resnet50, checkpoint: https://a/~b}}}}\n",
        "model.checkpoint=~/x.pth",
    ).config
    assert config.model.checkpoint == "/home/me/x.pth"
    assert config.distill.teacher.checkpoint == "https://a/~b"


def test_interpolation_uses_merged_values_and_keeps_types() -> None:
    write(
        "base.yaml",
        LR
        + ("train: {epochs: 5}\nschedule: {kwargs: {t: '${train.epochs}', l: ['${seed}', 1]}}\n"),
    )
    text = "_base_: base.yaml\nexpect: {note: 'lr ${optimizer.lr} seed ${seed}'}\n"
    config = load(text, "train.epochs=9").config
    assert config.schedule.kwargs == {"t": 9, "l": [0, 1]}
    assert (config.expect.note, config.seed) == ("lr 0.1 seed 0", 0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *(
            (f"${{{text}", "not allowed")
            for text in ("oc.env:SECRET}", " oc.env : SECRET }", "", ".note}", "seed")
        ),
        *(
            (f"a ${{{text}}} b", "not allowed")
            for text in ("oc.env:SECRET", "oc.env:${data.root}", "${data.root}")
        ),
        (r"\${train.epochs}", "not allowed"),
        ("${train.epoch}", "did you mean 'train.epochs'"),
        ("${train}", "is not a key with a value"),
        ("${expect.note}", "has a reference itself"),
        ("${expect.source}{oc.env:SECRET}", "after interpolation"),
    ],
)
def test_interpolation_in_other_form_is_an_error(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    (line,) = errors_of(f"{LR}expect:\n  note: '{value}'\n  source: '$'\n")
    assert line.startswith("x.yaml:3: expect.note: ") and message in line and "hunter2" not in line


def test_reference_to_a_value_with_references_is_an_error() -> None:
    text = LR + "model: {kwargs: {a: '${model.kwargs.b}', b: ['${seed}']}}\n"
    assert "has a reference itself" in errors_of(text)[0]
    assert "can't be interpolated" in errors_of(LR + "model: {name: '${data.root}'}\n")[0]


def test_question_marks_require_a_later_value() -> None:
    write("base.yaml", LR + "data:\n  root: ???\n")
    assert load("_base_: base.yaml\n", "data.root=here").config.data.root == "here"
    assert errors_of("_base_: base.yaml\n", "model.kwargs.a=???")[0].startswith(
        "base.yaml:3: data.root: has no value"
    )


def test_origins_name_layer_file_and_line() -> None:
    write("sub/base.yaml", "# a comment\noptimizer:\n  lr: 0.1\n  kwargs:\n    nesterov: true\n")
    origins = load(
        "_base_: sub/base.yaml\n\nseed: 3\n", "log.every_steps=5", "train.clip_norm="
    ).origins
    assert {key: origin for key, origin in origins.items() if origin} == {
        **dict.fromkeys(["optimizer", "optimizer.lr"], "sub/base.yaml:3"),
        **dict.fromkeys(["optimizer.kwargs", "optimizer.kwargs.nesterov"], "sub/base.yaml:5"),
        "seed": "x.yaml:3",
        "log.every_steps": "command line 'log.every_steps=5'",
        "train.clip_norm": "command line 'train.clip_norm='",
    }


def test_no_file_is_the_demo_and_a_byte_order_mark_is_ignored() -> None:
    loaded = load_config(None, ["seed=7"])
    assert (loaded.name, loaded.config.seed) == ("demo", 7)
    assert load_config(write("x.yaml", b"\xef\xbb\xbf" + LR.encode())).config == load(LR).config


def test_shipped_config_is_found_from_any_folder() -> None:
    assert (
        find_config("resnet50") == find_config("configs/resnet50.yaml") == CONFIGS / "resnet50.yaml"
    )
    assert load_config("resnet50_tv_v2").name == "resnet50_tv_v2"
    assert load(
        "_base_: [configs/_base_/schedules/sgd_cosine.yaml, vit_deit]\n"
    ).config.model.name.startswith("vit")
    Path("resnet50").mkdir()  # a folder is no config
    assert find_config("resnet50") == CONFIGS / "resnet50.yaml"
    for name in ("resnet5O", "configs/resnet5O.yaml"):
        with pytest.raises(ConfigError, match=r"did you mean '.*resnet50"):
            load_config(name)


def test_own_file_has_priority_over_a_shipped_config() -> None:
    for name in ("configs/resnet50.yaml", "resnet18"):
        write(name, LR + "seed: 7\n")
        assert load_config(name).config.seed == load(f"_base_: {name}\n").config.seed == 7
    for name in (
        "configs/mine.yaml",
        "/configs/demo.yaml",
        "sub/configs/demo.yaml",
        "_base_/demo.yaml",
    ):
        assert find_config(name) == Path(name)
    assert load_config("configs/resnet18.yaml").origins["model.name"].startswith(str(CONFIGS))


def test_names_of_shipped_configs_are_unique() -> None:
    recipes = [path for path in CONFIGS.rglob("*.yaml") if "_base_" not in path.parts]
    assert len(shipped_configs()) == len(recipes)


def test_config_from_dict_fills_defaults_and_checks_types() -> None:
    # ranges are not checked
    config = config_from_dict({"optimizer": {"name": "adamw", "lr": 1}, "seed": -1})
    assert (config.optimizer.kwargs, config.seed) == ({}, -1)
    good = {"optimizer": {"lr": 1}}
    wrongs: list[dict[str, Any]] = [
        {},
        {"optimizer": {"lr": "x"}},
        good | {"sed": 1},
        good | {"seed": object()},
        good | {"data": []},
    ]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            config_from_dict(wrong)


@pytest.mark.parametrize("key", keys.REMOVED_KEYS)
def test_removed_key_is_ignored_at_its_default_and_otherwise_an_error(key: str) -> None:
    default, advice = keys.REMOVED_KEYS[key]
    loaded = load(LR, f"{key}={'' if default is None else default}")
    assert loaded.warnings == [] and key not in values_by_key(loaded.config)
    with pytest.raises(ConfigError) as caught:
        load(LR, f"{key}=0.5")
    (line,) = caught.value.lines
    assert line.startswith(f"command line '{key}=0.5': {key}: ") and advice in line


@pytest.mark.parametrize("key", keys.REMOVED_KEYS)
def test_removed_key_of_a_checkpoint_is_ignored(key: str) -> None:
    default, _ = keys.REMOVED_KEYS[key]
    section, _, name = key.partition(".")
    for value in (default, "other"):
        stored = asdict(load(LR).config)
        stored[section][name] = value
        assert config_from_dict(stored) == load(LR).config


def test_delete_replaces_a_section_of_the_base() -> None:
    write(
        "base.yaml",
        LR
        + (
            "augment: {color_jitter: {hue: 0.1}, hflip_prob: 0.1}\nmodel: {name: "
            "a, kwargs: {x: 1}}\n"
        ),
    )
    section = "{_delete_: true, lr: 0.2}"
    loaded = load(
        f"_base_: base.yaml\noptimizer: {section}\naugment: {{_delete_: true, vflip_prob: 0.2}}\n"
    )
    assert loaded.config.augment.color_jitter.hue == 0 and loaded.config.augment.vflip_prob == 0.2
    assert loaded.config.optimizer.kwargs == {"momentum": 0.9} and loaded.config.optimizer.lr == 0.2
    loaded = load(
        "_base_: base.yaml\nmodel: {kwargs: {_delete_: true, y: 2}}\naugment: {_delete_: false}\n"
    )
    assert loaded.config.model.kwargs == {"y": 2} and loaded.config.augment.hflip_prob == 0.1


def test_config_of_a_run_has_the_name_of_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "config.yaml").write_text("optimizer: {lr: 0.1}\n")
    assert load_config(folder / "config.yaml").name == "config"
    (folder / "env.json").write_text("{}")
    assert load_config(folder / "config.yaml").name == "photos"
