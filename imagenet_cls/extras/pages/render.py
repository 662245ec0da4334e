"""Self-contained HTML pages from the templates in this folder. Nothing is loaded from a network.

Jinja2 assembles a page and escapes all values but the drawings of `figures.svg`.
"""

import base64
import io
import re
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from imagenet_cls.data.classes import with_readable_name
from imagenet_cls.errors import UsageError
from imagenet_cls.files import check_replaced, explain_write_errors, write_output
from imagenet_cls.text import printable

DURATION = "duration"  # the format of a number of hours
_TEMPLATES = Path(__file__).parent / "templates"


def utf8_text(value: Any) -> str:
    """The value as text that can be encoded in UTF-8, for a file: control characters and
    undecodable bytes of a path are escapes.
    """
    return printable(str(value)).encode(errors="backslashreplace").decode()


def render(template: str, **values: Any) -> bytes:
    """A page. template: a file of the folder templates/."""
    return _environment().get_template(template).render(**values).encode()


def check_page(path: Path, option: str = "--report") -> None:
    """Raise UsageError for a path that is no page, or another file of the user."""
    if path.suffix.lower() != ".html" or path.is_dir():
        raise UsageError(f"{option} {path}: the page is an HTML file.", "Name it *.html.")
    check_replaced(path, option)


def write_html(path: Path, page: bytes, option: str = "--report") -> None:
    """Write a page, in a new folder if need be. Raises ResourceError."""
    with explain_write_errors(path, f"Name another file with {option}."):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, page, option)


@cache  # the templates are compiled once
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_encodable,
    )
    environment.filters |= {"cell": format_cell, "data_url": data_url, "breakable": breakable}
    return environment


def _encodable(value: Any) -> Any:
    # not the markup of a macro
    return utf8_text(value) if type(value) is str else value


def breakable(name: str) -> Any:
    """A name as markup that a browser may break after `.`, `,`, `=`, `/` and `_`."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([.,=/_])", r"\1<wbr>", str(escape(utf8_text(name)))))


def format_cell(value: Any, number_format: str) -> Any:
    """A value of a table. number_format: such as `.2f`; `DURATION`; "" for text. None and NaN are
    dashes, and WordNet ids have the names that people use.
    """
    if value is None or value != value:
        return "–"
    if isinstance(value, str):
        return with_readable_name(value)
    if not number_format:
        return value
    if number_format == DURATION:
        return format_duration(value)
    return format(value, number_format)


def format_duration(hours: float) -> str:
    """`1:02:03`, as at the end of a run."""
    return str(timedelta(seconds=round(3600 * hours)))


def to_jpeg(picture: Image.Image, most_px: int) -> bytes:
    """A JPEG file of a picture, made smaller where a side has more than `most_px` pixels."""
    file = io.BytesIO()
    picture.thumbnail((most_px, most_px))
    picture.convert("RGB").save(file, "JPEG", quality=85)
    return file.getvalue()


def data_url(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
