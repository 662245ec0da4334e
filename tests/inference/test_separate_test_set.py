"""`test.py RUN --data PATH`, runs that hold out training images and are evaluated on another
folder, and other classes than a folder has: some of them, numbered ones, a list.
"""

import gzip
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_writers import write_tar
from helpers import arguments, before_classes, evaluations, fails, succeeds, train_here
from timm.data import ImageNetInfo

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.classes import classes_of_outputs, match_classes
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.files import has_training_part
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.errors import DataError

ALLOW = ["--allow-import", "helpers:plain"]
NAMES = list("abcdefghij")
WNIDS = ImageNetInfo("imagenet-1k").label_names()
PRESENT = [7, 3, 999, 500, 41]
FOLDER = {
    "data__name": "folder",
    "data__train": ".",
    "data__val": "null",
    "data__val_fraction": 0.2,
}


@pytest.fixture(scope="module")
def data(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as the classes a to j: 20 of each to train on in `photos`, 3 or 4 in `testset`, and
    copies of both.
    """
    root = tmp_path_factory.mktemp("data")
    for number, name in enumerate(NAMES):
        for i, file in enumerate(
            sorted((digits / "train" / str(number)).iterdir())[: 23 + number % 2]
        ):
            folder = root / ("photos" if i < 20 else "testset") / name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder)
    shutil.copytree(root / "photos", root / "both" / "train")
    shutil.copytree(root / "testset", root / "both" / "val")
    shutil.make_archive(str(root / "testset"), "zip", root, "testset")
    shutil.make_archive(str(root / "both"), "zip", root / "both")
    files = sorted((root / "testset").rglob("*.jpg"))
    rows = [f"testset/{file.parent.name}/{file.name},{file.parent.name}\n" for file in files]
    (root / "test.csv").write_text("image,label\n" + "".join(rows))
    for number in range(2):
        members = []
        for file in files[number::2]:
            label = file.parent.name
            members.append((f"{label}_{file.stem}.jpg", file.read_bytes()))
            members.append((f"{label}_{file.stem}.cls", label.encode()))
        write_tar(root / "shards" / f"test-{number:04}.tar", members)
    return root


@pytest.fixture(scope="module")
def run_folder(data: Path) -> Path:
    words = arguments(
        data / "photos", data / "run", **FOLDER, train__epochs=4, train__global_batch_size=16
    )
    train_here(words)
    return data / "run"


@pytest.fixture(autouse=True)
def in_data(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)


def evaluated(folder: Path, *words: Any) -> str:
    """What test.py prints about a run."""
    return succeeds(evaluate_command, folder, *ALLOW, *words)


def accuracy(out: str) -> str:
    return before_classes(out)[-1].partition("  over ")[0]


@pytest.mark.parametrize(
    "path",
    [
        "testset",
        "both",
        "both/val",
        "testset.zip",
        "both.zip/val",
        "test.csv",
        "shards",
        "shards/test-{0000..0001}.tar",
    ],
)
def test_whole_test_set_is_evaluated(run_folder: Path, path: str) -> None:
    out = evaluated(run_folder, "--data", path)
    expected = evaluated(run_folder, "data.root=both", "data.val=val")
    assert out.startswith("35 images of 10 classes, in ") and "over 35 images" in out
    assert accuracy(out) == accuracy(expected) and "warning" not in out
    assert "data.val" not in out  # the run has no other settings
    assert 20 < float(accuracy(out).split()[2]) < 100


def test_test_set_gets_the_classes_of_the_checkpoint(run_folder: Path, tmp_path: Path) -> None:
    for name in "bj":
        shutil.copytree(f"testset/{name}", tmp_path / "some" / name)
    rows = [line for line in Path("test.csv").read_text().splitlines() if line[-2:] in (",b", ",j")]
    (tmp_path / "some.csv").write_text("\n".join(rows))
    words = [run_folder, *ALLOW, "--data"]
    results = set()
    # The paths of a list are relative to data.root, if that is given.
    for some in ([tmp_path / "some"], [tmp_path / "some.csv", "data.root=."]):
        assert "eval.classes=present" in fails(3, evaluate_command, *words, *some)
        out = succeeds(evaluate_command, *words, *some, "eval.classes=present")
        assert out.startswith("8 images of 2 classes") and "2 of 10" in out
        results.add(accuracy(out))
    assert len(results) == 1
    err = fails(3, evaluate_command, *words, tmp_path / "some.csv", "eval.classes=present")
    assert "data.root" in err
    (tmp_path / "some" / "b").rename(tmp_path / "some" / "unknown")
    fails(3, evaluate_command, *words, tmp_path / "some", "eval.classes=present")


def test_training_images_as_test_set_are_a_warning(
    run_folder: Path, data: Path, tmp_path: Path
) -> None:
    words = arguments(
        data / "both", tmp_path / "run", **FOLDER | {"data__train": "train", "data__val": "val"}
    )
    train_here([word for word in words if "val_fraction" not in word] + ["data.val_fraction=null"])
    for option in (["--data", "photos"], ["data.val=train"]):
        assert "warning: " in evaluated(tmp_path / "run", *option)
    for option in (["--data", "testset"], []):
        assert "warning: " not in evaluated(tmp_path / "run", *option)


def test_split_stays_if_the_data_were_moved_and_is_an_error_for_others(
    run_folder: Path, data: Path, tmp_path: Path
) -> None:
    best = max(record["top1_pct"] for record in evaluations(run_folder))
    shutil.copytree("photos", tmp_path / "moved")
    out = evaluated(run_folder, f"data.root={tmp_path}/moved")
    assert out.startswith("40 images of 10 classes, held out of ")
    assert f"top-1 {best:.3f} %" in out and "warning" not in out
    for word in ("data.root=testset", "data.train=../testset", "data.val_fraction=0.5"):
        fails(3, evaluate_command, run_folder, *ALLOW, word)
    # The ways out that the error names.
    whole = evaluated(run_folder, "--data", "testset")
    for words in (["data.root=testset", "data.val=."], ["data.root=both", "data.val=val"]):
        out = evaluated(run_folder, *words)
        assert accuracy(out) == accuracy(whole)
    # Images were added in the same place.
    added = [shutil.copy(file, data / "photos" / "b") for file in Path("testset/a").iterdir()]
    try:
        fails(3, evaluate_command, run_folder, *ALLOW)
    finally:
        for file in added:
            Path(file).unlink()


def test_mistakes_in_the_place_are_errors_that_name_the_option(
    run_folder: Path, tmp_path: Path
) -> None:
    words = [run_folder, *ALLOW]
    for more in (["data.val=testset"], ["data.val=testset", "data.val_fraction=null"]):
        assert "photos/testset" in fails(3, evaluate_command, *words, *more)
    fails(2, evaluate_command, *words, "data.val=testset", "--data", "testset")
    fails(3, evaluate_command, *words, "--data", "nowhere")
    for name, content in (
        ("photo.png", b"\x89PNG\r\n\x1a\n\0\0\0"),
        ("all.tar.gz", gzip.compress(b"x")),
    ):
        (tmp_path / name).write_bytes(content)
        assert name in fails(3, evaluate_command, *words, "--data", tmp_path / name)
    # class folders are in folders of them
    shutil.copytree("testset", tmp_path / "both" / "test")
    for path in ("both.zip", tmp_path / "both"):
        err = fails(3, evaluate_command, *words, "--data", path)
        assert err.startswith(f"{path}: ")


# ---- other classes than a folder has


def test_run_records_the_classes_that_are_present(data: Path, tmp_path: Path) -> None:
    """Its checkpoint names the classes, so that the training folder is not needed."""
    for name in "bei":
        shutil.copytree(f"testset/{name}", tmp_path / "some" / name)
    val = {"data__train": "train", "data__val": tmp_path / "some", "data__val_fraction": "null"}
    changes = FOLDER | val | {"eval__classes": "present", "train__max_steps": 1}
    train_here(arguments(data / "both", tmp_path / "run", **changes))
    (record,) = evaluations(tmp_path / "run")
    assert (record["classes"], record["images"]) == ("3 of 10", 10)
    words = [tmp_path / "run", "data.train=absent", *ALLOW]
    out = succeeds(evaluate_command, *words)
    assert f"top-1 {record['top1_pct']:.3f} %" in out and "classes: 3 of 10" in out
    assert "eval.classes=present" in fails(3, evaluate_command, *words, "eval.classes=all")


def test_numbered_folders_are_the_classes_by_position(run_folder: Path, tmp_path: Path) -> None:
    found = match_classes(["0", "1", "10", *"23456789"], [*NAMES, "k"], "val")
    assert found == [0, 1, 10, *range(2, 10)]
    assert match_classes(["1", "0"], ["0", "1"], "val") == [1, 0]  # names, not numbers
    for number, name in enumerate(NAMES):
        shutil.copytree(f"testset/{name}", tmp_path / str(number))
    outs = [evaluated(run_folder, "--data", path) for path in ("testset", tmp_path)]
    assert accuracy(outs[0]) == accuracy(outs[1])


def test_classes_of_outputs_are_imagenets_without_a_training_folder(
    data: Path, tmp_path: Path
) -> None:
    def classes(found: list[str], *changes: str, root: Path = tmp_path) -> list[str]:
        words = [f"data.root={root}", "data.train=train", *changes]
        config = load_config("resnet50", words).config
        return list(classes_of_outputs(config, tuple(found), has_training_part(config.data)))

    numbers, five = sorted(map(str, range(1000))), [WNIDS[number] for number in PRESENT]
    assert classes(numbers) == classes(five, "eval.classes=present") == WNIDS
    assert classes(five) == five and classes(["cat"], "eval.classes=present") == ["cat"]
    (tmp_path / "train-0.tar").touch()
    assert has_training_part(DataConfig(root=str(tmp_path), train="train-*.tar"))
    # the training folder names the classes
    assert classes(five, "eval.classes=present", root=data / "both") == five
    reverse = WNIDS[::-1]
    assert classes(reverse, f"data.classes={reverse}") == reverse
    of_22k = classes(five, "eval.classes=present", "model.num_classes=21841")
    assert of_22k == ImageNetInfo("imagenet-22k").label_names()


def names(source: ImageSet) -> list[tuple[str, Any]]:
    return [(source.name(i).split("/")[-2], source.load(i)[1]) for i in range(len(source))]


@pytest.mark.parametrize(
    ("classes", "val", "fraction"), [(["h", "b", "d"], "train", None), ("classes.txt", None, 0.2)]
)
def test_data_classes_selects_and_orders(
    data: Path, classes: Any, val: str | None, fraction: float | None
) -> None:
    Path("classes.txt").write_text("h\nb\nd\n")
    config = DataConfig(root="both", classes=classes, val=val, val_fraction=fraction)
    opened = open_datasets(config)
    assert opened.classes == ("h", "b", "d")
    for part in (opened.train, opened.val):
        assert set(names(part)) == {("h", 0), ("b", 1), ("d", 2)}
    assert len(names(opened.train)) == (60 if val else 48)
    assert names(open_datasets(config, ("val",)).val) == names(opened.val)
    with pytest.raises(DataError, match=r"data\.classes"):
        open_datasets(replace(config, classes=["h", "x"]))


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
    opened = open_datasets(DataConfig(name=f"{__name__}:Three", classes=["z", "x"]))
    source = opened.train
    assert opened.classes == ("z", "x")
    loaded = [source.load(i) for i in range(len(source))]
    assert [int(image[0, 0, 0]) for image, _ in loaded] == [0, 2, 3, 5, 6]
    assert [target for _, target in loaded] == [1, 0, 1, 0, 1]
    config = DataConfig(name=f"{__name__}:Three", val=None, val_fraction=None, fold=[0, 10**9])
    assert source.digest != open_datasets(config, ("train",)).train.digest
    with pytest.raises(DataError, match=r"data\.val_fraction"):
        open_datasets(replace(config, classes=["z", "x"]))


@pytest.mark.parametrize("text", ["a\nb\na\n", "", None])
def test_bad_class_file_is_an_error(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "classes.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=r"data\.classes"):
        open_datasets(DataConfig(root="both", classes=str(file)))
