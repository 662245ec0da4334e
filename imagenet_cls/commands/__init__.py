"""The commands: arguments, printing and exit codes. `tools/` and the console scripts call their `main`.

Importing this package checks first that the libraries of setup.cfg are installed.
"""

import os
import sys
from importlib.util import find_spec

# Read when torch is imported: its warnings about sockets are a dozen lines each.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# By the names that they are imported by.
LIBRARIES = (
    "torch", "torchvision", "timm", "omegaconf", "tensorboard", "safetensors", "rich", "matplotlib", "sklearn", "numpy",
    "PIL", "yaml",
)  # fmt: skip

if missing := [name for name in LIBRARIES if name not in sys.modules and find_spec(name) is None]:
    print(
        f"{', '.join(missing)}: not installed for {sys.executable}.\n"
        "Run `bash scripts/setup.sh`, which makes .venv, and then `source .venv/bin/activate`.",
        file=sys.stderr,
    )
    sys.exit(2)
