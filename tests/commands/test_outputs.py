"""The files of a run, and test.py and predict.py on them."""

import csv
import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import timm
import torch
from helpers import (
    DEMO,
    REPOSITORY,
    arguments,
    before_classes,
    evaluations,
    losses,
    newest,
    plain,
    run,
    train_here,
)
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchvision.transforms import functional as reference

from imagenet_cls.checkpoint.format import write_manifest
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.config.load import load_config
from imagenet_cls.engine import train as training_loop

SECRET = "do-not-write-this-down"
# A checkpoint uses no code but what is named here, or in the config.
ALLOW = ("--allow-import", "helpers:noisy")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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


def words_of_evaluation(digits: Path, *more: str) -> list[str]:
    """Arguments of test.py for the tests' own network."""
    sizes = ["augment.size_px=16", "eval.crop_px=16"]
    return [
        DEMO,
        "model.name=helpers:noisy",
        f"data.root={digits}",
        "data.num_workers=0",
        *sizes,
        *more,
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# ---- the run folder


def test_metrics_hold_each_step_once_and_each_evaluation(resnet: Path, small: Path) -> None:
    # asserts that each step is there once
    assert len(losses(resnet)) == 2 and len(losses(small)) == 22
    assert [(r["weights"], r["step"], r["epoch"], r["images"]) for r in evaluations(small)] == [
        ("raw", 11, 0, 359),
        ("ema", 11, 0, 359),
        ("raw", 22, 1, 359),
        ("ema", 22, 1, 359),
    ]
    last = json.loads((small / "metrics.jsonl").read_text().splitlines()[-3])
    assert last.keys() >= {
        "loss",
        "top1_pct",
        "lr",
        "grad_norm",
        "images_per_sec",
        "data_wait_pct",
        "memory_mib",
    }
    assert not (small / "plots").exists()


def test_run_folder_holds_config_environment_plots_and_no_secret(
    resnet: Path, resnet_argv: list[str]
) -> None:
    assert {path.name for path in resnet.iterdir()} == {
        ".job",
        ".lock",
        "config.yaml",
        "env.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "plots",
        "logs",
    }
    assert [path.name for path in (resnet / "logs").iterdir()] == ["rank0.log"]
    plots = list((resnet / "plots").glob("*.png"))
    assert plots and all(Image.open(path).size[0] > 100 for path in plots)
    tags = EventAccumulator(str(resnet / "tensorboard")).Reload().Tags()
    assert tags["images"] == ["train/first_batch"] and {
        "train/loss",
        "val/loss",
        "val_ema/loss",
    } <= {*tags["scalars"]}
    assert "config/text_summary" in tags["tensors"]
    overrides = [word for word in resnet_argv[1:] if "=" in word]
    assert load_config(resnet / "config.yaml").config == load_config(DEMO, overrides).config
    env = json.loads((resnet / "env.json").read_text())
    assert env["versions"].keys() >= {"torch", "timm", "torchvision", "python", "imagenet_cls"}
    assert env["variables"].get("OMP_NUM_THREADS")
    for name, content in contents(resnet).items():
        assert SECRET.encode() not in content, name


# ---- use of weights


def test_predictions_equal_those_of_timm(resnet: Path, digits: Path, call: Callable) -> None:
    """timm, Pillow, and torchvision's to_tensor and normalize against predict.py, which normalizes
    in another order.
    """
    images = [sorted((digits / "train" / name).glob("*.jpg"))[3] for name in ("0", "4", "9")]
    tensors = [reference.to_tensor(Image.open(path).convert("RGB")) for path in images]
    pixels = torch.stack([reference.normalize(tensor, MEAN, STD) for tensor in tensors])
    for weights, file in (("raw", "model.safetensors"), ("ema", "ema.safetensors")):
        model = timm.create_model("resnet18", num_classes=10).eval()
        model.load_state_dict(load_file(newest(resnet) / file), strict=True)
        with torch.no_grad():
            expected = model(pixels)
        code, out, _ = call(
            predict_command, newest(resnet), *images, "--json", "--logits", "--weights", weights
        )
        rows = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and [row["image"] for row in rows] == [str(path) for path in images]
        torch.testing.assert_close(
            torch.tensor([row["logits"] for row in rows]), expected, rtol=0, atol=1e-6
        )
        for row, logits in zip(rows, expected, strict=True):
            assert len(row["top"]) == 5
            assert row["top"][0][0] == str(int(logits.argmax()))
            assert row["top"][0][1] == pytest.approx(float(logits.softmax(0).max()), abs=1e-6)


def test_predict_takes_files_folders_and_patterns(
    small: Path, digits: Path, call: Callable
) -> None:
    folder = digits / "train" / "7"
    files = sorted(folder.glob("*.jpg"))
    code, out, err = call(predict_command, small, folder, "--top", "2", *ALLOW)
    assert code == 0 and "raw weights" in err
    assert [line.partition(": ")[0] for line in out.splitlines()] == [str(path) for path in files]
    assert all(line.count(" %") == 2 for line in out.splitlines())
    code, out, _ = call(
        predict_command, small, folder / "*0.jpg", files[1], "--csv", "--top", "3", *ALLOW
    )
    rows = list(csv.reader(out.splitlines()))
    assert rows[0] == [
        "image",
        "class_1",
        "probability_1",
        "class_2",
        "probability_2",
        "class_3",
        "probability_3",
    ]
    assert [row[0] for row in rows[1:]] == [
        *(str(path) for path in files if path.stem.endswith("0")),
        str(files[1]),
    ]
    assert sum(row[1] == "7" for row in rows[1:]) > len(rows) / 2  # it has learned something


def test_predict_with_bad_arguments_is_an_error(
    small: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    good = next((digits / "train" / "7").glob("*.jpg"))
    (tmp_path / "broken.jpg").write_bytes(good.read_bytes()[:200])
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "none").mkdir()
    for word in ("broken.jpg", "text.jpg", "nowhere.jpg", "none", "*.png"):
        code, out, err = call(predict_command, small, tmp_path / word, *ALLOW)
        assert (code, out) == (3, "") and str(tmp_path / word) in err, word
    code, _, err = call(predict_command, tmp_path, good)
    assert code == 4 and str(tmp_path) in err
    code, _, err = call(predict_command, small, good, "--device", "cuda:77")
    assert code == 2


def test_predict_with_bad_images_prints_the_good_ones(
    small: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    good = sorted((digits / "train" / "7").glob("*.jpg"))[:40]  # two batches
    bad = [tmp_path / f"{number}.jpg" for number in range(5)]
    for path in bad:
        path.write_text("not an image")
    code, out, err = call(predict_command, small, *good[:1], *bad, *good[1:], *ALLOW)
    assert code == 3 and [line.partition(": ")[0] for line in out.splitlines()] == list(
        map(str, good)
    )
    assert [str(path) in err for path in bad] == [
        True,
        True,
        False,
        False,
        False,
    ] and err.startswith("5 of 45 images")
    code, out, err = call(predict_command, small, bad[0], good[0], "--json", *ALLOW)
    assert code == 3 and json.loads(out)["image"] == str(good[0]) and str(bad[0]) in err


def test_predict_takes_a_file_of_a_checkpoint(small: Path, digits: Path, call: Callable) -> None:
    image = next((digits / "train" / "7").glob("*.jpg"))
    for weights, file in (("raw", "model.safetensors"), ("ema", "ema.safetensors")):
        by_file = call(predict_command, newest(small) / file, image, *ALLOW)
        assert by_file[0] == 0
        assert by_file == call(predict_command, newest(small), image, "--weights", weights, *ALLOW)


def test_escape_sequences_of_a_checkpoint_do_not_reach_the_terminal(
    small: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    checkpoint = Path(shutil.copytree(newest(small), tmp_path / "checkpoint"))
    state = json.loads((checkpoint / "state.json").read_text())
    state["classes"] = [f"\x1b[31m\n{name}\x9b" for name in state["classes"]]
    state["step"] = "\x1b]0;title\x07"
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)
    image = next((digits / "train" / "7").glob("*.jpg"))
    code, out, _ = call(predict_command, checkpoint, image, *ALLOW)
    assert (
        code == 0
        and len(out.splitlines()) == 1
        and "\\x1b[31m\\n7\\x9b" in out
        and "\x1b" not in out
    )
    code, out, err = call(evaluate_command, *words_of_evaluation(digits), checkpoint)
    assert code == 3 and "\\x1b" in err and "\x1b" not in out + err


def test_run_folder_is_evaluated_with_its_own_config(
    small: Path, tmp_path: Path, call: Callable
) -> None:
    expected = call(evaluate_command, small / "config.yaml", small)
    found = call(evaluate_command, small, *ALLOW)
    assert [line.partition("  over ")[0] for line in found[1].splitlines()] == [
        line.partition("  over ")[0] for line in expected[1].splitlines()
    ]
    # which allows it
    assert call(evaluate_command, newest(small), "model.name=helpers:noisy")[0] == 0
    code, out, err = call(evaluate_command, small)
    assert (code, out) == (4, "") and "--allow-import helpers:noisy" in err
    assert call(evaluate_command, tmp_path)[0] == 2


def test_evaluation_of_a_checkpoint_equals_that_of_the_run(
    small: Path, digits: Path, call: Callable
) -> None:
    at = {(r["step"], r["weights"]): r for r in evaluations(small)}
    best = max(at.values(), key=lambda record: record["top1_pct"])["step"]
    argv = words_of_evaluation(digits)
    for checkpoint, step in (
        (small / "checkpoints" / "step-0000011", 11),
        (newest(small), 22),
        (small, best),
    ):
        code, out, err = call(evaluate_command, *argv, checkpoint)
        assert (code, err) == (0, "")
        images, origin, *lines = before_classes(out)
        assert images.startswith("359 images of 10 classes, held out of ")
        assert origin.endswith(f"step {step}") and [line.partition(":")[0] for line in lines] == [
            "raw",
            "ema",
        ]
        for line in lines:
            record = at[step, line.partition(":")[0]]
            assert f"top-1 {record['top1_pct']:.3f} %  top-5 {record['top5_pct']:.3f} %" in line
            assert f"loss {record['loss']:.4f}  " in line and "over 359 images" in line


@pytest.mark.parametrize("ranks", [1, 2])
def test_table_of_classes_counts_each_image_once(small: Path, tmp_path: Path, ranks: int) -> None:
    """Of the weights that predict.py uses, against a count of the rows that are written."""
    out = tmp_path / "rows.csv"
    options = ["--launcher", "spawn", "--gpus", str(ranks)]
    command = [
        sys.executable,
        REPOSITORY / "tools" / "test.py",
        small,
        *ALLOW,
        "--out",
        out,
        *options,
    ]
    result = run(command)
    assert result.returncode == 0, result.stderr
    with out.open() as file:
        pairs = [(row["target"], row["class_1"]) for row in csv.DictReader(file)]
    best = max(evaluations(small), key=lambda record: record["top1_pct"])["weights"]
    header, *lines = result.stdout.partition("class (")[2].splitlines()[:11]
    assert header.split() == [f"{best})", "images", "accuracy", "precision"]
    expected = []
    for name in sorted({target for target, _ in pairs}):
        predictions = [predicted for target, predicted in pairs if target == name]
        targets = [target for target, predicted in pairs if predicted == name]
        hits = predictions.count(name)
        recall = f"{100 * hits / len(predictions):.2f} %"
        precision = f"{100 * hits / len(targets):.2f} %" if targets else "-"
        expected.append(f"{name} {len(predictions)} {recall} {precision}")
    assert len(expected) == 10 and [" ".join(line.split()) for line in lines] == expected
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(("classes", "has_table"), [(50, True), (51, False)])
def test_table_of_classes_is_for_at_most_50_classes(
    call: Callable, tmp_path: Path, classes: int, has_table: bool
) -> None:
    torch.save(plain(classes).state_dict(), tmp_path / "a.pth")
    images = f"data.kwargs={{num_classes: {classes}, val_images: 64, size_px: 16}}"
    words = [DEMO, tmp_path / "a.pth", "model.name=helpers:plain", "data.name=synthetic", images]
    words += ["augment.size_px=16", "eval.crop_px=16", "--out", tmp_path / "rows.csv"]
    code, out, err = call(evaluate_command, *words)
    assert (code, err) == (0, "") and ("class (" in out) == has_table


def test_run_folder_in_place_of_a_config_is_answered_with_its_config(
    small: Path, call: Callable
) -> None:
    code, _, err = call(train_command, small)
    assert code == 2 and f"{small}/config.yaml" in err


def test_weights_of_an_evaluation_its_rows_and_its_report(
    small: Path, tmp_path: Path, call: Callable
) -> None:
    """By default the rows and the report are of the weights that predict.py uses: those of the best
    result.
    """
    best = max(evaluations(small), key=lambda record: record["top1_pct"])["weights"]
    other = {"raw": "ema", "ema": "raw"}[best]
    hits = {}
    for weights in (None, best, other):
        out = tmp_path / str(weights)
        out.mkdir()
        words = [] if weights is None else ["--weights", weights]
        code, printed, _ = call(
            evaluate_command, small, *ALLOW, "--out", out / "rows.csv", "--report", out, *words
        )
        evaluated = [name for name in ("raw", "ema") if f"{name}: top-1" in printed]
        assert code == 0 and evaluated == ([weights] if weights else ["raw", "ema"])
        with (out / "rows.csv").open() as file:
            hits[weights] = sum(row["target"] == row["class_1"] for row in csv.DictReader(file))
        report = json.loads((out / "report.json").read_text())
        assert report["weights"] == (weights or best) and report["correct"] == hits[weights]
    assert hits[None] == hits[best] > hits[other]


def test_evaluation_that_differs_from_the_runs_is_reported(
    small: Path, digits: Path, call: Callable
) -> None:
    """The config's values are used, and each difference is named; there is none with the run's own
    config.
    """

    def notes(out: str) -> list[str]:
        return [line for line in before_classes(out)[2:] if line[:5] not in ("raw: ", "ema: ")]

    bare = [DEMO, f"data.root={digits}", "data.num_workers=0", *ALLOW, small]
    code, out, err = call(
        evaluate_command, *bare, "eval.interpolation=bicubic", "data.mean=[0.5,0.5,0.5]"
    )
    keys = [
        "eval.crop_px",
        "eval.interpolation",
        "model.name",
        "data.mean",
        str(small / "config.yaml"),
    ]
    assert (code, err) == (0, "") and [re.split(r": | as ", line)[0] for line in notes(out)] == keys
    code, out, err = call(evaluate_command, small / "config.yaml", small, "eval.batch_size=100")
    best = max(record["top1_pct"] for record in evaluations(small))
    assert (code, err, notes(out)) == (0, "", []) and f"top-1 {best:.3f} %" in out
    code, out, _ = call(evaluate_command, small / "config.yaml", small, "data.val_fraction=0.5")
    assert code == 0 and notes(out)[0].startswith("data.val_fraction: 0.5, and 0.2")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_evaluation_writes_one_prediction_for_each_image(
    small: Path, digits: Path, tmp_path: Path, call: Callable, suffix: str
) -> None:
    argv = [*words_of_evaluation(digits), newest(small)]
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
    raw = next(line for line in out.splitlines() if line.startswith("raw"))
    assert f"top-1 {100 * right / 359:.3f} %" in raw  # the better ones


def test_predictions_file_that_cannot_be_written_is_an_error_before_the_evaluation(
    small: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    argv = [DEMO, f"data.root={digits}", "data.num_workers=0", newest(small)]
    (tmp_path / "old.csv").write_text("old")
    for path in (tmp_path / "none" / "x.csv", tmp_path / "old.csv", tmp_path / "old.csv" / "x.csv"):
        code, out, err = call(evaluate_command, *argv, "--out", path)
        assert (code, out) == (2, "") and str(path) in err and "--out" in err
    # Before the names of components are checked, and so before ranks start.
    for option in ("--out", "--report"):
        path = tmp_path / "old.csv"
        code, _, err = call(
            evaluate_command, *argv, "loss.name=none", "--launcher", "spawn", option, path
        )
        assert code == 2 and str(path) in err and option in err
    assert (tmp_path / "old.csv").read_text() == "old"
    # An evaluation that fails leaves no file.
    nowhere = [DEMO, "data.name=folder", f"data.root={tmp_path / 'nowhere'}", newest(small), *ALLOW]
    assert call(evaluate_command, *nowhere, "--out", tmp_path / "rows.csv")[0] == 3
    assert not (tmp_path / "rows.csv").exists()


def test_foreign_weights_are_evaluated_if_their_head_fits(
    small: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    """As a wrapped model saves them. With a head of another size predictions would be chance."""
    argv = words_of_evaluation(digits)
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
    assert (code, out) == (4, "")
    code, _, err = call(evaluate_command, *argv)
    assert code == 2 and "model.pretrained=true" in err


@pytest.mark.parametrize("key", ["model.checkpoint", "distill.teacher.checkpoint"])
def test_missing_weights_are_reported_with_their_key(
    digits: Path, tmp_path: Path, call: Callable, key: str
) -> None:
    teacher = (
        {"distill.kind": "soft", "distill.teacher.name": "helpers:plain"}
        if key.startswith("distill")
        else {}
    )
    argv = arguments(digits, tmp_path / "run", **teacher, **{key: "nowhere.pth"})
    code, _, err = call(train_command, *argv)
    assert code == 4 and err.startswith(f"{key}: ") and "nowhere.pth" in err
    if not teacher:
        assert call(evaluate_command, *argv[:-2])[2].startswith(f"{key}: ")
    code, _, err = call(evaluate_command, *argv[:-2], "lost.pth")
    assert code == 4 and "lost.pth" in err and key not in err


def test_predict_imports_the_modules_that_the_checkpoint_names(
    digits: Path, tmp_path: Path, call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = next((digits / "train" / "7").glob("*.jpg"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_names.py").write_text("")
    train_here(arguments(digits, tmp_path / "run", imports="[own_names]", train__max_steps=1))
    argv = [
        tmp_path / "run",
        image,
        "--allow-import",
        "own_names",
        "--allow-import",
        "helpers:plain",
    ]
    del sys.modules["own_names"]
    assert call(predict_command, *argv)[0] == 0
    assert sys.modules.pop("own_names").__file__ == str(tmp_path / "own_names.py")
    (tmp_path / "own_names.py").unlink()
    code, _, err = call(predict_command, *argv)
    assert code == 4 and "own_names" in err


# ---- ways to start


def test_dry_run_beside_a_run_says_what_resume_would_compare(
    digits: Path, tmp_path: Path, call: Callable
) -> None:
    words = arguments(digits, tmp_path / "run", train__max_steps=1)
    assert call(train_command, *words)[0] == 0
    before = contents(tmp_path)
    code, out, _ = call(train_command, *words, "--dry-run")
    assert code == 0 and "already holds a run, saved up to step 1" in out
    assert "nothing that --resume compares has changed" in out
    code, out, _ = call(train_command, *words, "seed=7", "--dry-run")
    assert code == 0 and "seed: 0 -> 7" in out
    assert contents(tmp_path) == before


def test_dry_run_creates_no_run_folder(digits: Path, tmp_path: Path, call: Callable) -> None:
    before = contents(digits)
    code, out, err = call(train_command, *arguments(digits, tmp_path / "run", "noisy"), "--dry-run")
    assert (code, err) == (0, "")
    assert "dry run: step 1 has loss " in out and "22 (11" in out
    assert list(tmp_path.iterdir()) == [] and contents(digits) == before


@pytest.mark.parametrize(("rho", "passes"), [("null", 1), (0.1, 2)])
def test_dry_run_with_sam_makes_both_passes(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rho: object, passes: int
) -> None:
    calls = mock.Mock(side_effect=training_loop.forward_backward)
    monkeypatch.setattr(training_loop, "forward_backward", calls)
    train_here([*arguments(digits, tmp_path, train__sam_rho=rho), "--dry-run"])
    assert calls.call_count == passes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"train.global_batch_size": 1000}, "warning: each epoch leaves out 438 of 1438 images"),
        ({"model.num_classes": 12}, "warning: the model has 12 outputs"),
        ({"schedule.warmup_epochs": 1, "train.epochs": 1}, "warning: the warm-up takes all epochs"),
        ({"model.head_only": True}, "warning: frozen parameters have random values"),
    ],
)
def test_config_that_is_rarely_wanted_is_a_warning(
    digits: Path, tmp_path: Path, call: Callable, changes: dict, named: str
) -> None:
    code, out, _ = call(
        train_command, *arguments(digits, tmp_path / "run", "noisy", **changes), "--dry-run"
    )
    assert code == 0 and named in out and out.count("warning: ") == 1, out


def test_resume_without_a_checkpoint_starts_from_scratch(
    digits: Path, small: Path, tmp_path: Path
) -> None:
    train_here([*arguments(digits, tmp_path / "run", "noisy", ema__decay=0.8), "--resume"])
    assert losses(tmp_path / "run") == losses(small)


def test_resume_of_a_finished_run_changes_nothing(
    digits: Path, tmp_path: Path, call: Callable
) -> None:
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


def test_resume_from_another_run_ends_in_the_same_bits(
    digits: Path, small: Path, tmp_path: Path, call: Callable
) -> None:
    before = contents(small)
    argv = arguments(digits, tmp_path / "run", "noisy", ema__decay=0.8)
    code, out, _ = call(
        train_command, *argv, "--resume-from", small / "checkpoints" / "step-0000011"
    )
    assert code == 0 and "step-0000011 at step 11" in out
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        assert (newest(tmp_path / "run") / name).read_bytes() == (
            newest(small) / name
        ).read_bytes(), name
    assert contents(small) == before


def test_line_of_a_resumed_epoch_says_how_many_steps_its_means_are_of(
    digits: Path, tmp_path: Path, call: Callable
) -> None:
    """Resumed in the middle of the first epoch of 11 steps; of the second, all are of this run."""
    first, second = tmp_path / "first", tmp_path / "second"
    train_here(arguments(digits, first, checkpoint__every_steps=7, checkpoint__keep_last=9))
    checkpoint = first / "checkpoints" / "step-0000007"
    code, out, _ = call(train_command, *arguments(digits, second), "--resume", checkpoint)
    expected = losses(first)
    assert code == 0
    assert re.findall(r"^epoch ./2  train loss (\S+), \S+ %(.*?)  val ", out, re.M) == [
        (f"{sum(expected[7:11]) / 4:.4f}", " in 4 steps"),
        (f"{sum(expected[11:]) / 11:.4f}", ""),
    ]


def test_mnist_config_trains_on_torchvision_files(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 40), ("t10k", 10)):
        labels, images = (
            bytes(i % 10 for i in range(count)),
            bytes(i % 256 for i in range(count * 28 * 28)),
        )
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">4i", 2051, count, 28, 28) + images
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels)
    small = [
        "train.global_batch_size=20",
        "train.epochs=1",
        "schedule.warmup_epochs=0",
        "data.num_workers=0",
    ]
    train_here(
        [
            str(Path(DEMO).with_name("mnist.yaml")),
            f"data.root={tmp_path}",
            *small,
            "--work-dir",
            str(tmp_path / "run"),
        ]
    )
    assert len(losses(tmp_path / "run")) == 2 and [
        r["images"] for r in evaluations(tmp_path / "run")
    ] == [10]
    state = json.loads((newest(tmp_path / "run") / "state.json").read_text())
    assert state["classes"][0] == "0 - zero" and len(state["classes"]) == 10
