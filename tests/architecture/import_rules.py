"""Import rules and forbidden calls, checked in the source without running it.

    tools -> commands -> engine -> {data, models, optim, checkpoint, guards, report} -> {config, parallel, seeding}
          -> {lookup, interrupts, files} -> errors

A module may import its own part and the parts to the right. Parts in braces do not import each other. `config` never
imports torch.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "imagenet_cls"
LEVELS = [
    {"tools"},
    {"commands"},
    {"engine"},
    {"data", "models", "optim", "checkpoint", "guards", "report"},
    {"config", "parallel", "seeding"},
    {"lookup", "interrupts", "files"},
    {"errors"},
    {PACKAGE},  # imagenet_cls/__init__.py itself, which holds the version
]
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}
UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
TORCH = {"torch", "torchvision", "timm", "safetensors"}


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, for all of imagenet_cls/ and tools/ below `root`."""
    found = {}
    for path in sorted([*(root / PACKAGE).rglob("*.py"), *(root / "tools").rglob("*.py")]):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def part_of(module: str) -> str:
    """The part that a module belongs to: `data` for imagenet_cls.data.index, `tools` for tools.train."""
    names = module.split(".")
    return names[1] if names[0] == PACKAGE and len(names) > 1 else names[0]


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a module, those inside functions and under TYPE_CHECKING included."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, [above, node.module]))
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield node.lineno, name if name in known else source
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((node.lineno, str(word.value)) for word in node.args[:1] if isinstance(word, ast.Constant))


def upward_imports(root: Path) -> list[str]:
    """One line for each import that goes the wrong way."""
    known, wrong = modules(root), []
    for module, path in known.items():
        own = part_of(module)
        for line, name in imports(module, path, known):
            other = part_of(name)
            if name.split(".")[0] not in (PACKAGE, "tools") or own == other:
                continue
            unknown = own not in LEVEL_OF or other not in LEVEL_OF
            if unknown or LEVEL_OF[own] >= LEVEL_OF[other]:
                wrong.append(f"{path.relative_to(root)}:{line}: {own} imports {other}")
    return list(dict.fromkeys(wrong))  # `from x import a, b` is one import


def torch_in_config(root: Path) -> list[str]:
    """One line for each import of torch or a library based on it, in `config` and in what it imports of the package."""
    known = modules(root)
    waiting, reached, wrong = [module for module in known if part_of(module) == "config"], set(), []
    while waiting:
        module = waiting.pop()
        if module in reached or module not in known:
            continue
        reached.add(module)
        waiting.append(module.rpartition(".")[0])  # importing a module runs the __init__ of its packages
        for line, name in imports(module, known[module], known):
            waiting.append(name)
            if name.split(".")[0] in TORCH:
                wrong.append(f"{known[module].relative_to(root)}:{line}: {name}")
    return wrong


def forbidden_calls(root: Path) -> list[str]:
    """One line for each call that can execute a file or text: unpickling, eval, exec, yaml.load, a shell."""
    wrong = []
    for path in modules(root).values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            reason = _forbidden(node)
            if reason:
                wrong.append(f"{path.relative_to(root)}:{node.lineno}: {reason}")  # type: ignore[attr-defined]
    return wrong


def _forbidden(node: ast.AST) -> str | None:
    """The reason why a node is forbidden, or None."""
    if isinstance(node, ast.Import | ast.ImportFrom):  # another name would hide the calls
        names = {alias.name for alias in node.names if isinstance(node, ast.ImportFrom) or alias.asname}
        if isinstance(node, ast.ImportFrom) and node.module == "yaml":
            return "from yaml import load" if "load" in names else None
        source = {node.module} if isinstance(node, ast.ImportFrom) else names
        return f"import of {source & UNSAFE}" if source & UNSAFE else None
    if not isinstance(node, ast.Call):
        return None
    function = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    calls = ("eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load")
    if function in calls or function.split(".")[0] in UNSAFE:
        return f"{function}()"
    if function == "torch.load" and given.get("weights_only") != "True":
        return "torch.load() without weights_only=True"
    for keyword, value in (("weights_only", "False"), ("shell", "True"), ("allow_pickle", "True")):
        if given.get(keyword) == value:
            return f"{keyword}={value}"
    return None
