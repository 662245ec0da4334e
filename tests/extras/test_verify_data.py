"""Bad images: found by verify_data, and left out by `data.exclude`, within a bound."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archive_writers import write_tar
from helpers import call, datasets_in, fails, write_files
from test_data_datasets import names

from imagenet_cls.data.index import index_folder
from imagenet_cls.data.lists import BAD_IMAGES_FILE, bad_rows, read_bad_images
from imagenet_cls.errors import DataError
from imagenet_cls.extras.datasets.verify_data import verify_command


@pytest.fixture
def odd_root(tmp_path: Path, image_folder: Path) -> Path:
    """good/: images that can be read; bad/: what no process can use."""
    jpeg = (image_folder / "train" / "cat" / "000.JPEG").read_bytes()
    root = tmp_path / "odd"
    write_files(root / "bad", {"empty.JPEG": "", "text.JPEG": "404 not found\n" * 50})
    (root / "bad" / "truncated.JPEG").write_bytes(jpeg[: len(jpeg) // 2])
    (root / "bad" / "dangling.JPEG").symlink_to("nowhere.JPEG")
    os.mkfifo(root / "bad" / "pipe.JPEG")
    (root / "good/below").mkdir(parents=True)
    for name in ("plain.JPEG", "below/other.jfif"):
        (root / "good" / name).write_bytes(jpeg)
    return root


def verify(*arguments: object) -> int:
    code, _, _ = call(verify_command, *arguments)
    return code


def test_verify_data_odd_folder_lists_exactly_the_bad_images(
    odd_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, error = call(verify_command, odd_root)
    assert code == 3 and "5 of 7" in error
    assert capfd.readouterr().err == ""  # nothing from the decoders' C libraries
    listed = odd_root / BAD_IMAGES_FILE
    assert read_bad_images(listed) == {f"bad/{path.name}" for path in (odd_root / "bad").iterdir()}
    for line in listed.read_text().splitlines():
        assert line.replace("\t", ": ") in out


def test_verify_data_good_folder_writes_a_list_only_over_an_earlier_one(
    image_folder: Path, tmp_path: Path
) -> None:
    good = Path(shutil.copytree(image_folder, tmp_path / "good"))
    assert verify(good, "--out", tmp_path / "bad.txt") == 0
    assert read_bad_images(tmp_path / "bad.txt") == set()
    assert verify(good) == 0 and not (good / BAD_IMAGES_FILE).exists()
    (good / BAD_IMAGES_FILE).write_text("plain.JPEG\tempty\n")
    assert verify(good) == 0 and read_bad_images(good / BAD_IMAGES_FILE) == set()


def test_verify_data_bad_arguments_exit_with_their_code(image_folder: Path) -> None:
    for code, *arguments in (
        (2, "nowhere"),
        (2, "resnet50", "data.name=synthetic"),
        (5, image_folder, "--out", "/proc/none/m.txt"),
    ):
        fails(code, verify_command, *arguments)


def test_verify_data_of_a_config_reads_the_images_of_its_lists(
    image_folder: Path, tmp_path: Path
) -> None:
    """Absolute paths, an image listed twice, one that is missing, and one that is a folder."""
    (tmp_path / "folder.jpg").mkdir()
    good = image_folder / "train" / "cat" / "000.JPEG"
    os.link(good, tmp_path / "1.JPEG")
    paths = [good, *[good] * 10, "x/../1.JPEG", "1.JPEG", "folder.jpg", "missing.JPEG"]
    lists = {"name": "list", "train": "train.txt", "val": "val.txt"}
    lines = "".join(f"{path} 0\n" for path in paths)
    write_files(tmp_path, {"train.txt": lines, "val.txt": "1.JPEG 0\n"})
    overrides = [f"data.{key}={value}" for key, value in lists.items()]
    code, out, _ = call(verify_command, "resnet50", f"data.root={tmp_path}", *overrides)
    assert code == 3 and "4 images, 2 bad" in out
    assert read_bad_images(tmp_path / BAD_IMAGES_FILE) == {"folder.jpg", "missing.JPEG"}
    assert len(excluding(tmp_path, **lists).train) == 13


def test_verify_data_reads_each_image_of_archives_with_equal_names(
    image_folder: Path, tmp_path: Path
) -> None:
    images = [path.read_bytes() for path in sorted((image_folder / "train").rglob("*.JPEG"))[:5]]
    for shard in range(2):
        files = [(f"{i}.jpg", image) for i, image in enumerate(images)]
        if shard == 0:
            files[3] = ("3.jpg", images[3][:900])
        labels = [(f"{i}.cls", b"0") for i in range(5)]
        write_tar(tmp_path / f"train-{shard}.tar", files + labels)
    config = ["resnet50", f"data.root={tmp_path}", "data.train=train-*.tar", "data.val=train-1.tar"]
    code, out, _ = call(verify_command, *config)
    assert code == 3 and "15 images, 1 bad" in out
    assert f"(in {tmp_path / 'train-0.tar'})" in out
    assert read_bad_images(tmp_path / BAD_IMAGES_FILE) == {"train-*.tar/3.jpg"}


# ---- data.exclude


@pytest.fixture
def one_bad(image_folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder where train/dog/004.JPEG is empty, and the list of bad images in it."""
    root = Path(shutil.copytree(image_folder, tmp_path / "data"))
    write_files(root, {"train/dog/004.JPEG": "", BAD_IMAGES_FILE: "train/dog/004.JPEG\tempty\n"})
    return root


def excluding(root: Path, **settings: Any) -> Any:
    """The datasets without the listed images."""
    return datasets_in(root, exclude=str(root / BAD_IMAGES_FILE), **settings)


def test_exclude_leaves_out_the_listed_training_image_alone(one_bad: Path) -> None:
    opened, whole = excluding(one_bad), datasets_in(one_bad)
    assert names(opened.train) == [n for n in names(whole.train) if n != "dog/004.JPEG"]
    assert "dog/004.JPEG" in opened.note and whole.note is None
    assert opened.train.digest != whole.train.digest
    held_out = {"val": None, "val_fraction": 0.2}
    kept, all_val = excluding(one_bad, **held_out).val, datasets_in(one_bad, **held_out).val
    assert kept.digest == all_val.digest


def test_exclude_allows_one_percent_or_ten_images_and_at_most_a_tenth_or_three(
    one_bad: Path,
) -> None:
    index = index_folder(one_bad / "train")
    for count, most in ((4, 3), (99, 9), (500, 10), (1_100, 11)):
        for excluded in (most, most + 1):
            rows = [12] * excluded + [0] * (count - excluded)  # one file, in several rows
            paths = index.select(np.array(rows)).full_paths()
            part = paths, one_bad, one_bad / BAD_IMAGES_FILE, "training"
            if excluded == most:
                assert len(bad_rows(*part)) == most
            else:
                with pytest.raises(DataError):
                    bad_rows(*part)
