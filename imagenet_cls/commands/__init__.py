"""The commands: arguments, printing and exit codes.

`tools/` and the console script (`main`) run them by `cli.main`.

Importing this package checks first that the working directory exists, and that the libraries of
setup.cfg are installed.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

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
    "rich",
    "tqdm",
    "matplotlib",
    "sklearn",
    "numpy",
    "PIL",
    "yaml",
)
# check_gpu and the runs that it starts do without these: a GPU machine may have no network to
# install them.
_FOR_REPORTS = ("tensorboard", "matplotlib", "sklearn")
if Path(sys.argv[0]).stem == "check_gpu" or sys.argv[1:2] == ["check-gpu"]:
    os.environ["IMAGENET_CLS_NO_REPORTS"] = "1"

if sys.platform == "win32":
    print(
        "imagenet-cls does not run on Windows.\nUse WSL (Windows Subsystem for Linux).",
        file=sys.stderr,
    )
    sys.exit(5)

try:
    os.getcwd()  # noqa: PTH109
except FileNotFoundError:
    # Here, because the import of numpy fails in such a folder on Python 3.13.
    print("The working directory no longer exists.\nChange to another folder.", file=sys.stderr)
    sys.exit(5)

unused = _FOR_REPORTS if "IMAGENET_CLS_NO_REPORTS" in os.environ else ()
needed = [name for name in LIBRARIES if name not in (*sys.modules, *unused)]
if missing := [name for name in needed if find_spec(name) is None]:
    clone = Path(__file__).resolve().parents[2] / "scripts" / "setup.sh"
    remedy = "Run `bash scripts/setup.sh`, which makes .venv, and then `source .venv/bin/activate`."
    remedy = (
        remedy if clone.is_file() else ("Install imagenet-cls with pip again, without --no-deps.")
    )
    print(f"{', '.join(missing)}: not installed for {sys.executable}.\n{remedy}", file=sys.stderr)
    sys.exit(2)
