"""The files of a run, and test.py and predict.py on them."""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import DEMO, arguments, evaluations, losses, newest, train_here
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms import functional as reference

from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.program import main
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.config.load import load_config
from imagenet_cls.data import open_datasets
from imagenet_cls.report.log import close_log

SECRET = "do-not-write-this-down"
# A checkpoint uses no code but what is named here, or in the config.
ALLOW = ("--allow-import", "helpers:noisy")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(autouse=True)
def log_closed() -> Iterator[None]:
    """A run's log belongs to its process; here many runs share one."""
    yield
    close_log()


@pytest.fixture(scope="module")
def resnet_argv(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """timm's resnet18 at 32 px, two steps, with all outputs of a run."""
    folder = tmp_path_factory.mktemp("resnet") / "run"
    size = {"augment.size_px": 32, "eval.crop_px": 32}
    more = {"train.max_steps": 2, "log.tensorboard": "true", "log.plots": "true"}
    more |= {"ema.decay": 0.5, "optimizer.lr": 0.001}
    return arguments(digits, folder, **{"model.name": "resnet18"}, **size, **more)


@pytest.fixture(scope="module")
def resnet(resnet_argv: list[str]) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_CLOUD_SECRET_KEY", SECRET)
        train_here(resnet_argv)
    return Path(resnet_argv[-1])


@pytest.fixture(scope="module")
def small(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' own network, trained for two epochs, with an average."""
    folder = tmp_path_factory.mktemp("small") / "run"
    train_here(arguments(digits, folder, "noisy", ema__decay=0.8))
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command here: exit code, stdout, stderr."""

    def run(command: Callable, *argv: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(command, [str(word) for word in argv])
        return code, *capsys.readouterr()

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ----------------------------------------------------------------------------------------------- the run folder


def test_metrics_hold_each_step_once_and_each_evaluation(resnet: Path, small: Path) -> None:
    assert len(losses(resnet)) == 2 and len(losses(small)) == 22  # asserts that each step is there once
    assert [(r["weights"], r["step"], r["epoch"], r["images"]) for r in evaluations(small)] == [
        ("raw", 11, 0, 359), ("ema", 11, 0, 359), ("raw", 22, 1, 359), ("ema", 22, 1, 359),
    ]  # fmt: skip
    last = json.loads((small / "metrics.jsonl").read_text().splitlines()[-3])
    assert last.keys() >= {"loss", "lr", "grad_norm", "images_per_sec", "data_wait_pct", "memory_mib"}
    assert not (small / "plots").exists()


def test_event_files_hold_what_metrics_hold(resnet: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(resnet / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (step, pytest.approx(loss)) for step, loss in enumerate(losses(resnet), start=1)
    ]
    for tag, weights in (("val/top1_pct", "raw"), ("val_ema/top1_pct", "ema")):
        expected = [r["top1_pct"] for r in evaluations(resnet) if r["weights"] == weights]
        assert [e.value for e in events.Scalars(tag)] == pytest.approx(expected)
    (image,) = events.Images("train/first_batch")
    assert image.width > 32 and image.height > 32
    (text,) = events.Tensors("config/text_summary")
    assert b"name: resnet18" in text.tensor_proto.string_val[0]


def test_run_folder_holds_config_environment_and_no_secret(resnet: Path, resnet_argv: list[str]) -> None:
    assert {path.name for path in resnet.iterdir()} == {
        ".job", ".lock", "config.yaml", "env.json", "metrics.jsonl", "tensorboard", "checkpoints", "plots", "logs",
    }  # fmt: skip
    assert [path.name for path in (resnet / "logs").iterdir()] == ["rank0.log"]
    plots = list((resnet / "plots").glob("*.png"))
    assert plots and all(Image.open(path).size[0] > 100 for path in plots)
    overrides = [word for word in resnet_argv[1:] if "=" in word]
    assert load_config(resnet / "config.yaml").config == load_config(DEMO, overrides).config
    env = json.loads((resnet / "env.json").read_text())
    assert env["versions"].keys() >= {"torch", "timm", "torchvision", "python", "imagenet_cls"}
    assert env["variables"].get("OMP_NUM_THREADS")
    for name, content in contents(resnet).items():
        assert SECRET.encode() not in content, name


# ------------------------------------------------------------------------------------------------ use of weights


def test_predictions_equal_those_of_timm(resnet: Path, digits: Path, call: Callable) -> None:
    """timm, Pillow, and torchvision's to_tensor and normalize against predict.py, which normalises in another order."""
    images = [sorted((digits / "train" / name).glob("*.jpg"))[3] for name in ("0", "4", "9")]
    tensors = [reference.to_tensor(Image.open(path).convert("RGB")) for path in images]
    pixels = torch.stack([reference.normalize(tensor, MEAN, STD) for tensor in tensors])
    for weights, file in (("raw", "model.safetensors"), ("ema", "ema.safetensors")):
        model = timm.create_model("resnet18", num_classes=10).eval()
        model.load_state_dict(load_file(newest(resnet) / file), strict=True)
        with torch.no_grad():
            expected = model(pixels)
        code, out, _ = call(predict_command, newest(resnet), *images, "--json", "--logits", "--weights", weights)
        rows = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and [row["image"] for row in rows] == [str(path) for path in images]
        torch.testing.assert_close(torch.tensor([row["logits"] for row in rows]), expected, rtol=0, atol=1e-6)
        for row, logits in zip(rows, expected, strict=True):
            assert len(row["top"]) == 5
            assert row["top"][0][0] == str(int(logits.argmax()))
            assert row["top"][0][1] == pytest.approx(float(logits.softmax(0).max()), abs=1e-6)


def test_predict_takes_files_folders_and_patterns(small: Path, digits: Path, call: Callable) -> None:
    folder = digits / "train" / "7"
    files = sorted(folder.glob("*.jpg"))
    code, out, err = call(predict_command, small, folder, "--top", "2", *ALLOW)
    assert (code, err) == (0, "")
    assert [line.partition(": ")[0] for line in out.splitlines()] == [str(path) for path in files]
    assert all(line.count(" %") == 2 for line in out.splitlines())
    code, out, _ = call(predict_command, small, folder / "*0.jpg", files[1], "--csv", "--top", "3", *ALLOW)
    rows = list(csv.reader(out.splitlines()))
    assert rows[0] == ["image", "class_1", "probability_1", "class_2", "probability_2", "class_3", "probability_3"]
    assert [row[0] for row in rows[1:]] == [*(str(path) for path in files if path.stem.endswith("0")), str(files[1])]
    assert sum(row[1] == "7" for row in rows[1:]) > len(rows) / 2  # it has learned something


def test_predict_with_bad_arguments_is_an_error(small: Path, digits: Path, tmp_path: Path, call: Callable) -> None:
    good = next((digits / "train" / "7").glob("*.jpg"))
    (tmp_path / "broken.jpg").write_bytes(good.read_bytes()[:200])
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "none").mkdir()
    for word in ("broken.jpg", "text.jpg", "nowhere.jpg", "none", "*.png"):
        code, out, err = call(predict_command, small, tmp_path / word, *ALLOW)
        assert (code, out) == (3, "") and str(tmp_path / word) in err and len(err.splitlines()) <= 3, word
    code, _, err = call(predict_command, tmp_path, good)
    assert code == 4 and str(tmp_path) in err
    code, _, err = call(predict_command, small, good, "--device", "cuda:77")
    assert code == 2 and len(err.splitlines()) <= 3


def test_evaluation_of_a_checkpoint_equals_that_of_the_run(small: Path, digits: Path, call: Callable) -> None:
    at = {(r["step"], r["weights"]): r for r in evaluations(small)}
    best = max(at.values(), key=lambda record: record["top1_pct"])["step"]
    size = ["augment.size_px=16", "eval.crop_px=16"]
    argv = [DEMO, "model.name=helpers:noisy", f"data.root={digits}", "data.num_workers=0", *size]
    for checkpoint, step in ((small / "checkpoints" / "step-0000011", 11), (newest(small), 22), (small, best)):
        code, out, err = call(evaluate_command, *argv, checkpoint)
        assert (code, err) == (0, "")
        origin, *lines = out.splitlines()
        assert origin.endswith(f"step {step}") and [line.partition(":")[0] for line in lines] == ["raw", "ema"]
        for line in lines:
            record = at[step, line.partition(":")[0]]
            assert f"top-1 {record['top1_pct']:.3f} %  top-5 {record['top5_pct']:.3f} %" in line
            assert f"loss {record['loss']:.4f}  over 359 images" in line


def test_evaluation_that_differs_from_the_runs_is_reported(small: Path, digits: Path, call: Callable) -> None:
    """The config's values are used, and each difference is named; there is none with the run's own config."""

    def notes(out: str) -> list[str]:
        return [line for line in out.splitlines()[1:] if not line.startswith(("raw: ", "ema: "))]

    bare = [DEMO, f"data.root={digits}", "data.num_workers=0", *ALLOW, small]
    code, out, err = call(evaluate_command, *bare, "eval.interpolation=bicubic", "data.mean=[0.5,0.5,0.5]")
    keys = ["eval.crop_px", "eval.interpolation", str(small / "config.yaml"), "model.name", "data.mean"]
    assert (code, err) == (0, "") and [re.split(r": | as ", line)[0] for line in notes(out)] == keys
    code, out, err = call(evaluate_command, small / "config.yaml", small)
    best = max(record["top1_pct"] for record in evaluations(small))
    assert (code, err, notes(out)) == (0, "", []) and f"top-1 {best:.3f} %" in out
    code, out, _ = call(evaluate_command, small / "config.yaml", small, "data.val_fraction=0.5")
    assert code == 0 and notes(out)[0].startswith("data.val_fraction: 0.5, and 0.2") and "warning: " in notes(out)[-1]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_evaluation_writes_one_prediction_for_each_image(
    small: Path, digits: Path, tmp_path: Path, call: Callable, suffix: str
) -> None:
    size = ["augment.size_px=16", "eval.crop_px=16"]
    argv = [DEMO, "model.name=helpers:noisy", f"data.root={digits}", "data.num_workers=0", *size, newest(small)]
    code, out, _ = call(evaluate_command, *argv, "--out", tmp_path / f"x{suffix}")
    assert code == 0 and "wrote 359 predictions" in out
    if suffix == ".csv":
        with (tmp_path / "x.csv").open(newline="") as file:
            rows = [(row["image"], row["target"], row["class_1"]) for row in csv.DictReader(file)]
    else:
        parsed = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
        rows = [(row["image"], row["target"], row["top"][0][0]) for row in parsed]
    assert len(rows) == len({image for image, _, _ in rows}) == 359
    assert all(Path(image).parent.name == target for image, target, _ in rows)
    right = sum(target == named for _, target, named in rows)
    ema = next(line for line in out.splitlines() if line.startswith("ema"))
    assert f"top-1 {100 * right / 359:.3f} %" in ema


def test_predictions_file_that_cannot_be_written_is_an_error_before_the_evaluation(
    small: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    argv = [DEMO, f"data.root={digits}", "data.num_workers=0", newest(small)]
    (tmp_path / "old.csv").write_text("old")
    for path in (tmp_path / "none" / "x.csv", tmp_path / "old.csv"):
        code, out, err = call(evaluate_command, *argv, "--out", path)
        assert (code, out) == (2, "") and str(path) in err and "--out" in err
    assert (tmp_path / "old.csv").read_text() == "old"
    # An evaluation that fails leaves no file.
    nowhere = [DEMO, "data.name=folder", f"data.root={tmp_path / 'nowhere'}", "data.num_workers=0", newest(small)]
    assert call(evaluate_command, *nowhere, "--out", tmp_path / "rows.csv")[0] == 3
    assert not (tmp_path / "rows.csv").exists()


def test_foreign_weights_are_evaluated_if_their_head_fits(
    small: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    """As a wrapped model saves them. With a head of another size predictions would be chance."""
    argv = [DEMO, "model.name=helpers:noisy", f"data.root={digits}", "data.num_workers=0", "eval.crop_px=16"]
    state = load_file(newest(small) / "model.safetensors")
    wrapped = {f"module.{name}": value for name, value in state.items()}
    torch.save({"state_dict": wrapped, "epoch": 2}, tmp_path / "a.pth")
    code, out, err = call(evaluate_command, *argv, tmp_path / "a.pth")
    raw = evaluations(small)[-2]
    assert (code, err) == (0, "") and raw["weights"] == "raw"
    assert f"raw: top-1 {raw['top1_pct']:.3f} %" in out and "ema" not in out
    head = list(state)[-2:]
    torch.save(state | {name: state[name][:7].clone() for name in head}, tmp_path / "seven.pth")
    code, out, err = call(evaluate_command, *argv, tmp_path / "seven.pth")
    assert (code, out) == (4, "") and len(err.splitlines()) <= 3
    code, _, err = call(evaluate_command, *argv)
    assert code == 2 and "model.pretrained=true" in err


@pytest.mark.parametrize("key", ["model.checkpoint", "distill.teacher.checkpoint"])
def test_missing_weights_are_reported_with_their_key(digits: Path, tmp_path: Path, call: Callable, key: str) -> None:
    teacher = {"distill.kind": "soft", "distill.teacher.name": "helpers:plain"} if key.startswith("distill") else {}
    argv = arguments(digits, tmp_path / "run", **teacher, **{key: "nowhere.pth"})
    code, _, err = call(train_command, *argv)
    assert code == 4 and err.startswith(f"{key}: ") and "nowhere.pth" in err
    if not teacher:
        assert call(evaluate_command, *argv[:-2])[2].startswith(f"{key}: ")
    code, _, err = call(evaluate_command, *argv[:-2], "lost.pth")
    assert code == 4 and "lost.pth" in err and key not in err


OWN = """
from torch import nn
def build(num_classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, num_classes))
"""


def test_checkpoint_of_a_module_predicts_only_where_it_can_be_imported(
    digits: Path, tmp_path: Path, call: Callable
) -> None:
    image = next((digits / "train" / "7").glob("*.jpg"))
    (tmp_path / "own_network.py").write_text(OWN)
    (tmp_path / "own_names.py").write_text("")
    changes = {"model.name": "own_network:build", "imports": "[own_names]", "train.max_steps": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        train_here(arguments(digits, tmp_path / "run", **changes))
        for name in ("own_network", "own_names"):
            del sys.modules[name]
        argv = [tmp_path / "run", image, "--allow-import", "own_names", "--allow-import", "own_network:build"]
        assert call(predict_command, *argv)[0] == 0
        assert "own_names" in sys.modules
    for name in ("own_network", "own_names"):
        del sys.modules[name]
    code, _, err = call(predict_command, *argv)
    assert code == 4 and "own_n" in err and len(err.splitlines()) <= 3


# ---------------------------------------------------------------------------------------------- ways to start


def test_dry_run_writes_nothing(digits: Path, tmp_path: Path, call: Callable) -> None:
    before = contents(digits)
    code, out, err = call(train_command, *arguments(digits, tmp_path / "run", "noisy"), "--dry-run")
    assert (code, err) == (0, "")
    assert "logits (128, 10)" in out and "22 (11" in out
    assert list(tmp_path.iterdir()) == [] and contents(digits) == before


def test_resume_without_a_checkpoint_starts_from_scratch(digits: Path, small: Path, tmp_path: Path) -> None:
    train_here([*arguments(digits, tmp_path / "run", "noisy", ema__decay=0.8), "--resume"])
    assert losses(tmp_path / "run") == losses(small)


def test_resume_of_a_finished_run_changes_nothing(digits: Path, tmp_path: Path, call: Callable) -> None:
    argv = arguments(digits, tmp_path / "run")
    train_here(argv)
    before = contents(tmp_path / "run" / "checkpoints")
    code, out, _ = call(train_command, *argv, "--resume")
    assert code == 0 and "at step 22" in out and "done" in out
    assert contents(tmp_path / "run" / "checkpoints") == before
    assert len(losses(tmp_path / "run")) == 22 and len(evaluations(tmp_path / "run")) == 2
    # A longer run is a changed recipe.
    longer = [*arguments(digits, tmp_path / "run", train__epochs=3), "--resume"]
    assert call(train_command, *longer)[0] == 4
    code, out, _ = call(train_command, *longer, "--allow-change", "train.epochs")
    assert code == 0 and "train.epochs: 2 -> 3" in out
    assert len(losses(tmp_path / "run")) == 33


def test_overwrite_removes_the_old_run_and_nothing_else(digits: Path, tmp_path: Path) -> None:
    train_here(arguments(digits, tmp_path / "run", train__max_steps=12, checkpoint__every_steps=1))
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train_here([*arguments(digits, tmp_path / "run", train__max_steps=3, seed=7), "--overwrite"])
    assert len(losses(tmp_path / "run")) == 3 and len(evaluations(tmp_path / "run")) == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-0000003"]
    assert "seed: 7" in (tmp_path / "run" / "config.yaml").read_text()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_resume_from_another_run_ends_in_the_same_bits(
    digits: Path, small: Path, tmp_path: Path, call: Callable
) -> None:
    before = contents(small)
    argv = arguments(digits, tmp_path / "run", "noisy", ema__decay=0.8)
    code, out, _ = call(train_command, *argv, "--resume-from", small / "checkpoints" / "step-0000011")
    assert code == 0 and "step-0000011 at step 11" in out
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        assert (newest(tmp_path / "run") / name).read_bytes() == (newest(small) / name).read_bytes(), name
    assert contents(small) == before


def test_held_out_images_are_never_trained_on(digits: Path, tmp_path: Path, call: Callable) -> None:
    """With broken held-out images, epochs over all training images succeed, and the evaluation fails."""
    data = tmp_path / "digits"
    argv = ["data.name=folder", f"data.root={data}", *(f"data.{k}" for k in ("val=null", "val_fraction=0.2"))]
    for name, content in contents(digits).items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(content)
    sets = open_datasets(load_config(DEMO, argv).config.data)
    assert sets.train is not None and sets.val is not None
    trained = {sets.train.name(index) for index in range(len(sets.train))}
    held_out = {sets.val.name(index) for index in range(len(sets.val))}
    assert len(trained) == 1438 and len(held_out) == 359 and not trained & held_out
    for name in held_out:
        assert len(list(data.rglob(Path(name).name))) == 1
        next(data.rglob(Path(name).name)).write_bytes(b"broken")
    changes = {
        "data.name": "folder",
        "data.val": "null",
        "data.val_fraction": 0.2,
        "train.global_batch_size": 719,
        "train.epochs": 3,
        "eval.every_epochs": 3,
    }
    code, _, err = call(train_command, *arguments(data, tmp_path / "run", **changes))
    assert code == 3 and any(Path(name).name in err for name in held_out)
    assert len(losses(tmp_path / "run")) == 6  # two steps of 719 images: all 1,438, three times
