"""prepare_imagenet, on small archives in the published forms."""

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from archive_writers import write_tar
from helpers import write_files
from scipy.io import savemat
from torchvision.datasets import imagenet

from imagenet_cls.commands import cli
from imagenet_cls.extras.datasets import prepare_imagenet
from imagenet_cls.extras.datasets.prepare_imagenet import ARCHIVES, KAGGLE, prepare_command
from imagenet_cls.files import take_lock

WNIDS = ["n01440764", "n01443537", "n02105855"]
# By path in the folder that is prepared.
TRAIN = {f"train/{wnid}/{wnid}_{i}.JPEG": f"{wnid} {i}".encode() for wnid in WNIDS for i in "012"}
VAL = {
    f"val/{WNIDS[number]}/ILSVRC2012_val_{i:08d}.JPEG": f"val {i}".encode()
    for i, number in enumerate((2, 0, 1, 1, 0, 2, 2), 1)
}


@pytest.fixture(autouse=True)
def known_counts_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the small set."""
    monkeypatch.setattr(prepare_imagenet, "COUNTS", (len(WNIDS), len(TRAIN), len(VAL)))
    monkeypatch.setattr(imagenet, "ARCHIVE_META", {})


def write_archives(folder: Path) -> Path:
    """A tar of class tars, a flat tar, and the devkit, whose ids are in another order."""
    train, val, devkit = (folder / name for name in ARCHIVES)
    outer = []
    for wnid in WNIDS:
        files = [(Path(name).name, data) for name, data in TRAIN.items() if wnid in name]
        outer.append((f"{wnid}.tar", write_tar(train, files).read_bytes()))
    write_tar(train, outer)
    write_tar(val, [(Path(name).name, data) for name, data in VAL.items()])
    columns = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")
    rows = [(i, wnid, "a, b", "", 0) for i, wnid in enumerate(WNIDS[::-1], 1)]
    synsets = np.array([*rows, (4, "n00001740", "c", "", 3)], [(name, object) for name in columns])
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets[:, None]})
    numbers = [3 - WNIDS.index(Path(name).parent.name) for name in VAL]
    truth = "".join(f"{number}\n" for number in numbers).encode()
    content = [("meta.mat", meta.getvalue()), ("ILSVRC2012_validation_ground_truth.txt", truth)]
    files = [(f"ILSVRC2012_devkit_t12/data/{name}", data) for name, data in content]
    write_tar(devkit, files, mode="w:gz")
    for part, file in (("val", val), ("devkit", devkit)):
        imagenet.ARCHIVE_META[part] = (file.name, hashlib.md5(file.read_bytes()).hexdigest())
    return folder


def write_kaggle(folder: Path) -> Path:
    rows = ["ImageId,PredictionString"]
    files = {Path(KAGGLE[0]).parent / name: data.decode() for name, data in TRAIN.items()}
    for name, data in reversed(VAL.items()):
        path = Path(name)
        label = path.parent.name
        rows.append(f"{path.stem},{label} 10 20 30 40 {label} 1 2 3 4 ")
        files[Path(KAGGLE[1], path.name)] = data.decode()
    write_files(folder, files | {KAGGLE[2]: "\n".join(rows) + "\n"})
    return folder


def assert_complete(out: Path) -> None:
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.glob("*/*/*")}
    assert files == TRAIN | VAL


def prepare(*arguments: object) -> int:
    return cli.call_command(prepare_command, list(map(str, arguments)))


def test_prepare_twice_writes_only_what_is_incomplete(tmp_path: Path) -> None:
    source, out = write_archives(tmp_path / "in"), tmp_path / "out"
    assert prepare(source, out) == 0
    assert_complete(out)
    assert len(imagenet.ImageNet(out, "train")) == len(TRAIN)  # torchvision reads it
    complete = [path for path in out.glob("train/*/*") if WNIDS[1] not in path.name]
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in complete]
    # as an interrupted call leaves it: a class half written, and no validation images
    partial = (out / "train" / WNIDS[1]).rename(out / "train" / f".{WNIDS[1]}.partial")
    (partial / "stale.JPEG").write_bytes(b"x")
    (out / "val").rename(out / ".val.partial")
    assert prepare(source, out) == 0
    assert_complete(out)
    assert before == [(path.stat().st_ino, path.stat().st_mtime_ns) for path in complete]


def test_prepare_while_another_process_writes_is_an_error(tmp_path: Path) -> None:
    source = write_kaggle(tmp_path / "in")
    partial = tmp_path / "out" / ".val.partial"
    partial.mkdir(parents=True)
    with take_lock(tmp_path / "out", ""):
        child = os.fork()
        if not child:
            os._exit(prepare(source, tmp_path / "out"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert partial.exists()
    for _ in range(2):
        assert prepare(source, tmp_path / "out") == 0
        assert_complete(tmp_path / "out")
    image = source / KAGGLE[1] / "ILSVRC2012_val_00000001.JPEG"
    assert image.samefile(tmp_path / "out" / "val" / WNIDS[2] / image.name)  # a link


def test_prepare_malformed_solution_file_exits_with_3(tmp_path: Path) -> None:
    solution = write_kaggle(tmp_path / "in") / KAGGLE[2]
    good = solution.read_text()
    for row in (f"a,{'x' * 200_000}", "a", "a,", "a,n01440764"):
        solution.write_text(f"{good}{row}\n")
        assert prepare(tmp_path / "in", tmp_path / "out") == 3
        assert not (tmp_path / "out" / "val").exists()


@pytest.mark.parametrize("write", [write_archives, write_kaggle])
def test_prepare_without_a_file_exits_with_3(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    source = write(tmp_path / "in")
    for name in ARCHIVES if write is write_archives else KAGGLE:
        kept = (source / name).rename(tmp_path / "kept")
        assert prepare(source, tmp_path / "out") == 3
        kept.rename(source / name)


@pytest.mark.parametrize("number", range(3))
def test_prepare_broken_archive_exits_with_3(tmp_path: Path, number: int) -> None:
    """Cut, and, where tarfile would read what is before it, with a damaged header."""
    archive = write_archives(tmp_path / "in") / ARCHIVES[number]
    content = archive.read_bytes()
    for broken in (content[: len(content) // 2], content[:-20_000] + b"x" * 20_000):
        archive.write_bytes(broken)
        assert prepare(tmp_path / "in", tmp_path / "out") == 3


def test_prepare_other_counts_exit_with_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_imagenet, "COUNTS", (len(WNIDS), len(TRAIN), len(VAL) + 1))
    assert prepare(write_archives(tmp_path / "in"), tmp_path / "out") == 3
    assert_complete(tmp_path / "out")
