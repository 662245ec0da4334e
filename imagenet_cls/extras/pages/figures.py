"""The figures of the pages, of `plots/` and of `TrainedRun.plot`, each described once.

A `Chart` draws on axes of matplotlib. `svg` makes a drawing for a page of it, `picture` a figure
for a PNG file or a notebook. pyplot is not used, whose figures and backend are global. matplotlib
is imported inside the functions, since that takes half a second.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.files import OUTPUT_MARK, write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (6.2, 3.9)  # inches of 72 units, which are pixels of a page
# Of text and lines. In a page they are variables, which page.css sets for light and dark.
_VARIABLES = {"#1b1f24": "var(--ink)", "#dde1e6": "var(--line)", "#fffffe": "var(--card)"}
_INK, _LINE, _CARD = _VARIABLES
GREY = "#8b949e"
BLUE, ORANGE, GREEN = "#2f7fd0", "#e0822b", "#2a9d63"
COLORS = (
    *(BLUE, ORANGE, GREEN, "#d1495b", "#8a63c9"),
    *("#1aa6b7", "#c75fae", "#9a7b2f", "#6d7b8a", "#7aa32c", "#4c5fd5"),
)
_STYLE = {
    "font.size": 12,
    "text.color": _INK,
    "text.parse_math": False,  # `$` is part of a name
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": 13,
    "axes.xmargin": 0.04,
    "grid.color": _LINE,
    "xtick.color": _LINE,
    "xtick.labelcolor": _INK,
    "xtick.major.pad": 7,
    "ytick.color": _LINE,
    "ytick.labelcolor": _INK,
    "legend.facecolor": _CARD,
    "legend.edgecolor": "none",
    "legend.fontsize": 11,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "imagenet-cls",  # equal figures have equal bytes
}


@dataclass(frozen=True)
class Chart:
    """A figure. title: what it shows. draw: draws it. size: in inches."""

    title: str
    draw: Callable[["Axes"], None]
    size: tuple[float, float] = SIZE


def picture(charts: Sequence[Chart]) -> "Figure":
    """A figure with the charts in rows of three. A notebook shows it."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            """What a notebook shows. It knows other figures only if pyplot is imported."""
            return png(self)

    rows = -(-len(charts) // 3)
    width, height = SIZE
    with _style():
        figure = Picture((3 * width, rows * height), layout="constrained")
        grid = figure.subplots(rows, 3).flatten()
        for axes, chart in zip(grid, charts, strict=False):
            chart.draw(axes)
            axes.set_title(chart.title)
        for axes in grid[len(charts) :]:
            axes.axis("off")
    return figure


def png(figure: "Figure") -> bytes:
    content = BytesIO()
    with _style():
        figure.savefig(content, format="png", metadata={"Software": OUTPUT_MARK})
    return content.getvalue()


def write_figure(path: Path, figure: "Figure") -> None:
    """Write a PNG file whole or not at all. Raises OSError."""
    content = png(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content)


def svg(chart: Chart, names: Sequence[str] = ()) -> str:
    """A chart as an element of a page. The groups of artists with the id `run-3` get this class,
    and the name with this number, which a browser shows as a tooltip.
    """
    from matplotlib.figure import Figure

    content = BytesIO()
    with _style():
        figure = Figure(chart.size, layout="constrained", dpi=72)
        chart.draw(figure.subplots())
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    text = content.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    width = round(1.2 * 72 * chart.size[0])
    root = rf'<svg \1 role="img" style="max-width: {width}px">'
    text = re.sub(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', root, text, count=1)
    # a tenth of a pixel is exact enough
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)

    def named(group: re.Match[str]) -> str:
        title = escape(names[int(group[1])])
        return f'<g class="run-{group[1]}"><title>{title}</title>'

    text = re.sub(r'<g id="run-(\d+)">', named, text)
    return re.sub(r'<g id="[^"]*">', "<g>", text)  # equal in several figures of a page


def tinted(color: str, opacity: np.ndarray) -> np.ndarray:
    """Cells of a color for `imshow`: RGBA, (*opacity.shape, 4). opacity: from 0 to 1."""
    rgb = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return np.concatenate([np.broadcast_to(rgb, (*opacity.shape, 3)), opacity[..., None]], axis=-1)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib as mpl

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # Fonts that lack characters of a name. A browser has others.
        warnings.filterwarnings("ignore", "Glyph ", UserWarning)
        yield
