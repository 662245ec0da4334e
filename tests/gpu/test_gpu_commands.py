"""Each check of tools/check_gpu.py on a GPU."""

from pathlib import Path

import pytest

from imagenet_cls.extras.machine.check_gpu import CHECKS, Check, describe_machine, run_check

pytestmark = pytest.mark.gpu


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_on_a_gpu(name: str, tmp_path: Path) -> None:
    gpus: list[str] = []
    for check in (Check(describe_machine), CHECKS[name]):
        outcome, line = run_check(check, gpus, tmp_path / "log.txt")
        assert outcome in ("pass", "skipped"), line
