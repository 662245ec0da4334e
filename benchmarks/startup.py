"""Time to start: `python tools/benchmark.py startup`.

Each round starts each command once, in turn, in a new process with one thread. The demo is timed by
the marks that this file sets in a process of its own: imports, everything up to the first batch,
and the first step. All times are CPU times of the process, since something else may run on the
machine; the wall time is in the note.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.compare import ROOT, Row, measured

COMMANDS = {
    "train.py --help": (["tools/train.py", "--help"], 0, "<= 0.4"),
    "train.py, error in a config": (
        ["tools/train.py", "optimizer.lrr=1", "train.epochs=x"],
        2,
        "<= 0.7",
    ),
    "train.py --dry-run, unknown model": (
        ["tools/train.py", "--dry-run", "model.name=resnt50"],
        2,
        "",
    ),
    "train.py --dry-run of the demo": (["tools/train.py", "--dry-run"], 0, ""),
    "import torch": (["-c", "import torch"], 0, ""),
    "import torch, torchvision": (["-c", "import torch, torchvision"], 0, ""),
    "import torch, torchvision, timm": (["-c", "import torch, torchvision, timm"], 0, ""),
}
STAGES = (
    "imports",
    "from imports to the first batch",
    "first step",
    "after the imports, to the end of the first step",
)
GOALS = {STAGES[-1]: "<= 1.5"}


def time_command(arguments: list[str], code: int, folder: str) -> tuple[float, float]:
    """CPU and wall seconds of a process, children included."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    options = [f"data.root={folder}/digits"] if "--dry-run" in arguments else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", *arguments, *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def time_demo(folder: str) -> None:
    """Train two steps of the demo; print the CPU seconds of the stages."""
    marks = [time.process_time()]
    from imagenet_cls.commands.cli import main
    from imagenet_cls.commands.train import train_command
    from imagenet_cls.engine import component_checks, run

    assert component_checks
    marks.append(time.process_time())
    epoch_batches, after_step = run.Run.epoch_batches, run.Run.after_step

    def marked_batches(self: run.Run, epoch: int, first_step: int) -> Iterator[Any]:
        for batch in epoch_batches(self, epoch, first_step):
            marks.append(time.process_time())
            yield batch

    def marked_step(self: run.Run, *arguments: Any) -> None:
        marks.append(time.process_time())
        after_step(self, *arguments)

    run.Run.epoch_batches, run.Run.after_step = marked_batches, marked_step  # type: ignore[method-assign]
    main(
        train_command,
        [
            f"data.root={folder}/digits",
            f"--work-dir={folder}/run",
            "--overwrite",
            "train.max_steps=2",
        ],
    )
    imports, built, stepped = marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]
    print(json.dumps([imports, built, stepped, built + stepped]))


def run(rounds: int = 5, tiny: bool = False) -> list[Row]:
    """CPU seconds of each command and of the stages of the demo. tiny: no effect."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    with tempfile.TemporaryDirectory() as folder:
        # writes the digits, and fills caches
        time_command(["tools/train.py", "--dry-run"], 0, folder)
        for _ in range(rounds):
            for name, (arguments, code, _) in COMMANDS.items():
                found[name].append(time_command(arguments, code, folder))
            command = [sys.executable, "-P", "-m", "benchmarks.startup", folder]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            output = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
            )
            for name, value in zip(STAGES, json.loads(output.stdout.splitlines()[-1]), strict=True):
                stages[name].append(value)
    rows = []
    for name, (_, _, goal) in COMMANDS.items():
        cpu, wall = zip(*found[name], strict=True)
        rows.append(
            measured(f"{name}: CPU time", cpu, "s", goal, note=f"wall time {median(wall):.2f} s")
        )
    return rows + [
        measured(f"demo, {name}: CPU time", stages[name], "s", GOALS.get(name, ""))
        for name in STAGES
    ]


if __name__ == "__main__":
    time_demo(sys.argv[1])
