"""Shared by all tests: one thread, no GPU, which marked tests run, skips in CI, fixtures. Does not
import torch.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from PIL import Image

# For `helpers:plain` and others, which configs of tests name.
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import helpers  # noqa: E402
from forked_ranks import RankServer  # noqa: E402

# One thread for each test and the processes that it starts: threads that compete for few cores are
# slow, and their number changes the bits of sums. torch takes MKL's number, too. Set before the
# import of torch.
os.environ["MKL_NUM_THREADS"] = os.environ.setdefault("OMP_NUM_THREADS", "1")

# All that is imported until the tests begin stays. To look for garbage in it takes seconds in each
# process of pytest.
gc.disable()

# No test downloads a model. Read when huggingface_hub is imported, here and in started processes.
os.environ["HF_HUB_OFFLINE"] = "1"

# A background job of a script ignores Ctrl-C, one of nohup SIGHUP, and so would the runs that tests
# start.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The folders with the longest tests: they run first, so that no worker ends long after the others.
SLOW_FOLDERS = ("quick", "faults", "distributed", "engine")


os.environ["IMAGENET_CLS_CALLER"] = "command"  # messages have options, also in this process


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that do not need one: `device=auto` would choose them, and most tests
    assume a CPU.
    """
    folder = config.invocation_params.dir
    if helpers.runs_on_gpus(config.option.markexpr, [folder / path for path in config.args]):
        # cuBLAS reads it once in each process. Runs with train.deterministic=true need it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Runs that these tests start write no reports, and need no libraries for them.
        os.environ["IMAGENET_CLS_NO_REPORTS"] = "1"
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Collect garbage again, except in what is there before the tests."""
    gc.freeze()
    gc.enable()


def in_ci() -> bool:
    """Whether a missing tool is a failure: `.ci/run` and most CI services set CI=true."""
    return os.environ.get("CI", "").lower() in ("1", "true")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run slow folders first, deselect nightly tests unless `-m` names them, skip `gpu` tests
    without a GPU.
    """
    items.sort(key=lambda item: item.path.relative_to(HERE).parts[0] not in SLOW_FOLDERS)
    if "nightly" not in config.option.markexpr:
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device and -m gpu"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """In CI, a module that is skipped as a whole is an error."""
    report = yield
    if in_ci() and report.skipped:
        report.outcome = "failed"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """In CI, a skipped test fails, except `gpu` tests."""
    report = yield
    if (
        in_ci()
        and report.skipped
        and not hasattr(report, "wasxfail")
        and not item.get_closest_marker("gpu")
    ):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} was skipped, which counts as a failure where CI is set: "
            f"{report.longrepr}"
        )
    return report


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the handwritten digits, written once per process."""
    from imagenet_cls.data.builtin import write_digits

    root = tmp_path_factory.mktemp("data") / "digits"
    write_digits(root, "train")
    return root


@pytest.fixture(scope="session")
def train_on_digits(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains on the digits with arguments as of `helpers.arguments`, after the first two. Returns
    the run folder, which is new.
    """

    def train(*args: Any, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("digits") / "run"
        helpers.train_here(helpers.arguments(digits, folder, *args, **changes))
        return folder

    return train


@pytest.fixture(scope="session")
def photographs() -> list["Image.Image"]:
    """scikit-learn's two photographs, 640 x 427."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(image) for image in load_sample_images().images]


@pytest.fixture(scope="session")
def image_folder(
    tmp_path_factory: pytest.TempPathFactory, photographs: list["Image.Image"]
) -> Path:
    """train: 3 classes with 8, 12 and 20 JPEGs of different sizes; val: the same classes with 3
    each.
    """
    import numpy as np

    root = tmp_path_factory.mktemp("images")
    draws = np.random.default_rng(0)
    for part, counts in (("train", (8, 12, 20)), ("val", (3, 3, 3))):
        for class_name, count in zip(("cat", "dog", "eel"), counts, strict=True):
            folder = root / part / class_name
            folder.mkdir(parents=True)
            for i in range(count):
                left, top = (int(n) for n in draws.integers(0, 300, 2))
                width, height = (int(n) for n in draws.integers(40, 120, 2))
                crop = photographs[i % 2].crop((left, top, left + width, top + height))
                crop.save(folder / f"{i:03d}.JPEG", quality=90)
    return root


@pytest.fixture
def call() -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: `helpers.call`."""
    return helpers.call


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of a file system of one megabyte; a checkpoint of `helpers:noisy` takes about a
    tenth.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=1000000", "tmpfs", folder]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(
            f"needs a small file system (root, mount): {getattr(error, 'stderr', '') or error}"
        )
    yield folder
    for _ in range(2):  # a test may have mounted it twice
        subprocess.run(["umount", "-l", folder], capture_output=True)


@pytest.fixture(scope="session")
def rank_server() -> RankServer:
    """Runs functions or `train.py` on ranks without a launcher: see `forked_ranks.py`."""
    return RankServer()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a real SLURM cluster on this machine, one for each module: see
    `slurm_cluster.py`.
    """
    import slurm_cluster

    programs = ("slurmctld", "slurmd", "srun")
    if not all(shutil.which(name, path=slurm_cluster.SEARCHED) for name in programs):
        pytest.skip("needs a SLURM (Debian: slurm-wlm)")
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm") / "cluster") as env:
        yield env
