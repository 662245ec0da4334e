"""Paths that users give: outputs to a device or FIFO, and paths that the system or a missing
permission refuses, for every command.
"""

import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_ranks import RankServer
from helpers import arguments, call, fails

from imagenet_cls.commands.cli import main
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.print_config import print_config_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.extras.before_training.find_lr import find_lr_command
from imagenet_cls.extras.before_training.show_batch import show_batch_command
from imagenet_cls.extras.datasets.pack import pack_command
from imagenet_cls.extras.datasets.prepare_imagenet import prepare_command
from imagenet_cls.extras.datasets.verify_data import verify_command
from imagenet_cls.extras.pages.report import report_command
from imagenet_cls.extras.weights.export import export_command
from imagenet_cls.extras.weights.publish import publish_command


@pytest.fixture(scope="module")
def run(train_on_digits: Callable[..., Path]) -> Path:
    """The run folder of `helpers:plain` after two checkpoints."""
    return train_on_digits(train__max_steps=2, checkpoint__every_steps=1)


# In all arguments below, `fill` replaces the names in capitals. LONG is a name that file systems
# refuse: they take names of up to 255 bytes.

# Commands that write a file: the function, its arguments before the path, and the suffix of the
# path.
WRITERS: dict[str, tuple[Callable, str, str]] = {
    "verify-data": (verify_command, "DIGITS --out", ".txt"),
    "predict": (predict_command, "RUN IMAGE TRUST --features", ".npz"),
    "test": (evaluate_command, "CONFIG RUN --out", ".csv"),
    "test, results": (evaluate_command, "CONFIG RUN --results", ".json"),
    "export": (export_command, "RUN TRUST --out", ".pt2"),
    "report": (report_command, "RUN --out", ".html"),
    "show-batch": (show_batch_command, "CONFIG --out", ".png"),
    "find-lr": (find_lr_command, "CONFIG device=cpu --steps 20 --out", ".png"),
}
# Commands whose arguments hold a PATH, to use with LONG and with an EMPTY path, such as that of an
# unset variable of a shell.
ANY_PATH: list[tuple[Callable, str]] = [
    *((command, f"{words} PATH") for command, words, _ in WRITERS.values()),
    (train_command, "CONFIG --work-dir PATH"),
    (evaluate_command, "CONFIG RUN --report PATH"),
    (predict_command, "RUN PATH TRUST"),
    (report_command, "PATH"),
    (publish_command, "RUN PATH TRUST"),
    (prepare_command, "PATH new"),
]
# Commands with a path that can't be used: exit code, command, arguments.
UNUSABLE: list[tuple[int, Callable, str]] = [
    *((2, command, words.replace("PATH", "LONG")) for command, words in ANY_PATH),
    *((2, command, words.replace("PATH", "EMPTY")) for command, words in ANY_PATH),
    (2, train_command, "LONG"),
    (3, train_command, "CONFIG data.exclude=LONG --work-dir new"),
    (4, train_command, "CONFIG model.checkpoint=LONG --work-dir new"),
    (4, train_command, "CONFIG --work-dir new --resume-from=LONG"),
    (2, evaluate_command, "CONFIG LONG"),
    (2, evaluate_command, "CONFIG RUN --data EMPTY"),
    (2, predict_command, "LONG.onnx IMAGE"),
    (2, predict_command, "EMPTY IMAGE"),
    (2, print_config_command, "CONFIG --diff LONG"),
    (2, verify_command, "EMPTY"),
    (2, pack_command, "EMPTY new"),
    (2, pack_command, "IMAGES EMPTY"),
    (2, prepare_command, "IMAGES EMPTY"),
    # leads nowhere, or to another kind of file
    (2, train_command, "CONFIG --work-dir LOOP"),
    (2, train_command, "CONFIG --dry-run data.exclude=~nobody-here/list.txt"),
    (2, predict_command, "RUN IMAGE TRUST --features LINK.npz"),
    (2, verify_command, "DIGITS --out FOLDER"),
    (2, report_command, "RUN --out FOLDER.html"),
    (2, show_batch_command, "CONFIG --out FOLDER.png"),
]


@pytest.fixture
def fill(digits: Path, run: Path) -> Callable[[str], list[str]]:
    """Replaces the names in capitals."""
    images = digits / "train" / "7"
    words = {
        "CONFIG": arguments(digits, run)[:-2],
        "RUN": [str(run)],
        "TRUST": ["--allow-import", "helpers:plain"],
        "DIGITS": [str(digits)],
        "IMAGES": [str(images)],
        "IMAGE": [str(next(images.glob("*.jpg")))],
        "EMPTY": [""],
    }

    def filled(text: str) -> list[str]:
        named = text.replace("LONG", "x" * 300).split()
        return [given for word in named for given in words.get(word, [word])]

    return filled


@pytest.mark.parametrize("name", WRITERS)
def test_output_to_a_fifo_is_written_and_the_fifo_stays(
    name: str, fill: Callable[[str], list[str]], tmp_path: Path
) -> None:
    command, words, suffix = WRITERS[name]
    fifo = tmp_path / f"out{suffix}"
    os.mkfifo(fifo)
    content: list[bytes] = []
    reader = threading.Thread(target=lambda: content.append(fifo.read_bytes()), daemon=True)
    reader.start()
    assert call(command, *fill(words), fifo)[0] == 0
    reader.join(60)
    assert fifo.is_fifo() and [*tmp_path.iterdir()] == [fifo] and not reader.is_alive()
    assert content[0] or name == "verify-data"  # no image is bad


@pytest.mark.parametrize(("code", "command", "words"), UNUSABLE)
def test_path_that_cannot_be_used_has_an_exit_code_and_nothing_is_written(
    code: int,
    command: Callable,
    words: str,
    fill: Callable[[str], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("LOOP").symlink_to("LOOP")
    Path("LINK.npz").symlink_to("missing.npz")
    Path("folder").mkdir()
    for suffix in ("", ".html", ".png"):
        Path(f"FOLDER{suffix}").symlink_to("folder")
    before = sorted(tmp_path.rglob("*"))
    fails(code, command, *fill(words))
    assert sorted(tmp_path.rglob("*")) == before and Path("FOLDER.png").is_symlink()


def test_error_of_a_network_share_exits_with_5_and_names_the_path() -> None:
    def command(argv: object) -> int:
        raise OSError(errno.ESTALE, "stale", "share/images")

    assert "share/images" in fails(5, command)


def test_error_of_no_path_is_a_bug() -> None:
    def command(argv: object) -> int:
        raise FileNotFoundError(errno.ENOENT, "no such file", "checked before")

    with pytest.raises(FileNotFoundError):
        call(command)


# ---- paths without permission

CHECKPOINT = "run/checkpoints/step-0000001"
# Exit code, path without permission, command, and its arguments.
CASES: list[tuple[int, str, Callable, str]] = [
    (3, "images", train_command, "--overwrite"),
    (3, "images/train/3", train_command, "--overwrite"),
    (3, "images/train/3", verify_command, "images"),
    (2, "run", train_command, "--resume"),
    (4, "run", predict_command, "run photo.jpg"),
    (5, "run/metrics.jsonl", train_command, "--resume"),
    (4, "run/checkpoints", train_command, "--resume"),
    (4, CHECKPOINT, train_command, "--resume"),
    (4, CHECKPOINT, train_command, f"--work-dir=other --resume-from={CHECKPOINT}"),
    (
        4,
        CHECKPOINT,
        train_command,
        f"--work-dir=other model.checkpoint={CHECKPOINT}/model.safetensors",
    ),
    (4, f"{CHECKPOINT}/manifest.json", train_command, "--resume"),
    (3, "locked/list.txt", train_command, "--overwrite data.exclude=locked/list.txt"),
    (3, "locked", train_command, "--overwrite data.exclude=locked/list.txt"),
    (2, "locked", train_command, "--work-dir=locked/run"),
    (2, "locked", print_config_command, "locked/config.yaml"),
    (5, "locked", predict_command, "run locked/image.jpg"),
    (3, "locked", predict_command, "run locked"),
    (3, "images/train/3", predict_command, "run images/train"),
    (2, "run", report_command, "run"),
    (5, "locked", prepare_command, "locked imagenet"),
    (3, "locked", pack_command, "locked/images packed"),
    (3, "hub/train-0.parquet", pack_command, "hub packed"),
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
        found = main(command, [*(words if command is train_command else []), *more.split()])
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
