"""Commands on a GPU: the search for the largest batch, and each check of tools/check_gpu.py."""

import threading
from pathlib import Path

import pytest
from test_finders import search_with_a_limit

from imagenet_cls.extras.machine.check_gpu import CHECKS, Check, describe_machine, run_check

pytestmark = pytest.mark.gpu


def test_search_continues_below_a_size_that_is_out_of_memory_on_a_gpu(digits: Path) -> None:
    search_with_a_limit(digits, "cuda")


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_on_a_gpu(name: str, tmp_path: Path) -> None:
    gpus: list[str] = []
    for check in (Check(describe_machine), CHECKS[name]):
        result = run_check(name, check, gpus, threading.Event(), tmp_path / "log.txt")
        assert result.result in ("pass", "skipped"), result.line
