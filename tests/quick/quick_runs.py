"""Runs of the quick recipes, ours and in a plain loop, and the bands that both must land in.

Used by the tests; as a program it trains all of them with three seeds each and prints docs/quick.md:

    python tests/quick/quick_runs.py > docs/quick.md
    python tests/quick/quick_runs.py RUNS > docs/quick.md    # keeps figures in the file RUNS, and makes none twice
"""

import contextlib
import io
import json
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from statistics import mean

QUICK = Path(__file__).resolve().parents[2] / "configs" / "quick"
SEEDS = (0, 1, 2)

# Top-1 (%) on the 359 held-out digits, lowest and highest: from three seeds each, ours and plain (docs/quick.md), and a
# margin of one or two of the standard errors that so few images leave. `ema`: of the averaged weights.
BANDS: dict[str, dict[str, tuple[float, float]]] = {
    "convnext_3augment": {"raw": (68, 92)},
    "deit_distilled": {"raw": (77, 93)},
    "efficientnet_rmsprop": {"raw": (86, 97), "ema": (84, 99)},
    "resnet_augmix": {"raw": (87, 99)},
    "resnet_ffcv": {"raw": (80, 96)},
    "resnet_finetune": {"raw": (94, 100)},
    "resnet_mosaic": {"raw": (93, 100)},
    "resnet_one_cycle": {"raw": (89, 100)},
    "resnet_plateau": {"raw": (88, 99)},
    "resnet_rmsprop": {"raw": (93, 100)},
    "resnet_rsb_a2": {"raw": (88, 99)},
    "resnet_sgd_step": {"raw": (93, 100)},
    "resnet_tv_v2": {"raw": (77, 94), "ema": (78, 95)},
    "vit_deit": {"raw": (65, 87)},
}

# What these start from is the run of another recipe, named by this key.
TEACHER = "resnet_sgd_step"
STARTS_FROM = {"deit_distilled": "distill.teacher.checkpoint", "resnet_finetune": "model.checkpoint"}

Top1s = dict[str, float]


def train_ours(name: str, root: Path, folder: Path, seed: int = 0, teacher: Path | None = None) -> Top1s:
    """Train by the real command, in this process: top-1 (%) at the end, of the weights and of their average."""
    from helpers import evaluations, train_here

    from imagenet_cls.report.log import close_log

    words = [str(QUICK / f"{name}.yaml"), f"data.root={root}", f"seed={seed}", "--work-dir", str(folder)]
    if name in STARTS_FROM:
        words.append(f"{STARTS_FROM[name]}={teacher}")
    try:
        train_here(words)
    finally:
        close_log()
    records = evaluations(folder)
    return {record["weights"]: record["top1_pct"] for record in records if record["step"] == records[-1]["step"]}


def train_plain(name: str, root: Path, seed: int = 0) -> Top1s:
    """The same settings in a loop that shares no code with ours."""
    from plain_loop import train_plainly

    start = plain_teacher(root) if name in STARTS_FROM else None
    trained = train_plainly(QUICK / f"{name}.yaml", root, seed, start)
    return {"raw": trained.top1_pct} | ({} if trained.ema_top1_pct is None else {"ema": trained.ema_top1_pct})


@cache
def plain_teacher(root: Path):
    from plain_loop import train_plainly

    return train_plainly(QUICK / f"{TEACHER}.yaml", root, 0).model.eval().requires_grad_(False)


def in_band(name: str, top1s: Top1s) -> bool:
    """Whether each kind of weights is."""
    bands = BANDS[name]
    return bands.keys() == top1s.keys() and all(low <= top1s[kind] <= high for kind, (low, high) in bands.items())


# ------------------------------------------------------------------------------------------- docs/quick.md

PAGE = """# Quick recipes

`configs/quick/` holds shrunk recipes on the digits, small nets on images of 16 to 36 px, at least one for each part
that published recipes are made of. Each trains through in seconds on one thread of a CPU:

    python tools/train.py configs/quick/resnet_tv_v2.yaml

`resnet_finetune` starts from what `resnet_sgd_step` has learned, so that one is trained first.

The tests train each of them, and it must land in its band (`tests/quick/quick_runs.py`). The same settings in a plain
loop, made of timm's, torch's and torchvision's own parts and none of ours (`tests/quick/plain_loop.py`), land in the
same bands: `bash scripts/test.sh -m nightly tests/quick`. `python tests/quick/quick_runs.py` trains all of them and
prints this page.

Nets as small as these, trained for a hundred steps, end some points apart for no reason but rounding: the plain loop,
given the weights and the very batches of `resnet_tv_v2` with seed 0, ended at 88.3 % where ours had ended at 81.6 %.
So the loops are compared step by step, too (`tests/quick/test_quick_steps.py`): from the same weights and on the same
images each step makes the same weights and averages, and the evaluations count the same.

Top-1 (%) on the 359 held-out digits, by seed; one image is 0.28. *average*: of the averaged weights. seconds: CPU time
of one thread for a whole run of ours, with evaluation, the mean of the seeds.

| recipe | band | ours: seeds {seeds} | mean | plain: seeds {seeds} | mean | seconds |
|---|---|---|---|---|---|---|
{rows}

{when}, {machine}; {versions}.
"""


class Runs:
    """Figures of runs that were made, by recipe, loop and seed; those that are not there are made now."""

    def __init__(self, folder: Path, kept: Path):
        """folder: for the digits and the runs. kept: a file with a line of JSON for each run, appended to."""
        self.folder, self.kept = folder, kept
        lines = kept.read_text().splitlines() if kept.exists() else []
        self.done = {(name, loop, seed): found for name, loop, seed, found in map(json.loads, lines)}

    def __call__(self, name: str, loop: str, seed: int) -> Top1s:
        """Top-1 (%) by kind of weights; of ours, `seconds` of CPU time, too."""
        if (name, loop, seed) not in self.done:
            started = time.process_time()
            found = self.ours(name, seed) if loop == "ours" else train_plain(name, self.folder / "digits", seed)
            self.done[name, loop, seed] = found | ({"seconds": time.process_time() - started} if loop == "ours" else {})
            with self.kept.open("a") as file:
                print(json.dumps([name, loop, seed, self.done[name, loop, seed]]), file=file)
        return self.done[name, loop, seed]

    def ours(self, name: str, seed: int) -> Top1s:
        with contextlib.redirect_stdout(io.StringIO()):
            folder = self.folder / f"{name}-{seed}"
            return train_ours(name, self.folder / "digits", folder, seed, self.teacher if name in STARTS_FROM else None)

    @cached_property
    def teacher(self) -> Path:
        folder = self.folder / "teacher"
        train_ours(TEACHER, self.folder / "digits", folder)
        return folder


def table(runs: Runs) -> list[str]:
    """The rows of the page."""
    rows = []
    for name, bands in sorted(BANDS.items()):
        seconds = mean(runs(name, "ours", seed)["seconds"] for seed in SEEDS)
        for kind, (low, high) in bands.items():
            cells = [f"[{name}](../configs/quick/{name}.yaml)" + (" *average*" if kind == "ema" else "")]
            cells.append(f"{low:g} to {high:g}")
            for loop in ("ours", "plain"):
                top1s = [runs(name, loop, seed)[kind] for seed in SEEDS]
                cells += [", ".join(f"{top1:.1f}" for top1 in top1s), f"{mean(top1s):.1f}"]
            rows.append("| " + " | ".join([*cells, f"{seconds:.1f}"]) + " |")
    return rows


def cpu_name() -> str:
    """What the system says that its CPU is."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main(kept: Path | None) -> None:
    import timm
    import torch
    import torchvision

    import imagenet_cls.engine.run  # noqa: F401  # its imports are no part of a run's time

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = table(Runs(Path(folder), kept or Path(folder) / "runs.jsonl"))
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (torch, torchvision, timm))
    print(
        PAGE.format(
            seeds=", ".join(map(str, SEEDS)),
            rows="\n".join(rows),
            when=datetime.now(UTC).date().isoformat(),
            machine=f"{cpu_name()}, one of {os.cpu_count()} cores",
            versions=f"Python {platform.python_version()}, {versions}",
        ),
        end="",
    )


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[up]) for up in (1, 2)]
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
