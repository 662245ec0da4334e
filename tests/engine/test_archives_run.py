"""Runs from archives end in the bits of a run from the folder that they hold, also after a stop and
a resume.
"""

import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import arguments, fails, saved_bytes, train_here

from imagenet_cls.commands.cli import call_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.extras.datasets.pack import pack_command


def pack(*words: object) -> None:
    assert call_command(pack_command, list(map(str, words))) == 0


def zipped(digits: Path, root: Path) -> dict[str, Any]:
    with zipfile.ZipFile(root / "train.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((digits / "train").glob("*/*"), reverse=True):
            archive.write(path, path.relative_to(digits / "train"))
    return {"data__train": "train.zip"}


def class_tars(digits: Path, root: Path) -> dict[str, Any]:
    (root / "train").mkdir()
    for folder in (digits / "train").iterdir():
        path = root / "train" / f"{folder.name}.tar"
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
            for image in folder.iterdir():
                tar.add(image, image.name)
    return {}


def shards(digits: Path, root: Path) -> dict[str, Any]:
    config = root / "pack.yaml"
    config.write_text(
        f"data: {{name: folder, root: {digits}, val: train}}\noptimizer: {{lr: 0.1}}\n"
    )
    pack(config, root, "--images-per-shard", 400)
    return {"data__train": "train/train-{00000..00004}.tar"}


def from_parquet(digits: Path, root: Path) -> dict[str, Any]:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = sorted((digits / "train").glob("*/*"))
    rows = [
        {"image": {"bytes": path.read_bytes(), "path": path.name}, "label": int(path.parent.name)}
        for path in paths
    ]
    (root / "hub" / "data").mkdir(parents=True)
    for number, start in enumerate(range(0, len(rows), 700)):
        table = pyarrow.Table.from_pylist(rows[start : start + 700])
        parquet.write_table(
            table, root / f"hub/data/train-{number:05d}-of-00003.parquet", row_group_size=100
        )
    pack(root / "hub", root / "packed", "--images-per-shard", 300)
    return {"data__root": root / "packed"}


FOLDER = {
    "data__name": "folder",
    "data__val": "null",
    "data__val_fraction": 0.2,
    "train__epochs": 1,
}
LAYOUTS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "zip": zipped,
    "class tars": class_tars,
    "shards": shards,
    "Parquet": from_parquet,
}


@pytest.fixture(scope="module")
def folder_run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    work_dir = tmp_path_factory.mktemp("folder") / "run"
    train_here(arguments(digits, work_dir, **FOLDER))
    return saved_bytes(work_dir)


@pytest.mark.parametrize("name", LAYOUTS)
def test_run_from_an_archive_ends_in_the_bits_of_the_folder(
    name: str, digits: Path, tmp_path: Path, folder_run: dict[str, bytes]
) -> None:
    (tmp_path / "data").mkdir()
    changes = FOLDER | {"data__num_workers": 2} | LAYOUTS[name](digits, tmp_path / "data")
    root = changes.pop("data__root", tmp_path / "data")
    train_here(arguments(root, tmp_path / "run", train__max_steps=5, **changes))
    train_here([*arguments(root, tmp_path / "run", **changes), "--resume"])
    assert saved_bytes(tmp_path / "run") == folder_run


def test_run_continues_from_a_folder_in_a_zip(
    digits: Path, tmp_path: Path, folder_run: dict[str, bytes]
) -> None:
    """Digest and sizes are the same, so that no --allow-change is needed."""
    train_here(arguments(digits, tmp_path / "run", train__max_steps=5, **FOLDER))
    changes = FOLDER | zipped(digits, tmp_path)
    train_here(
        [
            *arguments(tmp_path, tmp_path / "run", **changes),
            "--resume",
            "--allow-change",
            "data.train",
        ]
    )
    assert saved_bytes(tmp_path / "run") == folder_run


def test_archive_that_is_cut_short_ends_with_exit_code_3(digits: Path, tmp_path: Path) -> None:
    class_tars(digits, tmp_path)
    archive = tmp_path / "train" / "5.tar"
    os.truncate(archive, 50_000)
    error = fails(3, train_command, *arguments(tmp_path, tmp_path / "run", **FOLDER))
    assert f"{archive}: cut short" in error
    assert not (tmp_path / "run").exists()
