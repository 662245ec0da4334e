"""Loading: layers, bases, resets, overrides, interpolation, dictionaries, and removed keys."""

from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from config_files import LR, errors_of, load, write

from imagenet_cls.config import keys
from imagenet_cls.config.compare import differing_values
from imagenet_cls.config.layers import CONFIGS, find_config
from imagenet_cls.config.load import config_from_dict, load_config, values_by_key
from imagenet_cls.errors import ConfigError

# ---- files


def test_load_returns_plain_dataclasses_with_defaults() -> None:
    config = load(LR).config
    for key, section in keys.sections().items():
        assert type(attrgetter(key)(config) if key else config) is section
    assert type(config.augment.scale) is list
    assert config.optimizer.kwargs == {"momentum": 0.9}  # sgd's own default


def test_bases_merge_depth_first_and_count_once() -> None:
    """Also a file that includes itself."""
    write(
        "root.yaml",
        "seed: 1\ntrain: {epochs: 1, global_batch_size: 8}\naugment: {scale: [0.1, 0.2]}\n",
    )
    write("sub/a.yaml", "_base_: ../root.yaml\nseed: 2\naugment: {scale: [0.3, 0.4]}\n")
    write("b.yaml", "_base_: [root.yaml, x.yaml]\noptimizer: {lr: 0.5, kwargs: {eps: 1}}\n")
    config = load("_base_: [sub/a.yaml, b.yaml]\ntrain: {epochs: 7}\n").config
    assert (config.seed, config.augment.scale) == (2, [0.3, 0.4])
    assert (config.train.epochs, config.train.global_batch_size) == (7, 8)
    assert config.optimizer.kwargs == {"momentum": 0.9, "eps": 1}


def test_no_file_is_the_demo_and_a_byte_order_mark_is_ignored() -> None:
    loaded = load_config(None, ["seed=7"])
    assert (loaded.name, loaded.config.seed) == ("demo", 7)
    assert load(b"\xef\xbb\xbf" + LR.encode()).config == load(LR).config


def test_shipped_config_is_found_from_any_folder() -> None:
    Path("resnet50").mkdir()  # a folder is no config
    for name in ("resnet50", "configs/resnet50.yaml"):
        assert find_config(name) == CONFIGS / "resnet50.yaml"
    loaded = load("_base_: [configs/_base_/schedules/sgd_cosine.yaml, vit_deit]\n")
    assert loaded.config.model.name.startswith("vit")
    assert loaded.origins["model.name"].startswith(str(CONFIGS))


def test_own_file_has_priority_over_a_shipped_config() -> None:
    for name in ("configs/resnet50.yaml", "resnet18"):
        write(name, f"{LR}seed: 7\n")
        assert load_config(name).config.seed == load(f"_base_: {name}\n").config.seed == 7
    for name in ("configs/mine.yaml", "/configs/demo.yaml", "sub/configs/demo.yaml"):
        assert find_config(name) == Path(name)
    assert find_config("configs/resnet18.yaml") == CONFIGS / "resnet18.yaml"


def test_config_of_a_run_has_the_name_of_the_run() -> None:
    file = write("photos/config.yaml", LR)
    assert load_config(file).name == "config"
    write("photos/env.json", "{}")
    assert load_config(file).name == "photos"


# ---- layers

BASE = """
optimizer: {lr: 0.3, weight_decay: 0.1, kwargs: {nesterov: true}}
model: {kwargs: {a: {b: 1, c: [1, 2]}, e: {}}}
augment: {policy: my:policy, policy_kwargs: {a: 1}, color_jitter: {hue: 0.1}, hflip_prob: 0.1}
distill: {kind: soft, teacher: {name: my:model, kwargs: {depth: 3}}}
"""
# A file over this base, overrides, and all values that they change.
LAYERS = [
    (
        "model: {kwargs: {a: {b: 2, c: [3]}, e: 6}}",
        "model.kwargs={}",
        "model.kwargs.a.b=2; model.kwargs.a.c=[3]; model.kwargs.e=6",
    ),
    # A name resets its section, and some names arguments.
    (
        "optimizer: {name: adamw, lr: 1}",
        "optimizer.kwargs.eps=1 optimizer.kwargs={a:[1]}",
        "optimizer.kwargs.a=[1]; optimizer.kwargs.eps=1; optimizer.kwargs.momentum=(absent); "
        "optimizer.kwargs.nesterov=(absent); optimizer.lr=1.0; optimizer.name=adamw; "
        "optimizer.weight_decay=0.0",
    ),
    (
        "optimizer: {name: adamw, lr: 1}",
        "optimizer.lr=2 optimizer.name=rmsproptf",
        "optimizer.kwargs.nesterov=(absent); optimizer.lr=2.0; optimizer.name=rmsproptf; "
        "optimizer.weight_decay=0.0",
    ),
    ("optimizer: {name: sgd}", "", ""),
    (
        "augment: {policy: my:other, policy_kwargs: {b: 2}}",
        "distill.teacher.name=my:other",
        "augment.policy='my:other'; augment.policy_kwargs.a=(absent); augment.policy_kwargs.b=2; "
        "distill.teacher.kwargs.depth=(absent); distill.teacher.name='my:other'",
    ),
    (
        "augment: {policy: my:policy, policy_kwargs: {b: 2}}",
        "distill.teacher.name=my:model",
        "augment.policy_kwargs.b=2",
    ),
    # Values have the type of their key, and in keyword arguments the one that they look like.
    (
        "data: {train: no, root: 1e3, mean: [0, 1, 0.5]}",
        "imports=[on,a.b] train.clip_norm=1 data.val= data.val_fraction='0.25'",
        "data.mean=[0.0, 1.0, 0.5]; data.root='1e3'; data.train='no'; data.val=null; "
        "data.val_fraction=0.25; imports=['on', a.b]; train.clip_norm=1.0",
    ),
    (
        "loss: {kwargs: {a: [1e-4, 1E5, .5, 1., -.5, 0x10, 1_0, on, ~, '1']}}",
        "loss.kwargs.b=[010,1:30,2020-01-01,n,1e]",
        "loss.kwargs.a=[0.0001, 100000.0, 0.5, 1.0, -0.5, 16, 10, true, null, '1']; "
        "loss.kwargs.b=[010, '1:30', 2020-01-01, n, 1e]",
    ),
    ("data:\n  root: ???", "data.root=here", "data.root=here"),
    (
        "distill: {teacher: {checkpoint: https://a/~b}}",
        "model.checkpoint=~/x.pth",
        "distill.teacher.checkpoint='https://a/~b'; model.checkpoint=/home/me/x.pth",
    ),
    (
        "schedule: {kwargs: {t: '${train.epochs}', l: ['${seed}', 1]}}",
        "train.epochs=9 expect.note=lr_${optimizer.lr}_seed_${seed}",
        "expect.note=lr_0.3_seed_0; schedule.kwargs.l=[0, 1]; schedule.kwargs.t=9; train.epochs=9",
    ),
]


@pytest.mark.parametrize(("text", "overrides", "changes"), LAYERS)
def test_layer_changes_these_values_only(
    text: str, overrides: str, changes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of the overrides."""
    monkeypatch.setenv("HOME", "/home/me")
    base = load_config(write("base.yaml", BASE)).config
    words = overrides.split()
    for order in (words, words[::-1]):
        config = load(f"_base_: base.yaml\n{text}\n", *order).config
        changed = differing_values([base, config])
        found = sorted(f"{key}={value}" for key, (_, value) in changed.items())
        assert "; ".join(found) == changes


def test_patterns_keep_their_order() -> None:
    write("base.yaml", 'optimizer: {lr: 0.1, lr_scales: {"head.*": 10, "*.bias": 2, "*": 1}}\n')
    config = load("_base_: base.yaml\n", 'optimizer.lr_scales={"*.bias": 3}').config
    assert list(config.optimizer.lr_scales.items()) == [("head.*", 10), ("*.bias", 3), ("*", 1)]


def test_changed_name_warns_of_each_dropped_value_with_its_place() -> None:
    """Not of defaults and of values that are given again."""
    write(
        "base.yaml",
        "optimizer: {lr: 0.3, weight_decay: 0.1, layer_decay: null, kwargs: {momentum: 0.8}}\n"
        "data: {val: null, val_fraction: 0.2, mean: [0.5, 0.5, 0.5]}\n",
    )
    changed = "_base_: base.yaml\noptimizer: {name: rmsproptf, lr: 0.1"
    loaded = load(changed + "}\n", "data.name=my:data", "data.mean=[0, 0, 0]")
    of_data, of_optimizer = sorted(loaded.warnings)
    assert of_data.startswith("command line 'data.name=my:data': data.name: ")
    assert "drops data.val (base.yaml:2), data.val_fraction (base.yaml:2);" in of_data
    assert of_optimizer.startswith("x.yaml:2: optimizer.name: ")
    dropped = "optimizer.weight_decay (base.yaml:1), optimizer.kwargs.momentum (base.yaml:1)"
    assert f"drops {dropped};" in of_optimizer
    assert load(changed + ", weight_decay: 0, kwargs: {momentum: 0.9}}\n").warnings == []


# ---- overrides


def test_last_of_equal_overrides_counts_and_the_others_are_not_read() -> None:
    assert load(LR, "seed={", "seed=1", "seed =2", "seed=2").config.seed == 2
    words = ["optimizer.lr=1", "optimizer={lr: 2, weight_decay: 3}", "optimizer.lr=4"]
    optimizer = load(LR, *words).config.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (4, 3)


@pytest.mark.parametrize(
    "text", ["a #b", "#", "a: b", "a\tb", "a\nb", " a ", "- a", "([^_]+)", "%a"]
)
def test_text_of_an_argument_is_taken_as_it_is(text: str) -> None:
    config = load(LR, f"data.root={text}", f"data.classes=&{text}").config
    assert (config.data.root, config.data.classes) == (text, f"&{text}")


# ---- stored configs


def test_config_from_dict_fills_defaults_and_checks_types() -> None:
    # ranges are not checked
    config = config_from_dict({"optimizer": {"name": "adamw", "lr": 1}, "seed": -1})
    assert (config.optimizer.kwargs, config.seed) == ({}, -1)
    wrongs: list[dict[str, Any]] = [{"sed": 1}, {"seed": object()}, {"data": []}]
    for wrong in [{"optimizer": {}}, *wrongs]:
        with pytest.raises(ConfigError):
            config_from_dict({"optimizer": {"lr": 1}} | wrong)


@pytest.mark.parametrize("key", keys.REMOVED_KEYS)
def test_removed_key_is_ignored_at_its_default_or_in_a_checkpoint(key: str) -> None:
    default, _ = keys.REMOVED_KEYS[key]
    loaded = load(LR, f"{key}={'' if default is None else default}")
    assert loaded.warnings == [] and key not in values_by_key(loaded.config)
    (line,) = errors_of(LR, f"{key}=0.5")
    assert line.startswith(f"command line '{key}=0.5': {key}: ")
    section, _, name = key.partition(".")
    stored = asdict(loaded.config)
    stored[section][name] = "other"
    assert config_from_dict(stored) == loaded.config
