"""Plots: real PNG files of the right curves, without pyplot; the batch picture holds every image under its label."""

import math
import subprocess
import sys

import numpy as np
from PIL import Image

from imagenet_cls.report.plots import draw_batch, plot_run


def run_records(steps: int) -> list[dict]:
    records = [
        {"kind": "train", "step": s, "epoch": 1, "loss": 2.0 / s, "lr": 0.1, "grad_norm": 1.0}
        for s in range(1, steps + 1)
    ]
    records[steps // 2]["loss"] = math.nan
    for weights in ("raw", "ema"):
        records.append(
            {
                "kind": "eval",
                "step": steps,
                "epoch": 1,
                "weights": weights,
                "top1_pct": 50.0,
                "top5_pct": 90.0,
                "loss": 1.0,
            }
        )
    return records


def test_three_png_files_with_something_drawn_on_them(tmp_path):
    paths = plot_run([*run_records(500), {"kind": "event", "step": 3, "message": "resumed"}], tmp_path / "plots")
    assert [path.name for path in paths] == ["loss.png", "lr.png", "top1.png"]
    for path in paths:
        pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
        blue = (pixels == (0x1F, 0x77, 0xB4)).all(axis=1).sum()  # the first colour of matplotlib's cycle
        assert blue > 20, path.name


def test_only_what_there_are_records_for_is_drawn(tmp_path):
    assert plot_run([], tmp_path) == []
    evaluations = [record for record in run_records(4) if record["kind"] == "eval"]
    assert [path.name for path in plot_run(evaluations, tmp_path)] == ["top1.png"]


def test_the_batch_picture_shows_every_image_in_reading_order(tmp_path):
    values = np.arange(10, 240, 23, dtype=np.uint8)
    images = np.broadcast_to(values[:, None, None, None], (len(values), 3, 16, 16))
    picture = draw_batch(images, [f"class {value}" for value in values], columns=4)
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    centres = {value: np.argwhere((picture == value).all(axis=2)).mean(axis=0) for value in values}
    order = sorted(values, key=lambda value: (round(centres[value][0] / 60), centres[value][1]))
    assert order == list(values)


def test_labels_change_the_picture_and_may_hold_anything():
    images = np.zeros((2, 3, 8, 8), dtype=np.uint8)
    plain = draw_batch(images, ["cat", "dog"])
    assert not np.array_equal(plain, draw_batch(images, ["dog", "cat"]))
    assert draw_batch(images, ["$\\frac{", "a very long name, " * 20]).shape == plain.shape


def test_pyplot_is_never_imported(tmp_path):
    code = (
        "import sys; from imagenet_cls.report import plots; assert 'matplotlib' not in sys.modules;"
        "record = {'kind': 'train', 'step': 1, 'epoch': 1, 'loss': 1.0, 'lr': 0.1};"
        f"plots.plot_run([record], plots.Path({str(tmp_path)!r}));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "loss.png").exists()
