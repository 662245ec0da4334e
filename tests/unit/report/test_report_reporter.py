"""Reporter and TensorBoard: every output gets its records, and a resume leaves one history."""

import os
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from imagenet_cls.report.jsonl import read_metrics
from imagenet_cls.report.reporter import Reporter

EVAL = {"kind": "eval", "step": 6, "epoch": 1, "weights": "raw", "top1_pct": 97.5, "top5_pct": 100.0}
EVAL |= {"loss": 0.1, "images": 360, "seconds": 0.5}


def train_records(first: int, last: int, loss: float = 1.0) -> list[dict]:
    records = [
        {"kind": "train", "step": step, "epoch": 1, "loss": loss, "lr": 0.1, "grad_norm": 1.0}
        for step in range(first, last + 1)
    ]
    records[-1] |= {"images_per_sec": 100.0, "data_wait_pct": 3.0, "memory_mib": 5.0}
    return records


def make_reporter(folder: Path | None, resume_step: int = 0, **changes: object) -> Reporter:
    settings = {"tensorboard": False, "is_main": True, "total_steps": 10, "total_epochs": 1}
    return Reporter(folder, resume_step, **settings | changes)


def read_events(folder: Path) -> EventAccumulator:
    return EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
    ).Reload()


def wait_for_the_next_second() -> None:
    """Event files are read in the order of their names, which hold the second."""
    time.sleep(1.01 - time.time() % 1)


def report_all(reporter: Reporter) -> None:
    reporter.table([("device", "cpu")])
    reporter.config("model:\n  name: resnet18")
    images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    reporter.first_batch(images, torch.arange(40) % 3, ("ant", "bee", "cat"))
    reporter.train([])
    reporter.train(train_records(1, 3))
    reporter.sync()
    reporter.train(train_records(4, 6))
    reporter.eval_progress(0, 360)
    reporter.eval_result(EVAL)
    reporter.eval_result({**EVAL, "weights": "ema", "top1_pct": 98.5})
    reporter.event(6, "stopped")
    reporter.plot()


def test_main_rank_writes_every_output(tmp_path, capsys):
    with make_reporter(tmp_path, tensorboard=True) as reporter:
        report_all(reporter)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["kind"] for record in records] == ["train"] * 6 + ["eval", "eval", "event"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["loss.png", "lr.png", "top1.png"]
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("step 3/10") == printed.out.count("step 6/10") == printed.out.count("stopped") == 1
    events = read_events(tmp_path)
    assert set(events.Tags()["scalars"]) == {
        *(f"train/{name}" for name in ("loss", "lr", "grad_norm", "images_per_sec", "data_wait_pct", "memory_mib")),
        *(f"{group}/{name}" for group in ("val", "val_ema") for name in ("top1_pct", "top5_pct", "loss")),
    }
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("train/images_per_sec")] == [3, 6]
    assert events.Scalars("val/top1_pct")[0].value == 97.5 and events.Scalars("val_ema/top1_pct")[0].value == 98.5
    assert events.Tags()["images"] == ["train/first_batch"]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "      name: resnet18" in texts["config/text_summary"]
    labels = texts["train/first_batch_labels/text_summary"].splitlines()
    assert labels[:4] == ["1. ant", "2. bee", "3. cat", "4. ant"] and len(labels) == 32


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    with make_reporter(tmp_path, tensorboard=True, is_main=False) as reporter:
        report_all(reporter)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_reporter_without_folder_only_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with make_reporter(None, tensorboard=True) as reporter:
        report_all(reporter)
    assert list(tmp_path.iterdir()) == []
    assert "top-1 97.50 %" in capsys.readouterr().out


@pytest.mark.parametrize("resume_step", [0, 4])
def test_history_after_resume_has_each_step_once(tmp_path, resume_step):
    """0: the first attempt died before its first checkpoint, and the second starts from scratch."""
    for first, resumed, loss in ((1, 0, 1.0), (resume_step + 1, resume_step, 2.0)):
        with make_reporter(tmp_path, resumed, tensorboard=True) as reporter:
            reporter.first_batch(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.tensor([0]), ("ant",))
            reporter.train(train_records(first, 7, loss))
        wait_for_the_next_second()
    expected = [(step, 1.0 if step <= resume_step else 2.0) for step in range(1, 8)]
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path / "metrics.jsonl")] == expected
    events = read_events(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == expected
    assert [event.step for event in events.Images("train/first_batch")] == sorted({1, resume_step or 1})


def test_tensorboard_after_resume_before_an_evaluation_shows_it_once(tmp_path):
    with make_reporter(tmp_path, tensorboard=True) as reporter:
        reporter.train(train_records(1, 6))
        reporter.eval_result(EVAL)
        reporter.train(train_records(7, 8))
    wait_for_the_next_second()
    with make_reporter(tmp_path, 6, tensorboard=True, evaluated_step=0) as reporter:
        reporter.eval_result(EVAL)
        reporter.train(train_records(7, 10))
    events = read_events(tmp_path)
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 11))
    assert [event.step for event in events.Scalars("val/top1_pct")] == [6]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10]
    assert len(events.Scalars("train/images_per_sec")) == sum("images_per_sec" in record for record in records)


def test_records_survive_a_process_killed_without_cleanup(tmp_path):
    pid = os.fork()
    if pid == 0:
        make_reporter(tmp_path).train(train_records(1, 5))
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    assert not (tmp_path / "tensorboard").exists()


def test_close_after_an_error_keeps_the_records(tmp_path):
    with pytest.raises(KeyboardInterrupt), make_reporter(tmp_path, tensorboard=True) as reporter:
        reporter.train(train_records(1, 3))
        raise KeyboardInterrupt
    reporter.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
