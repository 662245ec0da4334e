"""Quick recipes: their runs, and the top-1 or mAP that each must reach, from the table of
docs/quick.md.

python tests/quick/quick_runs.py SEED [RECIPE...]    # trains the recipes, prints their results
"""

import re
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = REPOSITORY / "configs" / "quick"

# These start from the trained network of another recipe; the key that names its run folder.
TEACHER = "resnet_sgd_step"
STARTS_FROM = {
    "deit_distilled": "distill.teacher.checkpoint",
    "resnet_finetune": "model.checkpoint",
}


def train_recipe(
    name: str, root: Path, folder: Path, teacher: Path | None, *more: str
) -> dict[str, float]:
    """Train in this process. teacher: run folder of `TEACHER`. Returns the final top-1 or mAP (%)
    by kind of weights.
    """
    from helpers import evaluations, train_here

    from imagenet_cls.config.metrics import main_metric

    start = [f"{STARTS_FROM[name]}={teacher}"] if name in STARTS_FROM else []
    train_here(
        [str(QUICK / f"{name}.yaml"), f"data.root={root}", *start, *more, "--work-dir", str(folder)]
    )
    records = evaluations(folder)
    return {
        record["weights"]: record[main_metric(record).field]
        for record in records
        if record["step"] == records[-1]["step"]
    }


def measured() -> dict[tuple[str, str], tuple[int, float, float]]:
    """Bound, mean and standard deviation of the top-1 or mAP, by recipe and weights, from
    docs/quick.md.
    """
    row = r"^\| \[(\w+)\]\(\S+\)( \*EMA\*)? \| (\d+) \| \d+ \| ([\d.]+) \| ([\d.]+) \|"
    found = re.findall(row, (REPOSITORY / "docs" / "quick.md").read_text(), re.MULTILINE)
    return {
        (n, "ema" if ema else "raw"): (int(bound), float(m), float(sd))
        for n, ema, bound, m, sd in found
    }


def main(seed: int, recipes: list[str]) -> None:
    import torch

    from imagenet_cls.data.builtin import write_digits

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_digits(folder / "digits", "train")
        names = recipes or [path.stem for path in QUICK.glob("*.yaml")]
        for recipe in sorted(names, key=lambda name: (name != TEACHER, name)):
            print(
                recipe,
                train_recipe(
                    recipe, folder / "digits", folder / recipe, folder / TEACHER, f"seed={seed}"
                ),
            )


if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY)]
    main(int(sys.argv[1]), sys.argv[2:])
