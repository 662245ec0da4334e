"""Errors in configs: reported all at once, with file and line; hostile YAML is rejected."""

import os
import string
from pathlib import Path

import pytest

from imagenet_cls.config import keys
from imagenet_cls.config.load import load_config
from imagenet_cls.config.origin import format_problems
from imagenet_cls.errors import ConfigError, Problem

LR = "optimizer: {lr: 0.1}\n"


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def errors_of(text: str | bytes, *overrides: str) -> list[str]:
    Path("x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config("x.yaml", overrides)
    assert caught.value.exit_code == 2
    assert all("\n" not in line and len(line) < 500 for line in caught.value.lines)
    return caught.value.lines


def test_all_problems_are_reported_at_once_with_place_and_suggestion() -> None:
    lines = errors_of(
        "optimizer:\n  lr: many\nmodle: {}\ntrain:\n  epochs: 0\n  precision: fp31\nseed: 1.5\n",
        "augment.hflip_prob=2",
        "log.every_step=3",
    )
    assert lines == [
        "x.yaml:3: unknown key 'modle'; did you mean 'model'?",
        "command line 'log.every_step=3': unknown key 'log.every_step'; did you mean 'log.every_steps'?",
        "x.yaml:2: optimizer.lr: 'many' is not a number",
        "x.yaml:6: train.precision: 'fp31' is not one of auto, fp32, bf16, fp16; did you mean 'fp32' or 'fp16'?",
        "x.yaml:7: seed: 1.5 is not a whole number",
        "command line 'augment.hflip_prob=2': augment.hflip_prob: 2.0 is out of range: 0 to 1",
        "x.yaml:5: train.epochs: 0 is out of range: 1 to 1,000,000",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {epochs: null}", "x.yaml:2: train.epochs: null "),
        ("train: {epochs: true}", "x.yaml:2: train.epochs: true "),
        ("train: {compile: 1}", "x.yaml:2: train.compile: 1 "),
        ("augment: {scale: 0.5}", "x.yaml:2: augment.scale: 0.5 "),
        ("augment: {scale: [0.5, x]}", "x.yaml:2: augment.scale: [0.5, 'x'] "),
        ("augment: {size_px: {a: 1}}", "x.yaml:2: augment.size_px: {a: 1} "),
        ("data: {root: [a]}", "x.yaml:2: data.root: ['a'] "),
        ("data: {root: }", "x.yaml:2: data.root: null "),
        ("data: {root: ''}", "x.yaml:2: data.root: "),
        ("model: resnet18", "x.yaml:2: model: 'resnet18' is given for a section; did you mean model.name: resnet18?"),
        ("model:", "x.yaml:2: model: null "),
        ("model: {kwargs: 3}", "x.yaml:2: model.kwargs: 3 "),
        ("lr: 1", "x.yaml:2: unknown key 'lr'; did you mean 'optimizer.lr'?"),
        ("loss.name: a", "x.yaml:2: unknown key 'loss.name'; dots are for the command line"),
        ("model: {xyzzy: 1}", "x.yaml:2: unknown key 'model.xyzzy'; further arguments belong in model.kwargs"),
        ("seed: 1\nseed: 2", "x.yaml:3: key 'seed' is given twice"),
        ("model:\n  kwargs: {a: 1,\n    a: 2}", "x.yaml:4: model.kwargs: key 'a' is given twice"),
        ("seed: 1\n  x: 2", "x.yaml:3: "),
        ("model:\n\tname: x", "x.yaml:3: "),
        ("seed: [1", "x.yaml:3: "),
        ("seed: 'a", "x.yaml:3: "),
        ("a: !!python/object/apply:os.system ['touch pwned']", "x.yaml:2: "),
        ("seed: !!python/object/apply:os.system ['touch pwned']", "x.yaml:2: seed: the tag "),
        ("model: {kwargs: {a: [!!set {b}]}}", "x.yaml:2: model.kwargs.a: the tag !!set "),
        ("model: !!python/name:os.system {}", "x.yaml:2: model: the tag "),
        ("data: &d {root: a}\nmodel: *d", "x.yaml:3: model: aliases "),
        ("data: {<<: {root: a}}", "x.yaml:2: data: merge keys "),
        ("model: {kwargs: {[1]: 2}}", "x.yaml:2: model.kwargs: a key "),
        ("seed: " + "9" * 5000, "x.yaml:2: seed: "),
        ("seed: !!int abc", "x.yaml:2: seed: the tag "),
        ("train: {clip_norm: .inf}", "x.yaml:2: train.clip_norm: inf "),
        ("train: {clip_norm: .nan}", "x.yaml:2: train.clip_norm: nan "),
        ("---\nseed: 1", "x.yaml:2: "),
        ("a: b: c", "x.yaml:2: "),
        ("_base_: 3", "x.yaml:2: _base_: no file 3"),
        ("_base_: {a: b}", "x.yaml:2: _base_: {a: 'b'} "),
        ("_base_: nowhere.yaml", "x.yaml:2: _base_: no file nowhere.yaml"),
        ("_base_: x.yaml", "x.yaml:2: _base_: a circle: x.yaml -> x.yaml"),
    ],
)
def test_error_in_file_names_line_and_key(text: str, line: str) -> None:
    (found,) = [line for line in errors_of(LR + text + "\n") if not line.startswith("optimizer.lr: has no value")]
    assert found.startswith(line)
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("train..epochs=3", "is not of the form key=value"),
        ("optimzer.lr=1", "unknown key 'optimzer'; did you mean 'optimizer'?"),
        ("train.epochs=many", "train.epochs: 'many' "),
        ("train.epochs=", "train.epochs: null "),
        ("train.epochs.x=3", "train.epochs: {x: 3} "),
        ("expect.note=a: b: c", "expect.note: "),
        ("expect.note=*a", "expect.note: aliases "),
        ("seed=!!python/name:os.system", "seed: the tag "),
        ("model=resnet18", "model: 'resnet18' "),
        ("_base_=x.yaml", "unknown key '_base_'"),
    ],
)
def test_error_in_override_names_argument_and_key(override: str, line: str) -> None:
    (found,) = errors_of(LR, override)
    assert found.startswith(f"command line {override!r}: {line}")


def test_all_errors_of_yaml_form_are_reported_at_once() -> None:
    lines = errors_of(LR + "seed: !!int 1\nseed: 2\ndata: {<<: {root: a}}\n", "train.epoch=1")
    places = [line.rpartition(": ")[0].partition(": ")[0] for line in lines]
    assert places == ["x.yaml:2", "x.yaml:3", "x.yaml:4", "command line 'train.epoch=1'"]


def test_circle_of_bases_names_its_chain() -> None:
    Path("a.yaml").write_text("_base_: b.yaml\n")
    Path("b.yaml").write_text("seed: 1\n_base_: [a.yaml]\n")
    with pytest.raises(ConfigError, match=r"^b.yaml:2: _base_: a circle: a.yaml -> b.yaml -> a.yaml$"):
        load_config("a.yaml")


def test_unreadable_file_names_file() -> None:
    Path("folder").mkdir()
    os.mkfifo("pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(ConfigError, match=f"^{name}: is "):
            load_config(name)
    assert errors_of(b"seed: 1\nexpect: {note: \xff}\n")[0].startswith("x.yaml:2: is not UTF-8")
    assert errors_of("seed: 1\nexpect: {note: a\x07b}\n")[0].startswith("x.yaml:2: the character '\\x07'")
    for text in ("- a\n- b\n", "just words\n", "#" * (2 << 20)):
        assert errors_of(text)[0].startswith("x.yaml: ")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="only Linux has a file that root can't read")
def test_unreadable_file_reports_reason_of_system() -> None:
    Path("secret.yaml").symlink_to("/proc/self/mem")  # this process's memory, unreadable at its beginning
    with pytest.raises(ConfigError, match=r"^secret.yaml: can't be read: Input/output error"):
        load_config("secret.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "model: {kwargs: {a: " + "[" * 50_000,
        "model: {kwargs: {a: " + "{a: " * 50_000,
        "a: &a [x,x]\n" + "".join(f"{b}: &{b} [*{a},*{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "".join(f"k{i}: 1\n" for i in range(3000)),
        "? " * 5000,
        "model: {kwargs: {" + "x" * 200_000 + ": 1}}",
    ],
)
def test_hostile_text_is_rejected(text: str) -> None:
    assert errors_of(LR + text)


def test_format_problems_uses_nearest_written_place() -> None:
    Path("x.yaml").write_text("optimizer:\n  lr: 0.1\n  kwargs:\n    momentun: 0.9\n")
    origins = load_config("x.yaml", ["model.kwargs.dorp=1"]).origins
    places = {
        "optimizer.kwargs.momentun": "x.yaml:4: ",
        "optimizer.kwargs.momentum": "x.yaml:3: ",
        "optimizer.name": "x.yaml:1: ",
        "optimizer.lr": "x.yaml:2: ",
        "model.name": "command line 'model.kwargs.dorp=1': ",
        "data.root": "",
    }
    assert format_problems([Problem(key, "no") for key in places], origins) == [
        f"{place}{key}: no" for key, place in places.items()
    ]


def test_one_letter_typo_of_a_key_suggests_it() -> None:
    """Deletion, doubling, swap and substitution at every place of every key."""
    right, missed = 0, []
    every = [path for path in [*keys.leaves(), *keys.sections()] if path]
    for path in every:
        name = path[-1]
        typos = {name[:i] + name[i + 1 :] for i in range(len(name))}
        typos |= {name[: i + 1] + name[i:] for i in range(len(name))}
        typos |= {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(len(name) - 1)}
        typos |= {name[:i] + string.ascii_lowercase[(i * 7 + len(name)) % 26] + name[i + 1 :] for i in range(len(name))}
        for typo in sorted(typos - {""}):
            if (*path[:-1], typo) not in every:
                message, _ = keys.unknown_key((*path[:-1], typo))
                right += repr(".".join(path)) in message
                missed += [] if repr(".".join(path)) in message else [(typo, message)]
    assert right > 1500 and len(missed) < right / 20, missed


def test_typo_of_a_required_key_is_reported_once() -> None:
    assert len(errors_of("optimizer: {xyz: 0.1}\n")) == 2  # not recognised as lr
    assert len(errors_of("optimizer: {l: 0.1}\n")) == 1
    assert len(errors_of("optimizr: {lr: 0.1}\n")) == 1
    assert len(errors_of(LR + "data: {val: null, val_fracton: 0.1}\n")) == 1
