"""Self-contained HTML pages: style, tables, images and plots.

No scripts; nothing is loaded from elsewhere.
"""

import base64
import html
import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from imagenet_cls.text import utf8_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60666d; --line: #d9dde1;
  --back: #fff; --head: #f3f5f7 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --soft: #9aa2aa; --line: #3a4047; --back: #15181b; --head: #1f2428 }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 68rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
p, figcaption { color: var(--soft); overflow-wrap: anywhere }
a { color: inherit; white-space: nowrap }
.table { overflow: auto; max-height: 32rem; margin: .8rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  max-width: 18rem; overflow-wrap: break-word }
th { position: sticky; top: 0; background: var(--head); vertical-align: bottom }
td { min-width: 4.5rem }
.number { text-align: right; min-width: 0 } td.number { white-space: nowrap }
.plot { overflow-x: auto }
svg { max-width: 100%; height: auto } svg text { font-family: inherit !important }
.images { display: flex; flex-wrap: wrap; gap: 1rem } .images figure { margin: 0; width: 10rem }
.images img { max-width: 100%; min-width: 6rem } figcaption { font-size: .8rem }
"""
_INK = "#010203"  # of plots; becomes the color of the page's text
_PLOT: dict[str, Any] = dict.fromkeys(
    ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
)
_PLOT |= {"grid.color": _INK, "grid.alpha": 0.15, "svg.fonttype": "none", "text.parse_math": False}
_PLOT |= {
    "legend.framealpha": 0.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
}
_PLOT |= {"axes.facecolor": "none", "font.size": 9.0, "font.family": "sans-serif"}


class Html(str):
    """Text that is HTML already; all other text is escaped."""


def escape(value: Any) -> str:
    return value if isinstance(value, Html) else html.escape(utf8_text(value))


def page(title: str, parts: Iterable[str]) -> bytes:
    """A whole page. parts: HTML."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{_STYLE}</style></head>
<body><h1>{escape(title)}</h1>
{chr(10).join(parts)}
</body></html>
""".encode()


def heading(title: str, *paragraphs: str) -> Html:
    """A heading and what is to be said about the part that follows."""
    return Html(
        "".join([f"<h2>{escape(title)}</h2>", *(f"<p>{escape(line)}</p>" for line in paragraphs)])
    )


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Any]]) -> Html:
    """A table. columns: titles, and formats of numbers, such as `.2f`; "" for text. None and NaN
    are dashes.
    """
    css = [' class="number"' if number_format else "" for _, number_format in columns]

    def cell(value: Any, number_format: str) -> str:
        if value is None or value != value:
            return "–"
        if number_format and not isinstance(value, str):
            value = format(value, number_format)
        return escape(value)

    lines = [
        "".join(f"<th{c}>{escape(title)}</th>" for c, (title, _) in zip(css, columns, strict=True))
    ]
    for row in rows:
        cells = zip(css, row, columns, strict=True)
        lines.append(
            "".join(
                f"<td{c}>{cell(value, number_format)}</td>"
                for c, value, (_, number_format) in cells
            )
        )
    return Html(
        '<div class="table"><table>'
        + "\n".join(f"<tr>{line}</tr>" for line in lines)
        + "</table></div>"
    )


def to_jpeg(picture: Image.Image, most_px: int) -> bytes:
    """A JPEG file of a picture, made smaller where a side has more than `most_px` pixels."""
    file = io.BytesIO()
    picture.thumbnail((most_px, most_px))
    picture.convert("RGB").save(file, "JPEG", quality=85)
    return file.getvalue()


def image(data: bytes) -> Html:
    """data: a JPEG file."""
    return Html(f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(data).decode()}">')


def gallery(images: Iterable[tuple[Html, Sequence[str]]]) -> Html:
    """Images in rows, each with lines of text below."""
    elements = (
        f"<figure>{img}<figcaption>{'<br>'.join(map(escape, lines))}</figcaption></figure>"
        for img, lines in images
    )
    return Html(f'<div class="images">{"".join(elements)}</div>')


def plot(width: float, height: float, draw: "Callable[[Figure], None]") -> Html:
    """What `draw` draws into a figure of matplotlib, as SVG in the color of the page's text. Sizes
    are in inches.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    file = io.BytesIO()
    with mpl.rc_context(_PLOT), warnings.catch_warnings():
        # glyphs that matplotlib's font lacks: the browser has its own
        warnings.simplefilter("ignore")
        figure = Figure((width, height), layout="constrained")
        draw(figure)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    drawn = file.getvalue().decode()
    drawn = re.sub(
        r' id="(?:figure|axes|patch|text|line2d|matplotlib\.axis|xtick|ytick|legend)_?\d*"',
        "",
        drawn,
    )
    drawn = drawn[drawn.index("<svg") :].replace(_INK, "currentColor")
    # in a narrow window the text stays legible
    smallest = f'<svg style="min-width: {0.7 * width:g}in"'
    return Html(f'<div class="plot">{drawn.replace("<svg", smallest, 1)}</div>')
