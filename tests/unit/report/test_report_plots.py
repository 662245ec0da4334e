"""Plots: PNG files of the right curves, without pyplot; the batch picture holds every image under its label."""

import math
import subprocess
import sys

import numpy as np
from PIL import Image

from imagenet_cls.report.plots import draw_batch, plot_run


def run_records(steps: int) -> list[dict]:
    records = [{"kind": "train", "step": s, "epoch": 1, "loss": 2.0 / s, "lr": 0.1} for s in range(1, steps + 1)]
    records[steps // 2]["loss"] = math.nan
    result = {"kind": "eval", "step": steps, "epoch": 1, "top1_pct": 50.0, "top5_pct": 90.0, "loss": 1.0}
    return [*records, *({**result, "weights": weights} for weights in ("raw", "ema"))]


def test_plot_run_draws_three_png_files(tmp_path):
    paths = plot_run([*run_records(500), {"kind": "event", "step": 3, "message": "resumed"}], tmp_path / "plots")
    assert [path.name for path in paths] == ["loss.png", "lr.png", "top1.png"]
    for path in paths:
        pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
        assert (pixels == (0x1F, 0x77, 0xB4)).all(axis=1).sum() > 20, path.name  # the first colour of matplotlib


def test_plot_run_without_records_of_a_kind_leaves_its_plot_out(tmp_path):
    assert plot_run([], tmp_path) == []
    evaluations = [record for record in run_records(4) if record["kind"] == "eval"]
    assert [path.name for path in plot_run(evaluations, tmp_path)] == ["top1.png"]


def test_draw_batch_shows_every_image_in_reading_order():
    values = np.arange(10, 240, 23, dtype=np.uint8)
    images = np.broadcast_to(values[:, None, None, None], (len(values), 3, 16, 16))
    picture = draw_batch(images, [f"class {value}" for value in values], columns=4)
    assert picture.dtype == np.uint8 and picture.shape[2] == 3
    centres = {value: np.argwhere((picture == value).all(axis=2)).mean(axis=0) for value in values}
    order = sorted(values, key=lambda value: (round(centres[value][0] / 60), centres[value][1]))
    assert order == list(values)


def test_draw_batch_takes_any_labels():
    images = np.zeros((2, 3, 8, 8), dtype=np.uint8)
    plain = draw_batch(images, ["cat", "dog"])
    assert not np.array_equal(plain, draw_batch(images, ["dog", "cat"]))
    assert draw_batch(images, ["$\\frac{", "a very long name, " * 20]).shape == plain.shape


def test_plots_never_import_pyplot(tmp_path):
    code = (
        "import sys; from imagenet_cls.report import plots; assert 'matplotlib' not in sys.modules;"
        "record = {'kind': 'train', 'step': 1, 'epoch': 1, 'loss': 1.0, 'lr': 0.1};"
        f"plots.plot_run([record], plots.Path({str(tmp_path)!r}));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "loss.png").exists()
