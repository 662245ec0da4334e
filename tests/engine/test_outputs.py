"""What a run leaves behind, and what test.py and predict.py make of it."""

import csv
import json
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
# A checkpoint calls no code of its own but what is named here, or in the config.
OURS = ("--allow-import", "helpers:noisy")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(autouse=True)
def log_closed() -> Iterator[None]:
    """A run's log belongs to its process; here many runs share one."""
    yield
    close_log()


@pytest.fixture(scope="module")
def resnet_words(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """timm's resnet18 at 32 px, two steps, with everything that a run can write."""
    folder = tmp_path_factory.mktemp("resnet") / "run"
    size = {"augment.size_px": 32, "eval.crop_px": 32}
    more = {"train.max_steps": 2, "log.tensorboard": "true", "log.plots": "true"}
    more |= {"ema.decay": 0.5, "optimizer.lr": 0.001}
    return arguments(digits, folder, **{"model.name": "resnet18"}, **size, **more)


@pytest.fixture(scope="module")
def resnet(resnet_words: list[str]) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_CLOUD_SECRET_KEY", SECRET)
        train_here(resnet_words)
    return Path(resnet_words[-1])


@pytest.fixture(scope="module")
def small(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' own network, trained for two epochs, with an average."""
    folder = tmp_path_factory.mktemp("small") / "run"
    train_here(arguments(digits, folder, "noisy", ema__decay=0.8))
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command here: exit code, stdout, stderr."""

    def run(command: Callable, *words: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(command, [str(word) for word in words])
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


def test_event_files_hold_what_metrics_hold(resnet: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(resnet / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    scalars = {"train/loss", "train/lr", "train/images_per_sec", "train/memory_mib", "val/top1_pct", "val_ema/top1_pct"}
    assert scalars <= set(tags["scalars"])
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2]
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(losses(resnet))
    for tag, weights in (("val/top1_pct", "raw"), ("val_ema/top1_pct", "ema")):
        expected = [r["top1_pct"] for r in evaluations(resnet) if r["weights"] == weights]
        assert [e.value for e in events.Scalars(tag)] == pytest.approx(expected)
    (image,) = events.Images("train/first_batch")
    assert image.width > 32 and image.height > 32
    (text,) = events.Tensors("config/text_summary")
    assert b"name: resnet18" in text.tensor_proto.string_val[0]


def test_the_config_in_the_folder_is_the_runs(resnet: Path, resnet_words: list[str]) -> None:
    words = [word for word in resnet_words[1:] if "=" in word]
    assert load_config(resnet / "config.yaml").config == load_config(DEMO, words).config


def test_the_environment_in_the_folder_holds_no_secret(resnet: Path) -> None:
    env = json.loads((resnet / "env.json").read_text())
    assert env["versions"].keys() >= {"torch", "timm", "torchvision", "python", "imagenet_cls"}
    assert env["variables"].get("OMP_NUM_THREADS")
    for name, content in contents(resnet).items():
        assert SECRET.encode() not in content, name


def test_the_rest_of_the_folder(resnet: Path) -> None:
    assert {path.name for path in resnet.iterdir()} == {
        ".job", ".lock", "config.yaml", "env.json", "metrics.jsonl", "tensorboard", "checkpoints", "plots", "logs",
    }  # fmt: skip
    assert [path.name for path in (resnet / "logs").iterdir()] == ["rank0.log"]
    assert all(Image.open(path).size[0] > 100 for path in (resnet / "plots").glob("*.png"))
    assert list((resnet / "plots").glob("*.png"))


def test_curves_are_drawn_where_they_are_asked_for(small: Path) -> None:
    assert evaluations(small) and not (small / "plots").exists()


# ------------------------------------------------------------------------------------------------ use of weights


def test_weights_load_in_timm_and_name_the_same(resnet: Path, digits: Path, call: Callable) -> None:
    """Bare timm, Pillow, and torchvision's to_tensor and normalize, against predict.py: equal within 1e-6.

    Not to the bit: the program normalises in another order of operations.
    """
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


def test_predicting_files_folders_and_patterns(small: Path, digits: Path, call: Callable) -> None:
    folder = digits / "train" / "7"
    files = sorted(folder.glob("*.jpg"))
    code, out, err = call(predict_command, small, folder, "--top", "2", *OURS)
    assert (code, err) == (0, "")
    assert [line.partition(": ")[0] for line in out.splitlines()] == [str(path) for path in files]
    assert all(line.count(" %") == 2 for line in out.splitlines())
    code, out, _ = call(predict_command, small, folder / "*0.jpg", files[1], "--csv", "--top", "3", *OURS)
    rows = list(csv.reader(out.splitlines()))
    assert rows[0] == ["image", "class_1", "probability_1", "class_2", "probability_2", "class_3", "probability_3"]
    assert [row[0] for row in rows[1:]] == [*(str(path) for path in files if path.stem.endswith("0")), str(files[1])]
    assert sum(row[1] == "7" for row in rows[1:]) > len(rows) / 2  # it has learned something


def test_predicting_what_is_no_image(small: Path, digits: Path, tmp_path: Path, call: Callable) -> None:
    good = next((digits / "train" / "7").glob("*.jpg"))
    (tmp_path / "broken.jpg").write_bytes(good.read_bytes()[:200])
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "none").mkdir()
    for word in ("broken.jpg", "text.jpg", "nowhere.jpg", "none", "*.png"):
        code, out, err = call(predict_command, small, tmp_path / word, *OURS)
        assert (code, out) == (3, "") and str(tmp_path / word) in err and len(err.splitlines()) <= 3, word
    code, _, err = call(predict_command, tmp_path, good)
    assert code == 4 and "neither a checkpoint" in err
    code, _, err = call(predict_command, small, good, "--device", "cuda:77")
    assert code == 2 and len(err.splitlines()) <= 3


def test_evaluating_a_checkpoint_repeats_the_runs_own_numbers(small: Path, digits: Path, call: Callable) -> None:
    at = {(r["step"], r["weights"]): r for r in evaluations(small)}
    best = max(at.values(), key=lambda record: record["top1_pct"])["step"]
    size = ["augment.size_px=16", "eval.crop_px=16"]
    words = [DEMO, "model.name=helpers:noisy", f"data.root={digits}", "data.num_workers=0", *size]
    for checkpoint, step in ((small / "checkpoints" / "step-0000011", 11), (newest(small), 22), (small, best)):
        code, out, err = call(evaluate_command, *words, checkpoint)
        assert (code, err) == (0, "")
        origin, *lines = out.splitlines()
        assert origin.endswith(f"step {step}") and [line.partition(":")[0] for line in lines] == ["raw", "ema"]
        for line in lines:
            record = at[step, line.partition(":")[0]]
            assert f"top-1 {record['top1_pct']:.3f} %  top-5 {record['top5_pct']:.3f} %" in line
            assert f"loss {record['loss']:.4f}  over 359 images" in line


def test_what_is_evaluated_otherwise_than_the_run_did_is_told(small: Path, digits: Path, call: Callable) -> None:
    """The config's values are used, and each that differs is named; nothing is said with the run's own config."""
    bare = [DEMO, f"data.root={digits}", "data.num_workers=0", *OURS, small]
    code, out, err = call(evaluate_command, *bare, "eval.interpolation=bicubic", "data.mean=[0.5,0.5,0.5]")
    notes = [line for line in out.splitlines()[1:] if not line.startswith(("raw: ", "ema: "))]
    assert (code, err) == (0, "") and notes == [
        "eval.crop_px: 32, and 16 in the run that made the checkpoint",
        "eval.interpolation: bicubic, and bilinear in the run that made the checkpoint",
        f"{small / 'config.yaml'} as CONFIG evaluates as the run did",
        "model.name: resnet18 is not used, but helpers:noisy, with which the checkpoint was trained",
        f"data.mean: [0.5, 0.5, 0.5] is not used, but {list(MEAN)}, with which the checkpoint was trained",
    ]
    code, out, err = call(evaluate_command, small / "config.yaml", small)
    assert (code, err) == (0, "") and [line.partition(":")[0] for line in out.splitlines()[1:]] == ["raw", "ema"]
    best = max(record["top1_pct"] for record in evaluations(small))
    assert f"top-1 {best:.3f} %" in out


def test_images_of_the_training_among_those_evaluated_are_told(small: Path, call: Callable) -> None:
    code, out, _ = call(evaluate_command, small / "config.yaml", small, "data.val_fraction=0.5")
    assert code == 0 and "data.val_fraction: 0.5, and 0.2 in the run that made the checkpoint" in out
    assert "warning: images that the run trained on" in out


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_predictions_of_an_evaluation_are_there_once_each(
    small: Path, digits: Path, tmp_path: Path, call: Callable, suffix: str
) -> None:
    size = ["augment.size_px=16", "eval.crop_px=16"]
    words = [DEMO, "model.name=helpers:noisy", f"data.root={digits}", "data.num_workers=0", *size, newest(small)]
    code, out, _ = call(evaluate_command, *words, "--out", tmp_path / f"x{suffix}")
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


def test_a_place_for_predictions_that_cannot_be_written_is_told_first(
    small: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    words = [DEMO, f"data.root={digits}", "data.num_workers=0", newest(small)]
    code, out, err = call(evaluate_command, *words, "--out", tmp_path / "none" / "x.csv")
    assert (code, out) == (2, "") and "can't write" in err and "--out" in err
    (tmp_path / "old.csv").write_text("old")
    code, out, err = call(evaluate_command, *words, "--out", tmp_path / "old.csv")
    assert (code, out) == (2, "") and "old.csv" in err and "--out" in err
    assert (tmp_path / "old.csv").read_text() == "old"


def test_an_evaluation_that_fails_leaves_no_file_of_predictions(small: Path, tmp_path: Path, call: Callable) -> None:
    words = [DEMO, "data.name=folder", f"data.root={tmp_path / 'nowhere'}", "data.num_workers=0", newest(small)]
    code, _, err = call(evaluate_command, *words, "--out", tmp_path / "rows.csv")
    assert code == 3 and "nowhere" in err
    assert not (tmp_path / "rows.csv").exists()


def test_foreign_weights(small: Path, digits: Path, tmp_path: Path, call: Callable) -> None:
    """As a wrapped model saves them; and a head of another size, which would name by chance, is refused."""
    words = [DEMO, "model.name=helpers:noisy", f"data.root={digits}", "data.num_workers=0", "eval.crop_px=16"]
    state = load_file(newest(small) / "model.safetensors")
    wrapped = {f"module.{name}": value for name, value in state.items()}
    torch.save({"state_dict": wrapped, "epoch": 2}, tmp_path / "a.pth")
    code, out, err = call(evaluate_command, *words, tmp_path / "a.pth")
    raw = evaluations(small)[-2]
    assert (code, err) == (0, "") and raw["weights"] == "raw"
    assert f"raw: top-1 {raw['top1_pct']:.3f} %" in out and "ema" not in out
    head = list(state)[-2:]
    torch.save(state | {name: state[name][:7].clone() for name in head}, tmp_path / "seven.pth")
    code, out, err = call(evaluate_command, *words, tmp_path / "seven.pth")
    assert code == 4 and "don't fit" in err and out == "" and len(err.splitlines()) <= 3
    code, _, err = call(evaluate_command, *words)
    assert code == 2 and "no weights to evaluate" in err


@pytest.mark.parametrize("key", ["model.checkpoint", "distill.teacher.checkpoint"])
def test_weights_that_are_missing_are_told_by_their_key(digits: Path, tmp_path: Path, call: Callable, key: str) -> None:
    teacher = {"distill.kind": "soft", "distill.teacher.name": "helpers:plain"} if key.startswith("distill") else {}
    words = arguments(digits, tmp_path / "run", **teacher, **{key: "nowhere.pth"})
    assert call(train_command, *words)[::2] == (
        4,
        f"{key}: no checkpoint 'nowhere.pth': no such file; check the path\n",
    )
    if not teacher:
        assert call(evaluate_command, *words[:-2])[2].startswith(f"{key}: no checkpoint 'nowhere.pth'")
    assert call(evaluate_command, *words[:-2], "lost.pth")[2].startswith("no checkpoint 'lost.pth'")


OWN = """
from torch import nn
def build(num_classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, num_classes))
"""


def test_a_checkpoint_whose_model_is_elsewhere(digits: Path, tmp_path: Path, call: Callable) -> None:
    """Its own modules are imported again to predict; where they can't be, that is said in words."""
    image = next((digits / "train" / "7").glob("*.jpg"))
    (tmp_path / "own_network.py").write_text(OWN)
    (tmp_path / "own_names.py").write_text("")
    changes = {"model.name": "own_network:build", "imports": "[own_names]", "train.max_steps": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        train_here(arguments(digits, tmp_path / "run", **changes))
        for name in ("own_network", "own_names"):
            del sys.modules[name]
        words = [tmp_path / "run", image, "--allow-import", "own_names", "--allow-import", "own_network:build"]
        assert call(predict_command, *words)[0] == 0
        assert "own_names" in sys.modules
    for name in ("own_network", "own_names"):
        del sys.modules[name]
    code, _, err = call(predict_command, *words)
    assert code == 4 and "can't be built here" in err and "own_n" in err and len(err.splitlines()) <= 3


# ---------------------------------------------------------------------------------------------- ways to start


def test_a_dry_run_writes_nothing(digits: Path, tmp_path: Path, call: Callable) -> None:
    before = contents(digits)
    code, out, err = call(train_command, *arguments(digits, tmp_path / "run", "noisy"), "--dry-run")
    assert (code, err) == (0, "")
    assert "logits (128, 10)" in out and "22 (11 an epoch, 2 epochs)" in out
    assert list(tmp_path.iterdir()) == [] and contents(digits) == before


def test_resuming_where_there_is_nothing_starts_fresh(digits: Path, small: Path, tmp_path: Path) -> None:
    train_here([*arguments(digits, tmp_path / "run", "noisy", ema__decay=0.8), "--resume"])
    assert losses(tmp_path / "run") == losses(small)


def test_resuming_a_finished_run_changes_nothing(digits: Path, tmp_path: Path, call: Callable) -> None:
    words = arguments(digits, tmp_path / "run")
    train_here(words)
    before = contents(tmp_path / "run" / "checkpoints")
    code, out, _ = call(train_command, *words, "--resume")
    assert code == 0 and "at step 22" in out and "done" in out
    assert contents(tmp_path / "run" / "checkpoints") == before
    assert len(losses(tmp_path / "run")) == 22 and len(evaluations(tmp_path / "run")) == 2
    # A longer run is a changed recipe: to be allowed, and then it goes on.
    longer = [*arguments(digits, tmp_path / "run", train__epochs=3), "--resume"]
    assert call(train_command, *longer)[0] == 4
    code, out, _ = call(train_command, *longer, "--allow-change", "train.epochs")
    assert code == 0 and "changed since the checkpoint: train.epochs: 2 -> 3" in out
    assert len(losses(tmp_path / "run")) == 33


def test_overwriting_leaves_nothing_of_the_old_run(digits: Path, tmp_path: Path) -> None:
    """Nor of its metrics, which the new run would else add to; what lies beside it stays."""
    train_here(arguments(digits, tmp_path / "run", train__max_steps=12, checkpoint__every_steps=1))
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train_here([*arguments(digits, tmp_path / "run", train__max_steps=3, seed=7), "--overwrite"])
    assert len(losses(tmp_path / "run")) == 3 and len(evaluations(tmp_path / "run")) == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-0000003"]
    assert "seed: 7" in (tmp_path / "run" / "config.yaml").read_text()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_going_on_from_another_runs_checkpoint(digits: Path, small: Path, tmp_path: Path, call: Callable) -> None:
    """It ends in the same bits, in a folder of its own, and leaves the other run alone."""
    before = contents(small)
    words = arguments(digits, tmp_path / "run", "noisy", ema__decay=0.8)
    code, out, _ = call(train_command, *words, "--resume-from", small / "checkpoints" / "step-0000011")
    assert code == 0 and "step-0000011 at step 11" in out
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        assert (newest(tmp_path / "run") / name).read_bytes() == (newest(small) / name).read_bytes(), name
    assert contents(small) == before


def test_held_out_images_are_never_trained_on(digits: Path, tmp_path: Path, call: Callable) -> None:
    """The held-out images broken, epochs that take every training image end well: it is the evaluation that fails."""
    data = tmp_path / "digits"
    words = ["data.name=folder", f"data.root={data}", *(f"data.{k}" for k in ("val=null", "val_fraction=0.2"))]
    for name, content in contents(digits).items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(content)
    sets = open_datasets(load_config(DEMO, words).config.data)
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
