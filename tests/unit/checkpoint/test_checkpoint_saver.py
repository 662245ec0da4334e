"""Asynchronous saving: one write at a time, in a background thread, whose error is raised by the next call."""

import threading
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint_format import snapshot

from imagenet_cls.checkpoint.format import Progress, list_checkpoints, step_of
from imagenet_cls.checkpoint.saver import CheckpointSaver
from imagenet_cls.config.schema import CheckpointConfig
from imagenet_cls.errors import ResourceError

LONG_SEC = 20.0


def saver_for(folder: Path, progress: Progress, is_main: bool = True, **changes: Any) -> CheckpointSaver:
    config = CheckpointConfig(on_error=changes.pop("on_error", "stop"), keep_last=1)
    defaults: dict[str, Any] = {
        "take_snapshot": lambda: snapshot(progress.step),
        "before_write": lambda: None,
        "report": lambda line: None,
    }
    return CheckpointSaver(folder / "checkpoints", config, is_main, progress, **(defaults | changes))


def fail() -> None:
    raise ResourceError("no room\nmake some")


def saved(folder: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(folder / "checkpoints")]


def test_save_returns_before_the_write_and_wait_waits(tmp_path: Path) -> None:
    release, progress = threading.Event(), Progress(step=1)
    with saver_for(tmp_path, progress, before_write=lambda: assert_set(release)) as saver:
        saver.save()
        progress.step = 2  # the snapshot is of step 1
        saver.check()  # does not wait
        assert saved(tmp_path) == []
        release.set()
        saver.wait()
        assert saved(tmp_path) == [1]
        saver.save()
    assert saved(tmp_path) == [2]  # waited for at the end; keep_last=1


def assert_set(event: threading.Event) -> None:
    assert event.wait(LONG_SEC)


def test_saves_are_written_one_at_a_time(tmp_path: Path) -> None:
    progress, most = Progress(), []
    count = lambda: most.append(sum(thread.name == "checkpoint" for thread in threading.enumerate()))  # noqa: E731
    with saver_for(tmp_path, progress, before_write=count) as saver:
        for step in range(1, 5):
            progress.step = step
            saver.save()
    assert most == [1] * 4


@pytest.mark.parametrize("call", ["check", "save", "wait"])
def test_failed_save_is_raised_once_by_the_next_call(tmp_path: Path, call: str) -> None:
    saver = saver_for(tmp_path, Progress(step=1), before_write=fail)
    saver.save()
    join(saver)
    with pytest.raises(ResourceError):
        getattr(saver, call)()
    saver.before_write = lambda: None
    saver.check()
    saver.save()
    saver.wait()
    assert saved(tmp_path) == [1]


def join(saver: CheckpointSaver) -> None:
    assert saver._thread is not None
    saver._thread.join(LONG_SEC)


def test_failed_save_on_error_continue_is_reported_but_wait_raises(tmp_path: Path) -> None:
    lines: list[str] = []
    saver = saver_for(tmp_path, Progress(step=1), on_error="continue", before_write=fail, report=lines.append)
    for call in (saver.check, saver.save):
        saver.save()
        join(saver)
        call()
    assert len(lines) == 2 and all(line.startswith("no room; ") for line in lines)
    with pytest.raises(ResourceError):
        saver.wait()


def test_error_that_is_no_user_error_is_raised_on_error_continue(tmp_path: Path) -> None:
    saver = saver_for(tmp_path, Progress(step=1), on_error="continue", before_write=lambda: [][0])
    saver.save()
    join(saver)
    with pytest.raises(IndexError):
        saver.check()


def test_exit_logs_a_failed_save_and_keeps_the_first_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), saver_for(tmp_path, Progress(step=1), before_write=fail) as saver:
        saver.save()
        raise KeyError
    assert "a save failed" in caplog.text


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with saver_for(tmp_path, Progress(step=1), is_main=False, take_snapshot=fail) as saver:
        saver.save()
    assert not list(tmp_path.iterdir())
