"""What all tests share: few threads, which marked tests run, and no quiet skips in CI.

Imports no torch: the tests of `config` measure how fast the program starts without it.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Where `helpers`, the tests' own network, is found by the name that a config gives it.
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from forked_ranks import RankServer  # noqa: E402

# One thread for each test and the processes that it starts: threads that compete for few cores are slow, and their
# number changes the bits of sums. torch takes MKL's number, too. Set before the import of torch.
os.environ["MKL_NUM_THREADS"] = os.environ.setdefault("OMP_NUM_THREADS", "1")

# A script's `&` leaves Ctrl-C ignored to all that it starts, and what is tested respects that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def in_ci() -> bool:
    """Whether a tool that is missing is a defect of the machine: `.ci/run` sets CI=true, as most services do."""
    return os.environ.get("CI", "").lower() in ("1", "true")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect nightly tests unless `-m` names them, and skip `gpu` tests where there is no CUDA device."""
    if "nightly" not in config.option.markexpr:
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """In CI, turn every skip but that of a `gpu` test into a failure: there, nothing may go untested unnoticed."""
    report = yield
    if in_ci() and report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which counts as a failure where CI is set: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """The same for a whole module that skips itself, such as by `pytest.importorskip`."""
    report = yield
    if in_ci() and report.skipped:
        report.outcome = "failed"
        report.longrepr = (
            f"{collector.nodeid} was skipped, which counts as a failure where CI is set: {report.longrepr}"
        )
    return report


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the handwritten digits, written once for all tests."""
    from imagenet_cls.data.digits import write_digits

    root = tmp_path_factory.mktemp("data") / "digits"
    write_digits(root, "train")
    return root


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    """Runs functions or `train.py` on ranks without a launcher: see `forked_ranks.py`."""
    with RankServer() as server:
        yield server


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a real SLURM on this machine, a new one for each module: see `slurm_cluster.py`."""
    import slurm_cluster

    if not slurm_cluster.is_there():
        pytest.skip("needs a SLURM (Debian: slurm-wlm)")
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm") / "cluster") as env:
        yield env
