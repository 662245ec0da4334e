"""The training loop is three short functions; the package has no hooks, registries or global
variables.
"""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "imagenet_cls"


@pytest.mark.parametrize(
    ("name", "order", "max_lines"),
    [
        (
            "train",
            ["compute_gradients", "parts.schedule", "parts.updater.update", "run.after_step"],
            35,
        ),
        ("compute_gradients", ["parts.sam.due", "parts.forward_backward"], 20),
        ("forward_backward", ["parts.preprocess", "parts.wrapped", "parts.scaler.scale"], 35),
    ],
)
def test_loop_shows_calls_in_order(name: str, order: list[str], max_lines: int) -> None:
    tree = ast.parse((PACKAGE / "engine" / "train.py").read_text())
    (loop,) = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert loop.end_lineno is not None and loop.end_lineno - loop.lineno < max_lines
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
    lines = [
        min(call.lineno for call in calls if ast.unparse(call.func) == function)
        for function in order
    ]
    assert lines == sorted(lines)


def test_no_hooks_and_no_registries() -> None:
    forbidden = re.compile(
        r"\.register_\w*hook\(|\bregistry\b\s*=|Registry\(|^\s*global \w+(, "
        r"\w+)*$",
        re.M,
    )
    for path in set(PACKAGE.rglob("*.py")) - set((PACKAGE / "extras").rglob("*.py")):
        assert not forbidden.search(path.read_text()), path
