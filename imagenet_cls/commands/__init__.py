"""The commands: arguments, printing and exit codes.

`tools/` and the console script run them by `commands.main.main`.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE

# A spawned rank imports the user's main module, and so this one, before torch, in whose imports a
# KeyboardInterrupt may get lost: the launching process would wait for the rank.
if LAUNCHED_VARIABLE in os.environ:
    from imagenet_cls.parallel.signals import exit_on_signal, handle_interrupts

    handle_interrupts(exit_on_signal)

# Read when torch is imported: its warnings about sockets are a dozen lines each.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# By the names that they are imported by.
LIBRARIES = (
    "torch",
    "torchvision",
    "timm",
    "omegaconf",
    "tensorboard",
    "safetensors",
    "tqdm",
    "matplotlib",
    "jinja2",
    "sklearn",
    "numpy",
    "PIL",
    "yaml",
)
# The tests and benchmarks that use a GPU do without these: its machine may have no network to
# install them.
_FOR_REPORTS = ("tensorboard", "matplotlib", "sklearn")


def check_libraries() -> None:
    """Raise ImportError on Windows, and where libraries of setup.cfg are not installed."""
    if sys.platform == "win32":
        raise ImportError(
            "imagenet-cls does not run on Windows.\nUse WSL (Windows Subsystem for Linux)."
        )
    unused = _FOR_REPORTS if "IMAGENET_CLS_NO_REPORTS" in os.environ else ()
    needed = [name for name in LIBRARIES if name not in (*sys.modules, *unused)]
    if missing := [name for name in needed if find_spec(name) is None]:
        remedy = "Install imagenet-cls with pip again, without --no-deps."
        if (Path(__file__).parents[2] / "scripts" / "setup.sh").is_file():
            remedy = (
                "Run `bash scripts/setup.sh`, which makes .venv, and then "
                "`source .venv/bin/activate`."
            )
        raise ImportError(f"{', '.join(missing)}: not installed for {sys.executable}.\n{remedy}")


def check_environment() -> None:
    """On the command line: print an error and end this process if the working directory no longer
    exists, or as `check_libraries`.
    """
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        # Here, because the import of numpy fails in such a folder on Python 3.13.
        print("The working directory no longer exists.\nChange to another folder.", file=sys.stderr)
        sys.exit(5)
    try:
        check_libraries()
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(5 if sys.platform == "win32" else 2)
