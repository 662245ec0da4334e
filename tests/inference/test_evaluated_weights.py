"""Which weights `test.py` evaluates, which classes their outputs are, and outputs that are NaN. The
head of published weights, and its order.
"""

import json
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers import (
    REPOSITORY,
    arguments,
    before_classes,
    evaluations,
    fails,
    has_clear_class,
    newest,
    plain,
    run,
    single_rank,
    succeeds,
    train_here,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import ImageNetInfo
from torch import Tensor, nn
from torchvision.models import ResNet18_Weights
from torchvision.transforms.functional import pil_to_tensor

from imagenet_cls.checkpoint.format import METADATA, write_manifest
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.schema import Config, DistillConfig, ModelConfig, TeacherConfig
from imagenet_cls.data.classes import natural_key
from imagenet_cls.engine.stored_weights import open_published, open_weights
from imagenet_cls.engine.training_model import build_distillation_teacher, build_initial_model
from imagenet_cls.errors import CheckpointError, DataError
from imagenet_cls.extras.weights.publish import publish_command
from imagenet_cls.inference.load_weights import models_of_config
from imagenet_cls.inference.predictor import Predictor

ALLOW = ["--allow-import", "helpers:plain"]
IDS = ImageNetInfo("imagenet-1k").label_names()
CATEGORIES = ResNet18_Weights.DEFAULT.meta["categories"]
PRESENT = [7, 3, 999, 500, 41]  # outputs
FOLDER_NAMES = [
    name.replace(" ", "_") if output in PRESENT else name for output, name in enumerate(CATEGORIES)
]
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.fixture(scope="module")
def run_folder(train_on_digits: Callable[..., Path]) -> Path:
    """A run with an EMA whose results differ from those of the raw weights."""
    return train_on_digits(ema__decay=0.9, train__epochs=1)


@pytest.mark.parametrize(
    ("trained", "average"), [("state_dict", "state_dict_ema"), ("model", "model_ema")]
)
def test_both_kinds_of_weights_in_a_file_can_be_evaluated(
    run_folder: Path, tmp_path: Path, trained: str, average: str
) -> None:
    """And in a checkpoint that is named by model.checkpoint."""
    raw, ema = (
        f"{record['weights']}: top-1 {record['top1_pct']:.3f} %"
        for record in evaluations(run_folder)
    )
    states = [load_file(newest(run_folder) / f"{name}.safetensors") for name in ("model", "ema")]
    both, only_raw, only_ema = (tmp_path / name for name in ("both.pth", "raw.pth", "ema.pth"))
    torch.save(dict(zip((trained, average), states, strict=True)), both)
    torch.save({trained: states[0]}, only_raw)
    torch.save({average: states[1]}, only_ema)
    config, checkpoint = run_folder / "config.yaml", f"model.checkpoint={newest(run_folder)}"
    for expected, *words in (
        (ema, both),
        (ema, both, "--weights", "ema"),
        (ema, only_ema),
        (ema, checkpoint, "--weights", "ema"),
        (raw, both, "--weights", "raw"),
        (raw, only_raw),
        (raw, checkpoint, "--weights", "raw"),
    ):
        assert before_classes(succeeds(evaluate_command, config, *words))[-1].startswith(expected)
    fails(4, evaluate_command, config, only_raw, "--weights", "ema")
    fails(4, evaluate_command, config, only_ema, "--weights", "raw")


def test_single_checkpoint_is_used_with_the_better_weights_of_its_run(run_folder: Path) -> None:
    top1 = {record["weights"]: record["top1_pct"] for record in evaluations(run_folder)}
    assert top1["raw"] > top1["ema"]
    for path in (run_folder, run_folder / "checkpoints" / "best", newest(run_folder)):
        assert Predictor(path, allow_import=["helpers:plain"]).weights == "raw"
        assert "class (raw)" in succeeds(evaluate_command, path, *ALLOW)


def save_with_bias(state: dict[str, torch.Tensor], value: float, path: Path) -> None:
    """Write weights with this bias of class 3."""
    bias = state["5.bias"].clone()
    bias[3] = value
    torch.save(state | {"5.bias": bias}, path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_outputs_that_are_not_finite_are_an_error_with_their_number(
    run_folder: Path, tmp_path: Path, value: float
) -> None:
    raw = load_file(newest(run_folder) / "model.safetensors")
    words = [run_folder / "config.yaml", tmp_path / "weights.pth", "--out", tmp_path / "rows.csv"]
    save_with_bias(raw, value, tmp_path / "weights.pth")
    fails(4, evaluate_command, *words)
    assert not (tmp_path / "rows.csv").exists()
    both = {"state_dict": torch.load(tmp_path / "weights.pth"), "state_dict_ema": raw}
    torch.save(both, tmp_path / "weights.pth")
    fails(4, evaluate_command, *words[:2], "--weights", "raw")
    succeeds(evaluate_command, *words[:2])
    save_with_bias(raw, -torch.inf, tmp_path / "weights.pth")  # a class that is never predicted
    succeeds(evaluate_command, *words[:2])


# ---- weights with an output for each class of ImageNet


def classify_by_hand(folder: Path, outputs: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets of the images in `folder` by the network of `imagenet`. outputs: of each
    class.
    """
    network = plain(1000)
    network.load_state_dict(torch.load(folder.parent / "model.pth", weights_only=True))
    files = sorted(folder.rglob("*.png"))
    pixels = torch.stack([pil_to_tensor(Image.open(file)) for file in files]) / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    with torch.no_grad():
        logits = network((pixels - mean) / std)
    return logits, torch.tensor([outputs[file.parent.name] for file in files])


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model.pth`, a network that classifies about half of its images right, and 40 images in
    `ids`, the WordNet ids of five classes, `categories`, torchvision's names of them without
    spaces, and `others`.
    """
    root, draws = tmp_path_factory.mktemp("imagenet"), np.random.default_rng(0)
    torch.manual_seed(0)
    network = plain(1000)
    images = draws.integers(0, 256, (40, 16, 16, 3), np.uint8)
    for number, pixels in enumerate(images):
        output = PRESENT[number % 5]
        for kind, name in (
            ("ids", IDS[output]),
            ("categories", FOLDER_NAMES[output]),
            ("others", f"k{number % 5}"),
        ):
            folder = root / kind / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"ILSVRC2012_val_{number + 1:08d}.png")
    network[5].bias.data[PRESENT] += 0.5  # so that these classes are predicted
    torch.save(network.state_dict(), root / "model.pth")
    return root


def evaluation_of(imagenet: Path, kind: str, *more: str) -> list[str]:
    settings = {
        "data__name": "folder",
        "data__train": "absent",
        "data__val": ".",
        "data__val_fraction": "null",
    }
    config, *words = arguments(imagenet / kind, imagenet / "run", **settings, eval__resize_px=16)[
        :-2
    ]
    return [config, str(imagenet / "model.pth"), *words, "data.mean=null", "data.std=null", *more]


def assert_results(out: str, logits: torch.Tensor, targets: torch.Tensor) -> None:
    """test.py has printed the accuracy and the loss of these outputs."""
    assert has_clear_class(logits).all()
    top1 = 100 * (logits.argmax(1) == targets).float().mean()
    assert 0 < top1 < 100 and f"top-1 {top1:.3f} %" in out
    loss = torch.nn.functional.cross_entropy(logits, targets).item()
    assert float(re.findall(r"loss ([\d.]+)", out)[-1]) == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("kind", ["ids", "categories"])
def test_outputs_for_imagenet_are_matched_to_folders_of_some_classes(
    imagenet: Path, tmp_path: Path, kind: str
) -> None:
    names = {"ids": IDS, "categories": FOLDER_NAMES}[kind]
    logits, targets = classify_by_hand(
        imagenet / kind, {names[output]: output for output in PRESENT}
    )
    # The advice, and then the number that a plain loop gives.
    err = fails(4, evaluate_command, *evaluation_of(imagenet, kind))
    assert "model.num_classes=1000" in err
    words = evaluation_of(imagenet, kind, "model.num_classes=1000")
    out = succeeds(evaluate_command, *words, "--out", tmp_path / "rows.jsonl")
    assert_results(out, logits, targets)
    assert "class (" not in out  # a table of up to 50 classes
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["top"][0][0] for row in rows] == [
        names[output] for output in logits.argmax(1).tolist()
    ]
    # The outputs of other classes are left out.
    present = torch.full_like(logits, -torch.inf)
    present[:, PRESENT] = logits[:, PRESENT]
    out = succeeds(evaluate_command, *evaluation_of(imagenet, kind, "eval.classes=present"))
    assert_results(out, present, targets)
    assert "5 of 1000" in out


def test_outputs_for_imagenet_of_other_folders_are_an_error(imagenet: Path, tmp_path: Path) -> None:
    words = evaluation_of(imagenet, "others", "model.num_classes=1000")
    for more in ([], ["eval.classes=present"]):
        fails(4, evaluate_command, *evaluation_of(imagenet, "others", *more))
        assert "data.classes" in fails(3, evaluate_command, *words, *more)
    # As the error says: the first five outputs are these classes.
    (tmp_path / "classes.txt").write_text("k4\nk3\nk2\nk1\nk0\n")
    words.append(f"data.classes={tmp_path}/classes.txt")
    logits, targets = classify_by_hand(
        imagenet / "others", {f"k{4 - output}": output for output in range(5)}
    )
    out = succeeds(evaluate_command, *words)
    loss = torch.nn.functional.cross_entropy(logits, targets)
    assert f"loss {loss:.4f}" in out


def test_weights_of_a_run_keep_their_classes(
    run_folder: Path, digits: Path, tmp_path: Path
) -> None:
    """In `model.checkpoint`, too: other folders, of the same number, would give the accuracy of
    other classes.
    """
    for number, folder in enumerate(sorted((digits / "train").iterdir())):
        shutil.copytree(folder, tmp_path / "train" / f"class {number}")
    words = [run_folder / "config.yaml", f"model.checkpoint={run_folder}", "data.name=folder"]
    fails(3, evaluate_command, *words, f"data.root={tmp_path}", "data.val=train")


# ---- class folders that timm sorts in another order than torchvision


def natural_run(digits: Path, root: Path, names: list[str], **changes: object) -> list[str]:
    """Trains two steps on folders of these names. Returns the arguments of an evaluation."""
    (root / "train").mkdir(parents=True)
    for number, name in enumerate(names):
        (root / "train" / name).symlink_to(digits / "train" / str(number))
    settings: dict[str, object] = {"data__name": "folder", "data__val": "null"}
    settings |= {"data__val_fraction": 0.2, "train__max_steps": 2, **changes}
    words = arguments(root, root / "run", **settings)
    train_here(words)
    return words[:-2]


def result_of(*words: object) -> str:
    """The results that test.py prints, without the seconds."""
    return before_classes(succeeds(evaluate_command, *words))[-1].partition(" images in")[0]


FOLDERS = {
    "numbers": [f"class {number}" for number in range(1, 11)],
    "case": ["cat", "Dog", "eel", "Fox", "5²", "٣a", "a1b2", "a1b10", "A1b3", "#9"],
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_weights_without_classes_need_their_order(
    digits: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each order can be chosen as the error says."""
    words = natural_run(digits, tmp_path / "data", FOLDERS[kind])
    expected = result_of(*words, tmp_path / "data" / "run")
    state = load_file(newest(tmp_path / "data" / "run") / "model.safetensors")
    torch.save(state, tmp_path / "plain.pth")
    plain_order = sorted(FOLDERS[kind])
    natural = sorted(plain_order, key=natural_key)
    order = [plain_order.index(name) for name in natural]
    head = {name: state[name][order] for name in ("5.weight", "5.bias")}
    torch.save(state | head, tmp_path / "natural.pth")
    (tmp_path / "temporary #1").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary #1"))
    err = fails(4, evaluate_command, *words, tmp_path / "plain.pth")
    overrides = [shlex.split(found)[0] for found in re.findall(r"'?data\.classes=.*", err)]
    for file, override in zip(("plain.pth", "natural.pth"), overrides, strict=True):
        assert result_of(*words, tmp_path / file, override) == expected
    fails(4, evaluate_command, *words, f"model.checkpoint={tmp_path}/natural.pth")
    fails(4, evaluate_command, *words, tmp_path / "plain.pth", "--data", tmp_path / "data/train")


def test_copied_weights_of_a_run_state_their_classes(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a published folder, and in the folder of an older checkpoint."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = FOLDERS["numbers"]
    run = tmp_path / "data" / "run"
    vit = {"model.name": "vit_tiny_patch16_224", "model.kwargs": "{img_size: 16, depth: 1}"}
    classes = json.dumps(names)
    words = natural_run(
        digits, tmp_path / "data", names, data__classes=classes, **vit, ema__decay=0.5
    )
    words.remove(f"data.classes={classes}")
    expected = result_of(*words, run, "--weights", "raw")
    weights = newest(run) / "model.safetensors"
    copy = shutil.copy(weights, tmp_path / "copy")
    succeeds(publish_command, weights, tmp_path / "published")
    save_file(load_file(weights), tmp_path / "old.safetensors")
    fails(4, evaluate_command, *words, tmp_path / "old.safetensors")
    files = [copy, tmp_path / "published/model.safetensors"]
    for file in files:
        assert result_of(*words, file) == expected
    published = [f"model.name=local-dir:{tmp_path}/published", "model.pretrained=true"]
    assert result_of(*words, *published) == expected
    assert open_weights(newest(run) / "ema.safetensors").classes == names
    shutil.copy(tmp_path / "old.safetensors", weights)
    write_manifest(weights.parent)
    assert result_of(*words, weights) == expected


def test_malformed_statement_of_classes_is_an_error(tmp_path: Path) -> None:
    for text in ("{", '{"classes": 3}'):
        save_file({"weight": torch.zeros(1)}, tmp_path / "file", {METADATA: text})
        with pytest.raises(CheckpointError):
            open_weights(tmp_path / "file")


def test_example_counts_real_labels(imagenet: Path, tmp_path: Path) -> None:
    """The class of the highest output and another one, one wrong class, or none for each image."""
    rows, real = tmp_path / "rows.jsonl", tmp_path / "real.json"
    words = evaluation_of(imagenet, "ids", "model.num_classes=1000")
    succeeds(evaluate_command, *words, "--out", rows)
    lists: list[list[int]] = [[] for _ in range(50)]
    for row in map(json.loads, rows.read_text().splitlines()):
        number = int(Path(row["image"]).stem[-8:])
        lists[number - 1] = ([0, IDS.index(row["top"][0][0])], [0], [])[number % 3]
    real.write_text(json.dumps(lists))
    done = run([sys.executable, REPOSITORY / "examples" / "real_labels.py", rows, real])
    assert done.stdout == f"ReaL {100 * 13 / 27:.3f} % of 27\n", done.stderr


# ---- published weights, read from a file in place of a download

SYNONYMS = ImageNetInfo("imagenet-1k").label_descriptions()
SYNONYMS[517] = "crane2"  # in ILSVRC/imagenet-1k of the Hub, which makes the second crane unique
NUMBERS = sorted(str(number) for number in range(1000))
UNKNOWN = [f"class {number}" for number in range(1000)]
MEAN_STD = ([0.5] * 3, [0.5] * 3)

# Class names, and the outputs that belong to the first ones.
ORDERS: dict[str, tuple[Sequence[str], list[int]]] = {
    "ids": (IDS, [0, 1, 2]),
    "numbers": (NUMBERS, [0, 1, 10, 100]),
    "padded": (sorted(f"{number:04}" for number in range(1000)), [0, 1, 2]),
    "categories": (sorted(CATEGORIES), [CATEGORIES.index(name) for name in sorted(CATEGORIES)]),
    "underscores": (sorted(name.replace(" ", "_") for name in CATEGORIES), []),
    "synonyms": (SYNONYMS, [0, 1, 2]),
    "some": (IDS[500:510], [*range(500, 510), *range(500), *range(510, 1000)]),
}


@pytest.fixture(scope="module")
def source() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=1000).eval()


@pytest.fixture
def published(source: nn.Module, tmp_path: Path) -> ModelConfig:
    """timm reads its published weights from a file."""
    save_file(source.state_dict(), tmp_path / "published.safetensors")
    kwargs = {"pretrained_cfg_overlay": {"file": str(tmp_path / "published.safetensors")}}
    return ModelConfig("test_resnet", pretrained=True, num_classes=1000, kwargs=kwargs)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32))[0]


@pytest.mark.parametrize("name", ORDERS)
def test_published_outputs_are_put_in_the_order_of_the_classes(
    name: str, source: nn.Module, published: ModelConfig
) -> None:
    classes, order = ORDERS[name]
    config = Config(model=published)
    evaluated = models_of_config(config, open_published(published), classes).models["raw"]
    started, (message,) = build_initial_model(config, 1000, classes)
    expected = logits(source)[order]
    torch.testing.assert_close(logits(evaluated)[: len(order)], expected)
    torch.testing.assert_close(logits(started)[: len(order)], expected)
    torch.testing.assert_close(logits(evaluated).sort().values, logits(source).sort().values)
    assert ("in the order of" in message) == (
        name in ("numbers", "categories", "underscores", "some")
    )
    if name == "numbers":
        teacher = TeacherConfig("test_resnet", pretrained=True, kwargs=published.kwargs)
        config = Config(distill=DistillConfig("soft", teacher=teacher))
        built = build_distillation_teacher(config, 1000, classes, single_rank(), MEAN_STD)
        assert built is not None
        torch.testing.assert_close(logits(built.network)[: len(order)], expected)


@pytest.mark.parametrize(
    "classes",
    [
        UNKNOWN,
        [*IDS[:-1], "n00000000"],
        NUMBERS[:999],
        [*IDS[:-1], IDS[0]],
        [*CATEGORIES[::-1][:10], "0"],
    ],
)
def test_published_weights_with_unknown_classes_start_a_run_but_are_not_evaluated(
    classes: list[str], source: nn.Module, published: ModelConfig
) -> None:
    config = Config(model=published)
    with pytest.raises(DataError):
        models_of_config(config, open_published(published), classes)
    started, messages = build_initial_model(config, 1000, classes)
    torch.testing.assert_close(logits(started), logits(source))
    assert "head of the published weights is kept" in messages[1]


def test_published_weights_are_not_evaluated_with_a_new_head(
    digits: Path, tmp_path: Path, published: ModelConfig
) -> None:
    words = arguments(
        digits, tmp_path, "x", model__pretrained="true", **{"model.name": "test_resnet"}
    )[:-2]
    file = tmp_path / "published.safetensors"
    words.append(f"model.kwargs.pretrained_cfg_overlay.file={file}")
    assert "model.num_classes=1000" in fails(4, evaluate_command, *words)
    # ten digits are no classes of ImageNet
    fails(3, evaluate_command, *words, "model.num_classes=1000")
