"""Small networks for tests, and runs on real digits, in this process or in others.

`helpers:plain` has neither BatchNorm nor dropout, so losses do not depend on how a batch is split;
`noisy` has both.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
TRAIN = str(REPOSITORY / "tools" / "train.py")
DIST_TRAIN = str(REPOSITORY / "scripts" / "dist_train.sh")
DEMO = str(REPOSITORY / "configs" / "demo.yaml")


def plain(num_classes: int, width: int = 16) -> Any:
    """Convolutions and ReLU only, for images of 16 px."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, num_classes),
    )


def mean_target(num_classes: int) -> Any:
    """A metric: the mean of the targets."""
    import torch
    from torch import nn

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sums", torch.zeros(2))

        def update(self, logits: Any, targets: Any) -> None:
            self.sums[0] += targets.sum()
            self.sums[1] += len(targets)

        def compute(self) -> Any:
            return self.sums[0] / self.sums[1]

        def reset(self) -> None:
            self.sums.zero_()

    return Mean()


def with_image_sum(num_classes: int) -> Any:
    """`plain` with a buffer that each forward pass in training changes: the sum of the image
    means.
    """
    import torch
    from torch import nn

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, images: Any) -> Any:
            if self.training:
                self.seen += images.detach().mean()
            return images

    return nn.Sequential(Mean(), plain(num_classes))


def noisy(
    num_classes: int,
    width: int = 16,
    pause_sec: float = 0.0,
    pause_after: int = 0,
    pause_until: str = "",
    pause_rank: int | None = None,
    pause_marker: str = "",
    dropout: float = 0.2,
) -> Any:
    """With BatchNorm and dropout: state in buffers, random draws in every step.

    pause_sec: sleep in each forward pass, so that tests can kill the run there. pause_after: passes
    without it.
    pause_until: a file; once it exists there are no more pauses. pause_rank: the only rank that
    pauses; None: all.
    pause_marker: a file that is written before a pause.
    """
    from torch import nn
    from torch.nn import functional

    class Pause(nn.Module):
        passed = 0

        def forward(self, images: Any) -> Any:
            if self.training:
                pauses = self.passed >= pause_after and not (
                    pause_until and Path(pause_until).exists()
                )
                pauses = pauses and (pause_rank is None or os.environ["RANK"] == str(pause_rank))
                if pauses and pause_marker:
                    Path(pause_marker).touch()
                time.sleep(pause_sec if pauses else 0.0)
                self.passed += 1
            return images

    class AveragePool2x2(nn.Module):
        """`nn.AdaptiveAvgPool2d(2)`, whose backward pass has no deterministic kernel for CUDA."""

        def forward(self, images: Any) -> Any:
            sizes = images.shape[-2:]
            return functional.avg_pool2d(
                images, [(size + 1) // 2 for size in sizes], [size // 2 for size in sizes]
            )

    return nn.Sequential(
        Pause(),
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        AveragePool2x2(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * width, num_classes),
    )


# By training step: what `eventful` calls with the network, in its forward pass.
EVENTS: dict[int, Callable[[Any], object]] = {}


def eventful(num_classes: int) -> Any:
    """`noisy`, with an event before the forward pass of each training step that `EVENTS` has."""
    from torch import nn

    class Events(nn.Module):
        step = 0  # of this process

        def forward(self, images: Any) -> Any:
            self.step += self.training
            if self.training and self.step in EVENTS:
                EVENTS[self.step](network)
            return images

    network = nn.Sequential(Events(), *noisy(num_classes))
    return network


def arguments(root: Any, work_dir: Any, model: Any = "plain", **changes: Any) -> list[str]:
    """Arguments of train.py: the demo at 16 px, 10 steps per epoch. A double underscore in a name
    is a dot.
    """
    settings: dict[str, Any] = {
        "model.name": f"helpers:{model}",
        "data.root": root,
        "data.num_workers": 0,
        "augment.size_px": 16,
        "eval.crop_px": 16,
        "optimizer.lr": 0.03,
        "train.epochs": 2,
        "train.global_batch_size": 128,
        "log.every_steps": 1,
        "log.tensorboard": "false",
        "log.plots": "false",  # slow
        "log.report": "false",
        "ema.decay": "null",
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    return [
        DEMO,
        *(f"{name}={value}" for name, value in settings.items()),
        "--work-dir",
        str(work_dir),
    ]


def assert_resumes(root: Any, folder: Path, stop_at: int, *args: Any, **changes: Any) -> None:
    """Runs of `arguments(root, ...)`: one that is stopped after a step and resumed has the losses
    and the bits of the one in `folder / "whole"`, which is not stopped.
    """
    whole, parts = folder / "whole", folder / "parts"
    train_here(arguments(root, whole, *args, **changes))
    words = arguments(root, parts, *args, **changes)
    train_here([*words, f"train.max_steps={stop_at}"])
    train_here([*words, "--resume"])
    assert losses(parts) == losses(whole)
    assert saved_bytes(parts) == saved_bytes(whole)


# Arguments of a run on composed digits, with several labels for an image.
MULTILABEL = (
    "data.name=imagenet_cls.data.builtin:ComposedDigits",
    "data.labels=multi",
    "data.val=val",
    "data.val_fraction=null",
    "loss.name=bce",
    "checkpoint.best=map",
)


def label_precision(num_classes: int) -> Any:
    """A metric of torchmetrics whose arguments have other names. It gathers all outputs in lists.

    Its scores are between 0 and 1 and in the order of the logits. The sigmoid of torchmetrics in
    float32 makes some of them equal, which ones depends on the processor.
    """
    from torchmetrics.classification import MultilabelAveragePrecision

    class Precision(MultilabelAveragePrecision):
        def update(self, preds: Any, target: Any) -> None:
            super().update(preds.double() / 1000 + 0.5, target)

    return Precision(num_labels=num_classes)


def has_clear_class(logits: Any) -> Any:
    """For each row whether its highest output stays the highest under another rounding."""
    first, second = logits.topk(2).values.unbind(1)
    return first - second > 1e-4


def runs_on_gpus(markers: str, paths: Sequence[str | Path] = ()) -> bool:
    """Whether pytest's `-m MARKERS` selects tests that need a GPU, or all `paths` are tests/gpu."""
    folder = REPOSITORY / "tests" / "gpu"
    in_folder = [Path(path).resolve().is_relative_to(folder) for path in paths]
    return "not gpu" not in markers and ("gpu" in markers or (in_folder != [] and all(in_folder)))


def python_path(*folders: Path) -> str:
    """A PYTHONPATH of these folders, then those of this process."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment(**more: str) -> dict[str, str]:
    """For processes of tests: one thread, `helpers` on the path, no variables of a launcher around
    the tests. PYTHONPATH of the tests' own process stays: packages may lie there.
    """
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in foreign}
    env |= {
        "PYTHONPATH": python_path(REPOSITORY / "tests"),
        "OMP_NUM_THREADS": "1",
        "PYTHON": sys.executable,
    }
    return env | more


def train_here(words: list[str]) -> None:
    """Run train.py on one rank, in this process. Raises what the run raises."""
    from imagenet_cls.commands.train import train_command

    assert train_command(words) == 0


def write_files(folder: Path, texts: Mapping[str, object]) -> None:
    """Write text files. texts: by path below `folder`."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(str(text))


def datasets_in(root: Path, parts: Sequence[str] = ("train", "val"), **settings: Any) -> Any:
    """The datasets of a config whose `data` section has this root and these settings."""
    from imagenet_cls.config.schema import DataConfig
    from imagenet_cls.data.datasets import open_datasets

    return open_datasets(DataConfig(root=str(root), **settings), parts)


def digits_as_rows(digits: Path) -> Any:
    """The files of the digits as a `datasets.Dataset`, in the order of the class folders."""
    from datasets import ClassLabel, Dataset, Features, Image

    files = sorted((digits / "train").glob("*/*"))
    rows = {
        "image": [{"bytes": file.read_bytes(), "path": file.name} for file in files],
        "label": [int(file.parent.name) for file in files],
    }
    classes = ClassLabel(names=[str(digit) for digit in range(10)])
    return Dataset.from_dict(rows, features=Features({"image": Image(), "label": classes}))


def single_rank() -> Any:
    """The `RankContext` of a run on one rank, on a CPU."""
    import torch

    from imagenet_cls.parallel.environment import RankInfo
    from imagenet_cls.parallel.process_group import RankContext

    return RankContext(RankInfo(), torch.device("cpu"))


def call(command: Callable[[list[str]], int], *arguments: Any) -> tuple[int, str, str]:
    """Run a command in this process. Returns exit code, stdout and stderr.

    Asserts that an error has at most three lines and no traceback.
    """
    from imagenet_cls.commands.cli import main

    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", newline="", write_through=True) for _ in range(2)
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command, [str(argument) for argument in arguments])
        except SystemExit:  # of --help
            code = 0
    printed, errors = (stream.buffer.getvalue().decode() for stream in (out, err))
    assert code == 0 or (0 < len(errors.splitlines()) <= 3 and "Traceback" not in errors), errors
    return code, printed, errors


def succeeds(command: Callable[[list[str]], int], *arguments: Any) -> str:
    """What a command prints to stdout; asserts that it ends with 0 and without a message."""
    code, out, err = call(command, *arguments)
    assert (code, err) == (0, "")
    return out


def fails(code: int, command: Callable[[list[str]], int], *arguments: Any) -> str:
    """The error of a command; asserts that it ends with this exit code."""
    found, _, err = call(command, *arguments)
    assert found == code, err
    return err


def run(
    words: Sequence[Any], timeout_sec: Any = 240, cwd: Any = REPOSITORY, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new session and kill the session at its end.

    Output goes to files: a surviving child that holds a pipe would block past any timeout.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with subprocess.Popen(
            words,
            env=environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=cwd,
            start_new_session=True,
        ) as started:
            try:
                code = started.wait(timeout_sec)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def records(work_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a kind in metrics.jsonl, in order: `train`, `eval` or `event`."""
    lines = (work_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def losses(work_dir: Path) -> list[float]:
    """The loss of every step, in order; asserts that each step is recorded exactly once."""
    steps = records(work_dir, "train")
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    return [record["loss"] for record in steps]


def before_classes(out: str) -> list[str]:
    """The lines that test.py prints before its table of the classes."""
    return out.partition("class (")[0].splitlines()


def evaluations(work_dir: Path) -> list[dict[str, Any]]:
    """The records of all evaluations, in order: one for each kind of weights."""
    return records(work_dir, "eval")


def newest(work_dir: Path) -> Path:
    """The folder of the checkpoint with the highest step."""
    return max((work_dir / "checkpoints").glob("step-*"))


def state_of(work_dir: Path) -> dict[str, Any]:
    """`state.json` of the newest checkpoint."""
    return json.loads((newest(work_dir) / "state.json").read_text())


def edit_state(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change `state.json` of a checkpoint, and write the digests that belong to it."""
    from imagenet_cls.checkpoint.format import write_manifest

    state = json.loads((checkpoint / "state.json").read_text())
    edit(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)


def altered(checkpoint: Path, copy: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a checkpoint with a changed `state.json`, and the digests that belong to it."""
    shutil.copytree(checkpoint, copy)
    edit_state(copy, edit)
    return copy


def saved_bytes(work_dir: Path) -> dict[str, bytes]:
    """Weights, EMA and optimizer state of the newest checkpoint: equal after the same steps,
    evaluated or not.
    """
    return {path.name: path.read_bytes() for path in newest(work_dir).glob("*.safetensors")}


def state_digest(work_dir: Path) -> str:
    """SHA-256 over everything that a run computed: weights, buffers, EMA, optimizer, scaler and
    progress.
    """
    folder = newest(work_dir)
    digest = hashlib.sha256()
    for name in [*sorted(path.name for path in folder.glob("*.safetensors")), "optimizer.json"]:
        digest.update(name.encode() + (folder / name).read_bytes())
    state = state_of(work_dir)
    digest.update(json.dumps([state["progress"], state["scaler"]], sort_keys=True).encode())
    return digest.hexdigest()


# For each process of pytest-xdist other ports, also beside another run of the tests, and below
# those that systems give to sockets without a chosen port (Linux: from 32768): until the test uses
# a port of those, another test's process may get it.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.count(20_000 + 1_000 * _WORKER + os.getpid() % 800)


def free_port() -> str:
    """A port that nothing uses."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("no port is free")


def pids_by_rank(work_dir: Path) -> dict[int, int]:
    """Process ids of the latest start, by rank, from the logs."""
    found = {}
    for log in (work_dir / "logs").glob("rank*.log"):
        matches = re.findall(r"rank (\d+) of \d+ on .*, process (\d+)", log.read_text())
        if matches:
            found[int(matches[-1][0])] = int(matches[-1][1])
    return found


def peak_kib() -> int:
    """The peak memory of this process, which never falls."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def wait_for(condition: Callable[[], bool], what: str, timeout_sec: float = 400) -> None:
    end = time.monotonic() + timeout_sec
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_sec} s for {what}"
        time.sleep(0.02)


def steps_done(work_dir: Path) -> int:
    """Number of steps that a running run has recorded."""
    metrics = work_dir / "metrics.jsonl"
    return metrics.read_text().count('"kind": "train"') if metrics.exists() else 0


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def read_weights(path: Path, averaged: bool = True) -> Any:
    """The EMA weights in a file, or with averaged=False the raw ones, or else its only ones, and
    their description.
    """
    from imagenet_cls.engine.stored_weights import open_weights

    weights = open_weights(path)
    found = weights.by_kind.get("ema" if averaged else "raw")
    return found or next(iter(weights.by_kind.values())), weights.origin
