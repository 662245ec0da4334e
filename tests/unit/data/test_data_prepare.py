"""The tool that prepares ImageNet, on small archives of the published forms."""

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from imagenet_cls.commands.prepare_imagenet import prepare_main

WNIDS = ["n01440764", "n01443537", "n02105855"]
VAL_CLASSES = [2, 0, 1, 1, 0, 2, 2]  # of validation images 1 to 7
COUNTS = ["--expect-classes", "3", "--expect-train", "9", "--expect-val", "7"]


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def train_image(class_number: int, i: int) -> bytes:
    return f"train {class_number} {i}".encode() * 100


def val_image(i: int) -> bytes:
    return f"val {i}".encode() * 100


def write_archives(folder: Path) -> Path:
    """The three archives. IDs in the devkit count from 1, and in another order than the WordNet IDs."""
    folder.mkdir()
    with tarfile.open(folder / "ILSVRC2012_img_train.tar", "w") as outer:
        for number, wnid in enumerate(WNIDS):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as inner:
                for i in range(3):
                    add(inner, f"{wnid}_{i}.JPEG", train_image(number, i))
            add(outer, f"{wnid}.tar", buffer.getvalue())
    with tarfile.open(folder / "ILSVRC2012_img_val.tar", "w") as tar:
        for i in range(1, 8):
            add(tar, f"ILSVRC2012_val_{i:08d}.JPEG", val_image(i))
    write_devkit(folder / "ILSVRC2012_devkit_t12.tar.gz")
    return folder


def write_devkit(file: Path) -> None:
    ids = {2: 1, 0: 2, 1: 3}  # class -> ILSVRC2012_ID
    form = [(name, object) for name in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children")]
    synsets = np.zeros((4, 1), form)
    for row, (number, ilsvrc_id) in enumerate(ids.items()):
        synsets[row, 0] = (ilsvrc_id, WNIDS[number], "words", "gloss", 0, np.zeros((1, 0)))
    synsets[3, 0] = (4, "n00001740", "entity", "gloss", 3, np.array([[1, 2, 3]]))
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets})
    truth = "".join(f"{ids[number]}\n" for number in VAL_CLASSES)
    with tarfile.open(file, "w:gz") as tar:
        add(tar, "ILSVRC2012_devkit_t12/data/meta.mat", meta.getvalue())
        add(tar, "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt", truth.encode())


def write_kaggle(folder: Path) -> Path:
    base = folder / "ILSVRC" / "Data" / "CLS-LOC"
    for number, wnid in enumerate(WNIDS):
        (base / "train" / wnid).mkdir(parents=True)
        for i in range(3):
            (base / "train" / wnid / f"{wnid}_{i}.JPEG").write_bytes(train_image(number, i))
    (base / "val").mkdir()
    rows = ["ImageId,PredictionString"]
    for i, number in enumerate(VAL_CLASSES, 1):
        (base / "val" / f"ILSVRC2012_val_{i:08d}.JPEG").write_bytes(val_image(i))
        rows.append(f"ILSVRC2012_val_{i:08d},{WNIDS[number]} 10 20 30 40 {WNIDS[number]} 1 2 3 4 ")
    (folder / "LOC_val_solution.csv").write_text("\n".join(rows[:1] + sorted(rows[1:], reverse=True)) + "\n")
    return folder


def assert_complete(out: Path) -> None:
    for number, wnid in enumerate(WNIDS):
        images = {path.name: path.read_bytes() for path in (out / "train" / wnid).iterdir()}
        assert images == {f"{wnid}_{i}.JPEG": train_image(number, i) for i in range(3)}
        images = {path.name: path.read_bytes() for path in (out / "val" / wnid).iterdir()}
        assert images == {
            f"ILSVRC2012_val_{i:08d}.JPEG": val_image(i) for i, label in enumerate(VAL_CLASSES, 1) if label == number
        }
    assert sorted(path.name for path in (out / "train").iterdir()) == WNIDS
    assert sorted(path.name for path in (out / "val").iterdir()) == WNIDS


def identities(out: Path) -> dict[str, tuple[int, int]]:
    """Which file lies where: a file that is written anew gets another inode or time."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("write", [write_archives, write_kaggle])
def test_prepares_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], write: Callable[[Path], Path]
) -> None:
    (tmp_path / "in").mkdir() if write is write_kaggle else None
    source, out = write(tmp_path / "in"), tmp_path / "out"
    assert prepare_main([str(source), str(out), *COUNTS]) == 0
    assert "3 classes, 9 training and 7 validation images" in capsys.readouterr().out
    assert_complete(out)
    before = identities(out)
    assert prepare_main([str(source), str(out), *COUNTS]) == 0
    assert identities(out) == before
    # as an earlier call leaves it that broke off: a class half written, a validation image missing, one cut short
    (out / "train" / WNIDS[1]).rename(out / "train" / f".{WNIDS[1]}.partial")
    (out / "train" / f".{WNIDS[1]}.partial" / "stale.JPEG").write_bytes(b"x")
    (out / "val" / WNIDS[0] / "ILSVRC2012_val_00000002.JPEG").unlink()
    cut = out / "val" / WNIDS[1] / "ILSVRC2012_val_00000003.JPEG"
    cut.unlink()
    cut.write_bytes(b"va")
    assert prepare_main([str(source), str(out), *COUNTS]) == 0
    assert_complete(out)
    redone = {name for name, identity in identities(out).items() if before.get(name) != identity}
    assert all(WNIDS[1] in name or "00000002" in name for name in redone)


def test_links_where_it_can_and_copies_where_asked(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = write_kaggle(tmp_path / "in")
    image = source / "ILSVRC" / "Data" / "CLS-LOC" / "val" / "ILSVRC2012_val_00000001.JPEG"
    placed = Path("val") / WNIDS[2] / image.name
    assert prepare_main([str(source), str(tmp_path / "linked"), *COUNTS]) == 0
    assert prepare_main([str(source), str(tmp_path / "copied"), "--copy", *COUNTS]) == 0
    assert image.samefile(tmp_path / "linked" / placed)
    assert not image.samefile(tmp_path / "copied" / placed)
    assert_complete(tmp_path / "copied")


def test_flat_val_folder_with_the_devkit(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = write_kaggle(tmp_path / "in")
    (source / "LOC_val_solution.csv").unlink()
    write_devkit(tmp_path / "devkit.tar.gz")
    base = source / "ILSVRC" / "Data" / "CLS-LOC"
    arguments = [str(base), str(tmp_path / "out"), "--labels", str(tmp_path / "devkit.tar.gz"), *COUNTS]
    assert prepare_main(arguments) == 0
    assert_complete(tmp_path / "out")


@pytest.mark.parametrize("row", [f"a,{'x' * 200_000}", "a", "a,"])
def test_a_solution_file_with_a_row_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str) -> None:
    (tmp_path / "in").mkdir()
    solution = write_kaggle(tmp_path / "in") / "LOC_val_solution.csv"
    solution.write_text(f"{solution.read_text()}{row}\n")
    assert prepare_main([str(tmp_path / "in"), str(tmp_path / "out"), *COUNTS]) == 3
    error = capsys.readouterr().err
    assert "LOC_val_solution.csv: broken as validation labels" in error and len(error) < 700


def evil(folder: Path, change: Callable[[tarfile.TarInfo], None]) -> None:
    member = tarfile.TarInfo("ILSVRC2012_val_00000001.JPEG")
    change(member)
    with tarfile.open(folder / "ILSVRC2012_img_val.tar", "w") as tar:
        tar.addfile(member)


def make_link(member: tarfile.TarInfo) -> None:
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"


@pytest.mark.parametrize(
    "change",
    [
        lambda member: setattr(member, "name", "../ILSVRC2012_val_00000001.JPEG"),
        lambda member: setattr(member, "name", "/tmp/ILSVRC2012_val_00000001.JPEG"),
        make_link,
    ],
)
def test_members_that_point_outside_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[tarfile.TarInfo], None]
) -> None:
    source = write_archives(tmp_path / "in")
    evil(source, change)
    assert prepare_main([str(source), str(tmp_path / "out"), *COUNTS]) == 3
    assert "points outside" in capsys.readouterr().err
    assert not list((tmp_path / "out" / "val").iterdir()) and not list(tmp_path.glob("*.JPEG"))


def break_archive(source: Path) -> None:
    archive = source / "ILSVRC2012_img_train.tar"
    archive.write_bytes(archive.read_bytes()[:20_000])


def remove_devkit(source: Path) -> None:
    (source / "ILSVRC2012_devkit_t12.tar.gz").unlink()


def break_devkit(source: Path) -> None:
    (source / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(b"no archive")


@pytest.mark.parametrize(
    ("change", "arguments", "code", "expected"),
    [
        (None, ["--expect-train", "10"], 3, "9 training"),
        (break_archive, [], 3, "cut short"),
        (remove_devkit, [], 3, "--labels"),
        (break_devkit, [], 3, "broken"),
        (None, ["--labels", "nowhere"], 3, "nowhere"),
        (None, ["--colour"], 2, "--colour"),
    ],
)
def test_errors_are_short_and_have_their_code(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None] | None,
    arguments: list[str],
    code: int,
    expected: str,
) -> None:
    source = write_archives(tmp_path / "in")
    if change is not None:
        change(source)
    assert prepare_main([str(source), str(tmp_path / "out"), *COUNTS, *arguments]) == code
    captured = capsys.readouterr().err
    assert expected in captured and len(captured.splitlines()) <= 3


def test_the_tool_runs_from_any_directory(tmp_path: Path) -> None:
    tool = Path(__file__).resolve().parents[3] / "tools" / "prepare_imagenet.py"
    run = subprocess.run(
        [sys.executable, str(tool), str(tmp_path), str(tmp_path / "out")], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 3 and "ILSVRC2012_img_train.tar" in run.stderr and len(run.stderr.splitlines()) <= 3
    assert not (tmp_path / "out").exists()
