"""Law 5: one function shows forward, backward and step; nothing of ours happens behind a hook or a registry."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "imagenet_cls"


def calls_in(function: ast.FunctionDef) -> list[str]:
    return [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]


def test_one_function_shows_forward_backward_and_step() -> None:
    tree = ast.parse((PACKAGE / "engine" / "train.py").read_text())
    (loop,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    calls = calls_in(loop)
    order = ["p.schedule", "p.wrapped", "p.criterion", "p.scaler.scale(loss).backward", "p.updater.update"]
    lines = [
        min(n.lineno for n in ast.walk(loop) if isinstance(n, ast.Call) and ast.unparse(n.func) == c) for c in order
    ]
    assert lines == sorted(lines), "not in the order in which they happen"
    assert all(calls.count(call) == 1 for call in order)
    assert loop.end_lineno is not None and loop.end_lineno - loop.lineno < 70


def test_no_hooks_and_no_registries() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"\.register_\w*hook\(|\bregistry\b\s*=|Registry\(|^\s*global ", path.read_text(), re.M), (
            path
        )
