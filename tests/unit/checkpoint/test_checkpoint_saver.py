"""Asynchronous saving: one write at a time, in a background thread, whose error is raised by the
next call.
"""

import shutil
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import pytest
from test_checkpoint_format import snapshot

from imagenet_cls.checkpoint.format import list_checkpoints, step_of
from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.checkpoint.saver import CheckpointSaver
from imagenet_cls.checkpoint.select import checkpoints_in, load_best
from imagenet_cls.config.schema import CheckpointConfig
from imagenet_cls.errors import ResourceError
from imagenet_cls.files import link

LONG_SEC = 240.0  # only ends what hangs


def saver_for(
    folder: Path, progress: Progress, before_write: Callable[[], None]
) -> CheckpointSaver:
    return CheckpointSaver(
        folder / "checkpoints",
        CheckpointConfig(keep_last=1),
        is_main=True,
        progress=progress,
        take_snapshot=lambda: snapshot(progress.step, **progress.best),
        before_write=before_write,
    )


def fail() -> None:
    raise ResourceError("No room.", "Make some.")


def saved(folder: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(folder / "checkpoints")]


def test_saves_are_written_one_at_a_time(tmp_path: Path) -> None:
    progress, most = Progress(), []

    def count_threads() -> None:
        most.append(sum(thread.name.startswith("checkpoint") for thread in threading.enumerate()))

    with saver_for(tmp_path, progress, count_threads) as saver:
        for step in range(1, 5):
            progress.step = step
            saver.save()
    assert most == [1] * 4


@pytest.mark.parametrize("call", ["check", "save", "wait"])
def test_failed_save_is_raised_once_by_the_next_call(tmp_path: Path, call: str) -> None:
    saver = saver_for(tmp_path, Progress(step=1), fail)
    saver.save()
    join(saver)
    with pytest.raises(ResourceError):
        getattr(saver, call)()
    saver.before_write = lambda: None
    saver.check()
    saver.save()
    saver.wait()
    assert saved(tmp_path) == [1]


def test_saving_continues_after_checkpoints_were_removed(tmp_path: Path) -> None:
    progress = Progress()
    saver = saver_for(tmp_path, progress, lambda: None)
    for progress.step in range(1, 5):
        saver.save()
        saver.wait()
        if progress.step == 2:
            shutil.rmtree(tmp_path / "checkpoints")
    assert saved(tmp_path) == [4]


def join(saver: CheckpointSaver) -> None:
    futures.wait([saver._save_in_progress], LONG_SEC)


def test_exit_logs_a_failed_save_and_keeps_the_first_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError), saver_for(tmp_path, Progress(step=1), fail) as saver:
        saver.save()
        raise KeyError
    assert "a save failed" in caplog.text


def test_links_name_the_newest_and_the_best_checkpoint(tmp_path: Path) -> None:
    """Of equally good ones the first."""
    progress, folder = Progress(), tmp_path / "checkpoints"
    with saver_for(tmp_path, progress, lambda: None) as saver:
        for progress.step, kind, top1_pct in (1, "raw", 10.0), (2, "raw", 30.0), (3, "ema", 30.0):
            progress.best[kind] = {"step": progress.step, "top1_pct": top1_pct}
            saver.save()
            saver.wait()
    links = {path.name: path.readlink().name for path in folder.iterdir() if path.is_symlink()}
    assert links == {"last": "step-0000003", "best": "step-0000002"} and saved(tmp_path) == [3, 2]
    assert load_best(tmp_path)[1] == "raw"
    for name, target in links.items():
        assert load_best(folder / name)[0].path == folder / target
        assert checkpoints_in(folder / name) == [folder / target]


def test_number_of_checkpoints_is_bounded_over_sessions_without_the_best_one(
    tmp_path: Path,
) -> None:
    """The best one is in another folder, of the run that this one continues."""
    progress = Progress(step=1, best={"raw": {"step": 1, "top1_pct": 50.0}})
    for _ in range(4):
        with saver_for(tmp_path, progress, lambda: None) as saver:
            saver.config = CheckpointConfig(keep_last=2)
            for _ in range(3):
                progress.step += 1
                saver.save()
    assert saved(tmp_path) == [13, 12]


def test_link_leaves_a_folder_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "last" / "mine").mkdir(parents=True)
    link(tmp_path / "last", "step-0000001")
    assert (tmp_path / "last" / "mine").is_dir() and not (tmp_path / "last").is_symlink()
