"""Runs of the quick recipes, ours and in a plain loop, and the bands that both must land in.

Used by the tests; as a program it trains all of them with three seeds each and prints docs/quick.md:

    python tests/quick/quick_runs.py > docs/quick.md
"""

import contextlib
import io
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import mean

QUICK = Path(__file__).resolve().parents[2] / "configs" / "quick"
SEEDS = (0, 1, 2)

# Top-1 (%) on the 359 held-out digits, lowest and highest: from three seeds each, ours and plain (docs/quick.md), and a
# margin of one or two of the standard errors that so few images leave. `ema`: of the averaged weights.
BANDS: dict[str, dict[str, tuple[float, float]]] = {
    "convnext_3augment": {"raw": (68, 90)},
    "deit_distilled": {"raw": (79, 93)},
    "efficientnet_rmsprop": {"raw": (86, 97), "ema": (84, 98)},
    "resnet_augmix": {"raw": (87, 98)},
    "resnet_ffcv": {"raw": (76, 96)},
    "resnet_finetune": {"raw": (95, 100)},
    "resnet_mosaic": {"raw": (95, 100)},
    "resnet_one_cycle": {"raw": (93, 100)},
    "resnet_plateau": {"raw": (94, 100)},
    "resnet_rsb_a2": {"raw": (87, 98)},
    "resnet_sgd_step": {"raw": (95, 100)},
    "resnet_tv_v2": {"raw": (77, 96), "ema": (77, 96)},
    "vit_deit": {"raw": (68, 91)},
}

# What these start from is the run of another recipe, named by this key.
TEACHER = "resnet_sgd_step"
STARTS_FROM = {"deit_distilled": "distill.teacher.checkpoint", "resnet_finetune": "model.checkpoint"}

Top1s = dict[str, float]


def train_ours(name: str, root: Path, folder: Path, seed: int = 0, teacher: Path | None = None) -> Top1s:
    """Train by the real command, in this process: top-1 (%) at the end, of the weights and of their average."""
    from bed import evaluations, train_here

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

The tests train each of them, and it must land in its band (`tests/quick/quick_runs.py`). The same settings in a plain
loop, made of timm's, torch's and torchvision's own parts and none of ours (`tests/quick/plain_loop.py`), land in the
same bands: `bash scripts/test.sh -m long tests/quick`. `python tests/quick/quick_runs.py` trains all of them anew and
prints this page.

Top-1 (%) on the 359 held-out digits, by seed; one image is 0.28. *average*: of the averaged weights. seconds: CPU time
of one thread for a whole run of ours, with evaluation, the mean of the seeds{note}.

| recipe | band | ours: seeds {seeds} | mean | plain: seeds {seeds} | mean | seconds |
|---|---|---|---|---|---|---|
{rows}

{when}, {machine}; {versions}.
"""


def measure(root: Path, folder: Path, log: io.TextIOBase) -> list[str]:
    """Train everything, in turn: the rows of the table."""
    rows = []
    for path in sorted(QUICK.glob("*.yaml"), key=lambda path: (path.stem != TEACHER, path.stem)):
        name, ours, plain, seconds = path.stem, [], [], []
        for seed in SEEDS:
            started = time.process_time()
            with contextlib.redirect_stdout(io.StringIO()):
                ours.append(train_ours(name, root, folder / f"{name}-{seed}", seed, folder / f"{TEACHER}-0"))
            seconds.append(time.process_time() - started)
            plain.append(train_plain(name, root, seed))
            print(name, seed, ours[-1], plain[-1], f"{seconds[-1]:.1f} s", file=log, flush=True)
        for kind in ours[0]:
            low, high = BANDS.get(name, {}).get(kind, (0.0, 100.0))
            cells = [f"[{name}](../configs/quick/{name}.yaml)" + (" *average*" if kind == "ema" else "")]
            cells.append(f"{low:g} to {high:g}")
            for runs in (ours, plain):
                top1s = [run[kind] for run in runs]
                cells += [", ".join(f"{top1:.1f}" for top1 in top1s), f"{mean(top1s):.1f}"]
            rows.append("| " + " | ".join([*cells, f"{mean(seconds):.1f}"]) + " |")
    return sorted(rows)


def cpu_name() -> str:
    """What the system says that its CPU is."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main(note: str) -> None:
    import timm
    import torch
    import torchvision

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder) / "digits", Path(folder), sys.stderr)
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (torch, torchvision, timm))
    print(
        PAGE.format(
            note=note,
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
    main("".join(f" ({word})" for word in sys.argv[1:]))
