"""Train ImageNet classifiers from config files, on any number of devices and machines.

`train` and `evaluate` run the commands of the same names, `TrainedRun` reads a run folder,
`Predictor` uses its weights, and `read_metrics` reads its metrics: see docs/api.md. They are
imported when they are used, and torch with them.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from imagenet_cls.versions import __version__

if TYPE_CHECKING:
    from imagenet_cls.commands.python_api import train
    from imagenet_cls.commands.trained_run import TrainedRun, evaluate
    from imagenet_cls.inference.predictor import Predictor
    from imagenet_cls.report.jsonl import read_metrics

# Of tqdm, which timm imports, in a notebook without ipywidgets.
warnings.filterwarnings("ignore", "IProgress not found")

# The module of each public name. This is all of the public API.
_MODULES = {
    "Predictor": "inference.predictor",
    "TrainedRun": "commands.trained_run",
    "evaluate": "commands.trained_run",
    "read_metrics": "report.jsonl",
    "train": "commands.python_api",
}

__all__ = [
    "Predictor",
    "TrainedRun",
    "__version__",
    "evaluate",
    "read_metrics",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError:
        from imagenet_cls.commands import check_libraries

        check_libraries()  # its error names all that are missing, and how to install them
        raise


def __dir__() -> list[str]:
    return __all__
