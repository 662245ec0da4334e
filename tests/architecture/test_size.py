"""The size in Python tokens, without comments and docstrings, has a limit.

Line breaks do not change the number of tokens, so longer lines do not make a package smaller. The
limits are lowered when the code gets smaller, and never raised: a new feature names what leaves. An
f-string is one token, as in Python 3.11, so that each version of Python counts the same.
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Core and extras, and tests.
LIMITS = {"imagenet_cls": 146_000, "tests": 209_400}
NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# From Python 3.12 on, an f-string is several tokens between these two.
FSTRING_START = getattr(tokenize, "FSTRING_START", None)
FSTRING_END = getattr(tokenize, "FSTRING_END", None)


def count_tokens(source: str) -> int:
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docstrings.add(node.body[0].lineno)
    total = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == FSTRING_START:
            total += depth == 0
            depth += 1
        elif token.type == FSTRING_END:
            depth -= 1
        elif depth == 0 and token.type not in NOT_COUNTED:
            total += not (token.type == tokenize.STRING and token.start[0] in docstrings)
    return total


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('x = f\'{a:{b}} {f"{c!r}"}\' rf"{d}"\n', 4),
        ('f"""{\n a\n}"""\n', 1),
        ('def f():\n    """Docstring."""\n    return f"{a}", "b"  # comment\n', 9),
    ],
)
def test_f_string_is_one_token(source: str, expected: int) -> None:
    assert count_tokens(source) == expected


@pytest.mark.parametrize("folder", LIMITS)
def test_size_is_not_above_its_limit(folder: str) -> None:
    files = (ROOT / folder).rglob("*.py")
    assert sum(count_tokens(file.read_text()) for file in files) <= LIMITS[folder]
