"""Bad images: found by verify_data, left out of training by `data.exclude`, never left out of validation."""

import io
import json
import os
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from imagenet_cls.commands import program
from imagenet_cls.commands.verify_data import image_problem, verify_command
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data import open_datasets
from imagenet_cls.data.index import index_folder
from imagenet_cls.data.lists import BAD_IMAGES_FILE, exclude_images, read_bad_images
from imagenet_cls.errors import DataError


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_png_size(data: bytes, width: int, height: int) -> bytes:
    chunk = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[33:]


def with_jpeg_size(data: bytes, width: int, height: int) -> bytes:
    frame = data.index(b"\xff\xc0")
    return data[: frame + 5] + struct.pack(">HH", height, width) + data[frame + 9 :]


@pytest.fixture
def odd_root(tmp_path: Path, photographs: list[Image.Image]) -> Path:
    """good/: unusual images that can be read; bad/: what no process can use."""
    image = photographs[0].resize((161, 107))
    jpeg, palette = encoded(image), image.quantize(16)
    sixteen = Image.fromarray((np.arange(107 * 161, dtype=np.uint16) * 3).reshape(107, 161))
    good = {
        "plain.JPEG": jpeg,
        "png_named.JPEG": encoded(image, "PNG"),
        "cmyk.JPEG": encoded(image.convert("CMYK")),
        "sixteen_bit.png": encoded(sixteen, "PNG"),
        "palette_with_alpha.png": encoded(palette, "PNG", transparency=bytes(range(0, 256, 16))),
        "broken_exif.JPEG": encoded(image, exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x02" + b"\xff" * 30),
        "animated.gif": encoded(palette, "GIF", save_all=True, append_images=[palette.rotate(180)]),
    }
    bad = {
        "empty.JPEG": b"",
        **{f"cut_at_{percent}.JPEG": jpeg[: len(jpeg) * percent // 100] for percent in (10, 50, 99)},
        "text.JPEG": b"404 not found\n" * 50,
        "bomb.JPEG": with_jpeg_size(jpeg, 20_000, 10_000),
        "bomb.png": with_png_size(encoded(image, "PNG"), 20_000, 10_000),
    }
    for folder, files in (("good", good), ("bad", bad)):
        (tmp_path / "odd" / folder).mkdir(parents=True)
        for name, data in files.items():
            (tmp_path / "odd" / folder / name).write_bytes(data)
    (tmp_path / "odd" / "bad" / "dangling.JPEG").symlink_to("nowhere.JPEG")
    os.mkfifo(tmp_path / "odd" / "bad" / "pipe.JPEG")
    return tmp_path / "odd"


def verify(*arguments: object) -> int:
    return program.exit_code_of(verify_command, [str(argument) for argument in arguments])


def test_verify_data_odd_folder_lists_exactly_the_bad_images(odd_root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify(odd_root, "--threads", 2) == 3
    out, err = capfd.readouterr()
    found = read_bad_images(odd_root / BAD_IMAGES_FILE)
    assert sorted(found) == sorted(f"bad/{path.name}" for path in (odd_root / "bad").iterdir())
    assert all(f"bad: {name}: {reason}" in out for name, reason in found.items())
    assert len(err.splitlines()) == 2 and "9 of 16" in err  # and nothing from the decoders' C libraries


def peak_kib() -> int:
    """The peak memory of this process, which never falls."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def test_image_problem_of_a_decompression_bomb_takes_no_memory(odd_root: Path) -> None:
    """200 megapixels are 600 MB."""
    before = peak_kib()
    for name in (b"bad/bomb.JPEG", b"bad/bomb.png"):
        assert "pixels" in (image_problem(odd_root, name) or "")
    assert peak_kib() - before < 50_000


def test_verify_data_good_folder_writes_an_empty_list(image_folder: Path, tmp_path: Path) -> None:
    assert verify(image_folder, "--out", tmp_path / "bad.txt") == 0
    assert read_bad_images(tmp_path / "bad.txt") == {}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["nowhere"], 3), (["{root}/train/cat/000.JPEG"], 3), (["{root}", "data.root=x"], 2),
     (["{root}", "--out", "/proc/none/m.txt"], 5)],
)  # fmt: skip
def test_verify_data_bad_arguments_exit_with_their_code(image_folder: Path, arguments: list[str], code: int) -> None:
    assert verify(*(argument.format(root=image_folder) for argument in arguments)) == code


def test_verify_data_of_a_config_reads_the_images_of_its_lists(image_folder: Path, tmp_path: Path) -> None:
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
    config = tmp_path / "list.yaml"
    config.write_text(f"data: {{name: list, root: {root}, train: train.txt, val: val.txt}}\noptimizer: {{lr: 0.1}}\n")
    assert verify(config) == 3
    assert sorted(read_bad_images(root / BAD_IMAGES_FILE)) == ["folder.jpg", "missing.JPEG"]
    assert verify(config, "data.name=synthetic") == 2
    data = DataConfig("list", str(root), "train.txt", "val.txt", exclude=str(root / BAD_IMAGES_FILE))
    with pytest.raises(DataError, match="at most 1"):
        open_datasets(data)
    (root / "train.txt").write_text("".join(line for line in lines if "folder.jpg" not in line))
    assert len(open_datasets(data).train) == 12  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- data.exclude


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


def excluding(root: Path, **changes: Any) -> DataConfig:
    return replace(DataConfig(root=str(root), exclude=str(root / BAD_IMAGES_FILE)), **changes)


def digest(data: DataConfig, part: str = "train") -> str:
    return getattr(open_datasets(data), part).digest()


def test_exclude_leaves_out_the_listed_training_image(one_bad: Path) -> None:
    opened, whole = open_datasets(excluding(one_bad)), open_datasets(DataConfig(root=str(one_bad)))
    assert opened.train is not None and whole.train is not None
    names = [whole.train.name(i) for i in range(40)]
    names.remove("dog/004.JPEG")
    assert [opened.train.name(i) for i in range(39)] == names
    assert opened.note is not None and "dog/004.JPEG" in opened.note and whole.note is None
    assert opened.train.digest() != whole.train.digest()
    # the same place by another path
    assert digest(excluding(one_bad / "train" / "..", train="./train")) == opened.train.digest()
    # as if the file were not there
    (one_bad / "train" / "dog" / "004.JPEG").unlink()
    assert digest(DataConfig(root=str(one_bad))) == opened.train.digest()


def test_exclude_with_val_fraction_keeps_the_validation_images(one_bad: Path) -> None:
    held_out = {"val": None, "val_fraction": 0.2}
    assert digest(excluding(one_bad, **held_out), "val") == digest(excluding(one_bad, exclude=None, **held_out), "val")


def test_exclude_reads_the_list_of_earlier_versions(one_bad: Path) -> None:
    old = one_bad / "verified_images.json"
    bad = [{"path": "train/dog/004.JPEG", "reason": "an empty file", "size_bytes": 0}]
    old.write_text(json.dumps({"format": "imagenet_cls verified images 1", "whole": {}, "folders": {}, "bad": bad}))
    assert digest(excluding(one_bad, exclude=str(old))) == digest(excluding(one_bad))


def test_exclude_allows_one_image_in_ten_thousand(one_bad: Path) -> None:
    (one_bad / BAD_IMAGES_FILE).write_text("train/cat/002.JPEG\ntrain/dog/004.JPEG\tempty\n")
    with pytest.raises(DataError, match="at most 1"):
        open_datasets(excluding(one_bad))
    index = index_folder(one_bad / "train")
    rows = np.concatenate((np.arange(40), np.full(9_961, 0)))
    with pytest.raises(DataError, match="at most 1"):
        exclude_images(index.select(rows[:10_000]), one_bad, one_bad / BAD_IMAGES_FILE)
    kept, _ = exclude_images(index.select(rows), one_bad, one_bad / BAD_IMAGES_FILE)
    assert len(kept) == 9_999


def test_exclude_of_a_validation_image_raises(one_bad: Path) -> None:
    make_empty(one_bad / "val" / "eel" / "001.JPEG")
    assert verify(one_bad) == 3
    with pytest.raises(DataError, match=r"001.JPEG \(image 7\)"):
        open_datasets(excluding(one_bad))
    assert len(open_datasets(excluding(one_bad), ("val",)).val) == 9  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [None, "{}", '{"bad": 3}', "{"])
def test_exclude_with_a_missing_or_foreign_list_raises(one_bad: Path, content: str | None) -> None:
    (one_bad / BAD_IMAGES_FILE).unlink()
    if content is not None:
        (one_bad / BAD_IMAGES_FILE).write_text(content)
    with pytest.raises(DataError, match=r"data\.exclude"):
        open_datasets(excluding(one_bad))


# ------------------------------------------------------------------------------------- the order of a file system


class Shuffled:
    """os.scandir, in an order of `seed`."""

    def __init__(self, path: Any, seed: int):
        with SCANDIR(path) as entries:
            self.entries = sorted(entries, key=lambda entry: os.fsencode(entry.name))
        random.Random(seed).shuffle(self.entries)

    def __enter__(self) -> "Iterator[os.DirEntry[Any]]":
        return iter(self.entries)

    def __exit__(self, *_: object) -> None: ...


SCANDIR = os.scandir


def test_index_does_not_depend_on_the_order_of_the_file_system(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for seed in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", lambda path=".", seed=seed: Shuffled(path, seed))
            opened = open_datasets(DataConfig(root=str(image_folder), val=None, val_fraction=0.3))
            assert opened.train is not None and opened.val is not None
            names = [opened.train.name(i) for i in range(len(opened.train))]
        found.append((names, opened.train.digest(), opened.val.digest(), opened.classes))
    assert found[0] == found[1] == found[2]
