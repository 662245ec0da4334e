"""Scenarios that run the program on simulated GPUs, and planted bugs that they have to notice.

    python tests/rehearsal/scenarios.py train fp16     # these scenarios, in one process
    python tests/rehearsal/scenarios.py --bug NAME     # a scenario with a planted bug

Prints a line for each scenario; exit code 1 if one fails.
"""

import contextlib
import gc
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "unit" / "data")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from helpers import DEMO, free_port  # noqa: E402
from rehearsal.simulation import simulated_gpus  # noqa: E402
from rehearsal.state import SimulatedGenerator, SimulatedStream, current  # noqa: E402
from torch import Tensor  # noqa: E402

SYNTHETIC = [
    "data.name=synthetic",
    "data.kwargs={train_images: 48, val_images: 20, num_classes: 10, size_px: 16}",
    *("augment.size_px=16", "eval.crop_px=16", "train.global_batch_size=8", "train.epochs=2"),
    *(
        "log.every_steps=4",
        "log.tensorboard=false",
        "log.plots=false",
        "log.report=false",
        "optimizer.lr=0.01",
    ),
]
DIGITS = [
    *("augment.size_px=16", "eval.crop_px=16", "train.global_batch_size=64", "train.max_steps=6"),
    *("log.every_steps=3", "log.plots=false", "log.report=false"),
]
CLASS_WEIGHTS = "loss.class_weights=[1,2,3,4,5,6,7,8,9,10]"


def train(work_dir: Path, *words: str, config: str | None = None) -> None:
    """Run train.py in this process. If a key is given twice, the last value is used."""
    from imagenet_cls.commands.train import train_command

    defaults = ["model.name=helpers:noisy", "device=cuda"]
    overrides = {word.partition("=")[0]: word for word in [*defaults, *words] if "=" in word}
    options = [word for word in words if "=" not in word]
    configs = [] if config is None else [config]
    assert (
        train_command([*configs, *overrides.values(), *options, "--work-dir", str(work_dir)]) == 0
    )


def run_train(folder: Path) -> None:
    """bf16, erasing, mixing, EMA, accumulation, evaluation, save and resume."""
    words = ["augment.erasing.prob=0.5", "augment.erasing.mode=pixel", "mix.mixup_alpha=0.2"]
    words += ["mix.cutmix_alpha=1.0", "ema.decay=0.9", "train.micro_batch_size=4"]
    words += ["checkpoint.every_steps=5"]
    train(folder / "run", *SYNTHETIC, *words, "train.max_steps=7")
    train(folder / "run", *SYNTHETIC, *words, "--resume")


def run_fp16(folder: Path) -> None:
    """The loss scale, with SGD and with fused and unfused AdamW."""
    words = [*SYNTHETIC, "train.precision=fp16"]
    train(folder / "sgd", *words, "train.clip_norm=1.0", "checkpoint.every_steps=5")
    train(folder / "fused", *words, "optimizer.name=adamw")
    train(folder / "unfused", *words, "optimizer.name=adamw", "optimizer.kwargs={fused: false}")


def run_files(folder: Path) -> None:
    """Images from files, with workers and a thread that pins; copies of images are asynchronous."""
    from imagenet_cls.data.builtin import write_digits

    write_digits(folder / "digits", "train")
    for workers in (0, 1):
        current().unpinned_copies.clear()
        words = [*DIGITS, f"data.root={folder}/digits", f"data.num_workers={workers}"]
        train(folder / f"run{workers}", *words, config=DEMO)
        places = current().unpinned_copies
        images = {place for place in places if place.endswith((" start_copy", " __call__"))}
        assert not images, f"copies from memory that is not pinned: {images}"


def run_prefetch(folder: Path) -> None:
    """The next batch is read, and its copy started, before a batch is used."""
    from test_data_device_prefetch import batches

    from imagenet_cls.data.device import DevicePrefetch

    read: list[int] = []
    prefetch = DevicePrefetch(torch.device("cuda", 0))
    seen = [(int(batch.targets[0]), len(read)) for batch in prefetch(batches(3, read, pin=True))]
    assert seen == [(0, 2), (1, 3), (2, 3)]
    assert not list(prefetch(batches(0, read)))


def run_waits(folder: Path) -> None:
    """From the second step on, no operator of a step makes the host wait."""
    from imagenet_cls.checkpoint.progress import Progress
    from imagenet_cls.config.load import load_config
    from imagenet_cls.engine.build import build
    from imagenet_cls.engine.meter import Meter, StepResult
    from imagenet_cls.engine.train import train as train_loop
    from imagenet_cls.parallel.environment import RankInfo
    from imagenet_cls.parallel.process_group import RankContext

    words = [*SYNTHETIC, "model.name=helpers:noisy", "device=cuda", "augment.erasing.prob=0.5"]
    words += ["ema.decay=0.9", "mix.mixup_alpha=0.2"]
    parts = build(load_config(None, words).config, RankContext(RankInfo(), torch.device("cuda", 0)))

    class Steps:
        def __init__(self) -> None:
            self.parts = parts
            self.progress = Progress()
            self.meter = Meter(parts.context, parts.plan.global_batch)

        def epoch_batches(self, epoch: int, first_step: int) -> Any:
            return parts.prefetch(parts.train_loader.epoch(epoch, first_step))

        def after_step(self, result: StepResult) -> None:
            self.meter.add(result)
            if self.progress.step == 1:
                current().waits.clear()

        def after_epoch(self) -> None:
            assert not current().waits, f"the host waits: {dict(current().waits)}"

    train_loop(Steps())


def run_dp(folder: Path) -> None:
    """DataParallel on two GPUs, with the outputs on the second one, fp16, and distillation."""
    words = [*SYNTHETIC, "parallel.mode=dp"]
    second = [
        "mix.mixup_alpha=0.2",
        "ema.decay=0.9",
        "eval.batch_size=3",
    ]
    train(folder / "bf16", *words, *second)
    train(folder / "fp16", *words, *second, "train.precision=fp16", "train.clip_norm=1")
    train(folder / "distill", *words, "distill.kind=hard", "distill.teacher.name=helpers:plain")


def run_ddp(folder: Path) -> None:
    """nccl on two ranks: accumulation, EMA, comparison of replicas, saves; then SyncBatchNorm."""
    from imagenet_cls.commands.train import train_command

    words = [*SYNTHETIC, "device=cuda", "parallel.timeout_sec=60"]
    noisy = ["model.name=helpers:noisy", "train.micro_batch_size=2", "ema.decay=0.9"]
    noisy += ["parallel.check_every_steps=3", "checkpoint.every_steps=5", "train.max_steps=7"]
    on_two_ranks(train_command, [*words, *noisy, "--work-dir", str(folder / "run")])
    sync = ["model.name=resnet10t", "parallel.sync_bn=true", "train.max_steps=3"]
    sync += ["train.grad_checkpointing=true"]
    on_two_ranks(train_command, [*words, *sync, "--work-dir", str(folder / "sync")])


def run_ddp_second_gpu(folder: Path) -> None:
    """DDP with one rank on cuda:1."""
    train(folder / "run", *SYNTHETIC, "device=cuda:1", "parallel.mode=ddp")
    dist.destroy_process_group()


def run_check_dist(folder: Path) -> None:
    """tools/check_dist.py, and with the GPUs in another order."""
    from imagenet_cls.extras.machine.check_dist import check_command

    on_two_ranks(check_command, ["device=cuda"])
    on_two_ranks(check_command, ["device=cuda", "parallel.device_ids=[1,0]"])


def run_old_gpu(folder: Path) -> None:
    """train.precision=auto on a GPU whose cuDNN has no convolutions in bfloat16, such as a T4."""
    train(folder / "run", *SYNTHETIC, "train.max_steps=2")


def run_recipes(folder: Path) -> None:
    """Losses, clipping, SAM, split BatchNorm, distillation, other optimizers, recomputation."""
    small = ["model.name=resnet18", "augment.size_px=32", "eval.crop_px=32", "train.max_steps=2"]
    recipes = [
        ["loss.name=bce", "mix.mixup_alpha=0.1"],
        ["loss.name=bce", CLASS_WEIGHTS, "mix.mixup_alpha=0.5", "mix.mode=elem"],
        ["loss.name=focal", CLASS_WEIGHTS, "train.clip_agc=0.1"],
        ["loss.name=jsd", "augment.splits=3", "train.clip_value=0.1"],
        ["train.sam_rho=0.1", "train.sam_every_steps=2", "optimizer.name=timm:lookahead_adamw"],
        ["optimizer.name=lamb", "ema.half_life_images=100", "ema.decay=null", "eval.flip_tta=true"],
        ["distill.kind=soft", "distill.teacher.name=helpers:plain", "train.micro_batch_size=4"],
        ["optimizer.name=rmsprop", "parallel.check_every_steps=2"],
        [*small, "train.grad_checkpointing=true"],
    ]
    for number, words in enumerate(recipes):
        try:
            train(folder / str(number), *SYNTHETIC, *words)
        except BaseException as error:
            raise RuntimeError(f"{' '.join(words)}: {error}") from error


def run_find_lr(folder: Path) -> None:
    """tools/find_lr.py."""
    from imagenet_cls.extras.before_training.find_lr import find_lr_command

    config = folder / "config.yaml"
    config.write_text("model: {name: 'helpers:noisy'}\noptimizer: {lr: 0.1}\n")
    words = [
        str(config),
        *(word for word in SYNTHETIC if "optimizer.lr" not in word),
        "device=cuda",
    ]
    find_lr_command([*words, "--steps", "20", "--out", str(folder / "lr.png")])


def run_evaluation(folder: Path) -> None:
    """tools/test.py with predictions, and a Predictor."""
    from imagenet_cls.commands.test import evaluate_command
    from imagenet_cls.data.builtin import write_digits
    from imagenet_cls.inference.predictor import Predictor

    write_digits(folder / "digits", "train")
    words = [*DIGITS, f"data.root={folder}/digits", "data.num_workers=0"]
    train(folder / "run", *words, config=DEMO)
    words = [str(folder / "run"), "--allow-import", "helpers:noisy"]
    assert evaluate_command([*words, "--out", str(folder / "predictions.csv")]) == 0
    image = next((folder / "digits").glob("train/3/*.jpg"))
    (row,) = Predictor(folder / "run", "cuda", allow_import=["helpers:noisy"]).predict([image])
    assert row["top"]


def run_benchmark(folder: Path) -> None:
    """A case of tools/benchmark.py gpu."""
    from benchmarks.gpu import CASES, speed

    *_, rows = speed("case", CASES["resnet20-128-ema"], folder, rounds=1, tiny=True)
    assert all(row["value"] for row in rows), rows


def on_two_ranks(command: Callable, words: list[str]) -> None:
    """Run a command on two forked ranks with a GPU each. Raises AssertionError with the exit
    codes.
    """
    # The garbage of an earlier scenario has a process group, whose threads a forked rank lacks: its
    # collection would wait for them forever there.
    gc.collect()
    pids = []
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = free_port()
    for rank in (0, 1):
        pid = os.fork()
        if pid == 0:
            try:
                os.environ |= {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with mock.patch("imagenet_cls.commands.distributed.hard_exit", os._exit):
                    os._exit(command(words) or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0, 0], f"exit codes {codes}"


# Function, number of GPUs.
SCENARIOS: dict[str, tuple[Callable[[Path], None], int]] = {
    "train": (run_train, 1),
    "fp16": (run_fp16, 1),
    "files": (run_files, 1),
    "prefetch": (run_prefetch, 1),
    "waits": (run_waits, 1),
    "dp": (run_dp, 2),
    "ddp": (run_ddp, 2),
    "ddp_second_gpu": (run_ddp_second_gpu, 2),
    "check_dist": (run_check_dist, 2),
    "old_gpu": (run_old_gpu, 1),
    "recipes": (run_recipes, 1),
    "find_lr": (run_find_lr, 1),
    "evaluation": (run_evaluation, 1),
    "benchmark": (run_benchmark, 1),
}


# ---- planted bugs


def mean_stays_on_the_cpu() -> Any:
    from imagenet_cls.data.device import Normalize

    original = Normalize.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.shift = self.shift.cpu()

    return mock.patch.object(Normalize, "__init__", init)


def no_wait_for_the_copy() -> Any:
    return mock.patch.object(SimulatedStream, "wait_event", lambda self, event: None)


def no_record_stream() -> Any:
    return mock.patch.object(Tensor, "record_stream", lambda *_: None)


def number_read_in_each_step() -> Any:
    from imagenet_cls.tasks.single_label import SingleLabel

    original = SingleLabel.step_metric

    def step_metric(self: SingleLabel, logits: Tensor, targets: Tensor) -> Tensor:
        share = original(self, logits, targets)
        share.item()
        return share

    return mock.patch.object(SingleLabel, "step_metric", step_metric)


def cpu_generator_for_erasing() -> Any:
    class CpuGenerator(SimulatedGenerator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return SimulatedGenerator.__new__(cls, "cpu")

    return mock.patch.object(torch, "Generator", CpuGenerator)


def cpu_tensor_to_nccl() -> Any:
    from imagenet_cls.engine import meter

    original = meter.all_reduce_mean
    return mock.patch.object(
        meter, "all_reduce_mean", lambda tensor, context: original(tensor.cpu(), context)
    )


# The scenario that has to notice the bug, a function that returns its patch, and what is printed.
PLANTED_BUGS: dict[str, tuple[str, Callable[[], Any], str]] = {
    "mean_stays_on_the_cpu": (
        "train",
        mean_stays_on_the_cpu,
        "Expected all tensors to be on the same device",
    ),
    "no_wait_for_the_copy": ("files", no_wait_for_the_copy, "race between streams"),
    "no_record_stream": ("files", no_record_stream, "without record_stream"),
    "number_read_in_each_step": ("waits", number_read_in_each_step, "the host waits"),
    "cpu_generator_for_erasing": (
        "train",
        cpu_generator_for_erasing,
        "a generator of cpu for a tensor of cuda:0",
    ),
    "cpu_tensor_to_nccl": ("ddp", cpu_tensor_to_nccl, "on nccl with tensors on"),
}


def run_scenario(name: str, bug: Callable[[], Any] = contextlib.nullcontext) -> bool:
    """Run one scenario, print whether it passes, with the traceback if not, and return this."""
    function, gpus = SCENARIOS[name]
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    major = 7 if name == "old_gpu" else 9
    try:
        with tempfile.TemporaryDirectory() as folder, simulated_gpus(gpus, major), bug():
            function(Path(folder))
    except BaseException:
        traceback.print_exc()
        print(f"FAILS {name}", flush=True)
        return False
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    print(f"passes {name}", flush=True)
    return True


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--bug"]:
        name, bug, _ = PLANTED_BUGS[arguments[1]]
        return int(not run_scenario(name, bug))
    passed = [run_scenario(name) for name in arguments or SCENARIOS]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
