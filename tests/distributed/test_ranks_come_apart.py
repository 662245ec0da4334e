"""Numbers that go wrong on one rank: NaN, other bits, other code, no memory. All ranks notice, at the same step, and
one tells which it was.

Two ranks are forked once and make one run after the other, `CASES`; what they left is for the tests.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from forked_ranks import RankServer, destroy_group
from helpers import DEMO, REPOSITORY, TRAIN, environment, free_port, is_alive, noisy, ranks_of, run
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from imagenet_cls.commands.train import load_for_training, train_here, train_parser
from imagenet_cls.engine.start import join_group
from imagenet_cls.errors import UserError
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.report.log import close_log
from imagenet_cls.seeding import generator

HERE = Path(__file__).stem
RANKS, BATCH, IMAGES, SEED = 2, 8, 96, 0
_SETTLING_PASSES = 2  # that DDP's buckets take before the first step


def words_for(work_dir: Path, **changes: Any) -> list[str]:
    """A run of 12 steps on made-up images, saved at each, on a network with BatchNorm, momentum and an average."""
    settings = {
        "model.name": f"{HERE}:quiet",
        "data.name": "synthetic",
        "data.kwargs": f"{{train_images: {IMAGES}, val_images: 4, num_classes: 2, size_px: 16}}",
        "augment.size_px": 16,
        "eval.crop_px": 16,
        "train.global_batch_size": BATCH,
        "train.epochs": 1,
        "optimizer.lr": 0.01,
        "ema.decay": 0.9,
        "log.every_steps": 4,
        "log.tensorboard": "false",
        "checkpoint.every_steps": 1,
        "checkpoint.keep_last": "null",
        "parallel.timeout_sec": 30,
        "device": "cpu",
        "seed": SEED,
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    return [DEMO, *(f"{name}={value}" for name, value in settings.items()), "--work-dir", str(work_dir)]


def quiet(num_classes: int) -> nn.Module:
    """No draws, so that nothing but what a test does tells ranks apart."""
    return noisy(num_classes, width=4, dropout=0.0)


def turning(rank: int, first_step: int, last_step: int, gradient: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy that is NaN on one rank in some steps; gradient: it is finite, and only its gradient is not."""
    calls = -_SETTLING_PASSES

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        good = functional.cross_entropy(logits, targets)
        if dist.get_rank() != rank or not first_step <= calls <= last_step:
            return good
        return good + (0 * logits).sum().sqrt() if gradient else good * float("nan")

    return loss


class Drifting(nn.Sequential):
    """In the forward pass of one step, the last bit of one weight changes on one rank."""

    def __init__(self, num_classes: int, rank: int, step: int, name: str = "1.weight"):
        super().__init__(*quiet(num_classes))
        self.rank, self.step, self.name, self.calls = rank, step, name, -_SETTLING_PASSES

    def forward(self, images: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and (dist.get_rank(), self.calls) == (self.rank, self.step):
            with torch.no_grad():
                weight = self.get_parameter(self.name)
                weight[-1, -1, -1, -1] = torch.nextafter(weight[-1, -1, -1, -1], torch.tensor(9.0))
        return super().forward(images)


def failing(num_classes: int) -> nn.Module:
    """A GPU's memory that runs out on rank 1 in the fourth step."""

    class Failing(nn.Sequential):
        calls = -_SETTLING_PASSES

        def forward(self, images: Tensor) -> Tensor:
            self.calls += self.training
            if dist.get_rank() == 1 and self.calls == 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has ...\nand more")
            return super().forward(images)

    return Failing(*quiet(num_classes))


def own_loss(**kwargs: Any) -> dict[str, Any]:
    given = ", ".join(f"{name}: {str(value).lower()}" for name, value in kwargs.items())
    return {"loss__name": f"{HERE}:turning", "loss__kwargs": f"{{{given}}}"}


def drifting(**kwargs: Any) -> dict[str, Any]:
    given = ", ".join(f"{name}: {value}" for name, value in kwargs.items())
    return {"model__name": f"{HERE}:Drifting", "model__kwargs": f"{{{given}}}"}


CASES: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "one NaN": own_loss(rank=1, first_step=6, last_step=6),
    "NaN in the last step": own_loss(rank=1, first_step=12, last_step=12),
    "NaN to the end": own_loss(rank=1, first_step=6, last_step=99) | {"train__max_nonfinite_steps": 3},
    "gradient to the end": own_loss(rank=1, first_step=2, last_step=99, gradient=True)
    | {"train__max_nonfinite_steps": 2, "train__micro_batch_size": 2},
    "drift": drifting(rank=1, step=5) | {"parallel__check_every_steps": 4, "checkpoint__every_steps": "null"},
    "drift, saved": drifting(rank=1, step=5),
    "drift, unseen": drifting(rank=1, step=5) | {"parallel__check_every_steps": "null"},
}


def every_case(rank: int, world_size: int, folder: Path) -> None:
    """One run after the other, and what each ended with."""
    ends = {}
    for name, changes in CASES.items():
        words = words_for(folder / name, parallel__init_method=f"file://{folder}/store {name}", **changes)
        arguments = train_parser().parse_intermixed_args(words)
        loaded, rank_info = load_for_training(arguments), RankInfo(rank, rank, world_size, world_size)
        group = join_group(loaded, rank_info)
        ends[name] = [0, ""]
        try:
            train_here(arguments, loaded, group)
        except UserError as error:
            ends[name] = [error.exit_code, str(error)]
            assert error.reported_by_main == (rank > 0), "only rank 0 speaks"
        close_log()
        destroy_group(group)
        group.heartbeat.close()
    (folder / f"ends{rank}.json").write_text(json.dumps(ends))


@pytest.fixture(scope="module")
def left(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apart")
    rank_server.call(every_case, RANKS, folder)
    return folder


def end_of(left: Path, name: str) -> tuple[int, list[str]]:
    """Exit code and lines of a case, which are those of every rank."""
    by_rank = [json.loads((left / f"ends{rank}.json").read_text())[name] for rank in range(RANKS)]
    assert by_rank[0] == by_rank[1]
    return by_rank[0][0], by_rank[0][1].splitlines()


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


def saved(folder: Path, step: int, name: str) -> dict[str, bytes]:
    """The bits of a checkpoint's tensors, but for BatchNorm's counts of batches, which count every one that it saw."""
    tensors = load_file(folder / "checkpoints" / f"step-{step:07d}" / name)
    bits = {key: tensor.view(-1).view(torch.uint8).numpy().tobytes() for key, tensor in tensors.items()}
    return {key: value for key, value in bits.items() if not key.endswith("num_batches_tracked")}


def samples(step: int, rank: int) -> list[str]:
    """What a rank sees in a step (from 1 on), by the definition of the order."""
    order = torch.randperm(IMAGES, generator=generator("permutation", SEED, 0)).tolist()
    return [f"synthetic/train[{index}]" for index in order[(step - 1) * BATCH : step * BATCH][rank::RANKS]]


def test_an_undisturbed_run_agrees_at_every_checkpoint(left: Path) -> None:
    assert end_of(left, "undisturbed") == (0, [])
    assert len(list((left / "undisturbed" / "checkpoints").iterdir())) == 12


def test_nan_on_one_rank_changes_the_weights_of_none(left: Path) -> None:
    """That ranks still agree, the checks before each checkpoint tell. Such a step is saved only if it is the last."""
    assert end_of(left, "one NaN") == end_of(left, "NaN in the last step") == (0, [])
    folder, ended = left / "one NaN", left / "NaN in the last step"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert saved(ended, 12, name) == saved(ended, 11, name) == saved(left / "undisturbed", 11, name)
        assert saved(ended, 12, name) != saved(left / "undisturbed", 12, name)
        assert saved(folder, 5, name) == saved(left / "undisturbed", 5, name) != saved(folder, 7, name)
        assert saved(folder, 7, name) != saved(left / "undisturbed", 7, name)
    assert not (folder / "checkpoints" / "step-0000006").exists()
    steps = records(folder, "train")
    assert [step["step"] for step in steps if step.get("skipped")] == [6] and len(steps) == 12
    (event,) = records(folder, "event")
    assert event["message"].startswith("step 6: loss or gradient was NaN or infinite (1 such steps")


def test_nan_that_stays_ends_the_run_and_names_step_rank_rate_and_samples(left: Path) -> None:
    code, lines = end_of(left, "NaN to the end")
    assert code == 6 and len(lines) == 3
    assert "in 3 steps in a row, the last one step 8 (loss nan, lr " in lines[0]
    mine = samples(8, rank=1)
    assert lines[1] == (f"It was the loss on rank 1 of 2, from {', '.join(mine[:3])} and 1 more (logs/rank1.log).")
    logs = [(left / "NaN to the end" / "logs" / f"rank{rank}.log").read_text() for rank in range(RANKS)]
    listed = re.findall(r"the samples of step 8 on this rank: (.*)", logs[1])
    assert [line.split(", ") for line in listed] == [mine] and "the samples of step" not in logs[0]


def test_a_gradient_that_is_not_finite_after_a_finite_loss_is_told_as_such(left: Path) -> None:
    """It is the same on all ranks once it is reduced, so all are named. From a second micro-batch on."""
    code, lines = end_of(left, "gradient to the end")
    assert code == 6 and len(lines) == 3
    assert "in 2 steps in a row, the last one step 2 (loss 0." in lines[0]
    seen = f"It was the gradient (the losses were finite) on ranks 0, 1 of 2, from {samples(2, 0)[0]}"
    assert lines[1].startswith(seen)
    assert "and 5 more" in lines[1]


def test_a_rank_that_drifts_is_found_and_named(left: Path) -> None:
    """In step 5 on rank 1 one bit changes; every fourth step is looked at."""
    code, lines = end_of(left, "drift")
    assert code == 5 and len(lines) == 3
    expected = r"diverged replicas: rank 1 \(.+\) of 2 differ from the rest after step 8, in 1\.weight\b.*\."
    assert re.fullmatch(expected, lines[0])
    assert "after step 4," in lines[2]


def test_what_ranks_disagree_about_is_not_saved(left: Path) -> None:
    code, lines = end_of(left, "drift, saved")
    assert code == 5 and "after step 5, in 1.weight" in lines[0] and "after step 4," in lines[2]
    assert max((left / "drift, saved" / "checkpoints").glob("step-*")).name == "step-0000004"


def test_without_the_check_nobody_notices(left: Path) -> None:
    """Which is why it is made: the run ends well, with other weights than it should have."""
    assert end_of(left, "drift, unseen") == (0, [])


# ------------------------------------------------------------------------------------- in processes of their own


def start(words: list[str], **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        env=environment(**env), cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_ranks_with_other_code_or_other_libraries_end_before_anything(tmp_path: Path) -> None:
    """Started by hand, as on two machines: on the second a line of the package differs, and a version."""
    for name in ("imagenet_cls", "tools"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "imagenet_cls" / "seeding.py").open("a") as file:
        file.write("# a line more\n")
    (tmp_path / "sitecustomize.py").write_text("import safetensors\nsafetensors.__version__ = '0.0.1'\n")
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    words = words_for(tmp_path / "run", model__name="helpers:plain")
    ranks = [
        start([TRAIN, *words], RANK="0", LOCAL_RANK="0", **address),
        start(
            [str(tmp_path / "tools" / "train.py"), *words],
            RANK="1", LOCAL_RANK="1", PYTHONPATH=f"{tmp_path}:{REPOSITORY / 'tests'}", **address,
        ),
    ]  # fmt: skip
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    what = f"safetensors {safetensors.__version__}, the code of imagenet_cls"
    assert f"rank 1 of 2 and rank 0 differ in: {what}\n" in errors[0]
    assert len(errors[0].splitlines()) == 2 and not errors[1] and not (tmp_path / "run").exists()


def test_memory_that_runs_out_on_one_rank_ends_all_soon(tmp_path: Path) -> None:
    words = words_for(tmp_path / "run", model__name=f"{HERE}:failing", model__kwargs="{}")
    paths = os.pathsep.join([str(REPOSITORY / "tests"), str(Path(__file__).parent)])
    done = run([sys.executable, TRAIN, *words, "--gpus", "2"], timeout_sec=120, PYTHONPATH=paths)
    lines = done.stderr.splitlines()
    assert done.returncode == 5 and len(lines) == 3, done.stderr
    assert re.match(
        r"out of memory on .*: 4 images at once of 16 px \(\d+ of 16 px in evaluation\), peak .* GiB$", lines[0]
    )
    assert "Tried to allocate 2.00 GiB" in lines[1]
    assert lines[2].startswith("Try train.micro_batch_size=2 ") and lines[2].count(", or ") == 2
    assert not any(is_alive(pid) for pid in ranks_of(tmp_path / "run").values())
