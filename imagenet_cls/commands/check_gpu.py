"""`tools/check_gpu.py`: check what this repository does on a GPU by short trainings, and write a table of the results.

Each check starts `tools/train.py` or another command as a process, which is killed at the check's time limit. This
process does not import torch.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from statistics import median
from threading import Event, Lock
from typing import Any

from imagenet_cls import __version__
from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import child_command
from imagenet_cls.engine.run_folder import code_version
from imagenet_cls.errors import ResourceError, UsageError, shorten
from imagenet_cls.files import explain_write_errors, write_output
from imagenet_cls.lookup import did_you_mean
from imagenet_cls.parallel.exit import handle_interrupts
from imagenet_cls.report.jsonl import read_metrics

# A ResNet without ReLU and max pooling, which would turn rounding errors of 1e-7 into 1e-2 in four steps.
CONFIG = """\
model: {name: resnet10t, kwargs: {act_layer: silu, replace_stem_pool: true, channels: [32, 32, 64, 64]}}
data: {name: synthetic, kwargs: {train_images: 20000, val_images: 32, num_classes: 10, size_px: 64}}
augment: {size_px: 64}
eval: {crop_px: 64, batch_size: 32}
optimizer: {name: sgd, lr: 0.02}
train: {epochs: 1, max_steps: 10, global_batch_size: 32, precision: fp32}
log: {every_steps: 5, tensorboard: false, plots: false}
"""
SPEED_CONFIG = """\
model: {name: resnet50}
data: {name: synthetic, kwargs: {train_images: 1281167, val_images: 64, num_classes: 1000, size_px: 224}}
optimizer: {name: sgd, lr: 0.1}
train: {epochs: 1, max_steps: 60, precision: bf16}
log: {every_steps: 10, tensorboard: false, plots: false}
"""
DISTINCT_IMAGES = 64  # the other files are links to these
TOLERANCE = (
    0.02  # of losses and gradient norms: a lost or repeated micro-batch changes the norm by more
)
CPU_SLOWER = 5  # time limits are for a GPU
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ERROR = re.compile(r"[\w.]*(Error|Exception|Errors)\b.*")


class CheckFailed(Exception):
    """A check that failed, with one line that says why."""


class CheckSkipped(Exception):
    """A check that can't run here, with one line that says why."""


@dataclass
class Result:
    """A row of the table. result: pass, fail or skipped. output: the end of a failed process's output."""

    check: str
    result: str
    seconds: float
    line: str
    values: dict[str, Any] = field(default_factory=dict)
    output: str = ""


@dataclass
class Session:
    """What the checks share. folder: for files that are removed at the end. machine: of `describe_machine`."""

    folder: Path
    logs: Path
    quick: bool
    code: dict[str, Any] = field(default_factory=lambda: code_version() or {})
    machine: dict[str, Any] = field(default_factory=dict)
    stopped: Event = field(default_factory=Event)
    reference_lock: Lock = field(default_factory=Lock)

    @property
    def gpus(self) -> int:
        return len(self.machine.get("gpus", ()))


@dataclass
class Task:
    """A running check: starts processes, and kills them at its time limit. end: on the clock `time.monotonic`."""

    name: str
    session: Session
    end: float
    values: dict[str, Any] = field(default_factory=dict)
    output: str = ""

    def run(
        self, words: Sequence[str | Path], kill_if: Callable[[], bool] = lambda: False, **env: str
    ) -> str:
        """Run a process; return what it printed. Raises CheckFailed. kill_if: whether to kill it by SIGKILL now."""
        log = self.session.logs / f"{self.name}.txt"
        environment = {
            name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES
        } | env
        cache = str(self.session.folder / "compiled")  # of no earlier run
        environment |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        with log.open("a") as file:
            print(
                "$",
                *(f"{name}={value}" for name, value in env.items()),
                *words,
                file=file,
                flush=True,
            )
            begin = file.tell()
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
                cwd=self.session.folder, start_new_session=True,
            )  # fmt: skip
            killed = in_time = True
            try:
                while process.poll() is None and in_time and not (killed := kill_if()):
                    in_time = time.monotonic() < self.end and not self.session.stopped.is_set()
                    time.sleep(0.02)
                killed = killed and process.poll() is None
            finally:
                kill_with_children(process)
        with log.open(errors="replace") as file:
            file.seek(begin)
            self.output = file.read()
        if not in_time:
            raise CheckFailed("a process was killed at the time limit of this check")
        if process.returncode and not killed:
            raise CheckFailed(
                error_line(self.output) or f"exit code {process.returncode}, without a message"
            )
        return self.output

    def command(self, name: str, *words: str | Path) -> str:
        return self.run([*child_command(name), *words])

    def train(
        self, name: str, *words: str | Path, config: str = "small.yaml", **options: Any
    ) -> Path:
        """Train; return the run folder. words: overrides and options. options: of `run`."""
        folder = self.session.folder / "runs" / name
        device = f"device={'cuda' if self.session.gpus else 'cpu'}"
        path = self.session.folder / config
        self.run([*child_command("train"), path, device, *words, "--work-dir", folder], **options)
        return folder

    def reference(self, name: str, *words: str, **env: str) -> Path:
        """As `train`, for a run that several checks compare with: it is trained once."""
        with self.session.reference_lock:
            folder = self.session.folder / "runs" / name
            done = folder.with_suffix(".done")
            if not done.exists():
                self.train(name, *words, "--overwrite", **env)
                done.touch()
        return folder


@dataclass(frozen=True)
class Check:
    """A check. run: returns the line of the table; raises CheckFailed or CheckSkipped. limit_sec: on a GPU. alone: no
    other check runs at the same time, since it measures speed or memory. quick: whether --quick has it.
    """

    run: Callable[[Task], str]
    limit_sec: float
    min_gpus: int = 0
    alone: bool = False
    quick: bool = False


def check_gpu_command(argv: Sequence[str]) -> int:
    """Run the checks; print and write the table. Returns the exit code."""
    arguments = cli.parse(check_gpu_parser(), argv)
    for name in [*arguments.only, *arguments.skip]:
        if name not in CHECKS:
            raise UsageError(
                f"no check {name!r}{did_you_mean(name, CHECKS)}\nThe checks: {', '.join(CHECKS)}."
            )
    is_default = [name for name, check in CHECKS.items() if check.quick or not arguments.quick]
    names = [name for name in arguments.only or is_default if name not in arguments.skip]
    handle_interrupts(signal.default_int_handler)
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that no process is left behind
    checks = {name: check for name, check in CHECKS.items() if name in names}
    results = run_checks(checks, arguments.out, arguments.quick, arguments.jobs)
    return ResourceError.exit_code if any(result.result == "fail" for result in results) else 0


def check_gpu_parser() -> argparse.ArgumentParser:
    parser = cli.build_parser(
        "check-gpu",
        "Check training on the GPUs of this machine by short runs: races, precisions, torch.compile, DP, DDP, "
        "determinism, resume, memory, speed. Needs no data and no network. Without a GPU, checks what a CPU can run. "
        "Exit code 0 if no check fails, else 5.",
        "[--quick] [--only NAME ...] [--skip NAME ...] [--out DIR] [--jobs N]",
        f"Checks: {', '.join(CHECKS)}.",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="run only these checks"
    )
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="NAME", help="do not run these checks"
    )
    parser.add_argument(
        "--jobs", type=cli.positive, default=max(1, min(4, (os.cpu_count() or 1) // 4)), metavar="N",
        help="checks that run at a time, but for those of memory and speed (default here: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer checks and steps")
    parser.add_argument(
        "--out", type=cli.path, default=Path("work_dirs/check_gpu"), metavar="DIR",
        help="folder for check_gpu.json, check_gpu.md and check_gpu_logs/; those of an earlier run are replaced "
        "(default: %(default)s)",
    )  # fmt: skip
    return parser


def run_checks(
    checks: Mapping[str, Check], out: Path, quick: bool = False, jobs: int = 1
) -> list[Result]:
    """Run checks, several at a time; print each result and write all so far when a check has finished.

    Raises ResourceError if `out` can't be written.
    """
    with explain_write_errors(out, "Name another folder with --out."):
        out.mkdir(parents=True, exist_ok=True)
        logs = out / "check_gpu_logs"  # not `logs`, which a run folder has
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
    with tempfile.TemporaryDirectory(prefix="imagenet-cls-", ignore_cleanup_errors=True) as name:
        session = Session(Path(name), logs.resolve(), quick)
        (session.folder / "small.yaml").write_text(CONFIG)
        (session.folder / "resnet50.yaml").write_text(SPEED_CONFIG)
        started = time.monotonic()
        # The first import of torch may be slow. Without its result, all checks would use the CPU.
        results = [run_check("machine", Check(describe_machine, 300), session)]

        def report(result: Result) -> None:
            print(
                f"{result.check:<25} {result.result:<7} {result.seconds:6.1f} s  {result.line}",
                flush=True,
            )
            write_results(out, session, results, len(results) == 1 + len(checks), started)

        report(results[0])
        order = ["machine", *checks]
        for alone in (False, True):
            with ThreadPoolExecutor(1 if alone else jobs) as pool:
                group = {name: check for name, check in checks.items() if check.alone == alone}
                futures: list[Future[Result]] = [
                    pool.submit(run_check, name, check, session) for name, check in group.items()
                ]
                try:
                    for future in as_completed(futures):
                        results.append(future.result())
                        results.sort(key=lambda result: order.index(result.check))
                        report(future.result())
                except BaseException:  # Ctrl-C, SIGTERM, a full disk
                    session.stopped.set()
                    pool.shutdown(cancel_futures=True)
                    raise
    counts = [
        f"{sum(r.result == kind for r in results)} {kind}" for kind in ("pass", "fail", "skipped")
    ]
    print(f"{', '.join(counts)}; written to {out}/check_gpu.md and check_gpu.json")
    return results


def run_check(name: str, check: Check, session: Session) -> Result:
    """Run a check. Any exception is a failure of this check only."""
    begin = time.monotonic()
    has_gpu = session.gpus > 0
    limit_sec = check.limit_sec * (1 if has_gpu or name == "machine" else CPU_SLOWER)
    task = Task(name, session, begin + limit_sec)
    output = ""
    try:
        if check.min_gpus > session.gpus:
            count = "a GPU" if check.min_gpus == 1 else f"{check.min_gpus} GPUs"
            raise CheckSkipped(f"needs {count}")
        outcome, line = "pass", check.run(task)
    except CheckSkipped as skipped:
        outcome, line = "skipped", str(skipped)
    except CheckFailed as failed:
        outcome, line, output = "fail", str(failed), task.output[-4000:]
    except Exception as error:
        outcome, line, output = "fail", f"{type(error).__name__}: {error}", task.output[-4000:]
    line = shorten(" ".join(line.split()), 300)
    return Result(name, outcome, round(time.monotonic() - begin, 1), line, task.values, output)


def write_results(
    out: Path, session: Session, results: Sequence[Result], finished: bool, started: float
) -> None:
    """Write check_gpu.json and check_gpu.md. Raises ResourceError."""
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "imagenet-cls": __version__,
        **session.code,
        "quick": session.quick,
        "finished": finished,
        "seconds": round(time.monotonic() - started),
        "machine": session.machine,
        "checks": [asdict(result) for result in results],
    }
    write_output(out / "check_gpu.json", json.dumps(content, indent=1) + "\n")
    commit = f" ({session.code['commit'][:7]})" if session.code else ""
    rows = [
        f"| {r.check} | {r.result} | {r.seconds:.0f} | {r.line.replace('|', chr(92) + '|')} |"
        for r in results
    ]
    head = f"imagenet-cls {__version__}{commit}, {content['date'][:10]}, {content['seconds']} s"
    head += "" if finished else ", not finished"
    lines = [head, "", "| check | result | s | |", "|---|---|---|---|", *rows]
    write_output(out / "check_gpu.md", "\n".join(lines) + "\n")


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, its group, and descendants that left the group, such as spawned ranks (those on Linux only)."""
    found = [process.pid]
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in found[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def error_line(output: str) -> str:
    """The line of a process's output that names its error: of a traceback, or the first of at most three lines."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    if "Traceback" in output and errors:
        return errors[-1]
    return (errors or lines[-1:] or [""])[-1]


# The checks.


def describe_machine(task: Task) -> str:
    """Versions, driver and GPUs, by a process that imports torch and uses each GPU."""
    code = "from imagenet_cls.commands.check_gpu import print_machine; print_machine()"
    python = child_command("train")[:-3]  # sets PYTHONPATH, too
    machine = json.loads(task.run([*python, "-c", code]).splitlines()[-1])
    problem = machine.pop("problem")
    driver = nvidia_smi("driver_version")
    machine["driver"] = driver[0] if driver else None
    if not problem and driver and not machine["gpus"] and "CUDA_VISIBLE_DEVICES" not in os.environ:
        problem = f"nvidia-smi lists {len(driver)} GPUs, and torch {machine['torch']} sees none"
    if problem:
        machine["gpus"] = []  # the other checks use the CPU
    task.session.machine |= machine
    task.values |= machine
    if problem:
        raise CheckFailed(problem)
    names = ", ".join(
        f"{gpu['name']} ({gpu['gib']} GiB, sm_{gpu['capability']})" for gpu in machine["gpus"]
    )
    software = (
        "python",
        "torch",
        "torchvision",
        "timm",
        "omegaconf",
        "safetensors",
        "cuda",
        "cudnn",
        "nccl",
        "driver",
    )
    versions = ", ".join(
        f"{name} {machine[name]}" for name in software if machine[name] is not None
    )
    return f"{names or 'no GPU'}; {machine['cpus']} CPUs; {versions}"


def print_machine() -> None:
    """Print what torch knows about this machine as JSON. problem: "" or why a GPU can't be used."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("torchvision", "timm", "omegaconf", "safetensors"):
        found[name] = None
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "nccl": None}
    found |= {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    }
    gpus, problem = [], ""
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
            capability = f"{properties.major}{properties.minor}"
            gib = round(properties.total_memory / 2**30)
            gpus.append({"name": properties.name, "gib": gib, "capability": capability})
        if gpus and torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:
        problem = f"torch {torch.__version__} can't use the GPU: {str(error).splitlines()[0]}"
    print(json.dumps({**found, "gpus": gpus, "problem": problem}))


def nvidia_smi(query: str) -> list[str]:
    """The answers of nvidia-smi, one for each GPU; none without it."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.splitlines()
    return []


def write_images(folder: Path, count: int, width: int, height: int) -> str:
    """Write `count` JPEG files, and an eighth of that for validation; return the overrides for them, as one text.

    Colors that change smoothly, with noise: with 500 x 375 pixels about as large as ImageNet's.
    """
    import numpy as np
    from PIL import Image

    draws = np.random.default_rng(0)
    for number in range(DISTINCT_IMAGES):
        colors = draws.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        smooth = np.asarray(
            Image.fromarray(colors).resize((width, height), Image.Resampling.BICUBIC), np.int16
        )
        pixels = smooth + draws.normal(0, 6, (height, width, 1)).astype(np.int16)
        path = folder / "distinct" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=95)
    for part, images in (("train", count), ("val", count // 8)):
        for number in range(images):
            link = folder / part / str(number % 10) / f"{number}.jpg"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder / "distinct" / f"{number % DISTINCT_IMAGES}.jpg")
    return f"data.root={folder}"


def small_images(session: Session, workers: int = 2) -> list[str]:
    """Overrides for 640 JPEG files of 80 x 64 pixels."""
    folder = session.folder / "small"
    with session.reference_lock:
        if not folder.exists():
            write_images(folder, 640, 80, 64)
    return [
        "data.name=folder",
        "data.kwargs={}",
        f"data.root={folder}",
        f"data.num_workers={workers}",
        "train.epochs=100",
    ]


def sanitizer(task: Task) -> str:
    """A race: data that one stream writes while another reads it.

    Without workers: the sanitizer asks CUDA for the stream of each operator, which a forked process can't do.
    """
    words = [
        "train.precision=bf16",
        "train.micro_batch_size=16",
        "ema.decay=0.9",
        "mix.mixup_alpha=0.2",
    ]
    words += ["mix.cutmix_alpha=1.0", "augment.erasing.prob=0.5"]
    task.train(
        "sanitizer", *small_images(task.session, workers=0), *words, TORCH_CUDA_SANITIZER="1"
    )
    return "10 steps of JPEG files, mixing, erasing, accumulation and EMA without a race"


def precision(task: Task, name: str) -> str:
    """Losses and gradient norms of all steps, close to those in fp32."""
    exact = steps_of(task.reference("eager-1", NVIDIA_TF32_OVERRIDE="0"))
    if name == "fp32":
        return f"10 steps, loss {exact[0]['loss']:.4f} to {exact[-1]['loss']:.4f}"
    steps = steps_of(task.train(name, f"train.precision={name}"))
    if name == "bf16":
        return compare_steps(steps, exact, 0.1)
    skipped = sum(step.get("skipped", False) for step in steps)  # the loss scale starts too high
    return f"{compare_steps(steps, exact, 0.2, ('loss',))}; {skipped} skipped"


def compiled(task: Task, mode: str, micro_batches: int) -> str:
    """Losses and gradient norms of all steps, close to those without train.compile."""
    if not (task.session.gpus or shutil.which("g++") or shutil.which("clang++")):
        raise CheckSkipped("needs a C++ compiler on a CPU")
    exact_math = {"NVIDIA_TF32_OVERRIDE": "0"}
    micro_batch = f"train.micro_batch_size={32 // micro_batches}"
    eager = task.reference(f"eager-{micro_batches}", micro_batch, **exact_math)
    begin = time.monotonic()
    run = task.train(task.name, micro_batch, f"train.compile={mode}", **exact_math)
    task.values["seconds_compiled"] = round(time.monotonic() - begin, 1)
    return compare_steps(steps_of(run), steps_of(eager), TOLERANCE)


def data_parallel(task: Task) -> str:
    """DataParallel on two GPUs, against one device with two micro-batches: the same images in each forward pass."""
    images = small_images(task.session)
    one = task.reference("one-device-2", *images, "train.micro_batch_size=16")
    run = task.train("dp", *images, "parallel.mode=dp", "parallel.device_ids=[0, 1]")
    return compare_steps(steps_of(run), steps_of(one), TOLERANCE)


def ddp(task: Task) -> str:
    """DDP on two ranks with SyncBN, against one device: on GPUs over nccl, on a CPU over gloo."""
    if task.session.gpus == 1:
        raise CheckSkipped("needs 2 GPUs")
    task.command("check-dist", "--gpus", "2", *([] if task.session.gpus else ["device=cpu"]))
    images = small_images(task.session)
    one = task.reference("one-device-1", *images)
    run = task.train("ddp", *images, "parallel.sync_bn=true", "--gpus", "2")
    return compare_steps(steps_of(run), steps_of(one), TOLERANCE)


def reproducible_words(session: Session) -> list[str]:
    """The settings of a run whose bits are compared, long enough to be killed."""
    steps = 300 if session.gpus else 60
    words = [
        "train.deterministic=true",
        "train.precision=bf16",
        "ema.decay=0.9",
        "checkpoint.every_steps=10",
    ]
    return [*small_images(session), *words, f"train.max_steps={steps}", "eval.every_epochs=100"]


def deterministic(task: Task) -> str:
    """Two runs with the same bits."""
    words = reproducible_words(task.session)
    first, second = (
        digest(task.reference("undisturbed", *words)),
        digest(task.train("again", *words)),
    )
    if first != second:
        raise CheckFailed(
            f"two runs with train.deterministic=true differ: {first[:12]} and {second[:12]}"
        )
    return f"two runs end with {first[:12]}"


def resume(task: Task) -> str:
    """A run that is killed and resumed, with the bits of an undisturbed one."""
    words = reproducible_words(task.session)
    expected = digest(task.reference("undisturbed", *words))
    checkpoints = task.session.folder / "runs" / "killed" / "checkpoints"
    folder = task.train("killed", *words, kill_if=lambda: any(checkpoints.glob("step-*")))
    saved = int(newest_checkpoint(folder).name.rpartition("-")[2])
    if f"train.max_steps={saved}" in words:
        raise CheckFailed("the run ended before it could be killed")
    found = digest(task.train("killed", *words, "--resume"))
    if found != expected:
        raise CheckFailed(
            f"resumed from step {saved}: {found[:12]}, and undisturbed {expected[:12]}"
        )
    return f"killed, resumed from step {saved}, ends with {found[:12]}"


def find_batch(task: Task) -> str:
    """Micro-batches of ResNet-50 up to the one that does not fit; on a CPU two of the small model."""
    folder = task.session.folder
    if task.session.gpus:
        output = task.command("find-batch", folder / "resnet50.yaml", "device=cuda")
    else:
        output = task.command("find-batch", folder / "small.yaml", "device=cpu", "--max", "2")
    return next(line for line in output.splitlines() if line.startswith("largest that fits"))


def speed(task: Task, from_files: bool) -> str:
    """Training of ResNet-50 at 224 px in bf16."""
    gib = min(gpu["gib"] for gpu in task.session.machine["gpus"])
    batch = 256 if gib >= 30 else 64
    steps = 30 if task.session.quick else 60
    words = [
        f"train.global_batch_size={batch}",
        f"train.max_steps={steps}",
        f"eval.batch_size={batch}",
    ]
    if from_files:
        folder = task.session.folder / "photos"
        write_images(folder, batch * steps, 500, 375)
        words += [
            "data.name=folder",
            "data.kwargs={}",
            f"data.root={folder}",
            "model.num_classes=1000",
        ]
    run = task.train(task.name, *words, config="resnet50.yaml")
    intervals = [record for record in steps_of(run) if "images_per_sec" in record][1:]
    rate = median(record["images_per_sec"] for record in intervals)
    waiting = median(record["data_wait_pct"] for record in intervals)
    gib = intervals[-1]["memory_mib"] / 2**10
    task.values |= {
        "images_per_sec": rate,
        "data_wait_pct": waiting,
        "memory_gib": gib,
        "batch": batch,
    }
    return f"{rate:,.0f} img/s, {waiting:.0f} % waiting for data, {gib:.1f} GiB: ResNet-50, 224 px, bf16, batch {batch}"


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The records of a run's steps."""
    return [record for record in read_metrics(run) if record["kind"] == "train"]


def compare_steps(
    found: Sequence[dict[str, Any]],
    expected: Sequence[dict[str, Any]],
    tolerance: float,
    names: Sequence[str] = ("loss", "grad_norm"),
) -> str:
    """The largest relative difference of losses and gradient norms. Raises CheckFailed above the tolerance."""
    worst = 0.0
    for mine, other in zip_longest(found, expected):
        if mine is None or other is None:
            raise CheckFailed(f"{len(found)} steps in place of {len(expected)}")
        for name in names:
            difference = abs(mine[name] - other[name]) / abs(other[name])
            if not difference <= tolerance:  # also of NaN
                step = mine["step"]
                raise CheckFailed(
                    f"step {step}: {name} {mine[name]:.6g}, expected {other[name]:.6g}"
                )
            worst = max(worst, difference)
    what = "losses and gradient norms" if "grad_norm" in names else "losses"
    return f"{len(found)} steps: {what} differ by at most {worst:.1e}"


def newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def digest(run: Path) -> str:
    """SHA-256 of weights, EMA and optimizer state of a run's last checkpoint."""
    hashed = sha256()
    for path in sorted(newest_checkpoint(run).glob("*.safetensors")):
        hashed.update(path.name.encode() + path.read_bytes())
    return hashed.hexdigest()


CHECKS = {
    "sanitizer": Check(sanitizer, 90, min_gpus=1, quick=True),
    "precision-fp32": Check(partial(precision, name="fp32"), 60, quick=True),
    "precision-bf16": Check(partial(precision, name="bf16"), 60, quick=True),
    "precision-fp16": Check(partial(precision, name="fp16"), 60, min_gpus=1),
    **{
        f"compile-{mode}-{count}": Check(
            partial(compiled, mode=mode, micro_batches=count),
            limit_sec,
            min_gpus=0 if mode == "default" else 1,
            quick=(mode, count) == ("reduce-overhead", 2),
        )
        for mode, limit_sec in (("default", 120), ("reduce-overhead", 120), ("max-autotune", 200))
        for count in (1, 2)
    },
    "deterministic": Check(deterministic, 120, quick=True),
    "resume": Check(resume, 120, quick=True),
    "dp": Check(data_parallel, 90, min_gpus=2),
    "ddp": Check(ddp, 120),
    "find-batch": Check(find_batch, 120, alone=True),
    "speed-synthetic": Check(
        partial(speed, from_files=False), 90, min_gpus=1, alone=True, quick=True
    ),
    "speed-jpeg": Check(partial(speed, from_files=True), 120, min_gpus=1, alone=True),
}
