"""Import rules and forbidden calls, checked in the source without running it.

    tools -> extras -> commands -> inference -> engine -> tasks
          -> {data, models, optim, checkpoint, guards, report}
          -> {config, parallel, seeding, versions} -> private_names -> {lookup, files, entry_points}
          -> errors -> text

A module imports from its own part and from parts to the right. Parts in braces do not import each
other. `config` never imports torch. The core (all parts but tools and extras) never imports extras,
which import only the public names that docs/architecture.md lists.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "imagenet_cls"
LEVELS = [
    {"tools", "__main__", "__init__"},
    {"extras"},
    {"commands"},
    {"inference"},
    {"engine"},
    {"tasks"},
    {"data", "models", "optim", "checkpoint", "guards", "report"},
    {"config", "parallel", "seeding", "versions"},
    {"private_names"},
    {"lookup", "files", "entry_points"},
    {"errors"},
    {"text"},
    # the version; imagenet_cls/__init__.py itself imports the Python API when it is used
    {PACKAGE},
]
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}
WITHOUT_TORCH = {"config", *LEVELS[9], *LEVELS[10], *LEVELS[11], *LEVELS[12]}
FORBIDDEN = re.compile(
    r"^\s*(import|from) "
    r"(c?pickle|cloudpickle|dill|marshal|shelve)\b|(?<![.\w])(eval|exec)\(|\bos\.(system|popen)\("
    r"|\byaml\.(unsafe_)?load\(|from yaml "
    r"import|torch\.load\((?!.*weights_only=True)|torch\.export\.load\("
    r"|weights_only=False|shell=True|allow_pickle=True",
    re.MULTILINE | re.IGNORECASE,
)
MODULES = sorted([*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "tools").glob("*.py")])


def imports(path: Path) -> Iterator[str]:
    """The dotted name of every import in a module, those inside functions and under TYPE_CHECKING
    included.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(names: list[str]) -> str:
    """`data` of imagenet_cls.data.index, `tools` of tools.train, `imagenet_cls` of
    imagenet_cls.__version__.
    """
    return names[1] if names[0] == PACKAGE and len(names) > 1 and names[1] in LEVEL_OF else names[0]


def test_modules_import_only_from_parts_to_the_right() -> None:
    for path in MODULES:
        own = part_of(list(path.relative_to(ROOT).with_suffix("").parts))
        for name in imports(path):
            other = part_of(name.split("."))
            if other != own and name.split(".")[0] in (PACKAGE, "tools"):
                assert LEVEL_OF[own] < LEVEL_OF[other], f"{path} imports {name}"
            if own in WITHOUT_TORCH:
                assert name.split(".")[0] not in ("torch", "torchvision", "timm", "safetensors"), (
                    f"{path} imports {name}"
                )
                assert other != "private_names", f"{path} imports torch through it"


def used_names(path: Path) -> Iterator[str]:
    """The names of the core that a module uses, such as `files.write_file`: those that it imports,
    and of a module that it imports the attributes.
    """
    tree = ast.parse(path.read_text())
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}."):
            for alias in node.names:
                name = f"{node.module}.{alias.name}".removeprefix(f"{PACKAGE}.")
                if (ROOT / PACKAGE / f"{name.replace('.', '/')}.py").exists():
                    modules[alias.asname or alias.name] = name
                elif not name.startswith("extras."):
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id, "extras.")
            if not module.startswith("extras."):
                yield f"{module}.{node.attr}"


def test_extras_use_the_public_names_that_the_docs_list() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, section = page.partition("## What extras use\n")
    rows = re.findall(r"^\| [^|`]+ \| (`.+`) \|$", section.partition("\n## ")[0], re.MULTILINE)
    listed = [name for row in rows for name in re.findall("`(.+?)`", row)]
    extras = [path for path in MODULES if (ROOT / PACKAGE / "extras") in path.parents]
    assert len(listed) == len(set(listed))
    assert set(listed) == {name for path in extras for name in used_names(path)}


def imported_modules() -> dict[str, set[str]]:
    """For each module of the package the modules of the package that it imports."""
    names = {path: dotted_name(path) for path in MODULES if path.is_relative_to(ROOT / PACKAGE)}
    modules = set(names.values())
    graph: dict[str, set[str]] = {}
    for path, own in names.items():
        graph[own] = set()
        for name in imports(path):
            # `name` is a module, or an object in one
            found = name if name in modules else name.rpartition(".")[0]
            if found in modules and found != own:
                graph[own].add(found)
    return graph


def test_shipped_configs_load_without_torch_and_numpy() -> None:
    program = (
        "import sys\nsys.modules.update(torch=None, numpy=None)\n"
        "from imagenet_cls.config.load import load_config\n"
        "for path in sys.argv[1:]: load_config(path, [])"
    )
    configs = [ROOT / "configs" / name for name in ("demo.yaml", "resnet50.yaml")]
    subprocess.run([sys.executable, "-c", program, *configs], cwd=ROOT, check=True, timeout=60)


def dotted_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(imported_modules()).prepare()  # raises CycleError, which shows the circle


def test_no_call_executes_files() -> None:
    found = {path: match for path in MODULES if (match := FORBIDDEN.search(path.read_text()))}
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "from pickle import loads",
        "    import pickle as p",
        "x = torch.load(f)",
        "torch.export.load(f)",
        "eval('1')",
        "yaml.load(f, Loader)",
    ],
)
def test_forbidden_line_is_found(line: str) -> None:
    assert FORBIDDEN.search(f"import os\n{line}\n")
    assert not FORBIDDEN.search(
        "model.eval()\ntorch.load(f, map_location=device, weights_only=True)"
    )
