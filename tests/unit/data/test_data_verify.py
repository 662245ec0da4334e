"""Every image read: odd ones good, broken ones named with a reason; stopped, gone on, and the same file comes out."""

import io
import json
import os
import random
import runpy
import shutil
import signal
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from imagenet_cls.commands import verify_data as verify_module
from imagenet_cls.commands.program import main
from imagenet_cls.commands.verify_data import Verdict, images_below, read_image, verify
from imagenet_cls.config.schema import AugmentConfig, DataConfig, EvalConfig
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.index import index_folder
from imagenet_cls.data.loader import TrainLoader, eval_batches
from imagenet_cls.data.manifest import FILE_NAME, Manifest, leave_out, read_manifest
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.transforms import EvalTransform, train_transform
from imagenet_cls.errors import DataError, ResourceError, Stopped, UsageError

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[3] / "tools" / "verify_data.py"))["verify_command"]


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header_of(data: bytes, width: int, height: int) -> bytes:
    chunk = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[33:]


def jpeg_header_of(data: bytes, width: int, height: int) -> bytes:
    frame = data.index(b"\xff\xc0")
    return data[: frame + 5] + struct.pack(">HH", height, width) + data[frame + 9 :]


def odd_files(photograph: Image.Image) -> tuple[dict[str, bytes], dict[str, tuple[bytes, str]]]:
    """Good ones, and bad ones with a part of the reason, by names."""
    image = photograph.resize((161, 107))
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
        "empty.JPEG": (b"", "an empty file"),
        **{f"cut_at_{n}.JPEG": (jpeg[: len(jpeg) * n // 100], "cut short") for n in (10, 50, 99)},
        "text.JPEG": (b"404 not found\n" * 50, "not an image"),
        "bomb.JPEG": (jpeg_header_of(jpeg, 20_000, 10_000), "20000 x 10000 pixels"),
        "bomb.png": (png_header_of(encoded(image, "PNG"), 20_000, 10_000), "178956970 pixels"),
    }
    return good, bad


@pytest.fixture(scope="module")
def odd_root(tmp_path_factory: pytest.TempPathFactory, photographs: list[Image.Image]) -> Path:
    """train/good, train/bad; with what no process can read among the bad ones, root's included."""
    root = tmp_path_factory.mktemp("odd")
    good, bad = odd_files(photographs[0])
    for folder, files in (("good", good), ("bad", {name: data for name, (data, _) in bad.items()})):
        (root / "train" / folder).mkdir(parents=True)
        for name, data in files.items():
            (root / "train" / folder / name).write_bytes(data)
    (root / "train" / "bad" / "dangling.JPEG").symlink_to("nowhere.JPEG")
    os.mkfifo(root / "train" / "bad" / "pipe.JPEG")
    return root


def verified(root: Path, out: Path, **kwargs: Any) -> Manifest:
    options: dict[str, Any] = {"num_threads": 2, "seen": lambda verdict: None} | kwargs
    return verify(root, images_below(root), out, **options)


def test_odd_images_are_good_and_broken_ones_are_named_with_a_reason(
    odd_root: Path, tmp_path: Path, photographs: list[Image.Image], capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = verified(odd_root, tmp_path / "m.json")
    assert read_manifest(tmp_path / "m.json") == manifest
    expected = {f"train/bad/{name}": reason for name, (_, reason) in odd_files(photographs[0])[1].items()}
    expected |= {"train/bad/dangling.JPEG": "No such file", "train/bad/pipe.JPEG": "not a regular file"}
    found = {image.path: image.reason for image in manifest.bad}
    assert found.keys() == expected.keys()
    for path, reason in expected.items():
        assert reason in found[path] and "\n" not in found[path], (path, found[path])
    assert (manifest.whole.images, manifest.whole.bad) == (7 + 9, 9)
    assert manifest.whole.size_bytes == sum(
        path.stat().st_size for path in odd_root.rglob("*") if path.is_file() and not path.is_symlink()
    )
    assert capfd.readouterr() == ("", "")  # the decoders' C libraries print, too


def test_a_bomb_costs_no_memory(photographs: list[Image.Image]) -> None:
    """200 megapixels are 600 MB. The peak of a process never falls, so a rise would show."""
    peak_kib = lambda: int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])  # noqa: E731
    _, bad = odd_files(photographs[0])
    before = peak_kib()
    for name in ("bomb.JPEG", "bomb.png"):
        with pytest.raises(DataError, match="pixels"):
            verify_module.decode_rgb(bad[name][0])
    assert peak_kib() - before < 50_000


def test_an_image_that_vanishes_between_listing_and_reading(image_folder: Path) -> None:
    verdict = read_image(image_folder, b"train/cat/gone.JPEG")
    assert (verdict.reason, verdict.size_bytes, verdict.digest) == ("No such file or directory", None, "")


def as_nobody(action: Callable[[], str]) -> str:
    """What `action` returns or raises in a process of another user, who may read only what all may; in this one where
    it is not root's.
    """

    def told() -> str:
        try:
            return action()
        except DataError as error:
            return str(error)

    if os.getuid() != 0:
        return told()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65_534)
            os.setuid(65_534)
            os.write(writing, told().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:  # noqa: PTH123 (a descriptor)
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def locked(image_folder: Path) -> Iterator[Path]:
    """A data set that everybody finds, with train/dog/004.JPEG that only its owner may read: not even that one."""
    with tempfile.TemporaryDirectory() as place:  # `tmp_path` is closed to others
        root = Path(place) / "data"
        shutil.copytree(image_folder, root)
        for path in (root.parent, root, *root.rglob("*")):
            path.chmod(0o755)
        (root / "train" / "dog" / "004.JPEG").chmod(0)
        yield root


def test_a_file_that_this_user_may_not_read(locked: Path) -> None:
    def found() -> str:
        manifest = verify(locked, images_below(locked), locked.parent / "m.json", 2, lambda verdict: None)
        return repr([(bad.path, bad.reason, bad.size_bytes) for bad in manifest.bad])

    def loaded() -> str:
        source = open_datasets(DataConfig(root=str(locked))).train
        assert source is not None
        row = next(i for i in range(len(source)) if source.name(i) == "dog/004.JPEG")
        source.load(row - 1)
        source.load(row)
        return "loaded"

    locked.parent.chmod(0o777)  # the manifest is written by that user
    size_bytes = (locked / "train" / "dog" / "004.JPEG").stat().st_size
    assert as_nobody(found) == repr([("train/dog/004.JPEG", "Permission denied", size_bytes)])
    said = as_nobody(loaded)
    assert f"{locked}/train/dog/004.JPEG (image " in said and "Permission denied" in said
    (locked / "train" / "dog").chmod(0)
    said = as_nobody(loaded)
    assert f"{locked}/train/dog: Permission denied\nmake it readable for this user" in said
    (locked / "train" / "dog").chmod(0o755)


def test_a_folder_that_is_not_there(image_folder: Path, tmp_path: Path) -> None:
    for missing in (tmp_path / "none", image_folder / "train" / "dog" / "004.JPEG"):
        with pytest.raises(DataError) as caught:
            images_below(missing)
        assert str(caught.value).splitlines() == [f"{missing}: no such folder", "name the folder that holds the images"]


def test_counts_and_digests(image_folder: Path, tmp_path: Path) -> None:
    """Against a plain loop over the files."""
    manifest = verified(image_folder, tmp_path / "m.json")
    assert manifest.bad == () and set(manifest.folders) == {"train", "val"}
    for top, contents in {".": manifest.whole, **manifest.folders}.items():
        digest, size_bytes, images = sha256(), 0, 0
        for path in sorted((image_folder / top).rglob("*.JPEG"), key=str):
            data = path.read_bytes()
            digest.update(str(path.relative_to(image_folder)).encode() + b"\0" + sha256(data).hexdigest().encode())
            digest.update(b"\n")
            size_bytes, images = size_bytes + len(data), images + 1
        assert (contents.images, contents.size_bytes, contents.digest) == (images, size_bytes, digest.hexdigest())


class Interrupted:
    """Sends Ctrl-C to this process behind the n-th verdict."""

    def __init__(self, n: int):
        self.n, self.paths = n, list[str]()

    def __call__(self, verdict: Verdict) -> None:
        self.paths.append(verdict.path)
        if len(self.paths) == self.n:
            signal.raise_signal(signal.SIGINT)


def test_stopped_and_gone_on(image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = verified(image_folder, tmp_path / "undisturbed.json")
    out = tmp_path / "m.json"
    with pytest.raises(Stopped, match="interrupted after 15 of 49 images") as stopped:
        verified(image_folder, out, seen=Interrupted(15))
    assert stopped.value.exit_code == 130 and not out.exists()
    partial = tmp_path / "m.json.partial"
    assert len(partial.read_text().splitlines()) >= 15
    # killed in the middle of a line; and an image that was read is another one now
    partial.write_text(partial.read_text()[:-30])
    noted = {json.loads(line)[0] for line in partial.read_text().splitlines()[:-1]}
    with partial.open("ab") as file:
        file.write(b'\n[1, "\xff"]\n{}\n')  # and what a disk makes of it
    touched = image_folder / "train" / "cat" / "003.JPEG"
    info = touched.stat()
    os.utime(touched, ns=(info.st_atime_ns, info.st_mtime_ns + 1))
    read: list[str] = []

    def reading(root: Path, name: bytes) -> Verdict:
        read.append(name.decode())
        return read_image(root, name)

    monkeypatch.setattr(verify_module, "read_image", reading)
    assert verified(image_folder, out) == undisturbed
    everything = {name.decode() for name in images_below(image_folder)}
    assert sorted(read) == sorted(everything - noted | {"train/cat/003.JPEG"})
    assert out.read_bytes() == (tmp_path / "undisturbed.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.json", "undisturbed.json"]


def test_two_at_once_and_places_that_take_no_file(image_folder: Path, tmp_path: Path) -> None:
    codes = []

    def second(verdict: Verdict) -> None:
        if not verdict.path.endswith("cat/000.JPEG"):
            return
        child = os.fork()  # locks are between processes
        if child == 0:
            try:
                verified(image_folder, tmp_path / "m.json")
            except UsageError as error:
                os._exit(7 if "another process" in str(error) else 8)
            finally:
                os._exit(9)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    verified(image_folder, tmp_path / "m.json", seen=second, num_threads=1)
    assert codes == [7, 7]
    with pytest.raises(ResourceError, match="--out FILE"):
        verified(image_folder, Path("/proc/m.json"))


# ------------------------------------------------------------------------------------------------- the tool


def tool(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, list[str]]:
    capsys.readouterr()
    code = main(TOOL, [str(word) for word in words])
    out, err = capsys.readouterr()
    assert len(err.splitlines()) <= 3
    return code, out, err.splitlines()


def test_the_tool(odd_root: Path, image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "m.json"
    code, out, err = tool(capsys, odd_root, "--out", manifest, "--threads", 1)
    assert code == 3 and "bad: train/bad/empty.JPEG: an empty file" in out and "16 images" in out
    assert "9 of 16 images are bad" in err[0] and f"data.exclude={manifest}" in err[1]
    code, out, err = tool(capsys, image_folder, "--out", manifest)
    assert code == 0 and "49 images" in out and "other than the time before: train, val" in out and not err
    assert "the same as the time before" in tool(capsys, image_folder, "--out", manifest)[1]
    manifest.write_text("{}")
    assert tool(capsys, image_folder, "--out", manifest)[0] == 3
    assert manifest.read_text() == "{}"  # not ours: not written over
    assert tool(capsys, tmp_path / "nowhere")[0] == 3
    assert tool(capsys, image_folder, "data.root=x")[0] == 2


def test_the_images_of_a_config(image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list names what is read: places elsewhere, the same twice, one that is missing, one that is a folder."""
    root = tmp_path / "root"
    root.mkdir()
    elsewhere = [f"{image_folder}/train/cat/00{i}.JPEG" for i in range(3)]
    names = [*elsewhere, "x/../1.JPEG", "1.JPEG", "2.JPEG", "folder.jpg"]
    for i in range(1, 3):
        (root / f"{i}.JPEG").write_bytes((image_folder / "train" / "cat" / "000.JPEG").read_bytes())
    (root / "folder.jpg").mkdir()
    good = f"{image_folder}/train/cat/001.JPEG 0\n"
    lines = [good, *(f"{name} 0\n" for name in names), "missing.JPEG 0\n", *[good] * 5]
    (root / "train.txt").write_text("".join(lines))
    (root / "val.txt").write_text("2.JPEG 0\n")
    config = tmp_path / "list.yaml"
    config.write_text(f"data: {{name: list, root: {root}, train: train.txt, val: val.txt}}\noptimizer: {{lr: 0.1}}\n")
    code, out, err = tool(capsys, config)
    assert code == 3 and "7 images" in out and "2 of 7 images are bad: folder.jpg, missing.JPEG" in err[0]
    assert {image.path for image in read_manifest(root / FILE_NAME).bad} == {"folder.jpg", "missing.JPEG"}
    assert tool(capsys, config, "data.name=synthetic")[0] == 2
    # and what it says holds for the list
    data = DataConfig(name="list", root=str(root), train="train.txt", val="val.txt", exclude=str(root / FILE_NAME))
    with pytest.raises(DataError, match="2 of 14 training images are bad, and at most 1"):
        open_datasets(data)
    (root / "train.txt").write_text("".join(line for line in lines if "folder.jpg" not in line))
    opened = open_datasets(data)
    assert opened.train is not None and len(opened.train) == 12
    assert "missing.JPEG" not in [opened.train.name(i) for i in range(12)]


# -------------------------------------------------------------------------------- what the manifest leaves out


@pytest.fixture
def one_bad(image_folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder where train/dog/004.JPEG is empty, and its manifest in it."""
    for path in sorted(image_folder.rglob("*.JPEG")):
        target = tmp_path / "data" / path.relative_to(image_folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, target)
    bad = tmp_path / "data" / "train" / "dog" / "004.JPEG"
    bad.unlink()
    bad.write_bytes(b"")
    verified(tmp_path / "data", tmp_path / "data" / FILE_NAME)
    return tmp_path / "data"


def excluding(root: Path, **changes: Any) -> DataConfig:
    return replace(DataConfig(root=str(root), exclude=str(root / FILE_NAME)), **changes)


def test_a_bad_image_is_left_out_and_the_digest_says_so(one_bad: Path, image_folder: Path) -> None:
    opened, whole = open_datasets(excluding(one_bad)), open_datasets(DataConfig(root=str(one_bad)))
    assert opened.train is not None and whole.train is not None and opened.val is not None and whole.val is not None
    names = [whole.train.name(i) for i in range(40)]
    names.remove("dog/004.JPEG")
    assert [opened.train.name(i) for i in range(39)] == names
    assert opened.note == "1 of 40 training images left out, being bad: dog/004.JPEG" and whole.note is None
    assert opened.train.digest() != whole.train.digest() and opened.val.digest() == whole.val.digest()
    assert open_datasets(excluding(one_bad)).train.digest() == opened.train.digest()  # type: ignore[union-attr]
    # seen from elsewhere, by another name for the same place, and with a manifest elsewhere
    (one_bad / FILE_NAME).rename(one_bad.parent / "m.json")
    other = excluding(one_bad / "train" / "..", train="./train", exclude=str(one_bad.parent / "m.json"))
    assert open_datasets(other).train.digest() == opened.train.digest()  # type: ignore[union-attr]
    # a validation part that is held out stays as it was
    held_out = {"val": None, "val_fraction": 0.2}
    parts = [open_datasets(replace(data, **held_out)).val for data in (other, DataConfig(root=str(one_bad)))]
    assert parts[0].digest() == parts[1].digest()  # type: ignore[union-attr]


def test_every_layout_of_ranks_sees_the_same_samples(one_bad: Path) -> None:
    def seen(world_size: int) -> list[set[str]]:
        """The names of each step's global batch."""
        steps: list[set[str]] = [set() for _ in range(9)]
        for rank in range(world_size):
            source = open_datasets(excluding(one_bad)).train
            assert source is not None
            sampler = EpochSampler(len(source), 4, rank, world_size, seed=3)
            sampler.set_epoch(2)
            for n, (_, index, _) in enumerate(sampler):
                source.load(index)
                steps[n // (4 // world_size)].add(source.name(index))
        return steps

    assert seen(1) == seen(2) == seen(4)
    assert {len(names) for names in seen(1)} == {4}


def test_what_exclusion_refuses(one_bad: Path, image_folder: Path) -> None:
    data = excluding(one_bad)
    manifest = one_bad / FILE_NAME
    # another bad one, which the manifest does not name
    unknown = one_bad / "train" / "cat" / "002.JPEG"
    unknown.unlink()
    unknown.write_bytes(b"x")
    source = open_datasets(data).train
    assert source is not None
    with pytest.raises(DataError, match=r"002.JPEG \(image 2\): .*does not name it.*verify_data.py") as error:
        source.load(2)
    assert "\n" not in str(error.value)
    verified(one_bad, manifest)
    with pytest.raises(DataError, match="2 of 40 training images are bad, and at most 1"):
        open_datasets(data)
    # one in ten thousand, rounded up
    index = index_folder(one_bad / "train")
    rows = np.concatenate((np.arange(40), np.full(9_961, 0)))
    with pytest.raises(DataError, match="2 of 10000 training images are bad, and at most 1"):
        leave_out(index.select(rows[:10_000]), one_bad, manifest)
    kept, note = leave_out(index.select(rows), one_bad, manifest)
    assert len(kept) == 9_999 and note is not None and "cat/002.JPEG, dog/004.JPEG" in note
    # repaired since
    unknown.write_bytes((image_folder / "train" / "cat" / "001.JPEG").read_bytes())
    with pytest.raises(DataError, match=r"002.JPEG: was bad .* has changed since"):
        open_datasets(data)
    verified(one_bad, manifest)
    # validation leaves nothing out
    broken = one_bad / "val" / "eel" / "001.JPEG"
    broken.unlink()
    broken.write_bytes(b"")
    verified(one_bad, manifest)
    with pytest.raises(DataError, match=r"001.JPEG \(image 7\): an empty file.*validation leaves no image out"):
        open_datasets(data)
    validation = open_datasets(data, ("val",)).val
    assert validation is not None and len(validation) == 9
    # no manifest, and none of ours
    manifest.write_text("[]")
    with pytest.raises(DataError, match="not a file that"):
        open_datasets(data)
    manifest.unlink()
    with pytest.raises(DataError, match=r"No such file.*\n.*verify_data.py"):
        open_datasets(data)


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


def first_batches(root: Path, num_workers: int) -> list[torch.Tensor]:
    """Of the training part, and of a validation part that is held out of it."""
    opened = open_datasets(DataConfig(root=str(root), val=None, val_fraction=0.3))
    assert opened.train is not None and opened.val is not None
    sampler = EpochSampler(len(opened.train), 4, 0, 1, seed=3)
    loader = TrainLoader(opened.train, train_transform(AugmentConfig(size_px=24)), sampler, 4, 3, num_workers)
    batches = [tensor for batch in islice(loader.epoch(0), 3) for tensor in (batch.images, batch.targets)]
    loader.close()
    transform = EvalTransform(EvalConfig(crop_px=24))
    return [*batches, *next(eval_batches(opened.val, transform, range(len(opened.val)), 4, 0))]


def test_a_file_system_that_lists_in_another_order(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, batches = [], []
    for seed in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", lambda path=".", seed=seed: Shuffled(path, seed))
            patch.setattr(os, "listdir", lambda path=".", seed=seed: [e.name for e in Shuffled(path, seed).entries])
            index = index_folder(image_folder / "train")
            manifest = verified(image_folder, tmp_path / "m.json")
            batches.append(first_batches(image_folder, num_workers=seed))
        found.append((index.blob, index.targets.tolist(), index.classes, index.digest(), manifest))
    assert found[0] == found[1] == found[2]
    for others in batches[1:]:
        assert all(torch.equal(mine, other) for mine, other in zip(batches[0], others, strict=True))
