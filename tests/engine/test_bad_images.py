"""Bad images and failing data workers in a run: exit codes, names, and the same bits with
`data.exclude`.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import (
    TRAIN,
    arguments,
    environment,
    evaluations,
    fails,
    losses,
    run,
    single_rank,
    state_digest,
    succeeds,
    train_here,
)

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.config.load import load_config
from imagenet_cls.data import loader
from imagenet_cls.data.lists import BAD_IMAGES_FILE
from imagenet_cls.engine.build import build
from imagenet_cls.extras.datasets.verify_data import verify_command

EXCLUDE = {"data__exclude": "${data.root}/" + BAD_IMAGES_FILE}


@pytest.fixture
def folder(digits: Path, tmp_path: Path) -> Path:
    """train and val of 8 and 2 images for each of ten classes, as links. Training image 29 is
    truncated.
    """
    for name in sorted(path.name for path in (digits / "train").iterdir()):
        images = sorted((digits / "train" / name).iterdir())
        for part, chosen in (("train", images[:8]), ("val", images[8:10])):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for image in chosen:
                (tmp_path / "data" / part / name / image.name).symlink_to(image)
    bad = bad_image(tmp_path / "data")
    content = bad.read_bytes()
    bad.unlink()  # the link
    bad.write_bytes(content[:300])
    return tmp_path / "data"


def bad_image(data: Path) -> Path:
    return sorted((data / "train" / "3").iterdir())[5]


def of_folder(data: Path, work_dir: Path, **changes: Any) -> list[str]:
    settings = {"data__name": "folder", "data__val": "val", "data__val_fraction": "null"}
    settings |= {"train__global_batch_size": 16, "train__max_steps": 6}
    return arguments(data, work_dir, **settings | changes)


def test_excluded_image_gives_the_bits_of_a_run_without_the_file(
    folder: Path, tmp_path: Path
) -> None:
    bad = bad_image(folder)
    for workers in (0, 2):
        words = of_folder(folder, tmp_path / "error", data__num_workers=workers)
        error = fails(3, train_command, *words, "--overwrite")
        assert f"{bad} (image 29)" in error and "data.exclude" in error
    fails(3, verify_command, folder)
    train_here(of_folder(folder, tmp_path / "excluded", data__num_workers=2, **EXCLUDE))
    content = bad.read_bytes()
    bad.unlink()
    train_here(of_folder(folder, tmp_path / "deleted"))
    assert state_digest(tmp_path / "excluded") == state_digest(tmp_path / "deleted")
    # either run can be resumed from the other: the images have the same digest
    bad.write_bytes(content)
    words = of_folder(folder, tmp_path / "deleted", train__max_steps=8, **EXCLUDE)
    train_here([*words, "--resume"])
    assert len(losses(tmp_path / "deleted")) == 8


def test_images_and_files_that_are_left_out_are_counted(folder: Path, tmp_path: Path) -> None:
    """One of 80 training images, one of 20 validation images, and a file that is no image."""
    bad = sorted((folder / "val" / "7").iterdir())[1]
    bad.unlink()
    bad.write_bytes(b"")
    (folder / "train" / "3" / "notes.txt").touch()
    fails(3, verify_command, folder)
    out = succeeds(train_command, *of_folder(folder, tmp_path / "run", **EXCLUDE))
    assert "19 images (1 left out)" in out and "1 .txt" in out
    found = evaluations(tmp_path / "run")
    assert found and all((e["images"], e["left_out"]) == (19, 1) for e in found)
    out = succeeds(evaluate_command, tmp_path / "run" / "config.yaml", tmp_path / "run")
    assert "19 images (1 left out)" in out


# ---- data workers


class Faulty:
    """32 images, of which image 11 raises `error()`."""

    classes = ("a", "b")

    def __init__(self, root: str, part: str, error: str):
        self.error = ERRORS[error]

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == 11:
            raise self.error()
        return torch.full((3, 16, 16), i, dtype=torch.uint8), i % 2


def killed() -> Exception:
    os.kill(os.getpid(), signal.SIGKILL)
    return AssertionError("the signal had no effect")


ERRORS: dict[str, Callable[[], Exception]] = {
    "key": lambda: KeyError("no such record"),
    "memory": lambda: OSError(28, "No space left on device"),
    "killed": killed,
}


def of_faulty(tmp_path: Path, error: str, **changes: Any) -> list[str]:
    settings = {
        "data__name": "test_bad_images:Faulty",
        "data__kwargs": f"{{error: {error}}}",
        "data__num_workers": 1,
    }
    settings |= {"data__val": "val", "data__val_fraction": "null", "train__global_batch_size": 16}
    return arguments(tmp_path, tmp_path / "run", **(settings | changes))


@pytest.mark.parametrize(
    ("error", "expected"), [("key", "no such record"), ("memory", "data.num_workers")]
)
def test_raising_worker_exits_with_5_and_logs_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, expected: str
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    text = fails(5, train_command, *of_faulty(tmp_path, error))
    assert "Data worker 0 " in text and expected in text
    assert "raise self.error()" in (tmp_path / "run" / "logs" / "rank0.log").read_text()


def test_killed_worker_ends_the_program_with_5(tmp_path: Path) -> None:
    """As by the kernel, out of memory. In a process of its own, which ends only when nothing keeps
    its output open.
    """
    path = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    argv = of_faulty(tmp_path, "killed", data__num_workers=2, data__timeout_sec=20)
    ended = run([sys.executable, TRAIN, *argv], PYTHONPATH=path)
    assert ended.returncode == 5, ended.stderr
    assert len(ended.stderr.splitlines()) == 2 and "data.num_workers" in ended.stderr


def test_workers_of_training_and_of_evaluations_start_once_in_a_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_image(folder).unlink()
    starts = Mock(wraps=loader._start_workers)
    monkeypatch.setattr(loader, "_start_workers", starts)
    results = {}
    for workers in (1, 0):
        argv = of_folder(folder, tmp_path / str(workers), data__num_workers=workers)
        assert train_command(argv) == 0
        results[workers] = [r["loss"] for r in evaluations(tmp_path / str(workers))]
        assert not multiprocessing.active_children()
    assert starts.call_count == 2
    assert results[0] == results[1] and len(results[0]) > 1


def test_evaluation_after_an_unfinished_one_begins_with_the_first_image(folder: Path) -> None:
    settings = {"data__num_workers": 2, "eval__batch_size": 4}
    words = [word for word in of_folder(folder, folder, **settings) if "=" in word]
    evaluation = build(load_config(None, words).config, single_rank()).evaluation
    next(evaluation.batches())
    for _ in range(2):
        indices = [index for *_, batch in evaluation.batches() for index in batch.tolist()]
        assert indices == list(range(20))
        evaluation.close()
    assert not multiprocessing.active_children()
