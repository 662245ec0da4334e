"""Train ImageNet classifiers from config files, on any number of devices and machines.

`Predictor`, `load_model` and `read_metrics` are imported when they are used, and torch with them:
see docs/api.md.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from imagenet_cls.versions import __version__

if TYPE_CHECKING:
    from imagenet_cls.inference.predictor import Predictor, load_model
    from imagenet_cls.report.jsonl import read_metrics

__all__ = ["Predictor", "__version__", "load_model", "read_metrics"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if sys.platform == "win32":
        raise ImportError(
            "imagenet_cls does not run on Windows; use WSL (Windows Subsystem for Linux)"
        )
    module = "report.jsonl" if name == "read_metrics" else "inference.predictor"
    return getattr(import_module(f"{__name__}.{module}"), name)
