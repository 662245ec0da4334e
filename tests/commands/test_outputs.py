"""The files of a run, and test.py and predict.py on them."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import timm
import torch
from helpers import (
    DEMO,
    altered,
    arguments,
    before_classes,
    call,
    evaluations,
    fails,
    losses,
    newest,
    saved_bytes,
    succeeds,
    train_here,
    write_files,
)
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms import functional as reference

from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.config.load import load_config
from imagenet_cls.extras.before_training.find_lr import find_lr_command
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
def resnet(train_on_digits: Callable[..., Path]) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_CLOUD_SECRET_KEY", SECRET)
        return train_on_digits(**RESNET)


def words_of_small(digits: Path, folder: Path) -> list[str]:
    """The tests' own network, trained for two epochs, with an average."""
    return arguments(digits, folder, "noisy", ema__decay=0.8)


@pytest.fixture(scope="module")
def small(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "run"
    train_here(words_of_small(digits, folder))
    return folder


@pytest.fixture(scope="module")
def sevens(digits: Path) -> list[Path]:
    return sorted((digits / "train" / "7").glob("*.jpg"))


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def images_in(printed: str) -> list[str]:
    """The names before the predictions in the lines of predict.py."""
    return [line.partition(": ")[0] for line in printed.splitlines()]


# ---- the run folder


def test_run_folder_holds_config_environment_plots_and_no_secret(
    resnet: Path, digits: Path
) -> None:
    names = {".job", ".lock", "config.yaml", "env.json", "metrics.jsonl", "classes.json"}
    names |= {"tensorboard", "checkpoints", "plots", "logs"}
    assert {path.name for path in resnet.iterdir()} == names
    of_classes = json.loads((resnet / "classes.json").read_text())["raw"]
    last = [record for record in evaluations(resnet) if record["weights"] == "raw"][-1]
    assert fmean(of_classes["class_pct"]) == pytest.approx(last["balanced_accuracy_pct"])
    assert sum(of_classes["class_images"]) == last["images"]
    overrides = arguments(digits, resnet, **RESNET)[1:-2]
    assert load_config(resnet / "config.yaml").config == load_config(DEMO, overrides).config
    assert not any(SECRET.encode() in content for content in contents(resnet).values())


# ---- use of weights


def test_predictions_equal_those_of_timm(resnet: Path, digits: Path) -> None:
    """timm, Pillow, and torchvision's to_tensor and normalize against predict.py, which normalizes
    in another order.
    """
    images = [sorted((digits / "train" / name).glob("*.jpg"))[3] for name in ("0", "4", "9")]
    tensors = [reference.to_tensor(Image.open(path).convert("RGB")) for path in images]
    pixels = torch.stack([reference.normalize(tensor, MEAN, STD) for tensor in tensors])
    checkpoint = newest(resnet)
    average = checkpoint / "ema.safetensors"
    for file, words in (
        (checkpoint / "model.safetensors", [checkpoint, "--weights", "raw"]),
        (average, [average]),
    ):
        model = timm.create_model("resnet18", num_classes=10).eval()
        model.load_state_dict(load_file(file), strict=True)
        with torch.no_grad():
            expected = model(pixels)
        _, out, _ = call(predict_command, *words, *images, "--json", "--logits")
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["image"] for row in rows] == list(map(str, images))
        found = torch.tensor([row["logits"] for row in rows])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        top = [[int(name) for name, _ in row["top"]] for row in rows]
        assert top == found.topk(5).indices.tolist()
        shares = torch.tensor([row["top"][0][1] for row in rows])
        torch.testing.assert_close(shares, found.softmax(dim=1).amax(dim=1))


def test_predict_takes_files_folders_and_patterns(small: Path, sevens: list[Path]) -> None:
    folder = sevens[0].parent
    words = [small, folder, folder / "*0.jpg", sevens[1], "--top", "2", *ALLOW]
    matches = [path for path in sevens if path.stem.endswith("0")]
    expected = list(map(str, [*sevens, *matches, sevens[1]]))
    assert images_in(call(predict_command, *words)[1]) == expected
    rows = list(csv.reader(call(predict_command, *words, "--csv")[1].splitlines()))
    assert rows[0] == ["image", "class_1", "probability_1", "class_2", "probability_2"]
    assert [row[0] for row in rows[1:]] == expected
    assert sum(row[1] == "7" for row in rows) > len(rows) / 2  # it has learned something


def test_predict_names_bad_arguments_and_prints_the_good_images(
    small: Path, sevens: list[Path], tmp_path: Path
) -> None:
    bad = [tmp_path / f"{number}.jpg" for number in range(3)]
    for path in bad:
        path.write_text("not an image")
    (tmp_path / "none").mkdir()
    for path in (bad[0], tmp_path / "nowhere.jpg", tmp_path / "none", tmp_path / "*.png"):
        assert str(path) in fails(3, predict_command, small, path, *ALLOW)
    good = sevens[:40]  # two batches
    code, out, err = call(predict_command, small, *good[:1], *bad, *good[1:], *ALLOW)
    assert code == 3 and images_in(out) == list(map(str, good))
    assert [str(path) in err for path in bad] == [True, True, False]
    assert str(tmp_path) in fails(4, predict_command, tmp_path, sevens[0])
    fails(2, predict_command, small, sevens[0], "--device", "cuda:77")


def test_escape_sequences_of_a_checkpoint_do_not_reach_the_terminal(
    small: Path, digits: Path, sevens: list[Path], tmp_path: Path
) -> None:
    classes = [f"\x1b[31m\n{number}\x9b" for number in range(10)]
    odd = {"classes": classes, "step": "\x1b]0;title\x07"}
    checkpoint = altered(newest(small), tmp_path / "odd", lambda state: state.update(odd))
    code, out, _ = call(predict_command, checkpoint, sevens[0], *ALLOW)
    assert code == 0 and len(out.splitlines()) == 1
    assert "\\x1b[31m\\n7\\x9b" in out and "\x1b" not in out
    err = fails(3, evaluate_command, *arguments(digits, tmp_path, "noisy")[:-2], checkpoint)
    assert "\\x1b" in err and "\x1b" not in err


def test_run_folder_is_evaluated_with_its_own_config(small: Path, tmp_path: Path) -> None:
    outs = [
        re.sub(r"  over .*", "", succeeds(evaluate_command, *words))
        for words in ((small, *ALLOW), (small / "config.yaml", small))
    ]
    assert outs[0] == outs[1]
    succeeds(evaluate_command, newest(small), "model.name=helpers:noisy")  # which allows it
    assert "--allow-import helpers:noisy" in fails(4, evaluate_command, small)
    fails(4, evaluate_command, tmp_path)
    assert f"{small}/config.yaml" in fails(2, train_command, small)


def test_results_of_an_evaluation_are_those_of_the_run(small: Path, tmp_path: Path) -> None:
    """By default the rows and the report are of the weights that predict.py uses: those of the best
    result.
    """
    best = max(evaluations(small), key=lambda record: record["top1_pct"])
    records = {(record["step"], record["weights"]): record for record in evaluations(small)}
    other = {"raw": "ema", "ema": "raw"}[best["weights"]]
    for source, step, described, options in (
        (small, best["step"], best["weights"], []),
        (small / "checkpoints/step-0000011", 11, other, ["--weights", other]),
    ):
        out = tmp_path / described
        files = ["--out", f"{out}.csv", "--results", f"{out}.json", "--report", f"{out}.html"]
        succeeds(evaluate_command, source, *ALLOW, *files, *options)
        results = json.loads(Path(f"{out}.json").read_text())
        assert f" images, {described} weights" in Path(f"{out}.html").read_text()
        assert len(results) == (1 if options else 2)
        for weights, result in results.items():
            record = records[step, weights] | {"seconds": result["seconds"]}
            assert record | result == record
        rows = list(csv.DictReader(Path(f"{out}.csv").read_text().splitlines()))
        hits = sum(row["target"] == row["class_1"] for row in rows)
        assert (len(rows), 100 * hits / 359) == (359, pytest.approx(results[described]["top1_pct"]))


def test_evaluation_that_differs_from_the_runs_is_reported(
    small: Path, digits: Path, tmp_path: Path
) -> None:
    """The config's values are used, and each difference is named; there is none with the run's own
    config.
    """

    def keys(*words: Any) -> list[str]:
        lines = before_classes(succeeds(evaluate_command, *words))[2:]
        notes = [line for line in lines if line[:5] not in ("raw: ", "ema: ")]
        return [re.split(r": | as ", line)[0] for line in notes]

    bare = [DEMO, f"data.root={digits}", "data.num_workers=0", *ALLOW, small]
    (tmp_path / "bad.txt").write_text(str(next(digits.rglob("*.jpg"))))
    bare.append(f"data.exclude={tmp_path}/bad.txt")
    data, *found = keys(*bare, "eval.interpolation=bicubic", "data.mean=[0.5,0.5,0.5]")
    own = small / "config.yaml"
    assert data == "data.exclude"
    assert found == ["eval.crop_px", "eval.interpolation", "model.name", "data.mean"]
    assert keys(own, small, "eval.batch_size=100") == []


def test_predictions_file_that_cannot_be_written_is_an_error_before_the_evaluation(
    small: Path, digits: Path, tmp_path: Path
) -> None:
    words = [DEMO, f"data.root={digits}", "data.num_workers=0", newest(small)]
    old = tmp_path / "old.csv"
    old.write_text("old")
    for path in (tmp_path / "none" / "x.csv", old, old / "x.csv"):
        assert str(path) in fails(2, evaluate_command, *words, "--out", path)
    same = tmp_path / "same.json"
    fails(2, evaluate_command, *words, "--out", same, "--results", same)
    # Before the names of components are checked, and so before ranks start.
    for option in ("--out", "--report"):
        more = ["loss.name=none", "--launcher", "spawn", option, old]
        assert str(old) in fails(2, evaluate_command, *words, *more)
    assert old.read_text() == "old"
    # An evaluation that fails leaves no file.
    nowhere = [DEMO, "data.name=folder", f"data.root={tmp_path / 'nowhere'}", newest(small), *ALLOW]
    fails(3, evaluate_command, *nowhere, "--out", tmp_path / "rows.csv")
    assert not (tmp_path / "rows.csv").exists()


def test_missing_weights_of_an_evaluation_are_named(digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path)[:-2]
    assert "model.pretrained=true" in fails(2, evaluate_command, *words)
    for lost in ("model.checkpoint=lost.pth", "lost.pth"):
        assert "lost.pth" in fails(4, evaluate_command, *words, lost)


# ---- ways to start


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"train.global_batch_size": 1000}, "438 of 1438 images"),
        ({"model.head_only": True}, "frozen parameters"),
    ],
)
def test_config_that_is_rarely_wanted_is_a_warning(
    digits: Path, tmp_path: Path, changes: dict, named: str
) -> None:
    words = arguments(digits, tmp_path / "run", "noisy", **changes)
    (warning,) = re.findall("warning: .*", succeeds(train_command, *words, "--dry-run"))
    assert named in warning


def test_dry_run_whose_loss_is_not_finite_exits_with_6(digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path / "run", loss__class_weights=[0] * 10)
    fails(6, train_command, *words, "--dry-run")


def test_resume_of_a_finished_run_changes_nothing(
    digits: Path, small: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(small, tmp_path / "run", symlinks=True))
    succeeds(train_command, *words_of_small(digits, copy), "--resume")
    assert contents(copy / "checkpoints") == contents(small / "checkpoints")
    assert len(losses(copy)) == 22 and len(evaluations(copy)) == 4


def test_resume_from_another_run_ends_in_the_same_bits(
    digits: Path, small: Path, tmp_path: Path
) -> None:
    before = contents(small)
    words = words_of_small(digits, tmp_path / "run")
    checkpoint = small / "checkpoints" / "step-0000011"
    succeeds(train_command, *words, "--resume-from", checkpoint)
    assert saved_bytes(tmp_path / "run") == saved_bytes(small)
    assert contents(small) == before


# ---- files of the user


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        (show_batch_command, "a.png", "demo --out a.png"),
        (find_lr_command, "a.png", "demo --out a.png"),
        (report_command, "report.html", "run run2"),
        (evaluate_command, "a.html", "demo run --report a.html"),
        (verify_command, "labels.csv", "photos --out labels.csv"),
        (verify_command, "photos/a/0.png", "photos --out photos/a/0.png"),
        (sweep_command, "sweep/table.csv", "demo seed=0 --out sweep"),
    ],
)
def test_file_of_the_user_is_not_replaced(
    command: Callable, name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, {"run/metrics.jsonl": "", "run2/metrics.jsonl": "", "sweep/a": ""})
    for label in "ab":
        Path("photos", label).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (8, 8)).save(f"photos/{label}/{number}.png")
    file = Path(name)
    if not file.exists():
        file.write_text("mine")
    before = file.read_bytes()
    fails(2, command, *words.split())
    assert file.read_bytes() == before


def test_earlier_picture_is_replaced(digits: Path, tmp_path: Path) -> None:
    for _ in range(2):
        succeeds(show_batch_command, "demo", f"data.root={digits}", "--out", tmp_path / "a.png")
