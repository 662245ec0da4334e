"""Keys that do nothing: told where they are written, forgotten where a later layer took away what they need."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagenet_cls.config import keys
from imagenet_cls.config.idle import NEEDS, ineffective_keys
from imagenet_cls.config.load import Loaded, dump_yaml, load_config
from imagenet_cls.errors import ConfigError

Load = Callable[..., Loaded]

# Each: a key, a value that is not its default, and what lets it act.
IDLE: list[tuple[str, Any, dict[str, Any]]] = [
    ("data.repeats_multiple", 64, {"data.repeats": 3}),
    ("augment.progressive.multiple_px", 16, {"augment.progressive": {"epochs": [0, 9], "sizes_px": [112, 224]}}),
    *(("augment.color_jitter.prob", 0.5, {f"augment.color_jitter.{name}": 0.1}) for name in ("brightness", "hue")),
    ("augment.erasing.mode", "pixel", {"augment.erasing.prob": 0.1}),
    ("augment.erasing.max_count", 3, {"augment.erasing.prob": 0.1}),
    ("augment.erasing.scale", [0.1, 0.2], {"augment.erasing.prob": 0.1}),
    ("augment.erasing.ratio", [0.5, 2.0], {"augment.erasing.prob": 0.1}),
    ("mix.prob", 0.5, {"mix.mixup_alpha": 0.2}),
    ("mix.prob", 0.5, {"mix.cutmix_minmax": [0.2, 0.8]}),
    ("mix.mode", "pair", {"mix.cutmix_alpha": 1.0}),
    ("mix.switch_prob", 0.25, {"mix.mixup_alpha": 0.2, "mix.cutmix_alpha": 1.0}),
    ("mix.off_epoch", 3, {"mix.mixup_alpha": 0.2}),
    ("distill.alpha", 0.9, {"distill": {"kind": "hard", "teacher": {"name": "resnet18", "pretrained": True}}}),
    ("distill.temperature", 4.0, {"distill": {"kind": "soft", "teacher": {"name": "resnet18", "pretrained": True}}}),
    ("optimizer.lr_scaling", "sqrt", {"optimizer.lr_base_batch": 512}),
    ("schedule.warmup_start_factor", 0.1, {"schedule.warmup_epochs": 5}),
    ("schedule.warmup_start_lr", 1e-6, {"schedule.warmup_epochs": 5}),
    ("schedule.warmup_prefix", False, {"schedule.warmup_epochs": 5}),
    ("train.sam_every_steps", 5, {"train.sam_rho": 0.1}),
    ("ema.every_steps", 32, {"ema.decay": 0.99}),
    ("ema.warmup", True, {"ema.half_life_images": 1e6}),
]

# Each: a key, a value, and what takes its effect away.
OUTDONE: list[tuple[str, Any, dict[str, Any]]] = [
    ("mix.switch_prob", 0.25, {"mix.mixup_alpha": 0.2}),
    ("mix.switch_prob", 0.25, {"mix.cutmix_minmax": [0.2, 0.8]}),
    ("mix.cutmix_alpha", 1.0, {"mix.cutmix_minmax": [0.2, 0.8]}),
    ("mix.off_epoch", 91, {"mix.mixup_alpha": 0.2, "train.epochs": 90}),
    ("distill.temperature", 4.0, {"distill": {"kind": "hard", "teacher": {"name": "resnet18", "pretrained": True}}}),
    ("schedule.warmup_start_factor", 0.1, {"schedule.warmup_epochs": 5, "schedule.warmup_start_lr": 1e-6}),
    ("eval.crop_pct", 0.95, {"eval.resize_px": 256}),
]


def nested(dotted: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        inner = tree
        *parents, last = key.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = {**inner.get(last, {}), **value} if isinstance(value, dict) else value
    return tree


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Layers, lowest first, as files that inherit, and words over them; the learning rate is in a file below."""
    monkeypatch.chdir(tmp_path)

    def load_layers(*layers: dict[str, Any], words: tuple[str, ...] = ()) -> Loaded:
        Path("0.yaml").write_text("optimizer: {lr: 0.1}\n")
        for number, layer in enumerate(layers, 1):
            Path(f"{number}.yaml").write_text(yaml.safe_dump({"_base_": f"{number - 1}.yaml", **nested(layer)}))
        return load_config(f"{len(layers)}.yaml", words)

    return load_layers


def told(load: Load, *layers: dict[str, Any], words: tuple[str, ...] = ()) -> str:
    """The one line that is said."""
    with pytest.raises(ConfigError) as raised:
        load(*layers, words=words)
    (line,) = raised.value.lines
    return line


def value(loaded: Loaded, key: str) -> Any:
    return keys.value_of(loaded.config, tuple(key.split(".")))


def test_every_key_of_the_table_is_tried_here_and_exists() -> None:
    subjects = {subject for need in NEEDS for subject in need.subjects if need.words}
    assert subjects == {key for key, _, _ in [*IDLE, *OUTDONE]}
    known = {".".join(path) for path in keys.leaves()}
    assert {*subjects, *(switch for need in NEEDS for switch in need.switches)} <= known


@pytest.mark.parametrize(("key", "given", "switch"), IDLE, ids=lambda part: part if isinstance(part, str) else "")
def test_a_key_that_does_nothing_is_told_in_a_file_and_in_a_word(
    load: Load, key: str, given: Any, switch: dict[str, Any]
) -> None:
    assert value(load({key: given, **switch}), key) == given
    assert value(load(switch, {key: given}), key) == given
    line = told(load, {key: given})
    assert line.startswith("1.yaml:") and f" {key}: " in line and "; " in line
    word = f"{key}={yaml.safe_dump(given, default_flow_style=True).splitlines()[0]}"
    assert told(load, words=(word,)).startswith(f"command line {word!r}: {key}: ")


@pytest.mark.parametrize(("key", "given", "switch"), OUTDONE, ids=lambda part: part if isinstance(part, str) else "")
def test_a_key_that_another_outdoes_is_told_in_the_same_layer_and_above(
    load: Load, key: str, given: Any, switch: dict[str, Any]
) -> None:
    assert f" {key}: " in told(load, {key: given, **switch})
    assert f"2.yaml:3: {key}: " in told(load, switch, {key: given})
    below = load({key: given}, switch)  # and forgotten below
    assert value(below, key) == keys.default_of(tuple(key.split("."))) and below.origins[key].is_default


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"mix.mixup_alpha": 0.2, "mix.cutmix_alpha": 1.0, "mix.prob": 0.5, "mix.mode": "pair", "mix.off_epoch": 9},
         ("mix.mixup_alpha=0", "mix.cutmix_alpha=0")),
        ({"ema.decay": 0.99, "ema.warmup": True, "ema.every_steps": 32}, ("ema.decay=null",)),
        ({"schedule.warmup_epochs": 5, "schedule.warmup_start_lr": 1e-6, "schedule.warmup_prefix": False},
         ("schedule.warmup_epochs=0",)),
        ({"train.sam_rho": 0.1, "train.sam_every_steps": 5}, ("train.sam_rho=null",)),
        ({"augment.erasing": {"prob": 0.2, "mode": "pixel", "max_count": 3}}, ("augment.erasing.prob=0",)),
        ({"mix.mixup_alpha": 0.2, "mix.off_epoch": 80}, ("train.epochs=9",)),
        ({"distill": {"kind": "soft", "temperature": 4.0, "teacher": {"name": "resnet18", "pretrained": True}}},
         ("distill.kind=none",)),
    ],
)  # fmt: skip
def test_what_a_recipe_sets_beside_a_switch_is_forgotten_where_the_switch_is_turned_off_above(
    load: Load, recipe: dict[str, Any], words: tuple[str, ...]
) -> None:
    off = load(recipe, words=words)
    assert off.config == load({}, words=words).config or words == ("train.epochs=9",)
    assert value(load(recipe), next(iter(recipe))) is not None
    Path("dump.yaml").write_text(dump_yaml(off.config))
    assert load_config("dump.yaml").config == off.config, "a dump loads"


def test_a_switch_that_is_turned_on_again_brings_back_what_stands_beside_it(load: Load) -> None:
    recipe = {"mix.mixup_alpha": 0.2, "mix.prob": 0.5}
    off = {"mix.mixup_alpha": 0.0}
    assert value(load(recipe, off), "mix.prob") == 1.0
    assert value(load(recipe, off, words=("mix.cutmix_alpha=1",)), "mix.prob") == 0.5


def test_the_share_of_the_crop_is_told_above_a_size_even_where_it_is_the_default(load: Load) -> None:
    size = {"eval.resize_px": 256, "eval.crop_pct": 0.875}
    assert load(size).config.eval.resize_px == 256
    line = told(load, size, words=("eval.crop_pct=0.875",))
    assert line.endswith("eval.crop_pct: 0.875 does nothing beside eval.resize_px=256; set eval.resize_px=null")
    assert told(load, size, words=("eval.crop_px=240", "eval.crop_pct=0.95")).endswith("set eval.resize_px=null")
    assert load(size, words=("eval.resize_px=null", "eval.crop_pct=0.95")).config.eval.crop_pct == 0.95


def test_nothing_is_said_of_what_is_wrong_already(load: Load) -> None:
    assert "is out of range" in told(load, {"mix.prob": 2.0})
    assert "is out of range" in told(load, {"mix.prob": 0.5, "mix.mixup_alpha": -1.0})


def test_idle_keys_are_those_whose_values_do_not_matter(load: Load) -> None:
    config = load({"mix.mixup_alpha": 0.2}).config
    assert {"mix.switch_prob", "ema.warmup"} <= ineffective_keys(config).keys()
    assert not {"mix.prob", "mix.mode", "eval.crop_pct"} & ineffective_keys(config).keys()
    assert "eval.crop_pct" in ineffective_keys(
        dataclasses.replace(config, eval=dataclasses.replace(config.eval, resize_px=9))
    )
