"""metrics.jsonl: always valid JSON, readable after a kill at any byte, truncated at the right step
on a resume.
"""

import json
import math
from pathlib import Path

import pytest

from imagenet_cls.errors import CheckpointError
from imagenet_cls.report.jsonl import (
    MetricsFile,
    describe_result,
    finite_json,
    read_metrics,
    truncate_after,
)


def train_record(step: int, loss: float = 0.5) -> dict:
    return {"kind": "train", "step": step, "epoch": 1, "loss": loss, "lr": 0.1, "grad_norm": 2.0}


def write(path: Path, records: list[dict]) -> Path:
    metrics = MetricsFile(path)
    metrics.write(records)
    metrics.close()
    return path


def test_records_are_read_as_they_were_written(tmp_path):
    records = [
        train_record(1),
        {"kind": "eval", "step": 1, "weights": "ema", "classes": "all", "my_metric": math.inf},
        {"kind": "event", "step": 1, "message": "Übung, a 'quote' and\na line end, \udcff"},
        {"kind": "event", "step": 1, "message": "NaN"},
    ]
    assert read_metrics(write(tmp_path / "new" / "metrics.jsonl", records)) == records


def test_nonfinite_numbers_are_valid_json_and_read_back(tmp_path):
    path = write(
        tmp_path / "m.jsonl",
        [train_record(i, x) for i, x in enumerate((math.nan, math.inf, -math.inf), 1)],
    )
    texts = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    assert texts == ["NaN", "Infinity", "-Infinity"]
    losses = [record["loss"] for record in read_metrics(path)]
    assert math.isnan(losses[0]) and losses[1:] == [math.inf, -math.inf]


def test_nonfinite_numbers_are_null_in_files_of_results():
    values = {"loss": math.inf, "f1": [math.nan, 0.5], "name": "NaN"}
    assert json.loads(finite_json(values)) == {"loss": None, "f1": [None, 0.5], "name": "NaN"}


@pytest.mark.parametrize(
    ("top1_pct", "images", "text"),
    [
        (4300 / 60, 60, "71.7 % (59 to 81)"),
        (100.0, 20, "100.0 % (84 to 100)"),
        (0.0, 20, "0.0 % (0 to 16)"),
        (75.0, 2000, "75.0 %"),
    ],
)
def test_top1_of_few_images_has_its_interval(top1_pct, images, text):
    result = {"top1_pct": top1_pct, "images": images, "seconds": 1.0}
    assert describe_result(result, 1, 5)[0] == f"top-1 {text}"


def test_kill_at_any_byte_loses_at_most_the_unfinished_line(tmp_path):
    whole = write(
        tmp_path / "whole.jsonl", [train_record(1), train_record(2), train_record(3)]
    ).read_bytes()
    cut = tmp_path / "cut.jsonl"
    for length in [*range(0, len(whole), 7), len(whole) - 1, len(whole)]:
        cut.write_bytes(whole[:length])
        lines = whole[:length].count(b"\n")
        assert len(read_metrics(cut)) == lines
        truncate_after(cut, 3, 0)
        write(cut, [train_record(9)])
        assert [record["step"] for record in read_metrics(cut)] == [*range(1, lines + 1), 9]


@pytest.mark.parametrize(
    ("step", "evaluated_step", "kept"), [(4, 4, [0, 1, 2, 3]), (4, 2, [0, 1, 2]), (3, 2, [0, 1])]
)
def test_truncate_keeps_earlier_lines_byte_for_byte(tmp_path, step, evaluated_step, kept):
    evaluations = [
        {"kind": "eval", "step": at, "epoch": 0, "weights": "raw", "top1_pct": 1.0} for at in (2, 4)
    ]
    records = [train_record(2), evaluations[0], train_record(4), evaluations[1], train_record(5)]
    path = write(tmp_path / "m.jsonl", records)
    lines = path.read_bytes().splitlines(keepends=True)
    truncate_after(path, step, evaluated_step)
    assert path.read_bytes() == b"".join(lines[number] for number in kept)


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1, 2]",
        b"{}",
        b"\xff\xfe",
        pytest.param(b"[" * 100_000, id="deep"),
        b'{"kind": "train", "step": null}',
        b'{"kind": "train", "step": 1, "loss": "x"}',
    ],
)
def test_invalid_line_is_an_error_with_its_number(tmp_path, line):
    path = write(tmp_path / "m.jsonl", [train_record(1)])
    path.write_bytes(path.read_bytes() + line + b"\n" + path.read_bytes())
    with pytest.raises(CheckpointError, match=r"m\.jsonl:2: "):
        read_metrics(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
def test_close_on_a_full_disk_raises_once_and_closes(tmp_path):
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    metrics = MetricsFile(tmp_path / "m.jsonl")
    for fails in (lambda: metrics.write([train_record(1)]), metrics.close):
        with pytest.raises(OSError, match="No space left"):
            fails()
    metrics.close()


def test_removed_file_is_written_again(tmp_path):
    records = [train_record(step) for step in range(4)]
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write(records[:2])
    metrics.path.unlink()
    metrics.write(records[2:3])
    metrics.sync()
    metrics.write(records[3:])
    metrics.path.rename(tmp_path / "moved.jsonl")
    metrics.close()
    assert read_metrics(metrics.path) == records
