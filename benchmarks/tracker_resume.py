"""Kill a run three times, resume it, and compare what wandb (offline) stored with metrics.jsonl.

    pip install 'imagenet-cls[wandb]'
    python benchmarks/tracker_resume.py DIGITS WORK_DIR

DIGITS: a folder for the images of the demo. Prints how many steps have other values.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from imagenet_cls.report.jsonl import read_metrics
from imagenet_cls.report.reporter import scalars

KILL_AT = (20, 38, 57)  # steps; checkpoints are at multiples of 7 and of 22
MEASURED = ("images_per_sec", "data_wait_pct", "memory_mib")  # other values when a step is repeated
Rows = dict[int, dict[str, float]]


def run_until(command: list[str], folder: Path, step: int | None) -> None:
    """Run the command; kill it once metrics.jsonl has this step."""
    process = subprocess.Popen(
        command, env={**os.environ, "WANDB_MODE": "offline"}, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and step is not None:
        records = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
        if records and records[-1]["step"] >= step:
            process.send_signal(signal.SIGKILL)
            print(f"killed at step {records[-1]['step']}")
            break
        time.sleep(0.01)
    process.wait()


def rows_of_metrics(folder: Path) -> Rows:
    rows: Rows = {}
    for record in read_metrics(folder):
        if values := scalars(record):
            rows.setdefault(record["step"], {}).update(values)
    return rows


def rows_of_wandb(folder: Path) -> Rows:
    """The history in the newest offline folder: a LevelDB log of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (folder / "wandb" / "latest-run").glob("run-*.wandb")
    data, rows, position, content = path.read_bytes(), {}, 7, b""
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        content += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the end of one
            record, content = Record.FromString(content), b""
            if record.WhichOneof("record_type") == "history":
                items: dict[str, Any] = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                assert items["_step"] not in rows, "a step is there twice"
                rows[items["_step"]] = {
                    key: value for key, value in items.items() if not key.startswith("_")
                }
    return rows


def main() -> None:
    digits, folder = sys.argv[1], Path(sys.argv[2])
    command = [
        sys.executable,
        "tools/train.py",
        "configs/demo.yaml",
        f"data.root={digits}",
        "train.epochs=3",
    ]
    command += [
        "train.global_batch_size=64",
        "log.every_steps=3",
        "checkpoint.every_steps=7",
        "ema.decay=0.9",
    ]
    command += ["log.writers=[tensorboard,wandb]", "--work-dir", str(folder), "--resume"]
    for step in (*KILL_AT, None):
        run_until(command, folder, step)
    expected = rows_of_metrics(folder)
    rows = rows_of_wandb(folder)
    assert list(rows) == sorted(expected) == list(range(1, len(expected) + 1))
    assert all(rows[step].keys() == values.keys() for step, values in expected.items())
    differing = {
        tag for step, values in expected.items() for tag in values if rows[step][tag] != values[tag]
    }
    steps = sum(rows[step] != values for step, values in expected.items())
    print(
        f"wandb has {len(rows)} steps, each once; {steps} steps differ, in "
        f"{sorted(differing) or 'nothing'}"
    )
    assert all(tag.endswith(MEASURED) for tag in differing)


if __name__ == "__main__":
    main()
