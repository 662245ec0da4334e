"""Bad images: found by verify_data, and left out by `data.exclude`, within a bound."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import datasets_in

from imagenet_cls.commands import cli
from imagenet_cls.data import datasets
from imagenet_cls.data.index import index_folder
from imagenet_cls.data.lists import BAD_IMAGES_FILE, exclude_images, read_bad_images
from imagenet_cls.errors import DataError
from imagenet_cls.extras.datasets.verify_data import verify_command


@pytest.fixture
def odd_root(tmp_path: Path, image_folder: Path) -> Path:
    """good/: images that can be read; bad/: what no process can use."""
    jpeg = (image_folder / "train" / "cat" / "000.JPEG").read_bytes()
    for name, data in (
        ("good/plain.JPEG", jpeg),
        ("good/below/other.JPEG", jpeg),
        ("bad/empty.JPEG", b""),
        ("bad/truncated.JPEG", jpeg[: len(jpeg) // 2]),
        ("bad/text.JPEG", b"404 not found\n" * 50),
    ):
        (tmp_path / "odd" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "odd" / name).write_bytes(data)
    (tmp_path / "odd" / "bad" / "dangling.JPEG").symlink_to("nowhere.JPEG")
    os.mkfifo(tmp_path / "odd" / "bad" / "pipe.JPEG")
    return tmp_path / "odd"


def verify(*arguments: object) -> int:
    return cli.call_command(verify_command, [str(argument) for argument in arguments])


def test_verify_data_odd_folder_lists_exactly_the_bad_images(
    odd_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert verify(odd_root, "--threads", 2) == 3
    out, err = capfd.readouterr()
    file = odd_root / BAD_IMAGES_FILE
    assert read_bad_images(file) == {f"bad/{path.name}" for path in (odd_root / "bad").iterdir()}
    reasons = file.read_text().replace("\t", ": ").splitlines()
    assert len(reasons) == 5 and all(f"bad: {reason}\n" in out for reason in reasons)
    # and nothing from the decoders' C libraries
    assert len(err.splitlines()) == 2 and "5 of 7" in err


def test_verify_data_good_folder_writes_a_list_only_over_an_earlier_one(
    odd_root: Path, tmp_path: Path
) -> None:
    good = odd_root / "good"
    assert verify(good, "--out", tmp_path / "bad.txt") == 0
    assert read_bad_images(tmp_path / "bad.txt") == set()
    assert verify(good) == 0 and not (good / BAD_IMAGES_FILE).exists()
    (good / BAD_IMAGES_FILE).write_text("plain.JPEG\tempty\n")
    assert verify(good) == 0 and read_bad_images(good / BAD_IMAGES_FILE) == set()


def test_verify_data_counts_the_files_that_are_not_read(
    image_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    jpeg = (image_folder / "train" / "cat" / "000.JPEG").read_bytes()
    for part in ("train", "val"):
        (tmp_path / "data" / part / "a").mkdir(parents=True)
        for name in ("1.JPEG", "2.jfif", "3.svg", "4.svg", "5.txt"):
            (tmp_path / "data" / part / "a" / name).write_bytes(jpeg)
    for words in ([tmp_path / "data"], ["resnet50", f"data.root={tmp_path / 'data'}"]):
        assert verify(*words) == 0
        out = capfd.readouterr().out
        assert "4 images, 0 bad" in out and "4 .svg, 2 .txt" in out


@pytest.mark.parametrize("heif", ["2.HEIC", "2.Heic"])
def test_heif_images_without_pillow_heif_are_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heif: str
) -> None:
    monkeypatch.setattr(datasets, "has_heif", lambda: False)
    for name in ("1.JPEG", heif):
        (tmp_path / "train" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / "a" / name).write_bytes(b"")
    with pytest.raises(DataError, match=rf"1 HEIF images.*{heif}"):
        datasets_in(tmp_path, val="train")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nowhere"], 3),
        (["{root}/train/cat/000.JPEG"], 3),
        (["{root}", "data.root=x"], 2),
        (["{root}", "--out", "/proc/none/m.txt"], 5),
    ],
)
def test_verify_data_bad_arguments_exit_with_their_code(
    image_folder: Path, arguments: list[str], code: int
) -> None:
    assert verify(*(argument.format(root=image_folder) for argument in arguments)) == code


def test_verify_data_of_a_compressed_tar_names_the_archives_it_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images.tar.gz").touch()
    assert verify(tmp_path / "images.tar.gz") == 3 and "no .tar or .zip" in capfd.readouterr().err


def test_verify_data_of_a_config_reads_the_images_of_its_lists(
    image_folder: Path, tmp_path: Path
) -> None:
    """Absolute paths, an image listed twice, one that is missing, and one that is a folder."""
    root = tmp_path / "root"
    (root / "folder.jpg").mkdir(parents=True)
    elsewhere = [f"{image_folder}/train/cat/00{i}.JPEG" for i in range(3)]
    for name in ("1.JPEG", "2.JPEG"):
        os.link(elsewhere[0], root / name)
    good = f"{elsewhere[1]} 0\n"
    names = [*elsewhere, "x/../1.JPEG", "1.JPEG", "2.JPEG", "folder.jpg", "missing.JPEG"]
    lines = [good, *(f"{name} 0\n" for name in names), *[good] * 5]
    (root / "train.txt").write_text("".join(lines))
    (root / "val.txt").write_text("2.JPEG 0\n")
    overrides = ["data.name=list", "data.train=train.txt", "data.val=val.txt"]
    assert verify("resnet50", f"data.root={root}", *overrides) == 3
    assert sorted(read_bad_images(root / BAD_IMAGES_FILE)) == ["folder.jpg", "missing.JPEG"]
    assert verify("resnet50", "data.name=synthetic") == 2
    opened = excluding(root, name="list", train="train.txt", val="val.txt")
    assert len(opened.train) == 12


# ---- data.exclude


@pytest.fixture
def one_bad(image_folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder where train/dog/004.JPEG is empty, and the list of bad images in it."""
    for path in sorted(image_folder.rglob("*.JPEG")):
        target = tmp_path / "data" / path.relative_to(image_folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, target)
    make_empty(tmp_path / "data" / "train" / "dog" / "004.JPEG")
    assert verify(tmp_path / "data") == 3
    return tmp_path / "data"


def make_empty(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"")


def excluding(root: Path, **settings: Any) -> Any:
    """The datasets without the images that verify_data has listed."""
    return datasets_in(root, exclude=str(root / BAD_IMAGES_FILE), **settings)


def test_exclude_leaves_out_the_listed_training_image(one_bad: Path) -> None:
    opened, whole = excluding(one_bad), datasets_in(one_bad)
    names = [whole.train.name(i) for i in range(40)]
    names.remove("dog/004.JPEG")
    assert [opened.train.name(i) for i in range(39)] == names
    assert "dog/004.JPEG" in opened.note and whole.note is None
    assert opened.train.digest() != whole.train.digest()
    # the same place by another path
    same = excluding(one_bad / "train" / "..", train="./train")
    assert same.train.digest() == opened.train.digest()
    # as if the file were not there
    (one_bad / "train" / "dog" / "004.JPEG").unlink()
    assert datasets_in(one_bad).train.digest() == opened.train.digest()


def test_exclude_with_val_fraction_keeps_the_validation_images(one_bad: Path) -> None:
    held_out = {"val": None, "val_fraction": 0.2}
    opened, whole = excluding(one_bad, **held_out), datasets_in(one_bad, **held_out)
    assert opened.val.digest() == whole.val.digest()


@pytest.mark.parametrize(
    ("count", "most"),
    [(4, 3), (39, 3), (40, 4), (99, 9), (500, 10), (1_099, 10), (1_100, 11), (20_000, 200)],
)
def test_exclude_allows_one_percent_or_ten_images_and_at_most_a_tenth_or_three(
    image_folder: Path, tmp_path: Path, count: int, most: int
) -> None:
    index = index_folder(image_folder / "train")
    (tmp_path / "list").write_text(f"train/{index.name(4)}\ttoo dark\n")

    def remaining(excluded: int) -> int:
        rows = np.array([4] * excluded + [7] * (count - excluded))  # one file, in several rows
        kept, note = exclude_images(index.select(rows), image_folder, tmp_path / "list", "training")
        assert (note is None) == (excluded == 0)
        return len(kept)

    assert remaining(most) == count - most
    with pytest.raises(DataError, match=f"{most + 1} of {count} training .* at most {most} "):
        remaining(most + 1)


def test_exclude_leaves_out_validation_images(one_bad: Path) -> None:
    whole = datasets_in(one_bad, val="train").val
    opened = excluding(one_bad, val="train")
    assert "1 of 40 training images" in opened.note
    assert "1 of 40 validation images" in opened.note
    only = excluding(one_bad, parts=("val",), val="train").val
    assert (len(whole), whole.left_out, len(only), only.left_out) == (40, 0, 39, 1)
    assert only.digest() == opened.val.digest() != whole.digest()


def test_exclude_of_too_many_validation_images_raises(one_bad: Path) -> None:
    """Four of nine are more than a tenth and more than three."""
    for bad in sorted((one_bad / "val").rglob("*.JPEG"))[:4]:
        make_empty(bad)
    assert verify(one_bad) == 3
    for parts in (("val",), ("train", "val")):
        with pytest.raises(DataError, match="4 of 9 validation images"):
            excluding(one_bad, parts=parts)
    assert len(excluding(one_bad, parts=("train",)).train) == 39


@pytest.mark.parametrize("part", ["train", "val"])
def test_error_about_a_bad_image_gives_three_commands(one_bad: Path, part: str) -> None:
    bad = one_bad / part / "eel" / "001.JPEG"
    make_empty(bad)
    source = getattr(datasets_in(one_bad), part)
    number = [source.name(i) for i in range(len(source))].index("eel/001.JPEG")
    with pytest.raises(DataError) as error:
        source.load(number)
    what, replace_or_delete, leave_out = str(error.value).splitlines()
    assert what.startswith(f"{bad} (image {number}): ")
    assert f"cp GOOD_FILE {bad}" in replace_or_delete and f"rm {bad}" in replace_or_delete
    assert f" {one_bad}, " in leave_out and f"data.exclude={one_bad / BAD_IMAGES_FILE}" in leave_out


def test_exclude_with_a_missing_list_raises(one_bad: Path) -> None:
    (one_bad / BAD_IMAGES_FILE).unlink()
    with pytest.raises(DataError, match=r"data\.exclude"):
        excluding(one_bad)
