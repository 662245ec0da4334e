"""Text of messages and tables: values as YAML users write them, printable and shortened text."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The environment variable that says who reads messages: `command`, which `commands.cli.main` sets
# unless the Python API has started the process. Without it, the package was imported.
CALLER_VARIABLE = "IMAGENET_CLS_CALLER"
# Options that are keyword arguments of the Python API, and how these are written.
_KEYWORDS = {
    r"--(resume|overwrite)\b(?!-)": r"\1=True",
    r"--allow-(import|change) (\S+)": r"allow_\1=['\2']",
    r"'\] allow_\w+=\['": "', '",
    r"--work-dir\b(?: DIR)?": "work_dir",
    r"--(data|gpus|device|model|weights|threshold|out|preprocess)\b": r"\1",
}


def is_called_from_python() -> bool:
    """Whether messages are for a user of the Python API."""
    return os.environ.get(CALLER_VARIABLE) != "command"


def for_caller(text: str) -> str:
    """The text of an error. For a user of the Python API, options are keyword arguments, except in
    lines with a command.
    """
    if not is_called_from_python():
        return text
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if not re.search("imagenet-cls |tools/", line):
            for option, keyword in _KEYWORDS.items():
                lines[number] = re.sub(option, keyword, lines[number])
    return "\n".join(lines)


def command_line(name: str) -> str:
    """How a user calls a command, for messages: `imagenet-cls train`, or `python tools/train.py` in
    the folder of a clone.
    """
    tool = Path("tools", f"{name.replace('-', '_')}.py")
    in_clone = tool.is_file() and tool.resolve() == Path(__file__).resolve().parents[1] / tool
    return (
        f"python {tool}"
        if in_clone and Path(sys.argv[0]).stem != "imagenet-cls"
        else f"imagenet-cls {name}"
    )


def first_line(error: BaseException) -> str:
    """The first line of an exception's text; its type's name where the text is empty."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def printable(text: str) -> str:
    """The text with control characters as escapes (`\\x1b`), for a terminal. Undecodable bytes of a
    path are kept.
    """
    keeps = (c.isprintable() or "\udc80" <= c <= "\udcff" for c in text)
    return "".join(c if kept else ascii(c)[1:-1] for c, kept in zip(text, keeps, strict=True))


def shorten(text: str, length: int) -> str:
    """The text in at most `length` characters, with `...` at the end where it was cut."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def format_value(value: Any) -> str:
    """A config value as YAML users write it, in at most 100 characters: `'many'`, `null`, `true`,
    `[0.1, 1.0]`.
    """
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, list):
        text = f"[{', '.join(map(format_value, value))}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{key}: {format_value(item)}' for key, item in value.items())}}}"
    else:
        text = repr(value)
    return shorten(text, 100)


def describe_type(value: Any) -> str:
    """The type of a value for a message: `a list`, `a torch.float32 Tensor of shape (2,)`."""
    kind = type(value).__name__
    if hasattr(value, "dtype"):
        return f"a {value.dtype} {kind} of shape {tuple(value.shape)}"
    return f"a {kind}"


def count_of(number: int, noun: str) -> str:
    """`1 step`, `2 steps`, `2 classes`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def join_names(names: Sequence[str], count: int = 3) -> str:
    """The first `count` names, each cut to 100 characters, and an ellipsis if there are more."""
    listed = ", ".join(shorten(printable(name), 100) for name in names[:count])
    return f"{listed}, ..." if len(names) > count else listed


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
