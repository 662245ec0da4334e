"""Reporter: each output gets what is its own, a resume leaves one history, and ranks other than 0 leave no trace."""

import os
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from imagenet_cls.report import Reporter, read_metrics


def train_records(first: int, last: int) -> list[dict]:
    records = [
        {"kind": "train", "step": step, "epoch": 1, "loss": 1.0 / step, "lr": 0.1, "grad_norm": 1.0}
        for step in range(first, last + 1)
    ]
    records[-1] |= {"images_per_sec": 100.0, "data_wait_pct": 3.0, "memory_mib": 5.0}
    return records


EVAL = {
    "kind": "eval",
    "step": 6,
    "epoch": 1,
    "weights": "raw",
    "top1_pct": 97.5,
    "top5_pct": 100.0,
    "loss": 0.1,
    "images": 360,
    "seconds": 0.5,
}


def drive(reporter: Reporter) -> None:
    reporter.banner([("device", "cpu")])
    reporter.config_text("seed: 0")
    images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    reporter.first_batch(images, torch.arange(40) % 3, ("ant", "bee", "cat"))
    reporter.train([])
    reporter.train(train_records(1, 3))
    reporter.sync()
    reporter.train(train_records(4, 6))
    reporter.evaluating(0, 360)
    reporter.evaluation(EVAL)
    reporter.event(6, "stopped")
    reporter.plot()


def test_main_rank_writes_everything(tmp_path, capsys):
    with Reporter(tmp_path, None, tensorboard=True, is_main=True, total_steps=10, total_epochs=1) as reporter:
        drive(reporter)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["kind"] for record in records] == ["train"] * 6 + ["eval", "event"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["loss.png", "lr.png", "top1.png"]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert len(events.Scalars("train/loss")) == 6
    labels = events.Tensors("train/first_batch_labels/text_summary")[0].tensor_proto.string_val[0].decode().splitlines()
    assert labels[:4] == ["1. ant", "2. bee", "3. cat", "4. ant"]
    assert len(labels) == 32
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("step 3/10") == printed.out.count("step 6/10") == printed.out.count("stopped") == 1


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    with Reporter(tmp_path, None, tensorboard=True, is_main=False, total_steps=10, total_epochs=1) as reporter:
        drive(reporter)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_without_a_folder_only_the_console_speaks(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Reporter(None, None, tensorboard=True, is_main=True, total_steps=10, total_epochs=1) as reporter:
        drive(reporter)
    assert list(tmp_path.iterdir()) == []
    assert "top-1 97.50 %" in capsys.readouterr().out


def test_tensorboard_can_be_switched_off(tmp_path):
    with Reporter(tmp_path, None, tensorboard=False, is_main=True, total_steps=10, total_epochs=1) as reporter:
        drive(reporter)
    assert not (tmp_path / "tensorboard").exists()


def test_a_resume_leaves_one_history(tmp_path):
    with Reporter(tmp_path, None, tensorboard=False, is_main=True, total_steps=10, total_epochs=1) as reporter:
        reporter.train(train_records(1, 7))
    with Reporter(tmp_path, 4, tensorboard=False, is_main=True, total_steps=10, total_epochs=1) as reporter:
        reporter.train(train_records(5, 10))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 11))


def test_tensorboard_shows_the_same_history_when_an_evaluation_is_made_again(tmp_path):
    def start(resume_step: int | None) -> Reporter:
        return Reporter(tmp_path, resume_step, True, True, 10, 1, evaluated_step=0 if resume_step else None)

    with start(None) as reporter:
        reporter.train(train_records(1, 6))
        reporter.evaluation(EVAL)
        reporter.train(train_records(7, 8))
    for _ in range(2):
        time.sleep(1.01 - time.time() % 1)  # event files are read in the order of their names, which hold the second
        with start(6) as reporter:
            reporter.evaluation(EVAL)
            reporter.train(train_records(7, 10))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 11))
    assert [event.step for event in events.Scalars("val/top1_pct")] == [6]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10]
    assert len(events.Scalars("train/images_per_sec")) == sum("images_per_sec" in record for record in records)


def test_a_new_start_where_nothing_was_saved_begins_anew(tmp_path):
    for _ in range(2):
        with Reporter(tmp_path, None, tensorboard=False, is_main=True, total_steps=10, total_epochs=1) as reporter:
            reporter.train(train_records(1, 2))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_records_survive_a_process_that_dies_without_cleanup(tmp_path):
    pid = os.fork()
    if pid == 0:
        Reporter(tmp_path, None, tensorboard=False, is_main=True, total_steps=10, total_epochs=1).train(
            train_records(1, 5)
        )
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5


def test_close_comes_to_its_end_after_an_error(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        Reporter(tmp_path, None, tensorboard=True, is_main=True, total_steps=10, total_epochs=1) as reporter,
    ):
        reporter.train(train_records(1, 3))
        raise KeyboardInterrupt
    reporter.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
