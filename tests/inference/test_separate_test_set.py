"""`test.py RUN --data PATH`, and runs that hold out training images and are evaluated on another
folder.
"""

import gzip
import io
import shutil
import tarfile
from pathlib import Path

import pytest
from helpers import arguments, before_classes, call, evaluations, fails, succeeds, train_here

from imagenet_cls.commands.test import evaluate_command

ALLOW = ["--allow-import", "helpers:plain"]
NAMES = list("abcdefghij")
FOLDER = {
    "data__name": "folder",
    "data__train": ".",
    "data__val": "null",
    "data__val_fraction": 0.2,
}


@pytest.fixture(scope="module")
def data(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as the classes a to j: 20 of each to train on in `photos`, 3 or 4 in `testset`, and
    copies of both.
    """
    root = tmp_path_factory.mktemp("data")
    for number, name in enumerate(NAMES):
        for i, file in enumerate(
            sorted((digits / "train" / str(number)).iterdir())[: 23 + number % 2]
        ):
            folder = root / ("photos" if i < 20 else "testset") / name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder)
    shutil.copytree(root / "photos", root / "both" / "train")
    shutil.copytree(root / "testset", root / "both" / "val")
    shutil.make_archive(str(root / "testset"), "zip", root, "testset")
    shutil.make_archive(str(root / "both"), "zip", root / "both")
    files = sorted((root / "testset").rglob("*.jpg"))
    rows = [f"testset/{file.parent.name}/{file.name},{file.parent.name}\n" for file in files]
    (root / "test.csv").write_text("image,label\n" + "".join(rows))
    (root / "shards").mkdir()
    for number in range(2):
        with tarfile.open(root / "shards" / f"test-{number:04}.tar", "w") as tar:
            for file in files[number::2]:
                key = f"{file.parent.name}_{file.stem}"
                for name, content in (
                    (f"{key}.jpg", file.read_bytes()),
                    (f"{key}.cls", file.parent.name.encode()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return root


@pytest.fixture(scope="module")
def run_folder(data: Path) -> Path:
    words = arguments(
        data / "photos", data / "run", **FOLDER, train__epochs=4, train__global_batch_size=16
    )
    train_here(words)
    return data / "run"


@pytest.fixture(autouse=True)
def in_data(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)


def accuracy(out: str) -> str:
    return before_classes(out)[-1].partition("  over ")[0]


@pytest.mark.parametrize(
    "path",
    [
        "testset",
        "both",
        "both/val",
        "testset.zip",
        "both.zip/val",
        "test.csv",
        "shards",
        "shards/test-{0000..0001}.tar",
    ],
)
def test_whole_test_set_is_evaluated(run_folder: Path, path: str) -> None:
    code, out, _ = call(evaluate_command, run_folder, *ALLOW, "--data", path)
    expected = succeeds(evaluate_command, run_folder, *ALLOW, "data.root=both", "data.val=val")
    assert code == 0 and out.startswith("35 images of 10 classes, in ") and "over 35 images" in out
    assert accuracy(out) == accuracy(expected) and "warning" not in out
    assert "data.val" not in out and "config.yaml" not in out  # the run has no other settings
    assert 20 < float(accuracy(out).split()[2]) < 100


def test_test_set_gets_the_classes_of_the_checkpoint(run_folder: Path, tmp_path: Path) -> None:
    for name in "bj":
        shutil.copytree(f"testset/{name}", tmp_path / "some" / name)
    rows = [line for line in Path("test.csv").read_text().splitlines() if line[-2:] in (",b", ",j")]
    (tmp_path / "some.csv").write_text("\n".join(rows))
    words = [run_folder, *ALLOW, "--data"]
    err = fails(3, evaluate_command, *words, tmp_path / "some")
    assert "eval.classes=present" in err and "data.val" not in err
    folders = succeeds(evaluate_command, *words, tmp_path / "some", "eval.classes=present")
    assert folders.startswith("8 images of 2 classes") and "2 of 10" in folders
    # The same for a list. Its paths are relative to data.root, if that is given.
    some = [tmp_path / "some.csv", "data.root=."]
    out = succeeds(evaluate_command, *words, *some, "eval.classes=present")
    assert accuracy(out) == accuracy(folders)
    err = fails(3, evaluate_command, *words, *some)
    assert "eval.classes=present" in err and "data.val" not in err
    err = fails(3, evaluate_command, *words, tmp_path / "some.csv", "eval.classes=present")
    assert "data.root" in err
    (tmp_path / "some" / "b").rename(tmp_path / "some" / "unknown")
    fails(3, evaluate_command, *words, tmp_path / "some", "eval.classes=present")


def test_training_images_as_test_set_are_a_warning(
    run_folder: Path, data: Path, tmp_path: Path
) -> None:
    words = arguments(
        data / "both", tmp_path / "run", **FOLDER | {"data__train": "train", "data__val": "val"}
    )
    train_here([word for word in words if "val_fraction" not in word] + ["data.val_fraction=null"])
    for option in (["--data", "photos"], ["data.val=train"]):
        assert "warning: " in succeeds(evaluate_command, tmp_path / "run", *ALLOW, *option)
    for option in (["--data", "testset"], []):
        assert "warning: " not in succeeds(evaluate_command, tmp_path / "run", *ALLOW, *option)


def test_split_stays_if_the_data_were_moved_and_is_an_error_for_others(
    run_folder: Path, data: Path, tmp_path: Path
) -> None:
    best = max(record["top1_pct"] for record in evaluations(run_folder))
    shutil.copytree("photos", tmp_path / "moved")
    out = succeeds(evaluate_command, run_folder, *ALLOW, f"data.root={tmp_path}/moved")
    assert out.startswith("40 images of 10 classes, held out of ")
    assert f"top-1 {best:.3f} %" in out and "warning" not in out
    for word in ("data.root=testset", "data.train=../testset"):
        code, out, err = call(evaluate_command, run_folder, *ALLOW, word)
        assert (code, out) == (3, "") and "--data" in err and "data.val=" in err
    # The ways out in the error.
    whole = succeeds(evaluate_command, run_folder, *ALLOW, "--data", "testset")
    for words in (["data.root=testset", "data.val=."], ["data.root=both", "data.val=val"]):
        out = succeeds(evaluate_command, run_folder, *ALLOW, *words)
        assert accuracy(out) == accuracy(whole)
    # The split of the run was changed, or images were added in the same place.
    out = succeeds(evaluate_command, run_folder, *ALLOW, "data.val_fraction=0.5")
    assert out.startswith("100 images") and "warning: " in out
    shutil.copy("testset/a/" + next(Path("testset/a").iterdir()).name, "photos/b")
    try:
        out = succeeds(evaluate_command, run_folder, *ALLOW)
        assert "warning: " in out
    finally:
        (data / "photos" / "b" / next(Path("testset/a").iterdir()).name).unlink()


def test_mistakes_in_the_place_are_errors_that_name_the_option(
    run_folder: Path, tmp_path: Path
) -> None:
    words = [run_folder, *ALLOW]
    for more in (["data.val=testset"], ["data.val=testset", "data.val_fraction=null"]):
        err = fails(2, evaluate_command, *words, *more)
        assert "--data testset" in err
    fails(2, evaluate_command, *words, "data.val=testset", "--data", "testset")
    fails(3, evaluate_command, *words, "--data", "nowhere")
    for name, content in (
        ("photo.png", b"\x89PNG\r\n\x1a\n\0\0\0"),
        ("all.tar.gz", gzip.compress(b"x")),
    ):
        (tmp_path / name).write_bytes(content)
        err = fails(3, evaluate_command, *words, "--data", tmp_path / name)
        assert name in err
    err = fails(3, evaluate_command, *words, "--data", "both.zip")
    assert err.startswith("both.zip: ")
    shutil.move("both/val", "both/test")
    try:
        err = fails(3, evaluate_command, *words, "--data", "both")
        assert err.startswith("both: ")
    finally:
        shutil.move("both/test", "both/val")


def test_features_of_the_run_classify_the_test_set(run_folder: Path) -> None:
    out = succeeds(evaluate_command, run_folder, *ALLOW, "--data", "testset", "--knn", 5)
    assert out.startswith("35 images of 10 classes, in testset") and "over 35 images" in out
