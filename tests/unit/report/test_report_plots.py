"""Plots: PNG files of the right curves, without pyplot."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from imagenet_cls.report import plots
from imagenet_cls.report.plots import plot_images, plot_lr_range, plot_panels, plot_run

FIRST_COLOR = (0x1F, 0x77, 0xB4)  # of matplotlib


def test_plot_run_draws_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # its import is an error
    records = [
        {"kind": "train", "step": s, "epoch": 1, "loss": 2.0 / s, "lr": 0.1} for s in range(1, 501)
    ]
    records[250]["loss"] = math.nan
    result = {
        "kind": "eval",
        "step": 500,
        "epoch": 1,
        "top1_pct": 50.0,
        "top5_pct": 90.0,
        "loss": 1.0,
    }
    records += [{**result, "weights": weights} for weights in ("raw", "ema")]
    plot_run([*records, {"kind": "event", "step": 3, "message": "resumed"}], tmp_path / "plots")
    pixels = np.asarray(Image.open(tmp_path / "plots" / "curves.png").convert("RGB"))
    for panel in np.array_split(pixels, 3, axis=1):  # loss, learning rate, top-1
        assert (panel == FIRST_COLOR).all(axis=2).sum() > 20


def test_failed_write_leaves_the_old_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    path = tmp_path / "picture.png"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        plot_images(path, np.zeros((1, 2, 2, 3)), ["label"])
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written."""
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "_write", lambda path, figure: figures.append(figure))
    return figures


@pytest.mark.parametrize(("last_loss", "scale"), [(3.0, "linear"), (40.0, "log")])
def test_lr_range_has_all_losses_in_the_frame_and_a_label_at_the_suggestion(
    drawn: list[Figure], last_loss: float, scale: str
) -> None:
    lrs = np.geomspace(1e-6, 10, 50).tolist()
    losses = [*np.linspace(2.5, 0.4, 45), 0.5, 1.0, 2.0, 2.5, last_loss]
    smoothed = np.convolve(losses, np.ones(5) / 5, "same").tolist()
    plot_lr_range(Path("lr.png"), lrs, losses, smoothed, {"suggestion: 0.01": 0.01})
    (axes,) = drawn[0].axes
    assert axes.get_xlim() == pytest.approx((lrs[0], lrs[-1]))
    low, high = axes.get_ylim()
    assert low < min(losses) and max(losses) < high and axes.get_yscale() == scale
    assert [text.get_text() for text in axes.texts] == ["suggestion: 0.01"]
    assert axes.texts[0].xy[0] == 0.01  # type: ignore[attr-defined]  # an Annotation


def test_panels_of_a_schedule_label_the_highest_value(drawn: list[Figure]) -> None:
    epochs = [step / 10 for step in range(40)]
    rates = [*np.linspace(0, 0.5, 11), *np.linspace(0.49, 0, 29)]
    plot_panels(Path("schedule.png"), "name", epochs, {"lr": rates, "px": [224] * 40})
    first, second = drawn[0].axes
    assert [text.get_text() for text in first.texts] == ["0.5 at epoch 1"]
    assert first.get_xlim() == (0, 3.9) and first.get_ylim()[1] > 0.5
    assert len(second.texts) == 0 and second.get_ylim()[0] == 0
