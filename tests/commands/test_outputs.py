"""The files of a run, and test.py and predict.py on them."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from helpers import (
    DEMO,
    arguments,
    before_classes,
    call,
    edit_state,
    evaluations,
    fails,
    losses,
    newest,
    plain,
    records,
    saved_bytes,
    succeeds,
    train_here,
)
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchvision.transforms import functional as reference

from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.config.load import load_config
from imagenet_cls.extras.before_training.find_lr import find_lr_command
from imagenet_cls.extras.before_training.plot_schedule import plot_schedule_command
from imagenet_cls.extras.before_training.show_batch import show_batch_command
from imagenet_cls.extras.datasets.verify_data import verify_command
from imagenet_cls.extras.pages.report import report_command
from imagenet_cls.extras.sweep.command import sweep_command

SECRET = "do-not-write-this-down"
# A checkpoint uses no code but what is named here, or in the config.
ALLOW = ("--allow-import", "helpers:noisy")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# timm's resnet18 at 32 px, two steps, with all outputs of a run.
RESNET = {
    "model.name": "resnet18",
    "augment.size_px": 32,
    "eval.crop_px": 32,
    "train.max_steps": 2,
    "log.tensorboard": "true",
    "log.plots": "true",
    "ema.decay": 0.5,
    "optimizer.lr": 0.001,
}


@pytest.fixture(scope="module")
def resnet(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resnet") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_CLOUD_SECRET_KEY", SECRET)
        train_here(arguments(digits, folder, **RESNET))
    return folder


@pytest.fixture(scope="module")
def small(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' own network, trained for two epochs, with an average."""
    folder = tmp_path_factory.mktemp("small") / "run"
    train_here(arguments(digits, folder, "noisy", ema__decay=0.8))
    return folder


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
    assert records(small, "train")[-1].keys() >= {
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
    resnet: Path, digits: Path
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
    overrides = arguments(digits, resnet, **RESNET)[1:-2]
    assert load_config(resnet / "config.yaml").config == load_config(DEMO, overrides).config
    env = json.loads((resnet / "env.json").read_text())
    assert env["versions"].keys() >= {"torch", "timm", "torchvision", "python", "imagenet_cls"}
    assert env["variables"].get("OMP_NUM_THREADS")
    for name, content in contents(resnet).items():
        assert SECRET.encode() not in content, name


# ---- use of weights


def test_predictions_equal_those_of_timm(resnet: Path, digits: Path) -> None:
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
        found = torch.tensor([row["logits"] for row in rows])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for row, logits in zip(rows, found, strict=True):
            assert len(row["top"]) == 5
            assert row["top"][0][0] == str(int(logits.argmax()))
            assert row["top"][0][1] == pytest.approx(float(logits.softmax(0).max()), abs=1e-6)


def test_predict_takes_files_folders_and_patterns(small: Path, digits: Path) -> None:
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
    err = fails(4, predict_command, tmp_path, good)
    assert str(tmp_path) in err
    err = fails(2, predict_command, small, good, "--device", "cuda:77")


def test_predict_with_bad_images_prints_the_good_ones(
    small: Path, digits: Path, tmp_path: Path
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


def test_predict_takes_a_file_of_a_checkpoint(small: Path, digits: Path) -> None:
    image = next((digits / "train" / "7").glob("*.jpg"))
    for weights, file in (("raw", "model.safetensors"), ("ema", "ema.safetensors")):
        by_file = call(predict_command, newest(small) / file, image, *ALLOW)
        assert by_file[0] == 0
        assert by_file == call(predict_command, newest(small), image, "--weights", weights, *ALLOW)


def test_escape_sequences_of_a_checkpoint_do_not_reach_the_terminal(
    small: Path, digits: Path, tmp_path: Path
) -> None:
    checkpoint = Path(shutil.copytree(newest(small), tmp_path / "checkpoint"))
    classes = [f"\x1b[31m\n{number}\x9b" for number in range(10)]
    edit_state(checkpoint, lambda state: state.update(classes=classes, step="\x1b]0;title\x07"))
    image = next((digits / "train" / "7").glob("*.jpg"))
    code, out, _ = call(predict_command, checkpoint, image, *ALLOW)
    assert (
        code == 0
        and len(out.splitlines()) == 1
        and "\\x1b[31m\\n7\\x9b" in out
        and "\x1b" not in out
    )
    words = arguments(digits, tmp_path, "noisy")[:-2]
    code, out, err = call(evaluate_command, *words, checkpoint)
    assert code == 3 and "\\x1b" in err and "\x1b" not in out + err


def test_run_folder_is_evaluated_with_its_own_config(small: Path, tmp_path: Path) -> None:
    expected = call(evaluate_command, small / "config.yaml", small)
    found = call(evaluate_command, small, *ALLOW)
    assert [line.partition("  over ")[0] for line in found[1].splitlines()] == [
        line.partition("  over ")[0] for line in expected[1].splitlines()
    ]
    # which allows it
    succeeds(evaluate_command, newest(small), "model.name=helpers:noisy")
    code, out, err = call(evaluate_command, small)
    assert (code, out) == (4, "") and "--allow-import helpers:noisy" in err
    fails(2, evaluate_command, tmp_path)


def test_evaluation_of_a_checkpoint_equals_that_of_the_run(small: Path, digits: Path) -> None:
    at = {(r["step"], r["weights"]): r for r in evaluations(small)}
    best = max(at.values(), key=lambda record: record["top1_pct"])["step"]
    argv = arguments(digits, small, "noisy", ema__decay=0.8)[:-2]
    for checkpoint, step in (
        (small / "checkpoints" / "step-0000011", 11),
        (newest(small), 22),
        (small, best),
    ):
        out = succeeds(evaluate_command, *argv, checkpoint)
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


@pytest.mark.parametrize(("classes", "has_table"), [(50, True), (51, False)])
def test_table_of_classes_is_for_at_most_50_classes(
    tmp_path: Path, classes: int, has_table: bool
) -> None:
    torch.save(plain(classes).state_dict(), tmp_path / "a.pth")
    images = f"data.kwargs={{num_classes: {classes}, val_images: 64, size_px: 16}}"
    words = [DEMO, tmp_path / "a.pth", "model.name=helpers:plain", "data.name=synthetic", images]
    words += ["augment.size_px=16", "eval.crop_px=16", "--out", tmp_path / "rows.csv"]
    out = succeeds(evaluate_command, *words)
    assert ("class (" in out) == has_table


def test_run_folder_in_place_of_a_config_is_answered_with_its_config(small: Path) -> None:
    err = fails(2, train_command, small)
    assert f"{small}/config.yaml" in err


def test_weights_of_an_evaluation_its_rows_and_its_report(small: Path, tmp_path: Path) -> None:
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
            rows = list(csv.DictReader(file))
        assert len({row["image"] for row in rows}) == len(rows) == 359
        assert all(Path(row["image"]).parent.name == row["target"] for row in rows)
        hits[weights] = sum(row["target"] == row["class_1"] for row in rows)
        report = json.loads((out / "report.json").read_text())
        assert report["weights"] == (weights or best) and report["correct"] == hits[weights]
    assert hits[None] == hits[best] > hits[other]


def test_evaluation_that_differs_from_the_runs_is_reported(small: Path, digits: Path) -> None:
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
    out = succeeds(evaluate_command, small / "config.yaml", small, "data.val_fraction=0.5")
    assert notes(out)[0].startswith("data.val_fraction: 0.5, and 0.2")


def test_predictions_file_that_cannot_be_written_is_an_error_before_the_evaluation(
    small: Path, digits: Path, tmp_path: Path
) -> None:
    argv = [DEMO, f"data.root={digits}", "data.num_workers=0", newest(small)]
    (tmp_path / "old.csv").write_text("old")
    for path in (tmp_path / "none" / "x.csv", tmp_path / "old.csv", tmp_path / "old.csv" / "x.csv"):
        code, out, err = call(evaluate_command, *argv, "--out", path)
        assert (code, out) == (2, "") and str(path) in err
    # Before the names of components are checked, and so before ranks start.
    for option in ("--out", "--report"):
        path = tmp_path / "old.csv"
        err = fails(
            2, evaluate_command, *argv, "loss.name=none", "--launcher", "spawn", option, path
        )
        assert str(path) in err and option in err
    assert (tmp_path / "old.csv").read_text() == "old"
    # An evaluation that fails leaves no file.
    nowhere = [DEMO, "data.name=folder", f"data.root={tmp_path / 'nowhere'}", newest(small), *ALLOW]
    fails(3, evaluate_command, *nowhere, "--out", tmp_path / "rows.csv")
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize("key", ["model.checkpoint", "distill.teacher.checkpoint"])
def test_missing_weights_are_reported_with_their_key(
    digits: Path, tmp_path: Path, key: str
) -> None:
    words = arguments(digits, tmp_path / "run")
    if key.startswith("distill"):
        words += ["distill.kind=soft", "distill.teacher.name=helpers:plain"]
    err = fails(4, train_command, *words, f"{key}=nowhere.pth")
    assert err.startswith(f"{key}: ") and "nowhere.pth" in err


def test_missing_weights_of_an_evaluation(digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path / "run")[:-2]
    err = fails(2, evaluate_command, *words)
    assert "model.pretrained=true" in err
    words.append("model.checkpoint=nowhere.pth")
    assert call(evaluate_command, *words)[2].startswith("model.checkpoint: ")
    assert "lost.pth" in fails(4, evaluate_command, *words[:-1], "lost.pth")


# ---- ways to start


def test_dry_run_beside_a_run_says_what_resume_would_compare(digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path / "run", train__max_steps=1)
    succeeds(train_command, *words)
    before = contents(tmp_path)
    out = succeeds(train_command, *words, "--dry-run")
    assert "already holds a run, saved up to step 1" in out
    assert "nothing that --resume compares has changed" in out
    out = succeeds(train_command, *words, "seed=7", "--dry-run")
    assert "seed: 0 -> 7" in out and "would be an error" in out
    out = succeeds(train_command, *words, "seed=7", "--dry-run", "--allow-change", "seed")
    assert "seed: 0 -> 7" in out and "would be an error" not in out
    assert contents(tmp_path) == before


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
    digits: Path, tmp_path: Path, changes: dict, named: str
) -> None:
    out = succeeds(
        train_command, *arguments(digits, tmp_path / "run", "noisy", **changes), "--dry-run"
    )
    assert named in out and out.count("warning: ") == 1, out


def test_resume_without_a_checkpoint_starts_from_scratch(
    digits: Path, small: Path, tmp_path: Path
) -> None:
    train_here([*arguments(digits, tmp_path / "run", "noisy", ema__decay=0.8), "--resume"])
    assert losses(tmp_path / "run") == losses(small)


def test_resume_of_a_finished_run_changes_nothing(digits: Path, tmp_path: Path) -> None:
    argv = arguments(digits, tmp_path / "run")
    train_here(argv)
    before = contents(tmp_path / "run" / "checkpoints")
    out = succeeds(train_command, *argv, "--resume")
    assert "at step 22" in out and "done" in out
    assert contents(tmp_path / "run" / "checkpoints") == before
    assert len(losses(tmp_path / "run")) == 22 and len(evaluations(tmp_path / "run")) == 2


def test_resume_from_another_run_ends_in_the_same_bits(
    digits: Path, small: Path, tmp_path: Path
) -> None:
    before = contents(small)
    argv = arguments(digits, tmp_path / "run", "noisy", ema__decay=0.8)
    checkpoint = small / "checkpoints" / "step-0000011"
    out = succeeds(train_command, *argv, "--resume-from", checkpoint)
    assert "step-0000011 at step 11" in out
    # All steps of the second epoch are of this run.
    assert re.search(r"^epoch 2/2  train loss \S+, \S+ %  val ", out, re.M)
    assert saved_bytes(tmp_path / "run") == saved_bytes(small)
    assert contents(small) == before


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        (plot_schedule_command, "a.png", ["demo", "--images", "1797"]),
        (show_batch_command, "a.png", ["demo"]),
        (find_lr_command, "a.png", ["demo"]),
        (report_command, "a.html", ["run"]),
        (report_command, "report.html", ["run", "run2"]),
        (verify_command, "labels.csv", ["photos"]),
        (verify_command, "photos/a/0.png", ["photos"]),
        (sweep_command, "sweep/table.csv", ["demo", "seed=0"]),
    ],
)
def test_file_of_the_user_is_not_replaced(
    command: Callable,
    name: str,
    words: list[str],
    call: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "run2", "photos/a", "sweep"):
        (tmp_path / folder).mkdir(parents=True)
    for run in ("run", "run2"):
        (tmp_path / run / "metrics.jsonl").touch()
    Image.new("RGB", (8, 8)).save("photos/a/0.png")
    file = tmp_path / name
    if not file.exists():
        file.write_text("mine")
    content = file.read_bytes()
    out = {"sweep/table.csv": ["--out", "sweep"], "report.html": []}.get(name, ["--out", name])
    assert call(command, *words, *out)[0] == 2
    assert file.read_bytes() == content


def test_earlier_picture_and_list_are_replaced(
    tmp_path: Path, call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.png").touch()
    for _ in range(2):
        words = ["demo", "--images", "1797", "--out", "a.png"]
        assert call(plot_schedule_command, *words)[0] == 0
    Path("photos").mkdir()
    Path("photos/a.jpg").write_text("none")
    for _ in range(2):
        assert call(verify_command, "photos")[0] == 3
