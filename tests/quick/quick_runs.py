"""Quick recipes: runs, the figures measured with them, the bounds that follow, and docs/quick.md.

    python tests/quick/quick_runs.py measure SEED LABEL    # train each recipe once, append to figures.jsonl
    python tests/quick/quick_runs.py page > docs/quick.md

LABEL names the arithmetic: `native`, or what the environment selects (ATEN_CPU_CAPABILITY and others).
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parent
QUICK = HERE.parents[1] / "configs" / "quick"
FIGURES = HERE / "figures.jsonl"
CHANCE_PCT = 10

# These start from the trained network of another recipe; the key that names its run folder.
TEACHER = "resnet_sgd_step"
STARTS_FROM = {"deit_distilled": "distill.teacher.checkpoint", "resnet_finetune": "model.checkpoint"}

Top1s = dict[str, float]


def arguments_of(name: str, root: Path, folder: Path, teacher: Path | None) -> list[str]:
    """Arguments of train.py. teacher: a run folder or weights file of `TEACHER`."""
    arguments = [str(QUICK / f"{name}.yaml"), f"data.root={root}", "--work-dir", str(folder)]
    return [*arguments, f"{STARTS_FROM[name]}={teacher}"] if name in STARTS_FROM else arguments


def train_recipe(arguments: list[str], folder: Path) -> Top1s:
    """Train in this process. Returns the final top-1 (%): `raw`, and `ema` where there are averaged weights."""
    from helpers import evaluations, train_here

    from imagenet_cls.report.log import close_log

    try:
        train_here(arguments)
    finally:
        close_log()
    records = evaluations(folder)
    return {record["weights"]: record["top1_pct"] for record in records if record["step"] == records[-1]["step"]}


def figures() -> dict[tuple[str, str], list[float]]:
    """Every top-1 measured, by recipe and weights."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in map(json.loads, FIGURES.read_text().splitlines()):
        for weights in {"raw", "ema"} & run.keys():
            found.setdefault((run["recipe"], weights), []).append(run[weights])
    return dict(sorted(found.items(), key=lambda item: (item[0][0], item[0][1] != "raw")))


def bounds() -> dict[tuple[str, str], int]:
    """The top-1 that every run must reach: 5 standard deviations and at least 20 points below the mean, but 3 x chance.

    A recipe that does not learn stays near chance; a run that only rounds differently stays above the bound.
    """
    found = {}
    for key, top1s in figures().items():
        low = mean(top1s) - max(20.0, 5 * stdev(top1s))
        found[key] = max(3 * CHANCE_PCT, 5 * int(low // 5))
    return found


PAGE = """# Quick recipes

`configs/quick/` holds small versions of published recipes: small networks, images of 16 to 36 px, handwritten digits.
Together they use every part that the other recipes use. Each trains in seconds on one CPU thread:

    python tools/train.py configs/quick/resnet_tv_v2.yaml

`deit_distilled` and `resnet_finetune` start from the network that `resnet_sgd_step` has trained: run that one first.

Each recipe is tested in two ways:

- **Equality.** A plain loop made of timm's, torch's and torchvision's own parts takes the same weights and images
  before each step. After it, weights and averaged weights must be equal up to rounding, and the evaluations must agree.
- **Learning.** The final top-1 must reach the bound in the table. The accuracy of networks this small depends on
  rounding: another processor or another seed changes it by several points. So the bound is 5 standard deviations and at
  least 20 points below the mean of the measured runs, but at least 30 % (chance is 10 %).

Top-1 (%) on the 359 held-out digits; one image is 0.28 points. *EMA*: with the averaged weights.

| recipe | bound | runs | mean | standard deviation | lowest | highest |
|---|---|---|---|---|---|---|
{rows}

Measured with PyTorch {torch} on one thread: {machines}.
"""


def page() -> str:
    rows, limits = [], bounds()
    for (name, weights), top1s in figures().items():
        label = f"[{name}](../configs/quick/{name}.yaml)" + (" *EMA*" if weights == "ema" else "")
        numbers = (mean(top1s), stdev(top1s), min(top1s), max(top1s))
        cells = [label, str(limits[name, weights]), str(len(top1s)), *(f"{number:.1f}" for number in numbers)]
        rows.append(f"| {' | '.join(cells)} |")
    runs = [json.loads(line) for line in FIGURES.read_text().splitlines()]
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(run["arithmetic"], set()).add(run["seed"])
    machines = "; ".join(f"{label}, seeds {', '.join(map(str, sorted(found)))}" for label, found in seeds.items())
    return PAGE.format(rows="\n".join(rows), torch=runs[-1]["torch"], machines=machines)


def measure(seed: int, label: str) -> None:
    import torch

    from imagenet_cls.data.digits import write_digits

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_digits(folder / "digits", "train")
        for recipe in sorted((path.stem for path in QUICK.glob("*.yaml")), key=lambda name: (name != TEACHER, name)):
            started = time.process_time()
            arguments = arguments_of(recipe, folder / "digits", folder / recipe, folder / TEACHER)
            top1s = train_recipe([*arguments, f"seed={seed}"], folder / recipe)
            run = {"recipe": recipe, "arithmetic": label, "seed": seed, "torch": torch.__version__.partition("+")[0]}
            run |= {weights: round(top1, 1) for weights, top1 in top1s.items()}
            with FIGURES.open("a") as file:
                print(json.dumps(run | {"cpu_sec": round(time.process_time() - started, 1)}), file=file)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    if sys.argv[1] == "measure":
        measure(int(sys.argv[2]), sys.argv[3])
    else:
        print(page(), end="")
