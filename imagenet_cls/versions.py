"""The versions of this package and of the libraries that weights may depend on."""

import os
import subprocess
from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def library_versions() -> dict[str, str]:
    """Versions by the names of the modules."""
    import numpy
    import PIL
    import safetensors
    import timm
    import torch
    import torchvision

    libraries = (torch, torchvision, timm, safetensors, numpy, PIL)
    versions = {module.__name__: module.__version__ for module in libraries}
    return {"imagenet_cls": __version__, **versions}


def code_version() -> dict[str, Any] | None:
    """The commit of the package's checkout, and whether the package differs from it; None without
    one or git.
    """
    folder = Path(__file__).parent
    # Variables such as GIT_DIR, which git sets for hooks, name another repository. `status` must
    # not write an index.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_OPTIONAL_LOCKS"] = "0"

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=10,
        )
        return done.stdout.decode(errors="replace").strip()

    try:
        # fails for an installed package in another repository
        git("ls-files", "--error-unmatch", "__init__.py")
        return {
            "commit": git("rev-parse", "HEAD"),
            "uncommitted_changes": bool(git("status", "--porcelain", ".")),
        }
    except (OSError, subprocess.SubprocessError):
        return None
