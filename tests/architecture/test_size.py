"""The size of each package in Python tokens, without comments and docstrings, has a ceiling.

Line breaks do not change the number of tokens, so longer lines do not make a package smaller. A
change that needs more raises the ceiling in its own commit, and says why.
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "imagenet_cls"
CEILINGS = {
    "checkpoint": 4_300,
    "commands": 36_550,
    "config": 12_300,
    "data": 32_900,
    "engine": 23_350,
    "guards": 4_100,
    "inference": 12_150,
    "models": 9_800,
    "optim": 6_800,
    "parallel": 10_600,
    "report": 11_550,
    "": 3_900,  # modules of the package itself
}
NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_tokens(source: str) -> int:
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docstrings.add(node.body[0].lineno)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type not in NOT_COUNTED
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokens
    )


@pytest.mark.parametrize("folder", CEILINGS)
def test_package_is_not_larger_than_its_ceiling(folder: str) -> None:
    pattern = "*.py" if folder == "" else "**/*.py"
    files = (PACKAGE / folder).glob(pattern)
    assert sum(count_tokens(file.read_text()) for file in files) <= CEILINGS[folder]


def test_each_folder_has_a_ceiling() -> None:
    folders = {file.parent.name for file in PACKAGE.glob("*/*.py")}
    assert folders == {folder for folder in CEILINGS if folder}
