"""The package's front: every name is there, and none of them is paid for by the tool that needs no torch."""

import subprocess
import sys

import imagenet_cls.data


def test_every_name_is_there() -> None:
    for name in imagenet_cls.data.__all__:
        assert getattr(imagenet_cls.data, name).__name__ == name


def test_preparing_imports_no_torch() -> None:
    code = "import sys, imagenet_cls.commands.prepare_imagenet; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
