"""Law 4 through the script: three ranks, which divide neither images nor batch, count every image once."""

import csv
from pathlib import Path

from helpers import REPOSITORY, arguments, evaluations, run, train_here

DIST_TEST = str(REPOSITORY / "scripts" / "dist_test.sh")


def test_three_ranks_count_what_one_counted(digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path / "run", "noisy", ema__decay=0.5)
    train_here(words)
    config, *changes = words[: words.index("--work-dir")]
    rows = tmp_path / "rows.csv"
    done = run(["bash", DIST_TEST, config, str(tmp_path / "run"), "3", *changes, "--out", str(rows)])
    assert done.returncode == 0, done.stderr
    for record in evaluations(tmp_path / "run")[-2:]:
        assert f"{record['weights']}: top-1 {record['top1_pct']:.3f} %" in done.stdout
    assert done.stdout.count("over 359 images") == 2
    with rows.open() as file:
        images = [row["image"] for row in csv.DictReader(file)]
    assert len(images) == len(set(images)) == 359
