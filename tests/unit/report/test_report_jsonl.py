"""metrics.jsonl: always valid JSON, readable after a kill at any byte, cut back exactly on a resume."""

import json
import math
from pathlib import Path

import pytest

from imagenet_cls.errors import CheckpointError, ResourceError
from imagenet_cls.report.jsonl import MetricsFile, missing_steps, read_metrics, truncate_after


def train_record(step: int, loss: float = 0.5) -> dict:
    return {"kind": "train", "step": step, "epoch": 1, "loss": loss, "lr": 0.1, "grad_norm": 2.0}


def write(path: Path, records: list[dict]) -> Path:
    metrics = MetricsFile(path)
    for record in records:
        metrics.write(record)
    metrics.close()
    return path


def test_records_are_read_as_they_were_written(tmp_path):
    records = [
        train_record(1),
        {"kind": "eval", "step": 1, "epoch": 1, "weights": "ema", "top1_pct": 97.5, "top5_pct": 100.0, "loss": 0.1},
        {"kind": "event", "step": 1, "message": "Übung, a 'quote' and\na line end"},
        {"kind": "event", "step": 1, "message": "NaN"},
    ]
    assert read_metrics(write(tmp_path / "new" / "metrics.jsonl", records)) == records


def test_nonfinite_numbers_are_valid_json_and_read_back(tmp_path):
    path = write(tmp_path / "m.jsonl", [train_record(i, x) for i, x in enumerate((math.nan, math.inf, -math.inf), 1)])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    texts = [json.loads(line, parse_constant=refuse)["loss"] for line in path.read_text().splitlines()]
    assert texts == ["NaN", "Infinity", "-Infinity"]
    losses = [record["loss"] for record in read_metrics(path)]
    assert math.isnan(losses[0]) and losses[1:] == [math.inf, -math.inf]


def test_flushed_records_are_in_the_file_while_it_is_open(tmp_path):
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.write(train_record(1))
    metrics.flush()
    assert read_metrics(metrics.path) == [train_record(1)]
    metrics.write(train_record(2))
    metrics.sync()
    assert len(read_metrics(metrics.path)) == 2
    metrics.close()
    metrics.close()


def test_kill_at_any_byte_loses_at_most_the_unfinished_line(tmp_path):
    whole = write(tmp_path / "whole.jsonl", [train_record(1), train_record(2), train_record(3)]).read_bytes()
    cut = tmp_path / "cut.jsonl"
    for length in [*range(0, len(whole), 7), len(whole) - 1, len(whole)]:
        cut.write_bytes(whole[:length])
        lines = whole[:length].count(b"\n")
        assert len(read_metrics(cut)) == lines
        truncate_after(cut, 3)
        write(cut, [train_record(9)])
        assert [record["step"] for record in read_metrics(cut)] == [*range(1, lines + 1), 9]


def test_truncate_keeps_earlier_lines_byte_for_byte(tmp_path):
    path = write(tmp_path / "m.jsonl", [train_record(step) for step in range(1, 8)])
    expected = b"".join(path.read_bytes().splitlines(keepends=True)[:4])
    with path.open("ab") as file:
        file.write(b'{"kind": "tra')
    truncate_after(path, 4)
    assert path.read_bytes() == expected
    truncate_after(tmp_path / "none.jsonl", 4)
    assert list(tmp_path.iterdir()) == [path]


def test_truncate_drops_evaluations_after_the_evaluated_step(tmp_path):
    evaluations = [{"kind": "eval", "step": step, "epoch": 0, "weights": "raw", "top1_pct": 1.0} for step in (2, 4)]
    path = write(tmp_path / "m.jsonl", [train_record(2), evaluations[0], train_record(4), evaluations[1]])
    truncate_after(path, 4, evaluated_step=4)
    assert len(read_metrics(path)) == 4
    truncate_after(path, 4, evaluated_step=2)
    assert read_metrics(path) == [train_record(2), evaluations[0], train_record(4)]


def test_truncate_that_fails_leaves_the_old_file(tmp_path):
    path = write(tmp_path / "m.jsonl", [train_record(1), train_record(2)])
    before = path.read_bytes()
    (tmp_path / ".tmp-m.jsonl").mkdir()
    with pytest.raises(ResourceError):
        truncate_after(path, 1)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("steps", "expected"),
    [([], "5 of the steps"), ([1, 2, 4, 5], "1 of the steps"), ([3, 4, 5], ""), ([1, 2, 3, 4, 5, 7], "")],
)
def test_missing_steps_are_counted_from_the_first_record(tmp_path, steps, expected):
    path = write(tmp_path / "m.jsonl", [train_record(step) for step in steps])
    message = missing_steps(path, 5)
    assert expected in message and bool(message) == bool(expected)


@pytest.mark.parametrize("line", [b"not json\n", b"[1, 2]\n", b"{}\n", b"\xff\xfe\n"])
def test_broken_line_inside_is_named(tmp_path, line):
    path = write(tmp_path / "m.jsonl", [train_record(1)])
    path.write_bytes(path.read_bytes() + line + path.read_bytes())
    for read in (read_metrics, lambda path: truncate_after(path, 1)):
        with pytest.raises(CheckpointError, match=r"m\.jsonl:2: "):
            read(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
def test_full_disk_is_a_resource_error(tmp_path):
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.write(train_record(1))
    with pytest.raises(ResourceError, match="No space left") as caught:
        metrics.flush()
    assert len(str(caught.value).splitlines()) <= 3
    with pytest.raises(ResourceError):
        metrics.close()
    metrics.close()
