"""`tools/check_gpu.py`: check training on the GPUs of this machine by short runs.

Each check is a function that starts `tools/train.py` or another command and compares what it wrote.
This process does not import torch: the processes that do may crash or hang.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from imagenet_cls import __version__
from imagenet_cls.commands import cli
from imagenet_cls.commands.child import Child
from imagenet_cls.commands.distributed import check_is_no_rank
from imagenet_cls.errors import ResourceError
from imagenet_cls.files import explain_write_errors, write_output
from imagenet_cls.parallel.signals import handle_stop_signals
from imagenet_cls.report.jsonl import read_metrics
from imagenet_cls.text import shorten
from imagenet_cls.versions import code_version, library_versions

# A ResNet without ReLU and max pooling, which would turn rounding errors of 1e-7 into 1e-2 in four
# steps.
SMALL_CONFIG = """\
model:
  name: resnet10t
  kwargs: {act_layer: silu, replace_stem_pool: true, channels: [32, 32, 64, 64]}
data:
  name: synthetic
  kwargs: {train_images: 20000, val_images: 32, num_classes: 10, size_px: 64}
augment:
  size_px: 64
eval:
  crop_px: 64
  batch_size: 32
optimizer:
  name: sgd
  lr: 0.02
train:
  epochs: 1
  max_steps: 10
  global_batch_size: 32
  precision: fp32
log:
  every_steps: 5
  tensorboard: false
  plots: false
  report: false
"""
# of losses and gradient norms: a lost or repeated micro-batch changes the norm by more
TOLERANCE = 0.02
LIMIT_SEC = 600  # of a check
REPRODUCIBLE_STEPS = 100  # enough to kill a run before it ends
_stop_signals: list[int] = []  # that this process has received


class CheckFailed(Exception):
    """A check that failed, with one line that says why."""


class CheckSkipped(Exception):
    """A check that can't run here, with one line that says why."""


@dataclass
class Task:
    """A check in progress, which starts processes.

    folder: for the files of this check; it is removed at the end. log: receives the output of the
    processes. gpus: the names of the GPUs, filled by `describe_machine`. end: time limit on the
    clock `time.monotonic`.
    """

    folder: Path
    log: Path
    gpus: list[str]
    end: float

    def run(
        self,
        name: str,
        argv: Sequence[str | Path],
        kill_when: Callable[[], bool] = lambda: False,
        **env: str,
    ) -> str:
        """Run a command in a process; return what it printed. Raises CheckFailed if it fails or
        takes too long.

        At the end its process group is killed. Ranks that it started, which have groups of their
        own, end with their launching process.

        kill_when: asked again and again; once it is true, the process is killed by SIGKILL, which
        is no failure.
        """
        # not of an earlier run: compiling is part of the checks
        cache = str(self.folder / "compiled")
        caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        with self.log.open("a+", errors="replace") as log:
            settings = [f"{name}={value}" for name, value in env.items()]
            print("$", *settings, name, *argv, file=log, flush=True)
            start = log.tell()
            error_file = Path(tempfile.mkdtemp(dir=self.folder)) / "error.json"
            process = Child(
                name,
                argv,
                error_file,
                caches | env,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )
            try:
                while process.poll() is None and not kill_when():
                    if _stop_signals:
                        sys.exit(128 + _stop_signals[0])
                    if time.monotonic() > self.end:
                        raise CheckFailed("a process was killed at the time limit of this check")
                    time.sleep(0.02)
                code = process.poll()  # None if it is to be killed
            finally:
                with suppress(ProcessLookupError):  # all of them have ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(start)
            output = log.read()
        if code:
            raise CheckFailed(str(process.error() or f"exit code {code}: see {self.log}"))
        return output

    def train(
        self,
        name: str,
        *overrides: str | Path,
        **options: Any,
    ) -> Path:
        """Train and return the run folder.

        overrides: may include options of the command. options: arguments of `run`.
        """
        run_folder = self.folder / "runs" / name
        device = f"device={'cuda' if self.gpus else 'cpu'}"
        argv = [self.folder / "small.yaml", device, *overrides, "--work-dir", run_folder]
        self.run("train", argv, **options)
        return run_folder

    def steps(self, *words: str, **options: Any) -> list[dict[str, Any]]:
        """Train; return the records of the steps. The arguments are those of `train`."""
        records = read_metrics(self.train(*words, **options))
        return [record for record in records if record["kind"] == "train"]


@dataclass(frozen=True)
class Check:
    """A check.

    run: returns the line of the table; raises CheckFailed or CheckSkipped.
    """

    run: Callable[[Task], str]
    min_gpus: int = 0


def check_gpu_command(argv: Sequence[str]) -> int:
    """Run the checks; print and write the table. Returns the exit code."""
    arguments = cli.parse(check_gpu_parser(), argv)
    if arguments.describe:
        print_machine()
        return 0
    check_is_no_rank()
    checks = {name: check for name, check in CHECKS.items() if name in (arguments.only or CHECKS)}
    # No exception: it would be lost where a process is forked, in a callback of logging.
    handle_stop_signals(lambda number, _: _stop_signals.append(number))
    return ResourceError.exit_code if "fail" in run_checks(checks, arguments.out) else 0


def check_gpu_parser() -> argparse.ArgumentParser:
    parser = cli.build_parser(
        "check-gpu",
        "Check training on the GPUs of this machine by short runs: races, precisions, "
        "torch.compile, DP, DDP, determinism, resume. Needs no data and no network. Without a GPU, "
        "checks what a CPU can run. Exit code 0 if no check fails, else 5.",
        "[--only NAME ...] [--out DIR]",
        f"Checks: {', '.join(CHECKS)}.",
    )
    parser.add_argument(
        "--only", nargs="+", choices=tuple(CHECKS), metavar="NAME", help="run only these checks"
    )
    # How this command starts itself, to import torch in another process.
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--out",
        type=cli.path,
        default=Path("work_dirs/check_gpu"),
        metavar="DIR",
        help="folder for check_gpu.md and check_gpu_logs/, which replace earlier ones "
        "(default: %(default)s)",
    )
    return parser


def run_checks(checks: Mapping[str, Check], out: Path) -> list[str]:
    """Run the check `machine` and these. After each, print its row and write the table so far.

    Returns pass, fail or skipped of each. Raises ResourceError if `out` can't be written, or if
    `machine` fails.
    """
    logs = out / "check_gpu_logs"  # not `logs`, which a run folder has
    with explain_write_errors(out, "Name another folder with --out."):
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
    commit = (code_version() or {}).get("commit", "")[:7]
    title = " ".join(["imagenet-cls", __version__, commit, f"{datetime.now(UTC):%Y-%m-%d}"])
    table = ["", "| check | result | s | |", "|---|---|---|---|"]  # to paste into an issue
    gpus: list[str] = []
    outcomes: list[str] = []
    for name, check in {"machine": Check(describe_machine), **checks}.items():
        begin = time.monotonic()
        outcome, line = run_check(check, gpus, logs / f"{name}.txt")
        outcomes.append(outcome)
        cells = [name, outcome, f"{time.monotonic() - begin:.0f}", line.replace("|", r"\|")]
        table.append(f"| {' | '.join(cells)} |")
        print(table[-1], flush=True)
        rest = len(checks) + 1 - len(outcomes)
        head = title + (f", {rest} more checks to run" if rest else "")
        write_output(out / "check_gpu.md", "\n".join([head, *table, ""]))
        if name == "machine" and outcome == "fail":
            raise ResourceError(f"The GPUs can't be used: {line}", f"See {logs}.")
    counts = [f"{outcomes.count(kind)} {kind}" for kind in ("pass", "fail", "skipped")]
    print(f"{', '.join(counts)}; written to {out / 'check_gpu.md'}")
    return outcomes


def run_check(check: Check, gpus: list[str], log: Path) -> tuple[str, str]:
    """Run a check in a temporary folder. Returns pass, fail or skipped, and the line of the table.
    Any exception is a failure of this check only.
    """
    outcome = "fail"
    try:
        if check.min_gpus > len(gpus):
            raise CheckSkipped(f"GPUs needed: {check.min_gpus}")
        with tempfile.TemporaryDirectory(
            prefix="imagenet-cls-", ignore_cleanup_errors=True
        ) as path:
            folder = Path(path)
            (folder / "small.yaml").write_text(SMALL_CONFIG)
            line = check.run(Task(folder, log, gpus, time.monotonic() + LIMIT_SEC))
        outcome = "pass"
    except CheckSkipped as skipped:
        line = str(skipped)
        outcome = "skipped"
    except CheckFailed as failed:
        line = str(failed)
    except Exception as error:
        line = f"{type(error).__name__}: {error}"
    return outcome, shorten(" ".join(line.split()), 300)


# The checks.


def describe_machine(task: Task) -> str:
    """Versions, driver and GPUs, by a process that imports torch and uses each GPU."""
    output = task.run("check-gpu", ["--describe"])
    found = json.loads(next(line for line in output.splitlines() if line.startswith('{"gpus"')))
    task.gpus += found["gpus"]
    drivers: list[str] = []
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        drivers = done.stdout.splitlines()
    if drivers and not task.gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        raise CheckFailed(f"nvidia-smi lists {len(drivers)} GPUs, and torch sees none")
    versions = found["versions"] | {"driver": ", ".join(set(drivers))}
    listing = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    return f"{', '.join(task.gpus) or 'no GPU'}; {os.cpu_count()} CPUs; {listing}"


def print_machine() -> None:
    """Print versions and the GPUs as JSON, after a computation on each GPU."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        torch.ones(1, device=f"cuda:{index}").add_(1).item()
        gpu = torch.cuda.get_device_properties(index)
        memory = round(gpu.total_memory / 2**30)
        gpus.append(f"{gpu.name} ({memory} GiB, sm_{gpu.major}{gpu.minor})")
    versions = {
        "python": platform.python_version(),
        **library_versions(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    if gpus and torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    print(json.dumps({"gpus": gpus, "versions": versions}))


def small_images(task: Task) -> list[str]:
    """Write 640 JPEG files of 80 x 64 pixels, and 80 for validation; return the overrides for
    them.
    """
    from PIL import Image

    folder = task.folder / "images"
    gradient = Image.linear_gradient("L")
    for part, count in (("train", 640), ("val", 80)):
        for number in range(count):
            path = folder / part / str(number % 10) / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            gradient.rotate(number).resize((80, 64)).convert("RGB").save(path)
    options = ["data.num_workers=2", "train.epochs=100"]
    return ["data.name=folder", "data.kwargs={}", f"data.root={folder}", *options]


def sanitizer(task: Task) -> str:
    """Fail if TORCH_CUDA_SANITIZER reports a data race in 10 steps.

    Without workers: the sanitizer asks CUDA for the stream of each operator, which a forked process
    can't do.
    """
    overrides = [
        "data.num_workers=0",
        "train.micro_batch_size=16",
        "ema.decay=0.9",
        "mix.mixup_alpha=0.2",
        "mix.cutmix_alpha=1.0",
        "augment.erasing.prob=0.5",
    ]
    task.train("sanitizer", *small_images(task), *overrides, TORCH_CUDA_SANITIZER="1")
    return "10 steps of JPEG files, mixing, erasing, accumulation and EMA without a race"


def precision(task: Task, name: str) -> str:
    """Fail unless losses and gradient norms of 10 steps are close to those in fp32 without TF32; in
    fp16 only losses.
    """
    exact = task.steps("eager-1", NVIDIA_TF32_OVERRIDE="0")
    if name == "fp32":
        return f"10 steps, loss {exact[0]['loss']:.4f} to {exact[-1]['loss']:.4f}"
    steps = task.steps(name, f"train.precision={name}")
    if name == "bf16":
        return compare_steps(steps, exact, 0.1)
    skipped = sum(step.get("skipped", False) for step in steps)  # the loss scale starts too high
    return f"{compare_steps(steps, exact, 0.2, ('loss',))}; {skipped} skipped"


def compiled(task: Task, mode: str) -> str:
    """Fail unless losses and gradient norms of steps with two micro-batches are close to those
    without `train.compile`.
    """
    micro_batch = "train.micro_batch_size=16"
    eager, run = (
        task.steps(name, micro_batch, f"train.compile={name}", NVIDIA_TF32_OVERRIDE="0")
        for name in ("false", mode)
    )
    return compare_steps(run, eager)


def data_parallel(task: Task) -> str:
    """Fail unless losses and gradient norms of DataParallel on two GPUs are close to those of one
    device with two micro-batches, whose forward passes have the same images.
    """
    images = small_images(task)
    one = task.steps("one-device-2", *images, "train.micro_batch_size=16")
    run = task.steps("dp", *images, "parallel.mode=dp", "parallel.device_ids=[0, 1]")
    return compare_steps(run, one)


def ddp(task: Task) -> str:
    """Fail unless losses and gradient norms of DDP with SyncBN on two ranks are close to those of
    one device. The ranks use nccl on GPUs, and gloo on a CPU.
    """
    if len(task.gpus) == 1:
        raise CheckSkipped("needs 2 GPUs")
    device = [] if task.gpus else ["device=cpu"]
    task.run("check-dist", ["--gpus", "2", *device])
    images = small_images(task)
    one = task.steps("one-device-1", *images)
    run = task.steps("ddp", *images, "parallel.sync_bn=true", "--gpus", "2")
    return compare_steps(run, one)


def reproducible_run(task: Task) -> list[str]:
    """The overrides of a run whose bits are compared."""
    return [
        *small_images(task),
        "train.deterministic=true",
        "train.precision=auto",
        "ema.decay=0.9",
        "checkpoint.every_steps=10",
        f"train.max_steps={REPRODUCIBLE_STEPS}",
        "eval.every_epochs=100",
    ]


def deterministic(task: Task) -> str:
    """Fail unless two deterministic runs are bitwise identical."""
    settings = reproducible_run(task)
    first = digest(task.train("undisturbed", *settings))
    second = digest(task.train("again", *settings))
    if first != second:
        raise CheckFailed(
            f"two runs with train.deterministic=true differ: {first[:12]} and {second[:12]}"
        )
    return f"two runs end with {first[:12]}"


def resume(task: Task) -> str:
    """Fail unless a run that is killed and resumed ends in the bits of an undisturbed one."""
    settings = reproducible_run(task)
    expected = digest(task.train("undisturbed", *settings))
    checkpoints = task.folder / "runs" / "killed" / "checkpoints"
    run = task.train("killed", *settings, kill_when=lambda: any(checkpoints.glob("step-*")))
    saved = int(newest_checkpoint(run).name.removeprefix("step-"))
    if saved == REPRODUCIBLE_STEPS:
        raise CheckFailed("the run ended before it could be killed")
    found = digest(task.train("killed", *settings, "--resume"))
    if found != expected:
        raise CheckFailed(
            f"resumed from step {saved}: {found[:12]}, and undisturbed {expected[:12]}"
        )
    return f"killed, resumed from step {saved}, ends with {found[:12]}"


def compare_steps(
    found: Sequence[dict[str, Any]],
    expected: Sequence[dict[str, Any]],
    tolerance: float = TOLERANCE,
    names: Sequence[str] = ("loss", "grad_norm"),
) -> str:
    """The largest relative difference of losses and gradient norms. Raises CheckFailed above the
    tolerance.
    """
    if len(found) != len(expected):
        raise CheckFailed(f"{len(found)} steps in place of {len(expected)}")
    worst = 0.0
    for mine, other in zip(found, expected, strict=True):
        for name in names:
            difference = abs(mine[name] - other[name]) / abs(other[name])
            if not difference <= tolerance:  # also of NaN
                raise CheckFailed(
                    f"step {mine['step']}: {name} {mine[name]:.6g}, expected {other[name]:.6g}"
                )
            worst = max(worst, difference)
    return f"{len(found)} steps: largest relative difference of {' and '.join(names)} {worst:.1e}"


def newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def digest(run: Path) -> str:
    """SHA-256 of weights, EMA and optimizer state of a run's last checkpoint."""
    hashed = sha256()
    for path in sorted(newest_checkpoint(run).glob("*.safetensors")):
        hashed.update(path.name.encode() + path.read_bytes())
    return hashed.hexdigest()


CHECKS = {
    "sanitizer": Check(sanitizer, min_gpus=1),
    "precision-fp32": Check(partial(precision, name="fp32")),
    "precision-bf16": Check(partial(precision, name="bf16")),
    "precision-fp16": Check(partial(precision, name="fp16"), min_gpus=1),
    "compile-default": Check(partial(compiled, mode="default")),
    "compile-reduce-overhead": Check(partial(compiled, mode="reduce-overhead"), min_gpus=1),
    "compile-max-autotune": Check(partial(compiled, mode="max-autotune"), min_gpus=1),
    "compile-max-autotune-no-cudagraphs": Check(
        partial(compiled, mode="max-autotune-no-cudagraphs"), min_gpus=1
    ),
    "deterministic": Check(deterministic),
    "resume": Check(resume),
    "dp": Check(data_parallel, min_gpus=2),
    "ddp": Check(ddp),
}
