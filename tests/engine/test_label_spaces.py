"""Evaluation and training on other classes than a folder has: some of them, numbered ones, a list,
ReaL labels.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import REPOSITORY, arguments, before_classes, evaluations, plain, run, train_here
from PIL import Image
from timm.data import ImageNetInfo

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.classes import classes_of_outputs, match_classes
from imagenet_cls.data.datasets import DataSets, has_training_part, open_datasets
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.errors import DataError

WNIDS = ImageNetInfo("imagenet-1k").label_names()
PRESENT = [7, 3, 999, 500, 41]
NAMES = list("abcdefghij")


def in_parts(train: Any, val: Any = "val", **changes: Any) -> dict[str, Any]:
    return {
        "data__name": "folder",
        "data__train": train,
        "data__val": val,
        "data__val_fraction": "null",
        **changes,
    }


@pytest.fixture(scope="module")
def letters(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as the classes a to j in `train`, those of b, e and i in `some`, and all as 0 to 9 in
    `numbered`.
    """
    root = tmp_path_factory.mktemp("letters")
    for number, name in enumerate(NAMES):
        files = sorted((digits / "train" / str(number)).iterdir())
        for part, folder, chosen in (
            ("train", name, files[10:50]),
            ("some", name, files[:10] if name in "bei" else []),
            ("numbered", str(number), files[:3]),
        ):
            for file in chosen:
                (root / part / folder).mkdir(parents=True, exist_ok=True)
                shutil.copy(file, root / part / folder)
    return root


@pytest.fixture(scope="module")
def trained(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    train_here(arguments(letters, folder, **in_parts("train", "some", eval__classes="present")))
    return folder


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images of 16 px of five of ImageNet's classes in `val`; `model.pth`, a network with 1,000
    outputs.
    """
    root, draws = tmp_path_factory.mktemp("imagenet"), np.random.default_rng(0)
    for number in range(40):
        folder = root / "val" / WNIDS[PRESENT[number % 5]]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"ILSVRC2012_val_{number + 1:08d}.png")
    torch.manual_seed(0)
    torch.save(plain(1000).state_dict(), root / "model.pth")
    return root


def logits_by_hand(root: Path) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Of `imagenet`: logits, targets, and the number of each image."""
    model = plain(1000)
    model.load_state_dict(torch.load(root / "model.pth", weights_only=True))
    files = sorted((root / "val").rglob("*.png"))
    images = (
        torch.stack(
            [torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files]
        )
        / 255
    )
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    with torch.no_grad():
        logits = model((images - mean) / std)
    return (
        logits,
        torch.tensor([WNIDS.index(file.parent.name) for file in files]),
        [int(f.stem[-8:]) for f in files],
    )


def words_of_test(imagenet: Path, *more: str) -> list[str]:
    changes = in_parts("train", eval__resize_px=16, eval__classes="present")
    config, *words = arguments(imagenet, imagenet / "run", **changes)[:-2]
    return [config, str(imagenet / "model.pth"), *words, "data.mean=null", "data.std=null", *more]


def test_outputs_of_absent_classes_are_ignored_without_a_training_folder(
    imagenet: Path, call: Callable
) -> None:
    rows = imagenet / "rows.jsonl"
    rows.unlink(missing_ok=True)
    code, out, _ = call(evaluate_command, *words_of_test(imagenet, "--out", rows))
    logits, targets, _ = logits_by_hand(imagenet)
    masked = torch.full_like(logits, -torch.inf)
    masked[:, PRESENT] = logits[:, PRESENT]
    hits = masked.argmax(1) == targets
    loss = torch.nn.functional.cross_entropy(masked, targets)
    assert code == 0 and "classes: 5 of 1000" in out and "over 40 images" in out
    assert f"top-1 {100 * hits.float().mean():.3f} %  top-5 100.000 %  loss {loss:.4f}" in out
    assert hits.sum() > (logits.argmax(1) == targets).sum()
    names = {
        name
        for line in rows.read_text().splitlines()
        for name, share in json.loads(line)["top"]
        if share > 0
    }
    assert names == {WNIDS[number] for number in PRESENT}


def test_classes_of_outputs_are_imagenets_without_a_training_folder(
    imagenet: Path, letters: Path
) -> None:
    def classes(found: list[str], *changes: str, root: Path = imagenet) -> list[str]:
        words = [f"data.root={root}", "data.train=train", *changes]
        config = load_config("resnet50", words).config
        return list(classes_of_outputs(config, tuple(found), has_training_part(config.data)))

    numbers, five = sorted(map(str, range(1000))), [WNIDS[number] for number in PRESENT]
    assert classes(numbers) == classes(five, "eval.classes=present") == WNIDS
    assert classes(five) == five and classes(["cat"], "eval.classes=present") == ["cat"]
    # the training folder names the classes
    assert classes(five, "eval.classes=present", root=letters) == five
    of_22k = classes(five, "eval.classes=present", "model.num_classes=21841")
    assert of_22k == ImageNetInfo("imagenet-22k").label_names()


def test_missing_classes_are_an_error_that_names_the_key(
    letters: Path, tmp_path: Path, call: Callable
) -> None:
    code, _, err = call(
        train_command, *arguments(letters, tmp_path / "run", **in_parts("train", "some"))
    )
    assert code == 3 and "eval.classes=present" in err and "7 of 10" in err


def test_run_records_the_classes_that_are_present(
    trained: Path, letters: Path, call: Callable
) -> None:
    records = evaluations(trained)
    assert {(record["classes"], record["images"]) for record in records} == {("3 of 10", 30)}
    code, out, _ = call(evaluate_command, trained, "--allow-import", "helpers:plain")
    assert (
        code == 0 and f"top-1 {records[-1]['top1_pct']:.3f} %" in out and "classes: 3 of 10" in out
    )
    # The checkpoint names its classes, so the training folder is not needed.
    words = ["data.train=absent", "--allow-import", "helpers:plain"]
    again = call(evaluate_command, trained, *words)[1]
    # not the seconds
    results = [before_classes(text)[-1].partition(" in ")[0] for text in (again, out)]
    assert results[0] == results[1]
    code, _, err = call(evaluate_command, trained, *words, "eval.classes=all")
    assert code == 3 and "eval.classes=present" in err


def test_numbered_folders_are_the_classes_by_position(
    trained: Path, letters: Path, call: Callable
) -> None:
    assert match_classes(["0", "1", "10", *"23456789"], [*NAMES, "k"], "val") == [
        0,
        1,
        10,
        *range(2, 10),
    ]
    assert match_classes(["1", "0"], ["0", "1"], "val") == [1, 0]  # names, not numbers
    renamed = [f"data.val={letters}/renamed", "--allow-import", "helpers:plain", "eval.classes=all"]
    shutil.rmtree(letters / "renamed", ignore_errors=True)
    shutil.copytree(letters / "numbered", letters / "renamed")
    for number, name in enumerate(NAMES):
        (letters / "renamed" / str(number)).rename(letters / "renamed" / name)
    numbered = [f"data.val={letters}/numbered", *renamed[1:]]
    for train in ("train", "absent"):
        outs = [
            call(evaluate_command, trained, f"data.train={train}", *words)
            for words in (renamed, numbered)
        ]
        top1 = [out.partition("top-1 ")[2].partition("  over")[0] for _, out, _ in outs]
        assert [code for code, *_ in outs] == [0, 0] and top1[0] == top1[1] and top1[0]


def names(source: ImageSource | None) -> list[tuple[str, int]]:
    assert source is not None
    return [(source.name(i).split("/")[-2], source.load(i)[1]) for i in range(len(source))]


@pytest.mark.parametrize("kind", ["list", "file"])
@pytest.mark.parametrize("val", ["numbered", "train", None])
def test_data_classes_selects_and_orders(
    letters: Path, tmp_path: Path, kind: str, val: str | None
) -> None:
    (tmp_path / "classes.txt").write_text("h\nb\nd\n")
    chosen: Any = ["h", "b", "d"] if kind == "list" else str(tmp_path / "classes.txt")
    data = DataConfig(
        root=str(letters), train="train", val=val, classes=chosen, val_fraction=None if val else 0.2
    )
    if val == "numbered":
        with pytest.raises(DataError, match=r"data\.classes"):
            open_datasets(data)
        return
    opened = open_datasets(data)
    assert opened.classes == ("h", "b", "d")
    for part in (opened.train, opened.val):
        assert set(names(part)) == {("h", 0), ("b", 1), ("d", 2)}
    assert len(names(opened.train)) == (120 if val else 96)
    assert names(open_datasets(data, ("val",)).val) == names(opened.val)


class Three:
    classes = ("x", "y", "z")
    targets = (0, 1, 2, 0, 1, 2, 0, 1)

    def __init__(self, root: str, part: str):
        pass

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 4, 4), i, dtype=torch.uint8), self.targets[i]


def test_data_classes_of_a_map_style_dataset_and_a_list(letters: Path, tmp_path: Path) -> None:
    opened: DataSets = open_datasets(DataConfig(name=f"{__name__}:Three", classes=["z", "x"]))
    source = opened.train
    assert source is not None and opened.classes == ("z", "x")
    loaded = [source.load(i) for i in range(len(source))]
    assert [(int(image[0, 0, 0]), target) for image, target in loaded] == [
        (0, 1),
        (2, 0),
        (3, 1),
        (5, 0),
        (6, 1),
    ]
    whole = open_datasets(DataConfig(name=f"{__name__}:Three")).train
    assert whole is not None and source.digest() != whole.digest()
    lines = [
        f"train/{file.parent.name}/{file.name} {file.parent.name}"
        for file in (letters / "train").rglob("*.jpg")
    ]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    data = DataConfig(
        name="list",
        root=str(letters),
        train=str(tmp_path / "all.txt"),
        val=str(tmp_path / "all.txt"),
    )
    opened = open_datasets(DataConfig(**vars(data) | {"classes": ["j", "a"]}))
    assert set(names(opened.train)) == set(names(opened.val)) == {("j", 0), ("a", 1)}


def test_data_classes_of_a_part_without_images_is_an_error() -> None:
    data = DataConfig(
        name=f"{__name__}:Three", val=None, val_fraction=None, fold=[0, 10**9], classes=["z", "x"]
    )
    with pytest.raises(DataError, match="part 'val' holds no image"):
        open_datasets(data)
    assert len(open_datasets(data, ("train",)).train) == 5


@pytest.mark.parametrize(
    ("text", "message"), [("a\nb\na\n", "more than once"), ("", "no class"), (None, "No such file")]
)
def test_bad_class_file_is_an_error(
    letters: Path, tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "classes.txt").write_text(text)
    with pytest.raises(DataError, match=message) as error:
        open_datasets(DataConfig(root=str(letters), classes=str(tmp_path / "classes.txt")))
    assert "data.classes" in str(error.value)


def test_run_with_data_classes(letters: Path, tmp_path: Path, call: Callable) -> None:
    changes = in_parts(
        "train", "train", data__classes="[h,b,d]", train__epochs=1, train__global_batch_size=32
    )
    train_here(arguments(letters, tmp_path / "run", **changes))
    state = json.loads(next((tmp_path / "run").glob("checkpoints/step-*/state.json")).read_text())
    assert (state["classes"], evaluations(tmp_path / "run")[0]["images"]) == (["h", "b", "d"], 120)
    words = arguments(letters, tmp_path / "other", **changes | {"data__classes": "[h,q]"})
    code, _, err = call(train_command, *words)
    assert code == 3 and "data.classes" in err and " q" in err


# ---- ReaL labels


@pytest.fixture(scope="module")
def real_labels(imagenet: Path) -> Path:
    """For each image of `imagenet` the right class and that of the highest output, one wrong one,
    or none.
    """
    logits, targets, numbers = logits_by_hand(imagenet)
    lists: list[list[int]] = [[] for _ in range(50)]
    for row, number in enumerate(numbers):
        kind = number % 3
        lists[number - 1] = (
            [int(targets[row]), int(logits[row].argmax())]
            if kind == 0
            else [0]
            if kind == 1
            else []
        )
    file = imagenet / "real.json"
    file.write_text(json.dumps(lists))
    return file


def expected_real(imagenet: Path, real_labels: Path) -> str:
    logits, _, numbers = logits_by_hand(imagenet)
    lists = json.loads(real_labels.read_text())
    hits = [
        int(row.argmax()) in lists[n - 1]
        for row, n in zip(logits, numbers, strict=True)
        if lists[n - 1]
    ]
    assert 0 < sum(hits) < len(hits) < 40
    return f"ReaL {100 * sum(hits) / len(hits):.3f} % of {len(hits)}"


def as_list(imagenet: Path, *more: str) -> list[str]:
    """Words of test.py: the images as a list with all of ImageNet's classes, so that all outputs
    count.
    """
    files = sorted((imagenet / "val").rglob("*.png"))
    rows = [f"val/{file.parent.name}/{file.name} {file.parent.name}\n" for file in files]
    (imagenet / "images.txt").write_text("".join(rows))
    (imagenet / "classes.txt").write_text("\n".join(WNIDS))
    words = [
        w
        for w in words_of_test(imagenet)
        if not w.startswith(("data.name", "data.train", "data.val=", "eval.classes"))
    ]
    return [*words, "data.name=list", "data.train=images.txt", "data.val=images.txt", *more]


def test_real_labels_count_any_of_them(imagenet: Path, real_labels: Path, call: Callable) -> None:
    code, out, err = call(evaluate_command, *as_list(imagenet, f"eval.real_labels={real_labels}"))
    assert code == 0 and expected_real(imagenet, real_labels) in out, err


@pytest.mark.nightly
def test_real_labels_and_present_classes_on_two_ranks(imagenet: Path, real_labels: Path) -> None:
    words = [
        *words_of_test(imagenet),
        f"eval.real_labels={real_labels}",
        "--launcher",
        "spawn",
        "device=cpu",
    ]
    tool = [sys.executable, str(REPOSITORY / "tools" / "test.py"), *words]
    results = [run([*tool, "--gpus", str(ranks)]) for ranks in (1, 2, 3)]
    lines = [before_classes(result.stdout)[-1].partition("  over")[0] for result in results]
    assert lines[0] == lines[1] == lines[2] and "ReaL" in lines[0] and "5 of 1000" in lines[0], (
        results
    )


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[[0]]",
        json.dumps([[]] * 50),
        *(f"[{first}{', [0]' * 49}]" for first in ("1", "[1000]", "[true]", "{}", '""')),
    ],
)
def test_bad_real_labels_are_an_error(
    imagenet: Path, tmp_path: Path, call: Callable, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "real.json").write_text(content)
    code, _, err = call(
        evaluate_command, *as_list(imagenet, f"eval.real_labels={tmp_path}/real.json")
    )
    assert code == 3 and "eval.real_labels" in err


def test_real_labels_for_other_classes_are_an_error(
    trained: Path, real_labels: Path, call: Callable
) -> None:
    words = ["--allow-import", "helpers:plain", f"eval.real_labels={real_labels}"]
    code, _, err = call(evaluate_command, trained, *words)
    assert code == 3 and "eval.real_labels" in err and "ImageNet-1k" in err
