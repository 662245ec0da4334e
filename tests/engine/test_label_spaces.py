"""Evaluation and training on other classes than a folder has: some of them, numbered ones, a
list.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import arguments, call, evaluations, fails, succeeds, train_here
from timm.data import ImageNetInfo

from imagenet_cls.commands.test import evaluate_command
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
    """Digits as the classes a to j in `train`, those of b, e and i in `some`, and the same files as
    a to j in `few` and as 0 to 9 in `numbered`.
    """
    root = tmp_path_factory.mktemp("letters")
    for number, name in enumerate(NAMES):
        files = sorted((digits / "train" / str(number)).iterdir())
        for part, folder, chosen in (
            ("train", name, files[10:50]),
            ("some", name, files[:10] if name in "bei" else []),
            ("few", name, files[:3]),
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


def test_classes_of_outputs_are_imagenets_without_a_training_folder(
    letters: Path, tmp_path: Path
) -> None:
    def classes(found: list[str], *changes: str, root: Path = tmp_path) -> list[str]:
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


def test_run_records_the_classes_that_are_present(trained: Path) -> None:
    records = evaluations(trained)
    assert {(record["classes"], record["images"]) for record in records} == {("3 of 10", 30)}
    # The checkpoint names its classes, so the training folder is not needed.
    words = [trained, "data.train=absent", "--allow-import", "helpers:plain"]
    out = succeeds(evaluate_command, *words)
    assert f"top-1 {records[-1]['top1_pct']:.3f} %" in out and "classes: 3 of 10" in out
    err = fails(3, evaluate_command, *words, "eval.classes=all")
    assert "eval.classes=present" in err


def test_numbered_folders_are_the_classes_by_position(trained: Path, letters: Path) -> None:
    found = match_classes(["0", "1", "10", *"23456789"], [*NAMES, "k"], "val")
    assert found == [0, 1, 10, *range(2, 10)]
    assert match_classes(["1", "0"], ["0", "1"], "val") == [1, 0]  # names, not numbers
    top1 = []
    for part in ("few", "numbered"):
        words = [f"data.val={letters}/{part}", "eval.classes=all"]
        _, out, _ = call(evaluate_command, trained, *words, "--allow-import", "helpers:plain")
        top1.append(out.partition("top-1 ")[2].partition("  over")[0])
    assert top1[0] == top1[1] != ""


def names(source: ImageSource | None) -> list[tuple[str, Any]]:
    assert source is not None
    return [(source.name(i).split("/")[-2], source.load(i)[1]) for i in range(len(source))]


@pytest.mark.parametrize(("kind", "val"), [("list", "train"), ("file", None)])
def test_data_classes_selects_and_orders(
    letters: Path, tmp_path: Path, kind: str, val: str | None
) -> None:
    (tmp_path / "classes.txt").write_text("h\nb\nd\n")
    chosen: Any = ["h", "b", "d"] if kind == "list" else str(tmp_path / "classes.txt")
    data = DataConfig(
        root=str(letters), train="train", val=val, classes=chosen, val_fraction=None if val else 0.2
    )
    opened = open_datasets(data)
    assert opened.classes == ("h", "b", "d")
    for part in (opened.train, opened.val):
        assert set(names(part)) == {("h", 0), ("b", 1), ("d", 2)}
    assert len(names(opened.train)) == (120 if val else 96)
    assert names(open_datasets(data, ("val",)).val) == names(opened.val)
    with pytest.raises(DataError, match=r"data\.classes"):
        open_datasets(replace(data, val="numbered", val_fraction=None))


class Three:
    classes = ("x", "y", "z")
    targets = (0, 1, 2, 0, 1, 2, 0, 1)

    def __init__(self, root: str, part: str):
        pass

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 4, 4), i, dtype=torch.uint8), self.targets[i]


def test_data_classes_of_a_map_style_dataset() -> None:
    opened: DataSets = open_datasets(DataConfig(name=f"{__name__}:Three", classes=["z", "x"]))
    source = opened.train
    assert source is not None and opened.classes == ("z", "x")
    loaded = [source.load(i) for i in range(len(source))]
    assert [int(image[0, 0, 0]) for image, _ in loaded] == [0, 2, 3, 5, 6]
    assert [target for _, target in loaded] == [1, 0, 1, 0, 1]
    whole = open_datasets(DataConfig(name=f"{__name__}:Three")).train
    assert whole is not None and source.digest() != whole.digest()


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
