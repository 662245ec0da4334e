"""Each check of tools/check_gpu.py on a GPU."""

import threading
from pathlib import Path

import pytest

from imagenet_cls.extras.machine.check_gpu import CHECKS, Check, describe_machine, run_check

pytestmark = pytest.mark.gpu


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_on_a_gpu(name: str, tmp_path: Path) -> None:
    gpus: list[str] = []
    for check in (Check(describe_machine), CHECKS[name]):
        result = run_check(name, check, gpus, threading.Event(), tmp_path / "log.txt")
        assert result.result in ("pass", "skipped"), result.line
