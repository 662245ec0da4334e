"""The pictures of commands: which curves and labels they have."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from imagenet_cls.extras.before_training import pictures
from imagenet_cls.extras.before_training.pictures import plot_lr_range, plot_panels


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written."""
    figures: list[Figure] = []
    monkeypatch.setattr(pictures, "write_figure", lambda path, figure: figures.append(figure))
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
