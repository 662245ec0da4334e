"""The commands: arguments, printing and exit codes. `tools/` and the console scripts call their `main`.

Importing this package checks first that the libraries of setup.cfg are installed.
"""

import sys
from importlib.util import find_spec

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
