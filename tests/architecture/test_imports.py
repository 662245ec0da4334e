"""Imports go one way, `config` never imports torch, and no call executes what a file says."""

from pathlib import Path

import pytest
from import_rules import PACKAGE, forbidden_calls, modules, torch_in_config, upward_imports

ROOT = Path(__file__).resolve().parents[2]


def test_imports_go_one_way():
    assert len(modules(ROOT)) > 20
    assert upward_imports(ROOT) == []


def test_config_never_imports_torch():
    assert torch_in_config(ROOT) == []


def test_no_call_executes_files():
    assert forbidden_calls(ROOT) == []


@pytest.fixture
def small_package(tmp_path):
    """A small package that breaks no rule; `plant(path, code)` appends to one of its files."""
    good = {
        f"{PACKAGE}/__init__.py": "__version__ = '0'",
        f"{PACKAGE}/errors.py": "",
        f"{PACKAGE}/lookup.py": "from imagenet_cls.errors import Problem",
        f"{PACKAGE}/seeding.py": "import torch",
        f"{PACKAGE}/config/__init__.py": "",
        f"{PACKAGE}/config/load.py": "from .. import lookup\nfrom .schema import Config",
        f"{PACKAGE}/config/schema.py": "",
        f"{PACKAGE}/parallel/__init__.py": "",
        f"{PACKAGE}/data/__init__.py": "",
        f"{PACKAGE}/data/loader.py": "from imagenet_cls import seeding\nfrom imagenet_cls.config import schema",
        f"{PACKAGE}/report/__init__.py": "",
        f"{PACKAGE}/engine/__init__.py": "import imagenet_cls.data\nmodel.eval()\ntorch.load(f, weights_only=True)",
        f"{PACKAGE}/commands/__init__.py": "",
        f"{PACKAGE}/commands/train.py": "import imagenet_cls\nfrom imagenet_cls import __version__, engine",
        "tools/train.py": "from imagenet_cls.commands.train import main",
    }
    for name, code in good.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code + "\n")

    def plant(name: str, code: str) -> Path:
        with (tmp_path / name).open("a") as file:
            file.write(code + "\n")
        return tmp_path

    return plant


def test_clean_package_has_no_findings(small_package):
    root = small_package("tools/train.py", "")
    assert upward_imports(root) == torch_in_config(root) == forbidden_calls(root) == []


@pytest.mark.parametrize(
    ("name", "code", "found"),
    [
        (f"{PACKAGE}/data/loader.py", "from imagenet_cls.engine import x", "data imports engine"),
        (f"{PACKAGE}/data/loader.py", "from imagenet_cls import engine", "data imports engine"),
        (f"{PACKAGE}/data/loader.py", "def f():\n    import imagenet_cls.report", "data imports report"),
        (f"{PACKAGE}/data/loader.py", "from ..report import x", "data imports report"),
        (f"{PACKAGE}/data/loader.py", "importlib.import_module('imagenet_cls.engine')", "data imports engine"),
        (
            f"{PACKAGE}/data/loader.py",
            "if TYPE_CHECKING:\n    from imagenet_cls.commands.train import x",
            "data imports commands",
        ),
        (f"{PACKAGE}/parallel/__init__.py", "from imagenet_cls.config import schema", "parallel imports config"),
        (f"{PACKAGE}/errors.py", "from imagenet_cls import lookup", "errors imports lookup"),
        (f"{PACKAGE}/commands/train.py", "import tools.train", "commands imports tools"),
        (f"{PACKAGE}/commands/train.py", "import imagenet_cls.helpers", "commands imports helpers"),
    ],
)
def test_upward_import_is_found(small_package, name, code, found):
    (line,) = upward_imports(small_package(name, code))
    assert line.startswith(name)
    assert line.endswith(found)


@pytest.mark.parametrize(
    ("name", "code", "found"),
    [
        (f"{PACKAGE}/config/schema.py", "import torch", "config/schema.py:2: torch"),
        (f"{PACKAGE}/config/schema.py", "def f():\n    from torch import nn", "config/schema.py:3: torch"),
        (f"{PACKAGE}/lookup.py", "import timm.models", "lookup.py:2: timm.models"),
        (f"{PACKAGE}/__init__.py", "import torchvision", "__init__.py:2: torchvision"),
        (f"{PACKAGE}/config/load.py", "from imagenet_cls.seeding import x", "seeding.py:1: torch"),
    ],
)
def test_torch_under_config_is_found(small_package, name, code, found):
    (line,) = torch_in_config(small_package(name, code))
    assert line.endswith(found)


@pytest.mark.parametrize(
    "code",
    [
        "pickle.load(f)",
        "x = pickle.Unpickler(f)",
        "from pickle import loads",
        "import pickle as p",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "load(f, weights_only=False)",
        "eval('1')",
        "exec(code)",
        "yaml.load(f, Loader=yaml.Loader)",
        "from yaml import load",
        "subprocess.run(x, shell=True)",
        "os.system('x')",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_forbidden_call_is_found(small_package, code):
    assert len(forbidden_calls(small_package(f"{PACKAGE}/commands/train.py", code))) == 1
