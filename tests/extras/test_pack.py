"""Packing into shards: the same images, equal bytes after an interruption, and bad input is an
error.
"""

import io
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import REPOSITORY, datasets_in, environment, fails, succeeds, wait_for, write_files
from PIL import Image, JpegImagePlugin
from test_data_datasets import names

from imagenet_cls.data.decode import decode_upright, exif_orientation
from imagenet_cls.extras.datasets.pack import pack_command

Packed = Callable[..., Any]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def packed(out: Path) -> Packed:
    """Pack a dataset into the folder `out` and open it."""

    def pack(source: object, *options: object, labels: str = "single") -> Any:
        succeeds(pack_command, source, out, *options)
        return datasets_in(out, labels=labels)

    return pack


def shards_in(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.tar"))}


def assert_same_images(packed: Any, expected: Any) -> None:
    for part in ("train", "val"):
        ours, theirs = packed.parts[part], expected.parts[part]
        assert ours.classes == theirs.classes
        assert ours.targets.tolist() == theirs.targets.tolist()
        assert all(ours.files.read(i) == theirs.files.read(i) for i in range(len(theirs)))


def test_packed_folder_is_the_same_dataset(image_folder: Path, out: Path, packed: Packed) -> None:
    folder = datasets_in(image_folder)
    data = packed(image_folder, "--images-per-shard", 16)
    shards = shards_in(out)
    assert_same_images(data, folder)
    assert names(data.train) == [name.replace("JPEG", "jpg") for name in names(folder.train)]
    fails(2, pack_command, image_folder, out)  # other options
    assert shards_in(out) == shards and len(shards) == 3 + 1


@pytest.mark.nightly
def test_pack_after_a_kill_continues_to_equal_bytes(
    image_folder: Path, tmp_path: Path, out: Path
) -> None:
    words = ["--images-per-shard", "1"]
    succeeds(pack_command, image_folder, tmp_path / "expected", *words)
    command = [sys.executable, REPOSITORY / "tools" / "pack.py", image_folder, out, *words]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    wait_for(lambda: len(list(out.rglob("*.tar"))) >= 3, "three shards")
    process.send_signal(signal.SIGKILL)
    process.wait()

    def files() -> set[int]:
        return {path.stat().st_ino for path in out.rglob("train-*.tar")}

    before = files()
    succeeds(pack_command, image_folder, out, *words)
    assert shards_in(out) == shards_in(tmp_path / "expected")
    assert before and before <= files()


# ---- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data/train/a class"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a dataset with the images in `folder`."""
    data = f"data: {{name: folder, root: {tmp_path / 'data'}, val: train}}"
    write_files(tmp_path, {"config.yaml": f"{data}\noptimizer: {{lr: 0.1}}\n"})
    return tmp_path / "config.yaml"


TURNED = Image.Exif()
TURNED[0x0112] = 6


def test_shards_have_the_names_that_other_readers_expect(
    folder: Path, config: Path, image_folder: Path, packed: Packed, out: Path
) -> None:
    """WebDataset's and timm's readers take a file as an image if its suffix is `jpg` or `png`, and
    a key ends at the first dot.
    """
    image = (image_folder / "train" / "cat" / "000.JPEG").read_bytes()
    for name in ("1.v2.JPEG", "2.jpe", "3.jfif", "4.PNG"):
        (folder / name).write_bytes(image)
    packed(config)
    keys = ["1_v2.jpg", "1_v2.cls", "2.jpg", "2.cls", "3.jpg", "3.cls", "4.png", "4.cls"]
    with tarfile.open(out / "train" / "train-00000.tar") as tar:
        assert tar.getnames() == [f"a class/{key}" for key in keys]


def test_only_large_images_are_shrunk(
    folder: Path, config: Path, photographs: list[Image.Image], packed: Packed
) -> None:
    """Gray of 16 bits stays gray, and the orientation stays."""
    gray = np.tile(np.linspace(0, 65_535, 256).astype(np.uint16), (256, 1))
    Image.fromarray(gray).save(folder / "0.png")
    photographs[0].save(folder / "1.png")
    photographs[1].resize((60, 40)).save(folder / "2.png")
    Image.new("RGB", (200, 100)).save(folder / "3.jpg", exif=TURNED)
    source = packed(config, "--max-px", 64).train
    pixels = source.load(0)[0][0].numpy()
    assert pixels.shape == (64, 64) and np.abs(pixels - np.linspace(1.5, 253.5, 64)).max() < 4
    with Image.open(io.BytesIO(source.files.read(1))) as image:
        assert (image.size, image.format) == ((64, 43), "JPEG")
    assert source.files.read(2) == (folder / "2.png").read_bytes()
    turned = source.files.read(3)
    assert exif_orientation(turned) == 6 and decode_upright(turned).shape == (3, 64, 32)


def test_reencode_encodes_every_jpeg(
    folder: Path, config: Path, photographs: list[Image.Image], packed: Packed
) -> None:
    """Also one that is called otherwise; gray and the orientation stay."""
    image = photographs[0].resize((200, 101))
    image.convert("L").save(folder / "0.jpg", quality=95)
    image.save(folder / "1.png", format="JPEG", quality=95, subsampling=0, exif=TURNED)
    image.save(folder / "2.jpg", format="PNG")
    source = packed(config, "--reencode", 90).train
    gray, color, png = (source.files.read(i) for i in range(3))
    assert png == (folder / "2.jpg").read_bytes() and exif_orientation(color) == 6
    with Image.open(io.BytesIO(gray)) as one, Image.open(io.BytesIO(color)) as other:
        assert (one.mode, other.mode) == ("L", "RGB")
        assert JpegImagePlugin.get_sampling(other) == 2, "4:2:0"
    pixels = np.asarray(image, np.float32).transpose(2, 0, 1)
    assert np.abs(source.load(1)[0].numpy() - pixels).mean() < 5


def test_damaged_jpeg_to_be_encoded_is_an_error(
    folder: Path, config: Path, image_folder: Path, out: Path
) -> None:
    image = (image_folder / "train" / "cat" / "000.JPEG").read_bytes()
    (folder / "cut.jpg").write_bytes(image[:1000])
    assert "cut.jpg" in fails(3, pack_command, config, out, "--reencode", 90)
    assert not (out / "train").exists()


def test_multilabel_of_a_list_are_packed(
    image_folder: Path, tmp_path: Path, packed: Packed
) -> None:
    """A shard has images without labels only."""
    files = sorted((image_folder / "train").rglob("*.JPEG"))[:8]
    labels = ["a;b", "c d", "", "b;a;c d", "", "", "c d;a", "b"]
    lines = [f"{file},{own}\n" for file, own in zip(files, labels, strict=True)]
    write_files(tmp_path, {"train.csv": "".join(lines), "val.csv": "".join(lines[:3:2])})
    lists = {"name": "list", "train": "train.csv", "val": "val.csv", "labels": "multi"}
    overrides = [f"data.{key}={value}" for key, value in (lists | {"root": tmp_path}).items()]
    words = [*overrides, "loss.name=bce", "checkpoint.best=map", "--images-per-shard", 2]
    data = packed("resnet50", *words, labels="multi")
    assert_same_images(data, datasets_in(tmp_path, **lists))


# ---- datasets of the Hub


def encoded(form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, form, **options)
    return file.getvalue()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write a folder of Parquet files whose parts have these images, labels and classes."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def write(images: list[bytes], labels: list[Any], *classes: str) -> str:
        label = datasets.ClassLabel(names=list(classes))
        if isinstance(labels[0], list):
            label = datasets.List(label)
        features = datasets.Features({"image": datasets.Image(), "label": label})
        columns = {"image": images, "label": labels}
        (tmp_path / "hub").mkdir(exist_ok=True)
        for part in ("train", "validation"):
            table = datasets.Dataset.from_dict(columns, features=features)
            table.to_parquet(tmp_path / "hub" / f"{part}-00000-of-00001.parquet")
        return f"hf:{tmp_path / 'hub'}"

    return write


def test_parquet_files_become_shards(rows: Callable[..., str], packed: Packed) -> None:
    """An MPO file is a JPEG."""
    mpo = encoded("MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    images = [encoded("PNG"), mpo, encoded("JPEG")]
    data = packed(rows(images, [0, 2, 1], "a b", ".net", "a/b"))
    assert data.classes == ("a b", ".net", "a/b") and data.val.targets.tolist() == [0, 2, 1]
    assert names(data.train) == ["a b/00000000.png", "a_b/00000001.jpg", "_net/00000002.jpg"]
    assert [data.val.files.read(i) for i in range(3)] == images


def test_lists_of_labels_become_shards(rows: Callable[..., str], packed: Packed) -> None:
    folder = rows([encoded("PNG")] * 2, [[1, 0], []], "b", "a")
    data = packed(folder, "--multilabel", labels="multi")
    assert data.classes == ("b", "a") and data.val.targets.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("content", [encoded("PCX"), b"no image"])
def test_row_that_training_can_not_read_is_an_error(
    content: bytes, rows: Callable[..., str], out: Path
) -> None:
    assert "train[0]" in fails(3, pack_command, rows([content], [0], "a"), out)
    assert not (out / "train").exists()


def test_class_names_that_shards_cannot_hold_are_errors(
    rows: Callable[..., str], out: Path
) -> None:
    folder = rows([encoded("PNG")], [0], "a", "b\nc")
    fails(3, pack_command, folder, out)
    assert not (out / "train").exists()
