"""Reporter and TensorBoard: every output gets its records, and a resume leaves one history."""

import errno
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracker import AppendOnly, read_rows

from imagenet_cls.config.schema import Config, LogConfig
from imagenet_cls.errors import ResourceError, Stopped
from imagenet_cls.report.jsonl import MetricsFile, read_metrics
from imagenet_cls.report.reporter import Reporter
from imagenet_cls.report.writers import TensorBoard, writer_names, writer_problems

TRAIN = {"kind": "train", "epoch": 1, "loss": 1.0, "top1_pct": 50.0, "lr": 0.1, "grad_norm": 1.0}
EVAL = {"kind": "eval", "step": 6, "epoch": 1, "weights": "raw", "top1_pct": 97.5}
EVAL |= {"top5_pct": 100.0, "map_pct": 9.0, "loss": 0.1, "images": 360, "seconds": 0.5}
TRACKER = "tracker:AppendOnly"
TAGS = (
    "train/loss train/top1_pct train/lr train/grad_norm train/images_per_sec train/data_wait_pct "
    "train/memory_mib val/top1_pct val/top5_pct val/map_pct val/loss val_ema/top1_pct "
    "val_ema/top5_pct val_ema/map_pct val_ema/loss"
)


def train_records(first: int, last: int, loss: float = 1.0) -> list[dict]:
    records = [TRAIN | {"step": step, "loss": loss} for step in range(first, last + 1)]
    records[-1] |= {"images_per_sec": 100.0, "data_wait_pct": 3.0, "memory_mib": 5.0}
    return records


def make_reporter(folder: Path, resume_step: int = 0, *writers: str, **changes: Any) -> Reporter:
    config = Config(log=LogConfig(writers=list(writers)))
    settings = {"config": config, "is_main": True, "total_steps": 10, "total_epochs": 1}
    return Reporter(folder, resume_step, **settings | changes)


def read_events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard"), {"scalars": 0}).Reload()


def steps_of(events: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in events.Scalars(tag)]


def wait_for_the_next_second() -> None:
    """Event files are read in the order of their names, which hold the second."""
    time.sleep(1.01 - time.time() % 1)


def report_all(reporter: Reporter) -> None:
    reporter.table([("device", "cpu")])
    reporter.report_steps([])
    reporter.report_steps(train_records(1, 3))
    reporter.sync()
    reporter.report_steps(train_records(4, 6))
    reporter.eval_progress(0, 360)
    ema = {**EVAL, "weights": "ema", "top1_pct": 98.5}
    reporter.eval_results([EVAL, ema], "the line of the epoch")
    reporter.event(6, "stopped")
    reporter.write_pages(["log.plots", "log.report", "unknown"])


def test_main_rank_writes_every_output(tmp_path, capsys):
    with make_reporter(tmp_path, 0, "tensorboard") as reporter:
        report_all(reporter)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["kind"] for record in records] == ["train"] * 6 + ["eval", "eval", "event"]
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["curves.png"]
    printed = capsys.readouterr()
    assert printed.err == ""
    for text in ("step 3  ", "step 6  ", "the line of the epoch\n", "stopped"):
        assert printed.out.count(text) == 1
    events = read_events(tmp_path)
    assert set(events.Tags()["scalars"]) == set(TAGS.split())
    assert steps_of(events, "train/loss") == [1, 2, 3, 4, 5, 6]
    assert steps_of(events, "train/images_per_sec") == [3, 6]
    values = [events.Scalars(f"{group}/top1_pct")[0].value for group in ("val", "val_ema")]
    assert values == [97.5, 98.5]


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    with make_reporter(tmp_path, 0, "tensorboard", is_main=False) as reporter:
        report_all(reporter)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("resume_step", [0, 4])
def test_history_after_resume_has_each_step_once(tmp_path, resume_step):
    """0: the first attempt died before its first checkpoint, and the second starts from scratch."""
    for resumed, loss in ((0, 1.0), (resume_step, 2.0)):
        with make_reporter(tmp_path, resumed, "tensorboard") as reporter:
            reporter.report_steps(train_records(resumed + 1, 7, loss))
        wait_for_the_next_second()
    expected = [(step, 1.0 if step <= resume_step else 2.0) for step in range(1, 8)]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == expected
    events = read_events(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == expected


def test_full_disk_is_an_error_of_each_method(tmp_path, monkeypatch):
    def full(self, records):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsFile, "write", full)
    with pytest.raises(ResourceError), make_reporter(tmp_path) as reporter:
        reporter.report_steps(train_records(1, 2))
    reporter = make_reporter(tmp_path)
    with pytest.raises(ResourceError):
        reporter.report_steps(train_records(3, 3))
    for save_or_end in (reporter.sync, reporter.close):
        with pytest.raises(ResourceError):
            save_or_end()


def rows_of(folder: Path) -> dict[int, dict[str, float]]:
    return read_rows(folder / "writers" / "tracker.AppendOnly" / "rows.jsonl")


def test_append_only_writer_has_each_step_once_and_complete(tmp_path):
    """Stopped before the evaluation of step 6 and killed after step 9; then the writer lacks steps
    of metrics.jsonl.
    """
    with pytest.raises(Stopped), make_reporter(tmp_path, 0, TRACKER) as reporter:
        reporter.report_steps(train_records(1, 6))
        raise Stopped("Stopped.", "Resume.", 15)
    assert sorted(rows_of(tmp_path)) == [1, 2, 3, 4, 5]
    killed = make_reporter(tmp_path, 6, TRACKER)
    killed.eval_results([EVAL], "")
    killed.report_steps(train_records(7, 9, loss=2.0))
    kept = rows_of(tmp_path)
    assert sorted(kept) == [1, 2, 3, 4, 5, 6, 7, 8] and kept[6]["val/top1_pct"] == 97.5
    with make_reporter(tmp_path, 7, TRACKER, evaluated_step=6) as reporter:
        reporter.report_steps(train_records(8, 10, loss=3.0))
    losses = [row["train/loss"] for row in rows_of(tmp_path).values()]
    assert losses == [1.0] * 6 + [2.0] * 2 + [3.0] * 2
    # added to a resumed run
    with make_reporter(tmp_path, 10, "tensorboard", evaluated_step=10):
        pass
    events = read_events(tmp_path)
    assert steps_of(events, "train/loss") == list(range(1, 11))
    assert steps_of(events, "val/loss") == [6]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_writer_that_fails_is_reported_once_and_the_run_continues(
    tmp_path, capsys, monkeypatch, error
):
    def fail(self, rows):
        raise error("no space in the tracker")

    monkeypatch.setattr(AppendOnly, "write", fail)
    with make_reporter(tmp_path, 0, TRACKER, "tensorboard") as reporter:
        reporter.report_steps(train_records(1, 3))
        reporter.report_steps(train_records(4, 6))
    assert capsys.readouterr().out.count("no space in the tracker") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 6
    assert len(steps_of(read_events(tmp_path), "train/loss")) == 6


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_writer_that_cannot_start_is_an_error_and_closes_the_others(tmp_path, monkeypatch, error):
    def fail(self, folder, config, resume_step):
        raise error("not logged in")

    closed = []
    monkeypatch.setattr(TensorBoard, "close", lambda writer, finished: closed.append(finished))
    monkeypatch.setattr(AppendOnly, "__init__", fail)
    with pytest.raises(ResourceError, match=r"log\.writers.*not logged in"):
        make_reporter(tmp_path, 0, "tensorboard", TRACKER)
    assert closed == [False]


def test_writer_problems_name_the_key_and_the_extra(monkeypatch):
    assert writer_problems(LogConfig(writers=["jsonl", "tensorboard", "tracker:AppendOnly"])) == []
    monkeypatch.setattr("imagenet_cls.report.writers.find_spec", lambda name: None)
    for name, expected in (
        ("wandb", r"pip install 'imagenet-cls\[wandb\]'"),
        ("tracker:NoArguments", "too many positional arguments"),
        ("tracker:read_rows", "no subclass"),
    ):
        (problem,) = writer_problems(LogConfig(writers=[name]))
        assert problem.key == "log.writers" and re.search(expected, problem.message)


def test_tensorboard_false_leaves_it_out():
    assert writer_names(LogConfig()) == ["tensorboard"]
    log = LogConfig(tensorboard=False, writers=["wandb", "jsonl", "tensorboard", "wandb"])
    assert writer_names(log) == ["wandb"]
