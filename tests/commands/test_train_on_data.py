"""`train` with a dataset in place of a config, and the Python API that does the same."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import REPOSITORY, environment, fails, succeeds, write_files
from PIL import Image

import imagenet_cls
from imagenet_cls.commands import child
from imagenet_cls.commands.child import command_arguments
from imagenet_cls.commands.own_data import (
    batch_size_for,
    load_config_or_data,
)
from imagenet_cls.commands.print_config import print_config_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.config.load import load_config
from imagenet_cls.errors import ConfigError, DataError, UsageError, UserError

SMALL = {
    "model.name": "helpers:plain",
    "model.pretrained": False,
    "augment.size_px": 16,
    "eval.crop_px": 16,
    "train.epochs": 1,
    "data.num_workers": 0,
    "optimizer.layer_decay": None,
    "log.tensorboard": False,
}
ARGUMENTS = [f"{key}={'null' if value is None else value}" for key, value in SMALL.items()]


def write_photos(
    folder: Path, classes: Sequence[str] = "abc", images: int = 10, px: int = 20, end: str = "jpg"
) -> Path:
    """Class folders of small files of random noise."""
    pixels = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(images):
            image = Image.fromarray(pixels.integers(0, 256, (px, px, 3), np.uint8))
            image.save(folder / name / f"{number}.{end}")
    return folder


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `photos` in the working directory: 30 images of three classes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    return write_photos(tmp_path / "photos")


def dry_run(source: str, *words: str) -> str:
    """What the training on a dataset would print."""
    return succeeds(train_command, source, *ARGUMENTS, *words, "--dry-run")


@pytest.mark.parametrize(("images", "batch"), [(1, 1), (160, 16), (639, 32), (640, 64)])
def test_batch_size_leaves_ten_steps_for_an_epoch(images: int, batch: int) -> None:
    assert batch_size_for(images) == batch


# Overrides beside the 30 photos, a key of the config, and its value.
DERIVED: list[tuple[str, str, Any]] = [
    ("", "data.train", "."),
    ("", "data.val_fraction", 0.2),
    ("", "train.global_batch_size", 8),
    ("train.global_batch_size=5", "train.global_batch_size", 5),
    ("size=64", "augment.size_px", 64),
    ("size=64", "eval.crop_px", 64),
    ("lr=0.1", "optimizer.lr", 0.1),
    # published weights, unless there are others
    ("model=resnet18", "model.pretrained", True),
    ("model.pretrained=false model=resnet18", "model.pretrained", False),
    ("model.checkpoint=a.pth model=resnet18", "model.pretrained", False),
    ("model.checkpoint=null", "model.pretrained", True),
    # layer decay, but not from scratch
    ("model.checkpoint=a.pth", "optimizer.layer_decay", 0.8),
    ("model.pretrained=false", "optimizer.layer_decay", None),
    ("model.pretrained=false optimizer.layer_decay=0.9", "optimizer.layer_decay", 0.9),
    # other values from scratch, unless they are given
    ("model.pretrained=false lr=0.1", "optimizer.lr", 0.1),
    ("model.pretrained=false epochs=7", "train.epochs", 7),
    ("", "train.epochs", 20),
    # a key that is given unsets those that it excludes
    ("data.val=null data.fold=[0,5]", "data.val_fraction", None),
    ("model.checkpoint=a.pth", "model.pretrained", False),
]


@pytest.mark.parametrize(("words", "key", "value"), DERIVED)
def test_config_of_a_dataset_follows_from_it_and_from_the_overrides(
    photos: Path, words: str, key: str, value: Any
) -> None:
    assert attrgetter(key)(load_config_or_data("photos", words.split()).config) == value


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        ("", ()),
        ("model.pretrained=false", ("optimizer.lr=", "train.epochs=")),
        ("model.pretrained=false lr=0.001", ("train.epochs=",)),
    ],
)
def test_line_names_the_values_that_a_training_from_scratch_has_by_default(
    photos: Path, words: str, noted: tuple[str, ...]
) -> None:
    notes = "\n".join(load_config_or_data("photos", words.split()).notes)
    found = [key for key in ("optimizer.lr=", "train.epochs=") if key in notes]
    assert found == [*noted]


@pytest.mark.parametrize("words", ["photos", "demo", "missing"])
def test_short_keys_work_beside_a_config_too(photos: Path, words: str) -> None:
    """Also those that are given beside the key of a section."""
    words = f"{words} model=resnet18 model.pretrained=false epochs=3 size=32 lr=0.1"
    if words.startswith("missing"):
        assert "given twice" not in fails(2, train_command, *words.split())
        return
    source, *overrides = words.split()
    config = load_config_or_data(source, overrides).config
    assert (config.model.name, config.train.epochs) == ("resnet18", 3)
    assert (config.augment.size_px, config.eval.crop_px, config.optimizer.lr) == (32, 32, 0.1)


def test_few_images_of_a_class_are_noted_with_a_command_for_folds(photos: Path) -> None:
    few = load_config_or_data("photos", ["epochs=3", "data.val_fraction=0.3"]).notes
    assert "sweep photos epochs=3 --folds 5" in "".join(few)
    folds = load_config_or_data("photos", ["data.fold=[0,5]"]).notes
    assert "--folds" not in "".join(folds)


def test_run_in_the_folder_is_an_error_before_the_images_are_listed(photos: Path) -> None:
    write_files(Path("work_dirs/photos"), {"metrics.jsonl": ""})
    (photos / "a" / "0.jpg").rename(photos / "0.jpg")  # beside the class folders
    assert "already holds a run" in fails(2, train_command, "photos")


def test_download_error_names_the_command_from_scratch(photos: Path) -> None:
    """`HF_HUB_OFFLINE` is set in tests."""
    words = ["photos", "epochs=1", "size=64", "--work-dir", "a run"]
    err = fails(5, train_command, *words)
    assert shlex.join([*words, "model=resnet18", "model.pretrained=false"]) in err


def test_folders_train_and_val_are_the_splits(photos: Path) -> None:
    write_photos(Path("sets/training"))
    write_photos(Path("sets/valid"))
    data = load_config_or_data("sets", []).config.data
    assert (data.train, data.val) == ("training", "valid")


def test_test_part_without_labels_is_not_evaluated(photos: Path) -> None:
    write_photos(Path("sets/train"))
    write_files(Path("sets/test"), {"1.jpg": ""})
    assert load_config_or_data("sets", []).config.data.val_fraction == 0.2


@pytest.mark.parametrize(
    ("folders", "train", "val"),
    [
        (["."], ".", None),
        (["train", "val"], "train", "val"),
        (["a/train", "a/val"], "train", "val"),
    ],
)
def test_folders_of_an_archive_are_classes_or_splits(
    photos: Path, folders: list[str], train: str, val: str | None
) -> None:
    with zipfile.ZipFile("photos.zip", "w") as archive:
        for folder in folders:
            for file in photos.rglob("*.jpg"):
                archive.write(file, Path(folder) / file.relative_to(photos))
    loaded = load_config_or_data("photos.zip", [])
    data = loaded.config.data
    assert (loaded.name, data.train, data.val) == ("photos", train, val)
    assert "3 classes (a, b, c)" in loaded.notes[0]


def test_list_of_several_labels_in_a_row_needs_the_key(photos: Path) -> None:
    rows = [
        f"{file},{file.parent.name};{'xy'[i % 2]}"
        for i, file in enumerate(sorted(photos.rglob("*.jpg")))
    ]
    Path("photos.csv").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"data\.labels=multi"):
        load_config_or_data("photos.csv", [])
    assert ", 5 classes\n" in dry_run("photos.csv", "data.labels=multi")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("modle=resnet18", "model"),
        ("model_ema=0.9", "ema.decay"),
        ("train.epoch=2 epoch=1", "train.epochs train.epochs"),
    ],
)
def test_typos_of_short_and_other_keys_are_reported_at_once(
    photos: Path, words: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config_or_data("photos", words.split())
    for word, line, key in zip(words.split(), raised.value.lines, meant.split(), strict=True):
        assert word in line and f"did you mean '{key}'" in line


@pytest.mark.parametrize("source", ["empty", "two.csv"])
def test_too_few_images_to_hold_any_out_are_an_error(photos: Path, source: str) -> None:
    Path("empty").mkdir()
    Path("two.csv").write_text("image,label\nphotos/a/0.jpg,a\nphotos/b/0.jpg,b\n")
    with pytest.raises(DataError, match=source):
        load_config_or_data(source, [])


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("data=photos", "data: 'photos'"),  # a dataset as a key
        ("phtos", "'photos'"),
        ("sets/phtos", "'sets/photos'"),
    ],
)
def test_wrong_place_of_a_dataset_names_the_right_one(photos: Path, word: str, named: str) -> None:
    Path("sets/photos").mkdir(parents=True)
    assert named in fails(2, train_command, word, "model=resnet18")


@pytest.mark.parametrize("name", ["photos #1", "[a] b", "x: y", "null"])
def test_folder_may_have_any_name(photos: Path, name: str) -> None:
    photos.rename(name)
    loaded = load_config_or_data(name, [])
    assert (loaded.config.data.root, loaded.name) == (name, name)


def test_resume_without_the_keys_of_the_run_names_them_and_the_command_that_works(
    photos: Path,
) -> None:
    words = ["photos", "size=32", "epochs=1", "data.num_workers=0", "log.tensorboard=false"]
    out = succeeds(train_command, *words, "model=test_resnet", "model.pretrained=false")
    assert "20% held out" in out
    for model, changed in (
        ("test_resnet", "model.pretrained: false -> true"),
        ("resnet18", "model.name: 'test_resnet' -> 'resnet18'"),
    ):
        err = fails(4, train_command, *words, f"model={model}", "--resume")
        assert changed in err and "--allow-change" not in err  # which could not load the state
    resume = shlex.split(err.partition("imagenet-cls train ")[2].splitlines()[0])
    assert "resumed from" in succeeds(train_command, *resume)


def test_data_takes_the_place_of_a_config_in_other_commands(photos: Path) -> None:
    words = ["photos", "epochs=3"]
    Path("printed.yaml").write_text(succeeds(print_config_command, *words))
    assert load_config("printed.yaml").config == load_config_or_data("photos", words[1:]).config


def test_config_wins_over_a_folder_of_its_name(photos: Path) -> None:
    photos.rename("resnet18")
    assert "./resnet18" in fails(3, train_command, "resnet18", "--dry-run")
    assert load_config_or_data("resnet18", []).notes  # other commands may need no data
    Path("resnet18").rename("demo")
    out = succeeds(train_command, "demo", "--dry-run", "data.root=digits")
    assert "./demo" in out and "10 classes" in out
    assert "3 classes (a, b, c)" in dry_run("./demo")


def test_one_class_is_an_error_and_one_without_validation_images_is_shown(photos: Path) -> None:
    write_photos(Path("one"), classes="a", images=20)
    out = fails(3, train_command, "one", "epochs=1")  # before the download, which would fail
    assert "same class" in out
    write_photos(photos, classes="d", images=1)
    assert re.search(r"^validation .* 0 \(d\) to ", dry_run("photos"), re.MULTILINE)


def test_python_api_trains_evaluates_and_predicts(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    succeeds(train_command, "photos", *ARGUMENTS, "--work-dir", "runs/a")
    run = imagenet_cls.train(
        "photos",
        {**SMALL, "data.root": photos},  # a path
        epochs=2,
        device="cpu",
        work_dir="runs/a",
        resume=True,
        allow_change=["train.epochs"],
    )
    out = capsys.readouterr().out
    next_lines = out.partition("next:")[2]
    assert "run.mistakes()" in next_lines and "imagenet-cls" not in next_lines
    assert "\r" not in out
    assert run.folder == photos.parent.resolve() / "runs/a"
    results = [record for record in run.metrics if record["kind"] == "eval"]
    assert {record["epoch"] for record in results} == {0, 1}
    assert run.best["top1_pct"] == max(record["top1_pct"] for record in results)
    figure: Any = run.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")  # in a notebook
    image = photos / "a" / "1.jpg"
    predictor = imagenet_cls.Predictor(run, allow_import=["helpers:plain"])
    row = predictor(image)
    assert isinstance(row, dict) and row["image"] == str(image)
    (photos / ".hidden.jpg").touch()
    assert len(predictor(photos)) == 30
    found = imagenet_cls.evaluate(run, data=photos, device="cpu", allow_import=["helpers:plain"])
    assert found["raw"]["images"] == 30
    with pytest.raises(UserError, match="already holds a run"):
        imagenet_cls.train("photos", SMALL, epochs=2, work_dir="runs/a")


def test_python_api_takes_values_of_numpy_and_paths(photos: Path) -> None:
    given = {
        "seed": np.int64(3),
        "data.stratify": np.bool_(False),
        "data.root": photos,
        "data.mean": np.zeros(3),
        "data.kwargs": {np.str_("a"): [photos, np.float32(0.5), {"b": (1, None)}]},
    }
    config = load_config(None, command_arguments(given)).config
    data = config.data
    assert (config.seed, data.stratify, data.root, data.mean) == (3, False, str(photos), [0.0] * 3)
    assert data.kwargs == {"a": [str(photos), 0.5, {"b": [1, None]}]}
    for value in ([object()], {"a": {1, 2}}, b"a"):
        with pytest.raises(UsageError):
            command_arguments({"data.kwargs.x": value})


def test_python_api_raises_the_errors_of_the_commands(photos: Path) -> None:
    wrong = {"loss.name": "focl", "schedule.name": "cosin"}
    with pytest.raises(ConfigError) as caught:  # all problems
        imagenet_cls.train("photos", {**SMALL, **wrong}, work_dir="runs/b")
    assert len(caught.value.lines) == 2
    (photos / "a" / "0.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"0\.jpg"):
        imagenet_cls.train("photos", {**SMALL, "data.val_fraction": 0.1}, work_dir="runs/b")
    for name, value in ("model", UserError), ("gpus", 0), ("on_eval", "print"):
        with pytest.raises(UsageError, match=name):
            imagenet_cls.train("photos", **{name: value})
    Path("runs/c").mkdir(parents=True)
    with pytest.raises(ConfigError, match="'runs/c'"):
        imagenet_cls.evaluate("runs/cc")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, BrokenPipeError, TimeoutError, SystemExit, GeneratorExit]
)
def test_command_is_stopped_before_an_exception_of_the_caller_is_raised(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has more to write than a pipe holds, and "saves" when it is stopped."""
    program = (
        "import os, pathlib, signal, sys, time\ndef stop(*_):\n    print('x' * 200_000)\n"
        f"    pathlib.Path({str(tmp_path / 'saved')!r}).write_text(str(os.getpid()))\n"
        "    sys.exit(1)\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n    signal.signal(number, stop)\n"
        "print('started', flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(child, "child_command", lambda _: [sys.executable, "-c", program])

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(sys, "stdout", Stream())
        child.run_command("train", [])
    with pytest.raises(ProcessLookupError):  # it has saved and ended
        os.kill(int((tmp_path / "saved").read_text()), 0)


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGALRM, 2)])
def test_interrupted_training_of_the_python_api_saves(
    photos: Path, number: signal.Signals, ranks: int
) -> None:
    slow = {**SMALL, "model.name": "helpers:noisy", "model.kwargs": {"pause_sec": 0.2}}
    program = (
        "import imagenet_cls, os, signal\ndef alarm(*_):\n    raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, alarm)\n"
        f"imagenet_cls.train('photos', {slow!r}, epochs=50, device='cpu', gpus={ranks})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ['PYTHONPATH']}"},
    )
    while not list(Path("work_dirs/photos").glob("checkpoints/step-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert ("KeyboardInterrupt" if number == signal.SIGINT else "TimeoutError") in err
    assert "Stopped after" in err
