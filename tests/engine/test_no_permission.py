"""Folders and files that the user may not read: the exit code of their kind, and never a
traceback.
"""

import ctypes
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from forked_ranks import RankServer
from helpers import arguments

from imagenet_cls.commands.cli import main
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.print_config import print_config_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.extras.datasets.pack import pack_command
from imagenet_cls.extras.datasets.prepare_imagenet import prepare_command
from imagenet_cls.extras.datasets.verify_data import verify_command
from imagenet_cls.extras.pages.report import report_command
from imagenet_cls.extras.weights.average_checkpoints import average_command

CHECKPOINT = "run/checkpoints/step-0000001"
# Exit code, path without permission, command, and its arguments.
CASES: list[tuple[int, str, Callable, Sequence[str]]] = [
    (3, "images", train_command, ["--overwrite"]),
    (3, "images/train", train_command, ["--overwrite"]),
    (3, "images/train/3", train_command, ["--overwrite"]),
    (3, "images/train/3", verify_command, ["images"]),
    (2, "run", train_command, ["--resume"]),
    (4, "run", predict_command, ["run", "photo.jpg"]),
    (5, "run/metrics.jsonl", train_command, ["--resume"]),
    (4, "run/checkpoints", train_command, ["--resume"]),
    (4, CHECKPOINT, train_command, ["--resume"]),
    (4, CHECKPOINT, train_command, ["--work-dir=other", f"--resume-from={CHECKPOINT}"]),
    (
        4,
        CHECKPOINT,
        train_command,
        ["--work-dir=other", f"model.checkpoint={CHECKPOINT}/model.safetensors"],
    ),
    (4, CHECKPOINT, average_command, [CHECKPOINT, "run", "--out=average"]),
    (4, f"{CHECKPOINT}/manifest.json", train_command, ["--resume"]),
    (3, "locked/list.txt", train_command, ["--overwrite", "data.exclude=locked/list.txt"]),
    (3, "locked", train_command, ["--overwrite", "data.exclude=locked/list.txt"]),
    (2, "locked", train_command, ["--work-dir=locked/run"]),
    (2, "locked", print_config_command, ["locked/config.yaml"]),
    (5, "locked", predict_command, ["run", "locked/image.jpg"]),
    (3, "locked", predict_command, ["run", "locked"]),
    (3, "images/train/3", predict_command, ["run", "images/train"]),
    (2, "run", report_command, ["run"]),
    (5, "locked", prepare_command, ["locked", "imagenet"]),
    (3, "locked", pack_command, ["locked", "packed"]),
    (3, "locked", pack_command, ["locked/images", "packed"]),
    (3, "hub/train-0.parquet", pack_command, ["hub", "packed"]),
]


def drop_capabilities() -> None:
    """Root has then no more permissions than any owner of a file."""
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, data) == 0


def try_all(rank: int, ranks: int, folder: Path) -> None:
    os.chdir(folder)
    drop_capabilities()
    changes = {
        "data__name": "folder",
        "data__val": "null",
        "data__val_fraction": 0.1,
        "train__global_batch_size": 16,
    }
    words = arguments(Path("images"), Path("run"), train__max_steps=1, **changes)
    assert main(train_command, words) == 0
    for code, path, command, more in CASES:
        mode = Path(path).stat().st_mode
        Path(path).chmod(0)
        found = main(command, [*(words if command is train_command else []), *more])
        Path(path).chmod(mode)
        assert found == code, (path, command, more, found)


def test_path_without_permission_has_the_exit_code_of_its_kind(
    digits: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    for name in "345":
        (tmp_path / "images/train" / name).mkdir(parents=True)
        for image in sorted((digits / "train" / name).iterdir())[:10]:
            shutil.copy(image, tmp_path / "images/train" / name)
    shutil.copy(image, tmp_path / "photo.jpg")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked/list.txt").touch()
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/train-0.parquet").touch()
    rank_server.call(try_all, 1, tmp_path)
