"""What is wrong with a config is reported at once, with file and line, and hostile YAML comes to nothing."""

import os
import string
import time
from pathlib import Path

import pytest

from imagenet_cls.config import keys
from imagenet_cls.config.load import load_config
from imagenet_cls.config.origin import Origin, format_problems
from imagenet_cls.errors import ConfigError, Problem

LR = "optimizer: {lr: 0.1}\n"


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines_of(text: str | bytes, *words: str) -> list[str]:
    Path("x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config("x.yaml", words)
    assert caught.value.exit_code == 2
    assert all("\n" not in line and len(line) < 500 for line in caught.value.lines)
    return caught.value.lines


def test_all_problems_are_reported_at_once_each_with_its_place() -> None:
    lines = lines_of(
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
        ("train: {epochs: null}", "x.yaml:2: train.epochs: null is not a whole number"),
        ("train: {epochs: true}", "x.yaml:2: train.epochs: true is not a whole number"),
        ("train: {compile: 1}", "x.yaml:2: train.compile: 1 is not true or false"),
        ("augment: {scale: 0.5}", "x.yaml:2: augment.scale: 0.5 is not a list of numbers"),
        ("augment: {scale: [0.5, x]}", "x.yaml:2: augment.scale: [0.5, 'x'] is not a list of numbers"),
        ("augment: {size_px: {a: 1}}", "x.yaml:2: augment.size_px: {a: 1} is not a whole number"),
        ("data: {root: [a]}", "x.yaml:2: data.root: ['a'] is not text"),
        ("data: {root: }", "x.yaml:2: data.root: null is not text"),
        ("data: {root: ''}", "x.yaml:2: data.root: is empty; write what it names"),
        (
            "model: resnet18",
            "x.yaml:2: model: 'resnet18' stands where a section is expected; did you mean model.name: resnet18?",
        ),
        ("model:", "x.yaml:2: model: null stands where a section is expected; write keys below it, or leave it out"),
        (
            "model: {kwargs: 3}",
            "x.yaml:2: model.kwargs: 3 stands where a section is expected; it holds keys: model.kwargs.NAME: value",
        ),
        ("lr: 1", "x.yaml:2: unknown key 'lr'; did you mean 'optimizer.lr'?"),
        (
            "loss.name: a",
            "x.yaml:2: unknown key 'loss.name'; dots are for the command line, in a file write loss: {name: ...}",
        ),
        (
            "model: {xyzzy: 1}",
            "x.yaml:2: unknown key 'model.xyzzy'; arguments of its own go into model.kwargs (allowed: name,",
        ),
        ("seed: 1\nseed: 2", "x.yaml:3: key 'seed' is given twice; the first is in line 2"),
        ("model:\n  kwargs: {a: 1,\n    a: 2}", "x.yaml:4: model.kwargs: key 'a' is given twice"),
        ("seed: 1\n  x: 2", "x.yaml:3: a ':' that can't stand here"),
        ("model:\n\tname: x", "x.yaml:3: a tab where YAML wants spaces"),
        ("seed: [1", "x.yaml:3: "),
        ("seed: 'a", "x.yaml:3: "),
        ("a: !!python/object/apply:os.system ['touch pwned']", "x.yaml:2: "),
        (
            "seed: !!python/object/apply:os.system ['touch pwned']",
            "x.yaml:2: seed: the tag !!python/object/apply:os.system is refused",
        ),
        ("model: {kwargs: {a: [!!set {b}]}}", "x.yaml:2: model.kwargs.a: the tag !!set is refused"),
        ("model: !!python/name:os.system {}", "x.yaml:2: model: the tag !!python/name:os.system is refused"),
        ("data: &d {root: a}\nmodel: *d", "x.yaml:3: aliases (*name) are refused"),
        ("data: {<<: {root: a}}", "x.yaml:2: data: a merge key (<<) is refused"),
        ("model: {kwargs: {[1]: 2}}", "x.yaml:2: model.kwargs: a key must be plain text"),
        ("seed: " + "9" * 5000, "x.yaml:2: seed: '9999999999999999999999999999999999999999' can't be read as int"),
        ("seed: !!int abc", "x.yaml:2: seed: 'abc' can't be read as int"),
        ("optimizer: {lr: 1e999}", "x.yaml:2: key 'optimizer' is given twice"),
        ("train: {clip_norm: .inf}", "x.yaml:2: train.clip_norm: inf is out of range: more than 0"),
        ("train: {clip_norm: .nan}", "x.yaml:2: train.clip_norm: nan is out of range: more than 0"),
        ("---\nseed: 1", "x.yaml:2: a second document"),
        ("a: b: c", "x.yaml:2: a ':' that can't stand here"),
        ("_base_: 3", "x.yaml:2: _base_: no file 3"),
        ("_base_: {a: b}", "x.yaml:2: _base_: {a: 'b'} is not a path or a list of paths"),
        ("_base_: nowhere.yaml", "x.yaml:2: _base_: no file nowhere.yaml"),
        ("_base_: x.yaml", "x.yaml:2: _base_: a circle: x.yaml -> x.yaml"),
    ],
)
def test_each_kind_of_mistake_names_file_and_line(text: str, line: str) -> None:
    lines = lines_of(LR + text + "\n")
    assert lines[0].startswith(line), lines
    assert len(lines) == 1, lines
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("seed", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("train..epochs=3", "is not of the form key=value"),
        ("optimzer.lr=1", "unknown key 'optimzer'; did you mean 'optimizer'?"),
        ("train.epochs=many", "train.epochs: 'many' is not a whole number"),
        ("train.epochs=", "train.epochs: null is not a whole number"),
        ("train.epochs.x=3", "train.epochs: {x: 3} is not a whole number"),
        ("expect.note=a: b: c", "expect.note: a ':' that can't stand here"),
        ("expect.note=*a", "expect.note: aliases (*name) are refused"),
        ("seed=!!python/name:os.system", "seed: the tag !!python/name:os.system is refused"),
        ("model=resnet18", "model: 'resnet18' stands where a section is expected"),
        ("_base_=x.yaml", "unknown key '_base_'"),
    ],
)
def test_each_kind_of_wrong_word(word: str, line: str) -> None:
    (found,) = lines_of(LR, word)
    assert found.startswith(f"command line {word!r}: {line}")


def test_a_circle_names_its_chain() -> None:
    Path("a.yaml").write_text("_base_: b.yaml\n")
    Path("b.yaml").write_text("seed: 1\n_base_: [a.yaml]\n")
    with pytest.raises(ConfigError, match=r"^b.yaml:2: _base_: a circle: a.yaml -> b.yaml -> a.yaml$"):
        load_config("a.yaml")


def test_files_that_are_no_config() -> None:
    Path("folder").mkdir()
    with pytest.raises(ConfigError, match=r"^folder: is a folder"):
        load_config("folder")
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match=r"^pipe: is not a regular file"):
        load_config("pipe")
    assert lines_of(b"seed: 1\nexpect: {note: \xff}\n")[0].startswith("x.yaml:2: is not UTF-8 text")
    assert lines_of("- a\n- b\n")[0].startswith("x.yaml: holds no mapping")
    assert lines_of("just words\n")[0].startswith("x.yaml: holds no mapping")
    assert lines_of("seed: 1\nexpect: {note: a\x07b}\n")[0].startswith("x.yaml:2: the character '\\x07'")
    assert "a config has at most" in lines_of("#" * (2 << 20))[0]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="only Linux has a file that root can't read")
def test_a_file_that_may_not_be_read() -> None:
    """This process's memory: nothing lies at its beginning, so that reading fails for root, too."""
    Path("secret.yaml").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match=r"^secret.yaml: can't be read: Input/output error"):
        load_config("secret.yaml")


def test_a_byte_order_mark_is_accepted_and_an_empty_file_is_an_empty_layer() -> None:
    Path("bom.yaml").write_bytes(b"\xef\xbb\xbf" + LR.encode())
    assert load_config("bom.yaml").config.optimizer.lr == 0.1
    Path("empty.yaml").write_text("# nothing\n")
    assert load_config("empty.yaml", ["optimizer.lr=2"]).config.optimizer.lr == 2


@pytest.mark.parametrize(
    "text",
    [
        "model: {kwargs: {a: " + "[" * 50_000,
        "model: {kwargs: {a: " + "{a: " * 50_000,
        "a: &a [x,x]\n"
        + "".join(f"{b}: &{b} [{'*' + a},{'*' + a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "".join(f"k{i}: 1\n" for i in range(3000)),
        "? " * 5000,
        "- " * 5000,
        "model: {kwargs: {" + "x" * 200_000 + ": 1}}",
    ],
)
def test_hostile_text_is_refused_quickly(text: str) -> None:
    Path("x.yaml").write_text(LR + text)
    started = time.monotonic()
    with pytest.raises(ConfigError):
        load_config("x.yaml")
    assert time.monotonic() - started < 5


def test_problems_find_the_nearest_place_that_somebody_wrote() -> None:
    Path("x.yaml").write_text("optimizer:\n  lr: 0.1\n  kwargs:\n    momentun: 0.9\n")
    origins = load_config("x.yaml", ["model.kwargs.dorp=1"]).origins
    problems = [
        Problem(f"optimizer.{key}", "no") for key in ("kwargs.momentun", "kwargs.momentum", "kwargs.x", "name", "lr")
    ]
    assert format_problems(problems, origins) == [
        "x.yaml:4: optimizer.kwargs.momentun: no",
        "x.yaml:3: optimizer.kwargs.momentum: no",
        "x.yaml:3: optimizer.kwargs.x: no",
        "x.yaml:1: optimizer.name: no",
        "x.yaml:2: optimizer.lr: no",
    ]
    assert format_problems([Problem("model.kwargs.dorp", "no"), Problem("model.name", "m")], origins) == [
        "command line 'model.kwargs.dorp=1': model.kwargs.dorp: no",
        "command line 'model.kwargs.dorp=1': model.name: m",
    ]
    assert format_problems([Problem("data.root", "gone"), Problem("", "all")], origins) == ["data.root: gone", "all"]
    assert str(Origin("default")) == "default"


def test_one_letter_typos_of_every_key_get_the_right_suggestion() -> None:
    """Every deletion, doubling, swap of neighbours, and a substitution at every place, of every key and section."""
    tried, right, missed = 0, 0, []
    every = [path for path in [*keys.leaves(), *keys.sections()] if path]
    for path in every:
        name = path[-1]
        typos = {name[:i] + name[i + 1 :] for i in range(len(name))}
        typos |= {name[: i + 1] + name[i:] for i in range(len(name))}
        typos |= {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(len(name) - 1)}
        typos |= {name[:i] + string.ascii_lowercase[(i * 7 + len(name)) % 26] + name[i + 1 :] for i in range(len(name))}
        for typo in sorted(typos - {""}):
            if (*path[:-1], typo) in every:
                continue
            tried += 1
            message, _ = keys.unknown_key((*path[:-1], typo))
            if repr(".".join(path)) in message:
                right += 1
            else:
                missed.append((typo, message))
    assert tried > 1500
    assert right / tried >= 0.95, missed


def test_a_typo_is_not_reported_twice() -> None:
    assert len(lines_of("optimizer: {xyz: 0.1}\n")) == 2  # nobody can tell that lr was meant
    assert len(lines_of("optimizer: {l: 0.1}\n")) == 1
    assert len(lines_of("optimizr: {lr: 0.1}\n")) == 1
    assert len(lines_of(LR + "data: {val: null, val_fracton: 0.1}\n")) == 1
