"""`train` with a dataset in place of a config, and the Python API that does the same."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import REPOSITORY, environment, fails, succeeds
from PIL import Image

import imagenet_cls
from imagenet_cls.commands import child, python_api
from imagenet_cls.commands.own_data import (
    SHORT_KEYS,
    batch_size_for,
    expand_short_keys,
    load_config_or_data,
    load_with_data,
)
from imagenet_cls.commands.print_config import print_config_command
from imagenet_cls.commands.python_api import _override_arguments
from imagenet_cls.commands.train import train_command
from imagenet_cls.config.load import load_config
from imagenet_cls.errors import ConfigError, DataError, UsageError, UserError
from imagenet_cls.extras.before_training.plot_schedule import plot_schedule_command
from imagenet_cls.inference.predictor import find_images

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


def write_photos(folder: Path, classes: str = "abc", images: int = 10) -> Path:
    """Class folders of small JPEG files of random noise."""
    pixels = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(images):
            image = Image.fromarray(pixels.integers(0, 256, (20, 20, 3), np.uint8))
            image.save(folder / name / f"{number}.jpg")
    return folder


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `photos` in the working directory: 30 images of three classes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    return write_photos(tmp_path / "photos")


@pytest.mark.parametrize(
    ("images", "batch"), [(1, 1), (5, 5), (24, 8), (160, 16), (320, 32), (639, 32), (640, 64)]
)
def test_batch_size_leaves_ten_steps_for_an_epoch(images: int, batch: int) -> None:
    assert batch_size_for(images) == batch


def test_short_keys_stand_for_keys_of_the_config() -> None:
    keys = expand_short_keys(["size=64", "epochs=2", "lr=0.1", "seed=1"], pretrained=True)
    expected = ["augment.size_px=64", "eval.crop_px=64", "train.epochs=2", "optimizer.lr=0.1"]
    assert keys == [*expected, "seed=1"]


@pytest.mark.parametrize(
    ("given", "pretrained"),
    [([], "true"), (["model.pretrained=false"], "false")],
)
def test_short_model_keeps_pretrained_unless_it_is_given(given: list[str], pretrained: str) -> None:
    keys = expand_short_keys(["model=resnet18", *given], pretrained=True)
    assert keys == ["model.name=resnet18", f"model.pretrained={pretrained}"]


@pytest.mark.parametrize("model", [[], ["model=resnet18"]])
def test_checkpoint_replaces_the_published_weights(photos: Path, model: list[str]) -> None:
    config = load_with_data("photos", ["model.checkpoint=weights.pth", *model]).config
    assert config.model.checkpoint == "weights.pth" and not config.model.pretrained
    assert load_with_data("photos", ["model.checkpoint=null"]).config.model.pretrained
    with pytest.raises(UserError):
        load_with_data("photos", ["model.checkpoint=weights.pth", "model.pretrained=true"])


def test_class_folders_are_split(photos: Path) -> None:
    config = load_with_data("photos", []).config
    assert (config.data.train, config.data.val, config.data.val_fraction) == (".", None, 0.2)
    assert config.train.global_batch_size == 8


def test_folders_train_and_val_are_the_splits(photos: Path) -> None:
    write_photos(Path("sets/training"))
    write_photos(Path("sets/valid"))
    config = load_with_data("sets", ["train.global_batch_size=5"]).config
    assert (config.data.train, config.data.val) == ("training", "valid")
    assert config.train.global_batch_size == 5


@pytest.mark.parametrize(
    ("overrides", "decay"),
    [
        ([], 0.8),
        (["model.checkpoint=a.pth"], 0.8),
        (["model.pretrained=false"], None),
        (["model.pretrained=false", "optimizer.layer_decay=0.9"], 0.9),
    ],
)
def test_training_from_scratch_has_no_layer_decay(
    photos: Path, overrides: list[str], decay: float | None
) -> None:
    assert load_with_data("photos", overrides).config.optimizer.layer_decay == decay


@pytest.mark.parametrize(
    ("overrides", "is_noted"),
    [
        ([], False),
        (["model.checkpoint=a.pth"], False),
        (["model.pretrained=false"], True),
        (["model.pretrained=false", "lr=0.001"], False),
    ],
)
def test_training_from_scratch_with_the_rate_for_published_weights_is_noted(
    photos: Path, overrides: list[str], is_noted: bool
) -> None:
    notes = load_with_data("photos", overrides).notes
    assert any("lr=0.01" in note for note in notes) == is_noted


def test_archive_and_list_are_data(photos: Path) -> None:
    files = sorted(photos.rglob("*.jpg"))
    with zipfile.ZipFile("photos.zip", "w") as archive:
        for file in files:
            archive.write(file, file.relative_to(photos))
    lines = [f"photos/{file.relative_to(photos)} {file.parent.name}\n" for file in files]
    Path("photos.txt").write_text("".join(lines))
    for source in ("photos.zip", "photos.txt"):
        loaded = load_with_data(source, [])
        assert loaded.name == "photos"
        assert "3 classes (a, b, c)" in loaded.notes[0]


@pytest.mark.parametrize("labels", ["single", "multi"])
def test_list_of_multilabel_in_a_row_warns_unless_the_key_is_set(photos: Path, labels: str) -> None:
    rows = [
        f"{file},{file.parent.name};{'xy'[i % 2]}"
        for i, file in enumerate(sorted(photos.rglob("*.jpg")))
    ]
    Path("photos.csv").write_text("\n".join(rows))
    words = [*ARGUMENTS, "data.labels=multi", "loss.name=bce", "checkpoint.best=map"]
    out = succeeds(
        train_command, "photos.csv", *(words if labels == "multi" else ARGUMENTS), "--dry-run"
    )
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert any("data.labels=multi" in line for line in warnings) == (labels == "single")
    assert (", 5 classes\n" in out) == (labels == "multi")


@pytest.mark.parametrize("top", ["", "sets/"])
def test_folders_train_and_val_of_an_archive_are_the_splits(photos: Path, top: str) -> None:
    with zipfile.ZipFile("photos.zip", "w") as archive:
        for file in photos.rglob("*.jpg"):
            for part in ("train", "val"):
                archive.write(file, f"{top}{part}/{file.relative_to(photos)}")
    loaded = load_with_data("photos.zip", [])
    assert (loaded.config.data.train, loaded.config.data.val) == ("train", "val")
    assert "3 classes (a, b, c)" in loaded.notes[0]


def test_error_for_an_unknown_key_names_the_short_keys(photos: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_with_data("photos", ["foo=1"])
    assert set(SHORT_KEYS) <= set(re.findall(r"\w+", str(raised.value)))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("sise=64", "size"),
        ("epoch=1", "epochs"),
        ("modle=resnet18", "model"),
        ("model_ema=0.9", "ema.decay"),
    ],
)
def test_typo_of_a_short_key_suggests_it(photos: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{key}'"):
        load_with_data("photos", [override])


def test_typos_of_short_and_other_keys_are_reported_at_once(photos: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_with_data("photos", ["sise=64", "epoch=1", "train.epoch=2"])
    assert [line.partition("=")[0] for line in raised.value.lines[:2]] == ["sise", "epoch"]
    assert "train.epoch" in raised.value.lines[2] and len(raised.value.lines) == 3


def test_too_few_images_to_hold_any_out_is_an_error_that_names_the_list(photos: Path) -> None:
    Path("two.csv").write_text("image,label\nphotos/a/0.jpg,a\nphotos/b/0.jpg,b\n")
    with pytest.raises(DataError, match=r"two\.csv"):
        load_with_data("two.csv", [])


def test_option_of_another_project_beside_a_dataset_names_the_short_key(
    call: Callable[..., tuple[int, str, str]], photos: Path
) -> None:
    options = ["--epochs", "3", "--imgsz", "64", "--batch", "16"]
    code, _, err = call(train_command, "photos", *options)
    assert code == 2
    assert " epochs=3\n" in err and " size=64\n" in err and "train.global_batch_size=16" in err
    code, _, err = call(train_command, "demo", *options)
    assert code == 2
    assert "train.epochs=3" in err and "augment.size_px=64" in err


def test_dataset_as_a_key_names_the_argument(
    call: Callable[..., tuple[int, str, str]], photos: Path
) -> None:
    code, _, err = call(train_command, "data=photos", "model=resnet18")
    assert code == 2
    assert "imagenet-cls train photos" in err


@pytest.mark.parametrize("name", ["photos #1", "[a] b", "x: y", "null", "v1.2"])
def test_folder_may_have_any_name(photos: Path, name: str) -> None:
    photos.rename(name)
    loaded = load_with_data(name, [])
    assert (loaded.config.data.root, loaded.name) == (name, name)


def test_data_without_images_is_a_data_error(photos: Path) -> None:
    Path("empty").mkdir()
    with pytest.raises(DataError):
        load_with_data("empty", [])


def test_folder_is_trained_into_a_run_folder_of_its_name(photos: Path) -> None:
    out = succeeds(train_command, "photos", *ARGUMENTS, "seed=1", "seed=2")
    assert "class folders, 3 classes (a, b, c), 20% held out" in out
    assert "seed=1 has no effect" in out
    assert Path("work_dirs/photos/checkpoints").is_dir()


def test_resume_without_the_keys_of_the_run_names_them_and_the_command_that_works(
    call: Callable[..., tuple[int, str, str]], photos: Path
) -> None:
    words = ["photos", "size=32", "epochs=1", "data.num_workers=0", "log.tensorboard=false"]
    succeeds(train_command, *words, "model=test_resnet", "model.pretrained=false")
    for model, changed in (
        ("test_resnet", "model.pretrained: false -> true"),
        ("resnet18", "model.name: 'test_resnet' -> 'resnet18'"),
    ):
        code, _, err = call(train_command, *words, f"model={model}", "--resume")
        assert code == 4
        assert changed in err and "--allow-change" not in err  # which could not load the state
    resume = shlex.split(err.partition("imagenet-cls train ")[2].splitlines()[0])
    assert "resumed from" in succeeds(train_command, *resume)


def test_mistyped_folder_is_named(
    call: Callable[..., tuple[int, str, str]], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = call(train_command, "phtos")
    assert code == 2
    assert "'photos'" in err
    monkeypatch.chdir(photos)
    code, _, err = call(train_command, "../phtos")
    assert code == 2
    assert "'../photos'" in err


def test_checkpoint_to_resume_needs_a_config_or_dataset(call: Callable, photos: Path) -> None:
    code, _, err = call(train_command, "--resume", "work_dirs/photos")
    assert code == 2
    assert "config" in err


def test_data_takes_the_place_of_a_config_in_other_commands(call: Callable, photos: Path) -> None:
    code, out, _ = call(plot_schedule_command, "photos", "epochs=3", "--out", "schedule.png")
    assert code == 0
    assert "3 epochs" in out and Path("schedule.png").exists()
    code, out, _ = call(print_config_command, "photos", "epochs=3")
    assert code == 0
    Path("printed.yaml").write_text(out)
    assert load_config("printed.yaml").config == load_with_data("photos", ["epochs=3"]).config


def test_path_without_images_is_named(photos: Path) -> None:
    Path("empty").mkdir()
    with pytest.raises(DataError, match="nowhere"):
        find_images(["nowhere"])
    with pytest.raises(DataError, match="empty"):
        find_images(["empty"])


def test_config_wins_over_a_folder_of_its_name(photos: Path) -> None:
    photos.rename("resnet18")
    assert "./resnet18" in fails(3, train_command, "resnet18", "--dry-run")
    assert load_config_or_data("resnet18", []).notes  # other commands may need no data
    Path("resnet18").rename("demo")
    out = succeeds(train_command, "demo", "--dry-run", "data.root=digits")
    assert "./demo" in out and "10 classes" in out
    out = succeeds(train_command, "./demo", "--dry-run", *ARGUMENTS)
    assert "3 classes (a, b, c)" in out


def test_one_class_is_a_warning(photos: Path) -> None:
    write_photos(Path("one"), classes="a", images=20)
    out = succeeds(train_command, "one", "--dry-run", *ARGUMENTS)
    assert "warning: the data has one class" in out and "top-5" not in out


@pytest.mark.parametrize("single", [False, True])
def test_class_without_validation_images_is_a_warning(photos: Path, single: bool) -> None:
    if single:
        write_photos(photos, classes="d", images=1)
    out = succeeds(train_command, "photos", "--dry-run", *ARGUMENTS)
    assert ("warning: no validation image" in out) == single


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
    assert "imagenet-cls test runs/a " in capsys.readouterr().out  # there is no folder `tools` here
    assert run.folder == photos.parent.resolve() / "runs/a"
    assert {record["epoch"] for record in run.metrics if record["kind"] == "eval"} == {0, 1}
    assert run.best["top1_pct"] == max(
        record["top1_pct"] for record in run.metrics if record["kind"] == "eval"
    )
    figure: Any = run.plot()
    assert len(figure.axes) == 3
    assert figure._repr_png_().startswith(b"\x89PNG")  # in a notebook
    image = photos / "a" / "1.jpg"
    predictor = imagenet_cls.Predictor(run, allow_import=["helpers:plain"])
    row = predictor(image)
    assert isinstance(row, dict) and row["image"] == str(image)
    assert [row["image"] for row in predictor([image, Image.open(image)])] == [str(image), 1]
    assert len(predictor(photos)) == 30
    assert len(predictor("photos/a/*.jpg")) == 10
    results = imagenet_cls.evaluate(run, data=photos, device="cpu", allow_import=["helpers:plain"])
    assert results["raw"]["images"] == 30
    with pytest.raises(UserError, match="already holds a run"):
        imagenet_cls.train("photos", SMALL, epochs=2, work_dir="runs/a")


def test_python_api_takes_values_of_numpy_and_paths(photos: Path) -> None:
    given = {
        "optimizer.lr": np.linspace(0.0, 0.1, 2)[1],
        "seed": np.int64(3),
        "data.stratify": np.bool_(False),
        "data.root": photos,
        "data.mean": np.zeros(3),
        "augment.scale": (np.float32(0.5), 1),
        "data.kwargs": {np.str_("a"): [photos, np.uint8(7), {"b": (1, None)}]},
    }
    config = load_config(None, _override_arguments(given)).config
    assert (config.optimizer.lr, config.seed, config.data.stratify) == (0.1, 3, False)
    assert (config.data.root, config.data.mean) == (str(photos), [0.0] * 3)
    assert config.augment.scale == [0.5, 1.0]
    assert config.data.kwargs == {"a": [str(photos), 7, {"b": [1, None]}]}
    for value in ([object()], {"a": {1, 2}}, b"a", signal.SIGINT):
        with pytest.raises(UsageError):
            _override_arguments({"data.kwargs.x": value})


@pytest.mark.parametrize("name", ["a.json", "b.py"])
def test_config_of_another_kind_is_no_list_of_images(name: str, photos: Path) -> None:
    Path("a.json").write_text(json.dumps({"optimizer": {"lr": 0.5}}))
    Path("b.py").write_text("optimizer = dict(lr=0.5)\n")
    if name == "a.json":
        assert load_config_or_data(name, []).config.optimizer.lr == 0.5
    else:
        with pytest.raises(ConfigError):
            load_config_or_data(name, [])


def test_run_is_read_after_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"kind": "event", "step": 1, "message": "a"}\n')
    monkeypatch.chdir(tmp_path)
    run = imagenet_cls.TrainedRun("run")
    monkeypatch.chdir("/")
    assert len(run.metrics) == 1 and Path(os.fspath(run)) == tmp_path / "run"


def test_python_api_raises_the_errors_of_a_run(photos: Path) -> None:
    (photos / "a" / "0.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"0\.jpg"):
        imagenet_cls.train("photos", {**SMALL, "data.val_fraction": 0.1}, work_dir="runs/b")
    with pytest.raises(UserError, match="can't be passed"):
        imagenet_cls.train("photos", model=UserError)
    with pytest.raises(UserError, match="--gpus"):
        imagenet_cls.train("photos", gpus=0)
    with pytest.raises(UserError, match="work_dir"):
        imagenet_cls.train("photos", work_dir="auto")


def test_python_api_raises_all_problems_of_a_config(photos: Path) -> None:
    wrong = {"loss.name": "focl", "schedule.name": "cosin"}
    with pytest.raises(ConfigError) as caught:
        imagenet_cls.train("photos", {**SMALL, **wrong}, work_dir="runs/b")
    assert len(caught.value.lines) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_follows_the_records_and_printed_lines_stay(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that prints what a line about a step looks like."""
    Path("talkative.py").write_text(
        "from helpers import plain\n"
        "def model(num_classes):\n"
        "    print('epoch 1/9  step 7  loss 0.1')\n"
        "    return plain(num_classes)\n"
    )
    drawn = Terminal()
    monkeypatch.setattr(sys, "stderr", drawn)
    options = {**SMALL, "model.name": "talkative:model", "log.every_steps": 1}
    run = imagenet_cls.train("photos", options, work_dir="runs/b")
    steps = max(record["step"] for record in run.metrics)
    assert f"{steps}/{steps}" in drawn.getvalue() and "7/" not in drawn.getvalue()
    assert "epoch 1/9  step 7  loss 0.1" in capsys.readouterr().out.splitlines()


def test_python_api_evaluates_no_folder_that_is_missing(photos: Path) -> None:
    Path("work_dirs/photos").mkdir(parents=True)
    with pytest.raises(UsageError, match="'work_dirs/photos'"):
        imagenet_cls.evaluate("work_dirs/phots")


def test_python_api_raises_an_error_of_one_line(photos: Path) -> None:
    with pytest.raises(UserError, match=r"train\.epoch"):
        imagenet_cls.evaluate("demo", overrides={"train.epoch": 2})


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
        python_api.run_command("train", [])
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
    assert "Stopped by SIG" in err
