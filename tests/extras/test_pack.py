"""Packing into shards: equal bytes after an interruption, names and classes survive, bad input is
an error.
"""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import REPOSITORY, datasets_in, environment, wait_for
from PIL import Image, JpegImagePlugin

from imagenet_cls.data.decode import decode_upright, exif_orientation
from imagenet_cls.data.sources import FolderSource
from imagenet_cls.extras.datasets import pack
from imagenet_cls.extras.datasets.pack import pack_command

Call = Callable[..., tuple[int, str, str]]
Packed = Callable[..., Any]


def shards_in(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.tar"))}


@pytest.fixture
def packed(tmp_path: Path, call: Call) -> Packed:
    """Pack a dataset into the folder `out` and open it."""

    def pack(source: object, *options: object) -> Any:
        assert call(pack_command, source, tmp_path / "out", *options)[0] == 0
        return datasets_in(tmp_path / "out")

    return pack


def test_classes_that_are_numbers_survive(
    image_folder: Path, tmp_path: Path, packed: Packed
) -> None:
    for number, path in enumerate(sorted(image_folder.rglob("*.JPEG"))[:12]):
        for part in ("train", "val"):
            target = tmp_path / "data" / part / str(number) / "image.jpg"
            target.parent.mkdir(parents=True)
            target.write_bytes(path.read_bytes())
    folder = datasets_in(tmp_path / "data")
    assert packed(tmp_path / "data").train.digest() == folder.train.digest()


def test_packed_folder_is_the_same_dataset(image_folder: Path, tmp_path: Path, call: Call) -> None:
    code, text, _ = call(pack_command, image_folder, tmp_path / "out", "--images-per-shard", 16)
    assert code == 0 and "40 images of 3 classes in 3 shards" in text
    packed, folder = (datasets_in(root) for root in (tmp_path / "out", image_folder))
    for ours, theirs in ((packed.train, folder.train), (packed.val, folder.val)):
        assert ours.classes == theirs.classes
        assert ours.index.targets.tolist() == theirs.index.targets.tolist()
        for i in range(len(theirs)):
            assert ours.name(i) == theirs.name(i).replace(".JPEG", ".jpg")
            assert ours.read(i) == theirs.read(i)
    before = shards_in(tmp_path / "out")
    assert call(pack_command, image_folder, tmp_path / "out", "--images-per-shard", 16)[0] == 0
    assert shards_in(tmp_path / "out") == before
    assert call(pack_command, image_folder, tmp_path / "out")[0] == 2  # other options


def test_images_are_read_in_the_threads_of_the_pool(
    image_folder: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    read = FolderSource.read

    def read_and_record(source: FolderSource, i: int) -> bytes:
        threads.add(threading.current_thread())
        return read(source, i)

    monkeypatch.setattr(FolderSource, "read", read_and_record)
    assert call(pack_command, image_folder, tmp_path / "out", "--threads", 2)[0] == 0
    assert threads and threading.main_thread() not in threads


@pytest.mark.nightly
def test_pack_after_a_kill_continues_to_equal_bytes(
    image_folder: Path, tmp_path: Path, call: Call
) -> None:
    expected, out = tmp_path / "expected", tmp_path / "out"
    words = ["--images-per-shard", "1"]
    assert call(pack_command, image_folder, expected, *words)[0] == 0
    command = [sys.executable, REPOSITORY / "tools" / "pack.py", image_folder, out, *words]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    wait_for(
        lambda: len(list(out.rglob("*.tar"))) >= 3 or process.poll() is not None, "three shards"
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    times = {path.name: path.stat().st_mtime_ns for path in out.rglob("train-*.tar")}
    assert call(pack_command, image_folder, out, *words)[0] == 0
    assert shards_in(out) == shards_in(expected)
    after = {path.name: path.stat().st_mtime_ns for path in out.rglob("train-*.tar")}
    assert after | times == after


def test_interrupted_pack_leaves_no_dataset(
    image_folder: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(pack, "write_shard", lambda *_: 1 // 0)
        call(pack_command, image_folder, tmp_path)
    assert not (tmp_path / "train").exists()
    assert call(pack_command, image_folder, tmp_path)[0] == 0 and (tmp_path / "train").exists()


def test_pack_shrinks_only_large_images(
    tmp_path: Path, photographs: list[Image.Image], packed: Packed
) -> None:
    folder = tmp_path / "data" / "train" / "a class"
    folder.mkdir(parents=True)
    photographs[0].save(folder / "large.png")
    photographs[0].convert("CMYK").save(folder / "large.v2.JPEG")
    photographs[1].resize((100, 66)).save(folder / "small.PNG")
    overrides = [f"data.root={tmp_path / 'data'}", "data.val=train"]
    source = packed("resnet50", *overrides, "--max-px", 128).train
    assert source.classes == ("a class",)
    assert [source.name(i) for i in range(3)] == [
        "a class/large.jpg",
        "a class/large_v2.jpg",
        "a class/small.png",
    ]
    assert source.read(2) == (folder / "small.PNG").read_bytes()
    for i in range(2):
        with Image.open(io.BytesIO(source.read(i))) as image:
            assert (image.size, image.format, image.mode) == ((128, 85), "JPEG", "RGB")


def test_shrunk_images_keep_gray_of_16_bits_and_orientation(tmp_path: Path, packed: Packed) -> None:
    gray = np.tile(np.linspace(0, 65_535, 256).astype(np.uint16), (256, 1))
    orientation = Image.Exif()
    orientation[0x0112] = 6
    for part in ("train", "val"):
        folder = tmp_path / "data" / part / "0"
        folder.mkdir(parents=True)
        Image.fromarray(gray).save(folder / "gray.png")
        Image.new("RGB", (200, 100)).save(folder / "turned.jpg", exif=orientation)
    source = packed(tmp_path / "data", "--max-px", 64, "--quality", 100).train
    pixels = source.load(0)[0][0].numpy()
    assert pixels.shape == (64, 64) and np.abs(pixels - np.linspace(1.5, 253.5, 64)).max() < 4
    turned = source.read(1)
    assert exif_orientation(turned) == 6 and decode_upright(turned).shape == (3, 64, 32)


@pytest.fixture
def files_of_all_kinds(tmp_path: Path, photographs: list[Image.Image]) -> Path:
    """A folder with a file of each kind of JPEG, and with a PNG of the name of one."""
    exif = Image.Exif()
    exif[0x0112] = 6
    options: dict[str, Any] = {"quality": 95, "subsampling": 0}
    image = photographs[0].resize((200, 101))
    for part in ("train", "val"):
        folder = tmp_path / "data" / part / "0"
        folder.mkdir(parents=True)
        image.convert("CMYK").save(folder / "cmyk.jpg", **options)
        image.convert("L").save(folder / "gray.jpeg", quality=95)
        image.save(folder / "mpo.jpg", format="MPO", save_all=True, append_images=[image])
        image.save(folder / "png.JPEG", format="PNG")
        image.save(folder / "turned.jpg", exif=exif, progressive=True, **options)
        image.save(folder / "unlike.png", format="JPEG", **options)
    return tmp_path / "data"


@pytest.mark.parametrize("max_px", [None, 150])
def test_reencode_encodes_every_jpeg(
    max_px: int | None, files_of_all_kinds: Path, tmp_path: Path, call: Call
) -> None:
    words = [files_of_all_kinds, tmp_path / "out", "--reencode", 90]
    words += [] if max_px is None else ["--max-px", max_px]
    code, text, _ = call(pack_command, *words)
    assert code == 0 and "lossy" in text
    before, packed = (
        datasets_in(root, exif="apply").train for root in (files_of_all_kinds, words[1])
    )
    for i in range(len(before)):
        name, data = Path(before.name(i)).stem, packed.read(i)
        with Image.open(io.BytesIO(data)) as image:
            is_encoded = name != "png" or max_px is not None
            assert (
                image.format == ("JPEG" if is_encoded else "PNG") and packed.name(i)[-4:] == ".jpg"
            )
            assert (data != before.read(i)) == is_encoded, name
            assert image.mode == ("L" if name == "gray" else "RGB")
            assert max(image.size) == (max_px or 200)
            if is_encoded and image.mode == "RGB":
                assert JpegImagePlugin.get_sampling(image) == 2, "4:2:0"
        if max_px is None:
            difference = packed.load(i)[0].float() - before.load(i)[0].float()
            assert difference.abs().mean() < 4, name
    assert call(pack_command, *words)[0] == 0
    assert call(pack_command, *words[:2])[0] == 2  # other options


@pytest.mark.parametrize(
    "options", [["0"], ["101"], ["90.5"], ["best"], [], ["90", "--quality", "80"]]
)
def test_bad_quality_of_reencode_is_a_usage_error(
    options: list[str], image_folder: Path, tmp_path: Path, call: Call
) -> None:
    assert call(pack_command, image_folder, tmp_path / "out", "--reencode", *options)[0] == 2
    assert not (tmp_path / "out").exists()


def test_damaged_jpeg_to_be_encoded_is_an_error(
    files_of_all_kinds: Path, tmp_path: Path, call: Call
) -> None:
    path = files_of_all_kinds / "train" / "0" / "mpo.jpg"
    path.write_bytes(path.read_bytes()[:1000])
    code, _, error = call(pack_command, files_of_all_kinds, tmp_path / "out", "--reencode", 90)
    assert code == 3 and "mpo.jpg" in error and not (tmp_path / "out" / "train").exists()


@pytest.mark.parametrize("name", [" b", "b\nc", "", "a"])
def test_class_names_that_shards_cannot_hold_are_errors_before_packing(
    name: str, write_parquet: Callable[..., Path], tmp_path: Path, call: Call
) -> None:
    code, _, error = call(pack_command, write_parquet([0, 1], ["a", name]), tmp_path / "out")
    assert code == 3 and f"the class {name!r}" in error and not (tmp_path / "out").exists()


def test_absolute_paths_of_a_list_are_packed(
    image_folder: Path, tmp_path: Path, packed: Packed
) -> None:
    files = sorted((image_folder / "train").rglob("*.JPEG"))[:10]
    (tmp_path / "all.txt").write_text("".join(f"{file} {file.parent.name}\n" for file in files))
    overrides = ["data.name=list", "data.train=all.txt", "data.val=all.txt"]
    source = packed("resnet50", f"data.root={tmp_path}", *overrides).train
    assert len(source) == 10
    assert f"/{source.name(0)}" == str(files[0]).replace(".JPEG", ".jpg")


MULTI_LABEL = ["data.labels=multi", "loss.name=bce", "checkpoint.best=map"]


@pytest.mark.parametrize("options", [MULTI_LABEL, ["--multilabel"]])
def test_multilabel_of_a_list_are_packed(
    options: list[str], image_folder: Path, tmp_path: Path, call: Call
) -> None:
    """A shard has images without labels only."""
    files = sorted((image_folder / "train").rglob("*.JPEG"))[:8]
    labels = ["a;b", "c d", "", "b;a;c d", "", "", "c d;a", "b"]
    lines = [f"{file} {own}\n" for file, own in zip(files, labels, strict=True)]
    (tmp_path / "train.csv").write_text("".join(lines).replace("JPEG ", "JPEG,"))
    (tmp_path / "val.csv").write_text(f"{files[3]},b;c d\n{files[4]},\n")
    places = [f"data.root={tmp_path}", "data.train=train.csv", "data.val=val.csv"]
    words = ["resnet50", tmp_path / "out", "data.name=list", *places, *options]
    assert call(pack_command, *words, "--images-per-shard", 2)[0] == 0
    packed = datasets_in(tmp_path / "out", labels="multi")
    data = {"name": "list", "train": "train.csv", "val": "val.csv", "labels": "multi"}
    listed = datasets_in(tmp_path, **data)
    for ours, theirs in ((packed.train, listed.train), (packed.val, listed.val)):
        assert ours.classes == theirs.classes == ("a", "b", "c d")
        assert ours.index.targets.tolist() == theirs.index.targets.tolist()
        assert [ours.read(i) for i in range(len(ours))] == [
            theirs.read(i) for i in range(len(theirs))
        ]
    with tarfile.open(tmp_path / "out" / "train" / "train-00001.tar") as tar:
        samples = [tar.extractfile(member) for member in tar if member.name.endswith(".cls")]
        assert [sample.read() for sample in samples] == [b"", b"0;1;2"]


def test_class_folders_with_multilabel_are_an_error(
    image_folder: Path, tmp_path: Path, call: Call
) -> None:
    assert call(pack_command, image_folder, tmp_path / "out", "--multilabel")[0] == 3


# ---- Parquet


@pytest.fixture
def write_parquet(tmp_path: Path, image_folder: Path) -> Callable[..., Path]:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = sorted((image_folder / "train").rglob("*.JPEG"))

    def write(
        labels: list[Any], names: list[str] | None = None, part: str = "train", **changes: Any
    ) -> Path:
        images = [{"bytes": files[i].read_bytes(), "path": None} for i in range(len(labels))]
        table = pyarrow.table({"image": images, "label": labels} | changes)
        if names is not None:
            features = {"label": {"names": names, "_type": "ClassLabel"}}
            table = table.replace_schema_metadata(
                {"huggingface": json.dumps({"info": {"features": features}})}
            )
        folder = tmp_path / "hub" / "data"
        folder.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, folder / f"{part}-00000-of-00001.parquet", row_group_size=4)
        return tmp_path / "hub"

    return write


def test_parquet_becomes_shards_with_its_names(
    write_parquet: Callable[..., Path], image_folder: Path, tmp_path: Path, call: Call
) -> None:
    names = ["tench, Tinca tinca", "a/b", ".net"]
    write_parquet([0, 2, 1, 2, 0], names)
    root = write_parquet([1, 1], names, "validation")
    code, text, _ = call(pack_command, root, tmp_path / "out", "--images-per-shard", 3)
    assert code == 0 and "5 images of 3 classes in 2 shards" in text
    opened = datasets_in(tmp_path / "out")
    source = opened.train
    assert source.classes == opened.val.classes == tuple(names)
    assert source.index.targets.tolist() == [0, 2, 1, 2, 0]
    assert source.name(0) == "tench, Tinca tinca/train-00000-of-00001-0-0.jpg"
    assert source.name(1).startswith("_net/") and source.name(2).startswith("a_b/")
    files = sorted((image_folder / "train").rglob("*.JPEG"))
    assert [source.read(i) for i in range(5)] == [path.read_bytes() for path in files[:5]]


def encoded(form: str) -> bytes:
    file, image = io.BytesIO(), Image.new("RGB", (8, 8))
    image.save(file, form, save_all=form == "MPO", append_images=[image])
    return file.getvalue()


def test_unnamed_mpo_file_of_parquet_is_a_jpeg(
    write_parquet: Callable[..., Path], packed: Packed
) -> None:
    image = [{"bytes": encoded("MPO"), "path": None}]
    write_parquet([0], ["a"], image=image)
    root = write_parquet([0], ["a"], "validation", image=image)
    assert packed(root).train.name(0).endswith(".jpg")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "PCX": (
        {"labels": [0], "names": ["a"], "image": [{"bytes": encoded("PCX"), "path": "x"}]},
        "a pcx file",
    ),
    "label out of range": (
        {"labels": [0, 5], "names": ["a", "b"]},
        "row 1 of row group 0: label 5",
    ),
    "null label": ({"labels": [0, None]}, "row 1 of row group 0: no label"),
    "null among several labels": ({"labels": [["a"], None]}, "row 1 of row group 0: no label"),
    "a number for each class": (
        {"labels": [[1, 0, 0], [0, 1, 0]]},
        "row 0 of row group 0: a label",
    ),
    "no rows": ({"labels": []}, "no rows in train-00000-of-00001.parquet"),
    "no bytes": (
        {"labels": [0], "names": ["a"], "image": [{"bytes": b"", "path": "x"}]},
        "no image",
    ),
    "image is text": ({"labels": [0], "names": ["a"], "image": ["x.jpg"]}, "no image"),
    "no image": (
        {"labels": [0], "names": ["a"], "image": [{"bytes": b"12345", "path": None}]},
        "row 0 of row group 0: cannot identify",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_of_parquet_are_errors(
    name: str, write_parquet: Callable[..., Path], tmp_path: Path, call: Call
) -> None:
    fields, text = BAD[name]
    code, _, error = call(pack_command, write_parquet(**fields), tmp_path / "out")
    assert code == 3 and text in error
    assert not (tmp_path / "out" / "train").exists()


def test_class_names_of_parquet_parts_are_matched(
    write_parquet: Callable[..., Path], tmp_path: Path, packed: Packed, call: Call
) -> None:
    write_parquet([0, 1, 1], ["a", "b"])
    root = write_parquet([0, 1], ["b", "a"], "validation")
    val = packed(root).val
    assert val.classes == ("a", "b") and val.index.targets.tolist() == [1, 0]
    write_parquet([0, 1], ["a", "c"], "validation")
    code, _, error = call(pack_command, root, tmp_path / "other")
    assert code == 3 and "validation-00000-of-00001.parquet" in error and ": c." in error
    assert not (tmp_path / "other").exists()


def test_string_labels_and_a_test_part_are_packed(
    write_parquet: Callable[..., Path], tmp_path: Path, call: Call
) -> None:
    write_parquet(["dog", "cat", "dog"])
    root = write_parquet(["dog", "cat"], part="test")
    code, out, _ = call(pack_command, root, tmp_path / "out")
    assert code == 0 and "test-00000-of-00001.parquet" in out
    sets = datasets_in(tmp_path / "out")
    assert sets.train.classes == sets.val.classes == ("cat", "dog")
    assert sets.train.index.targets.tolist() == [1, 0, 1]
    assert sets.val.index.targets.tolist() == [1, 0]
    write_parquet([-1, -1], part="test")
    code, out, _ = call(pack_command, write_parquet(["cat"], part="validation"), tmp_path / "other")
    assert code == 0 and "not packed: test-00000-of-00001.parquet" in out


def test_integers_without_names_are_positions_in_classes_txt(
    write_parquet: Callable[..., Path], packed: Packed
) -> None:
    write_parquet([0, 2], part="validation")
    root = write_parquet([2, 0])
    (root / "data" / "classes.txt").write_text("2\n1\n0\n")
    sets = packed(root)
    assert sets.train.classes == ("2", "1", "0")
    assert sets.train.index.targets.tolist() == [2, 0] and sets.val.index.targets.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("labels", "options", "classes", "rows"),
    [
        ([["b", "a"], [], ["b"]], [], ("a", "b"), [[1, 1], [0, 0], [0, 1]]),
        ([[1], [2, 0], []], [], ("0", "1", "2"), [[0, 1, 0], [1, 0, 1], [0, 0, 0]]),
        (["b; a", "", "b"], ["--multilabel"], ("a", "b"), [[1, 1], [0, 0], [0, 1]]),
        (["b;a", "b", "b"], [], ("b", "b;a"), [1, 0, 0]),
    ],
)
def test_multilabel_of_parquet_are_packed(
    labels: list[Any],
    options: list[str],
    classes: tuple[str, ...],
    rows: list[Any],
    write_parquet: Callable[..., Path],
    tmp_path: Path,
    call: Call,
) -> None:
    write_parquet(labels)
    root = write_parquet(labels[::-1], part="validation")
    assert call(pack_command, root, tmp_path / "out", *options)[0] == 0
    is_multi = isinstance(rows[0], list)
    sets = datasets_in(tmp_path / "out", labels="multi" if is_multi else "single")
    assert sets.train.classes == sets.val.classes == classes
    assert sets.train.index.targets.tolist() == rows
    assert sets.val.index.targets.tolist() == rows[::-1]
    if not is_multi:  # split, the labels are other classes
        assert call(pack_command, root, tmp_path / "out", "--multilabel")[0] == 2


@pytest.mark.parametrize("form", [0, 1])
def test_names_of_multilabel_of_parquet_are_kept(
    form: int, write_parquet: Callable[..., Path], tmp_path: Path, call: Call
) -> None:
    """The Hub's `datasets` stores the feature of a list in two ways, by its version."""
    import pyarrow
    from pyarrow import parquet

    feature = {"names": ["x", "b", "a"], "_type": "ClassLabel"}
    label = [[feature], {"feature": feature, "_type": "Sequence"}][form]
    for part in ("train", "validation"):
        root = write_parquet([[2, 0], []], part=part)
        (file,) = root.rglob(f"{part}*")
        stored = json.dumps({"info": {"features": {"label": label}}})
        table = pyarrow.parquet.read_table(file).replace_schema_metadata({"huggingface": stored})
        parquet.write_table(table, file)
    assert call(pack_command, root, tmp_path / "out")[0] == 0
    train = datasets_in(tmp_path / "out", labels="multi").train
    assert train.classes == ("x", "b", "a")
    assert train.index.targets.tolist() == [[1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("suffix", ["JPEG", "jpe", "jfif", "PNG"])
def test_shards_have_the_suffixes_that_other_readers_expect(
    suffix: str, tmp_path: Path, image_folder: Path, call: Call
) -> None:
    """WebDataset's and timm's readers take a file as an image if its suffix is `jpg` or `png`."""
    for part in ("train", "val"):
        (tmp_path / "data" / part / "a").mkdir(parents=True)
        image = min((image_folder / "train").rglob("*.JPEG"))
        (tmp_path / "data" / part / "a" / f"1.{suffix}").write_bytes(image.read_bytes())
    assert call(pack_command, tmp_path / "data", tmp_path / "out")[0] == 0
    with tarfile.open(tmp_path / "out" / "train" / "train-00000.tar") as tar:
        assert tar.getnames() == ["a/1.png" if suffix == "PNG" else "a/1.jpg", "a/1.cls"]


def test_broken_parquet_files_are_errors(
    write_parquet: Callable[..., Path], tmp_path: Path, call: Call
) -> None:
    root = write_parquet([0, 1])
    (file,) = root.rglob("*.parquet")
    os.truncate(file, file.stat().st_size - 100)
    code, _, error = call(pack_command, root, tmp_path / "out")
    assert code == 3 and str(file) in error
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"img": [b""], "fine_label": [0]}), file)
    code, _, error = call(pack_command, root, tmp_path / "out")
    assert code == 3 and "img, fine_label" in error and str(file) in error
