"""The size of each package in Python tokens, without comments and docstrings, has a ceiling.

Line breaks do not change the number of tokens, so longer lines do not make a package smaller. A
change that needs more raises the ceiling in its own commit, and says why. An f-string is one token,
as in Python 3.11, so that each version of Python counts the same.
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "imagenet_cls"
CEILINGS = {
    "checkpoint": 4_380,
    "commands": 36_100,
    "config": 12_790,
    "data": 34_600,
    "engine": 23_770,
    "guards": 2_680,
    "inference": 12_500,
    "models": 10_160,
    "optim": 6_670,
    "parallel": 10_600,
    "report": 11_770,
    "": 4_120,  # modules of the package itself
}
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


@pytest.mark.parametrize("folder", CEILINGS)
def test_package_is_not_larger_than_its_ceiling(folder: str) -> None:
    pattern = "*.py" if folder == "" else "**/*.py"
    files = (PACKAGE / folder).glob(pattern)
    assert sum(count_tokens(file.read_text()) for file in files) <= CEILINGS[folder]


def test_each_folder_has_a_ceiling() -> None:
    folders = {file.parent.name for file in PACKAGE.glob("*/*.py")}
    assert folders == {folder for folder in CEILINGS if folder}
