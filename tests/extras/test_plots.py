"""Pictures: which curves and labels they have, drawn without pyplot."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from imagenet_cls.extras.before_training import pictures
from imagenet_cls.extras.pages.plots import plot_run

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


@pytest.mark.parametrize(("last_loss", "scale"), [(3.0, "linear"), (40.0, "log")])
def test_lr_range_has_all_losses_in_the_frame_and_a_label_at_the_suggestion(
    last_loss: float, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(pictures, "write_figure", lambda path, figure: drawn.append(figure))
    lrs = np.geomspace(1e-6, 10, 50).tolist()
    losses = [*np.linspace(2.5, 0.4, 45), 0.5, 1.0, 2.0, 2.5, last_loss]
    smoothed = np.convolve(losses, np.ones(5) / 5, "same").tolist()
    pictures.plot_lr_range(Path("lr.png"), lrs, losses, smoothed, {"suggestion: 0.01": 0.01})
    (axes,) = drawn[0].axes
    assert axes.get_xlim() == pytest.approx((lrs[0], lrs[-1]))
    low, high = axes.get_ylim()
    assert low < min(losses) and max(losses) < high and axes.get_yscale() == scale
    assert [text.get_text() for text in axes.texts] == ["suggestion: 0.01"]
    assert axes.texts[0].xy[0] == 0.01  # type: ignore[attr-defined]  # an Annotation
