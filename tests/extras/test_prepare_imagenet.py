"""prepare_imagenet, on small archives in the published forms."""

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from archive_writers import write_devkit, write_imagenet

from imagenet_cls.commands import cli
from imagenet_cls.extras.datasets.prepare_imagenet import prepare_command
from imagenet_cls.files import take_lock

WNIDS = ["n01440764", "n01443537", "n02105855"]
VAL_LABELS = [WNIDS[i] for i in (2, 0, 1, 1, 0, 2, 2)]  # of validation images 1 to 7
CLS_LOC = "ILSVRC/Data/CLS-LOC"


def train_image(class_number: int, i: int) -> bytes:
    return f"train {class_number} {i}".encode() * 100


def val_image(i: int) -> bytes:
    return f"val {i}".encode() * 100


def write_archives(folder: Path) -> Path:
    train = {}
    for number, wnid in enumerate(WNIDS):
        train[wnid] = [(f"{wnid}_{i}.JPEG", train_image(number, i)) for i in range(3)]
    val = [(label, val_image(i)) for i, label in enumerate(VAL_LABELS, 1)]
    write_imagenet(folder, train, val)
    return folder


def write_kaggle(folder: Path) -> Path:
    base = folder / CLS_LOC
    for number, wnid in enumerate(WNIDS):
        (base / "train" / wnid).mkdir(parents=True)
        for i in range(3):
            (base / "train" / wnid / f"{wnid}_{i}.JPEG").write_bytes(train_image(number, i))
    (base / "val").mkdir()
    rows = ["ImageId,PredictionString"]
    for i, label in enumerate(VAL_LABELS, 1):
        (base / "val" / f"ILSVRC2012_val_{i:08d}.JPEG").write_bytes(val_image(i))
        rows.append(f"ILSVRC2012_val_{i:08d},{label} 10 20 30 40 {label} 1 2 3 4 ")
    (folder / "LOC_val_solution.csv").write_text(
        "\n".join(rows[:1] + sorted(rows[1:], reverse=True)) + "\n"
    )
    return folder


def assert_complete(out: Path) -> None:
    for number, wnid in enumerate(WNIDS):
        images = {path.name: path.read_bytes() for path in (out / "train" / wnid).iterdir()}
        assert images == {f"{wnid}_{i}.JPEG": train_image(number, i) for i in range(3)}
        images = {path.name: path.read_bytes() for path in (out / "val" / wnid).iterdir()}
        assert images == {
            f"ILSVRC2012_val_{i:08d}.JPEG": val_image(i)
            for i, label in enumerate(VAL_LABELS, 1)
            if label == wnid
        }
    assert sorted(path.name for path in (out / "train").iterdir()) == WNIDS
    assert sorted(path.name for path in (out / "val").iterdir()) == WNIDS


def prepare(*arguments: object) -> int:
    """Call the command on a set that is smaller than ImageNet."""
    words = ["--no-count-check", *map(str, arguments)]
    return cli.call_command(prepare_command, words)


def inodes(out: Path) -> dict[str, tuple[int, int]]:
    """A file that is written again gets another inode or time."""
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in out.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("write", "below"), [(write_archives, ""), (write_kaggle, ""), (write_kaggle, CLS_LOC)]
)
def test_prepare_twice_writes_only_what_is_incomplete(
    tmp_path: Path, write: Callable[[Path], Path], below: str
) -> None:
    source, out = write(tmp_path / "in") / below, tmp_path / "out"
    assert prepare(source, out) == 0
    assert_complete(out)
    before = inodes(out)
    # as an interrupted call leaves it: a class half written, and no validation images
    partial = (out / "train" / WNIDS[1]).rename(out / "train" / f".{WNIDS[1]}.partial")
    (partial / "stale.JPEG").write_bytes(b"x")
    (out / "val").rename(out / ".val.partial")
    assert prepare(source, out) == 0
    assert_complete(out)
    kept = {name for name, identity in inodes(out).items() if before.get(name) == identity}
    assert {
        name for name in before if f"train/{WNIDS[0]}" in name or f"train/{WNIDS[2]}" in name
    } <= kept


def test_prepare_while_another_process_writes_is_an_error(tmp_path: Path) -> None:
    source, partial = (
        write_kaggle(tmp_path / "in"),
        tmp_path / "out" / "train" / f".{WNIDS[0]}.partial",
    )
    partial.mkdir(parents=True)
    with take_lock(tmp_path / "out", ""):
        child = os.fork()
        if not child:
            os._exit(prepare(source, tmp_path / "out"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert partial.exists()
    assert prepare(source, tmp_path / "out") == 0
    assert_complete(tmp_path / "out")


def test_prepare_links_images_and_copies_with_copy(tmp_path: Path) -> None:
    source = write_kaggle(tmp_path / "in")
    image = source / CLS_LOC / "val" / "ILSVRC2012_val_00000001.JPEG"
    for options in ([], ["--copy"]):
        out = tmp_path / f"out{len(options)}"
        assert prepare(source, out, *options) == 0
        assert image.samefile(out / "val" / WNIDS[2] / image.name) == (not options)
        assert_complete(out)


def test_prepare_flat_folder_with_the_devkit_keeps_the_training_images(tmp_path: Path) -> None:
    kaggle = write_kaggle(tmp_path / "in") / CLS_LOC
    write_devkit(tmp_path / "devkit.tar.gz", WNIDS, VAL_LABELS)
    alone = tmp_path / "alone"
    assert prepare(kaggle / "val", alone, "--labels", tmp_path / "devkit.tar.gz") == 0
    assert sorted(path.name for path in (alone / "val").iterdir()) == WNIDS
    (tmp_path / "out").mkdir()
    (kaggle / "train").rename(tmp_path / "out" / "train")
    assert prepare(kaggle / "val", tmp_path / "out", "--labels", tmp_path / "devkit.tar.gz") == 0
    assert_complete(tmp_path / "out")


@pytest.mark.parametrize("row", [f"a,{'x' * 200_000}", "a", "a,"])
def test_prepare_malformed_solution_file_exits_with_3(tmp_path: Path, row: str) -> None:
    solution = write_kaggle(tmp_path / "in") / "LOC_val_solution.csv"
    solution.write_text(f"{solution.read_text()}{row}\n")
    assert prepare(tmp_path / "in", tmp_path / "out") == 3


@pytest.mark.parametrize(
    "name", ["../ILSVRC2012_val_00000001.JPEG", "/tmp/ILSVRC2012_val_00000001.JPEG", "link"]
)
def test_prepare_archive_with_outside_paths_writes_nothing_outside(
    tmp_path: Path, name: str
) -> None:
    source = write_archives(tmp_path / "in")
    member = tarfile.TarInfo("ILSVRC2012_val_00000001.JPEG" if name == "link" else name)
    if name == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(source / "ILSVRC2012_img_val.tar", "w") as tar:
        tar.addfile(member)
    assert prepare(source, tmp_path / "out") == (3 if name == "link" else 0)
    images = [path for path in tmp_path.rglob("ILSVRC2012_val*") if path.is_file()]
    assert all(path.parent.name in WNIDS and not path.is_symlink() for path in images)
    assert not Path("/tmp/ILSVRC2012_val_00000001.JPEG").exists()


@pytest.mark.parametrize(
    ("archive", "length"),
    [
        ("img_train.tar", 20_000),
        ("devkit_t12.tar.gz", 0),
        ("devkit_t12.tar.gz", None),
        ("img_*.tar", None),
    ],
)
def test_prepare_broken_or_missing_archive_exits_with_3(
    tmp_path: Path, archive: str, length: int | None
) -> None:
    """length: the bytes that are left of the archive; None: it is missing."""
    for path in list(write_archives(tmp_path / "in").glob(f"ILSVRC2012_{archive}")):
        content = path.read_bytes()
        path.unlink()
        if length is not None:
            path.write_bytes(content[:length])
    assert prepare(tmp_path / "in", tmp_path / "out") == 3


def test_prepare_sorted_validation_images_exits_with_3_and_writes_no_val(tmp_path: Path) -> None:
    val = write_kaggle(tmp_path / "in") / CLS_LOC / "val"
    val.rename(tmp_path / "flat")
    (val / WNIDS[0]).mkdir(parents=True)
    assert prepare(tmp_path / "in", tmp_path / "out") == 3
    assert not (tmp_path / "out" / "val").exists()


def test_prepare_other_counts_or_missing_labels_exit_with_3(tmp_path: Path) -> None:
    source = write_archives(tmp_path / "in")
    assert prepare(source, tmp_path / "out", "--labels", "nowhere") == 3
    assert cli.call_command(prepare_command, [str(source), str(tmp_path / "out")]) == 3
    assert_complete(tmp_path / "out")
