"""prepare_imagenet, on small archives in the published forms."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from archive_writers import write_imagenet, write_tar

from imagenet_cls.commands import cli
from imagenet_cls.extras.datasets.prepare_imagenet import VAL_TAR, prepare_command
from imagenet_cls.files import take_lock

WNIDS = ["n01440764", "n01443537", "n02105855"]
CLS_LOC = "ILSVRC/Data/CLS-LOC"
# By path in the folder that is prepared.
TRAIN = {f"train/{wnid}/{wnid}_{i}.JPEG": f"{wnid} {i}".encode() for wnid in WNIDS for i in "012"}
VAL = {
    f"val/{WNIDS[number]}/ILSVRC2012_val_{i:08d}.JPEG": f"val {i}".encode()
    for i, number in enumerate((2, 0, 1, 1, 0, 2, 2), 1)
}
VAL_LABELS = [Path(name).parent.name for name in VAL]


def write_archives(folder: Path) -> Path:
    train = {
        wnid: [(Path(name).name, data) for name, data in TRAIN.items() if wnid in name]
        for wnid in WNIDS
    }
    write_imagenet(folder, train, list(zip(VAL_LABELS, VAL.values(), strict=True)))
    return folder


def write_kaggle(folder: Path) -> Path:
    rows = ["ImageId,PredictionString"]
    files = TRAIN.copy()
    for name, data in reversed(VAL.items()):
        path = Path(name)
        label = path.parent.name
        rows.append(f"{path.stem},{label} 10 20 30 40 {label} 1 2 3 4 ")
        files[f"val/{path.name}"] = data
    for name, data in files.items():
        path = folder / CLS_LOC / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "LOC_val_solution.csv").write_text("\n".join(rows) + "\n")
    return folder


def assert_complete(out: Path) -> None:
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.glob("*/*/*")}
    assert files == TRAIN | VAL


def prepare(*arguments: object) -> int:
    """Call the command on a set that is smaller than ImageNet."""
    words = ["--no-count-check", *map(str, arguments)]
    return cli.call_command(prepare_command, words)


@pytest.mark.parametrize(
    ("write", "below"), [(write_archives, ""), (write_kaggle, ""), (write_kaggle, CLS_LOC)]
)
def test_prepare_twice_writes_only_what_is_incomplete(
    tmp_path: Path, write: Callable[[Path], Path], below: str
) -> None:
    source, out = write(tmp_path / "in") / below, tmp_path / "out"
    assert prepare(source, out) == 0
    assert_complete(out)
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
    partial = tmp_path / "out" / "train" / f".{WNIDS[0]}.partial"
    partial.mkdir(parents=True)
    with take_lock(tmp_path / "out", ""):
        child = os.fork()
        if not child:
            os._exit(prepare(source, tmp_path / "out"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert partial.exists()
    assert prepare(source, tmp_path / "out") == 0
    assert_complete(tmp_path / "out")
    image = source / CLS_LOC / "val" / "ILSVRC2012_val_00000001.JPEG"
    assert image.samefile(tmp_path / "out" / "val" / WNIDS[2] / image.name)  # a link


def test_prepare_malformed_solution_file_exits_with_3(tmp_path: Path) -> None:
    solution = write_kaggle(tmp_path / "in") / "LOC_val_solution.csv"
    good = solution.read_text()
    for row in (f"a,{'x' * 200_000}", "a", "a,"):
        solution.write_text(f"{good}{row}\n")
        assert prepare(tmp_path / "in", tmp_path / "out") == 3


@pytest.mark.parametrize(("prefix", "code"), [("../", 0), ("/tmp/", 0), ("", 3)])
def test_prepare_archive_with_outside_paths_or_a_link_writes_nothing_outside(
    tmp_path: Path, prefix: str, code: int
) -> None:
    """Without a prefix, it is a link."""
    image = "ILSVRC2012_val_00000001.JPEG"
    archive = write_archives(tmp_path / "in") / VAL_TAR
    write_tar(archive, [(prefix + image, b"")], links=[image], linkname="/etc/passwd")
    assert prepare(tmp_path / "in", tmp_path / "out") == code
    images = [path for path in tmp_path.rglob("ILSVRC2012_val_*") if path.is_file()]
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
    for path in write_archives(tmp_path / "in").glob(f"ILSVRC2012_{archive}"):
        if length is None:
            path.unlink()
        else:
            os.truncate(path, length)
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
