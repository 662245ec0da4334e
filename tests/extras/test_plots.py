"""Plots: PNG files of the right curves, without pyplot."""

import math
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from imagenet_cls.extras.pages.plots import plot_run, write_figure

FIRST_COLOR = (0x1F, 0x77, 0xB4)  # of matplotlib


def test_plot_run_draws_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # its import is an error
    records = [{"kind": "train", "step": s, "loss": 2.0 / s, "lr": 0.1} for s in range(1, 501)]
    records[250]["loss"] = math.nan
    result = {"kind": "eval", "step": 500, "top1_pct": 50.0, "loss": 1.0}
    records += [{**result, "weights": weights} for weights in ("raw", "ema")]
    plot_run([*records, {"kind": "event", "step": 3, "message": "resumed"}], tmp_path)
    pixels = np.asarray(Image.open(tmp_path / "curves.png").convert("RGB"))
    for panel in np.array_split(pixels, 3, axis=1):  # loss, learning rate, top-1
        assert (panel == FIRST_COLOR).all(axis=2).sum() > 20


def test_failed_write_leaves_the_old_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_figure(path, Figure())
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
