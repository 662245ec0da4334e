"""One rank differs: NaN, other bits, other code, out of memory. All ranks notice at the same step
and name it.

Two ranks are forked once and make one run after the other (`CASES`); the tests read their folders.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from forked_ranks import RankServer, destroy_process_groups
from helpers import arguments, noisy, records
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import imagenet_cls
from imagenet_cls.commands.distributed import join_ranks
from imagenet_cls.commands.train import load_for_training, run_options, train_parser
from imagenet_cls.engine.component_checks import check_on_all_ranks
from imagenet_cls.engine.run_training import run_training
from imagenet_cls.errors import UserError
from imagenet_cls.guards import agreement
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.seeding import generator

HERE = Path(__file__).stem
RANKS, BATCH, UNEVEN_BATCH, IMAGES, SEED = 2, 8, 9, 96, 0
_SETTLING_PASSES = 2  # that DDP's buckets take before the first step


def words_for(work_dir: Path, **changes: Any) -> list[str]:
    """A run of 12 steps on random images, saved at each, on a network with BatchNorm, momentum and
    an average.
    """
    settings: dict[str, Any] = {
        "model__name": f"{HERE}:quiet",
        "data__name": "synthetic",
        "data__kwargs": f"{{train_images: {IMAGES}, val_images: 4, num_classes: 2, size_px: 16}}",
        "train__global_batch_size": BATCH,
        "train__epochs": 1,
        "optimizer__lr": 0.01,
        "ema__decay": 0.9,
        "log__every_steps": 4,
        "checkpoint__every_steps": 1,
        "checkpoint__keep_last": "null",
        "seed": SEED,
    }
    return arguments("none", work_dir, **(settings | changes))


def quiet(num_classes: int) -> Any:
    """No draws, so that nothing but what a test does tells ranks apart."""
    return noisy(num_classes, width=4, dropout=0.0)


def nonfinite_loss(
    rank: int, first_step: int, last_step: int, gradient: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy that is NaN on one rank in some steps; gradient: it is finite, and only its
    gradient is not.
    """
    calls = -_SETTLING_PASSES

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        good = functional.cross_entropy(logits, targets)
        if dist.get_rank() != rank or not first_step <= calls <= last_step:
            return good
        return good + (0 * logits).sum().sqrt() if gradient else good * float("nan")

    return loss


class Disturbed(nn.Sequential):
    """`quiet`, with an event in the forward pass of one training step on rank 1."""

    def __init__(self, num_classes: int, event: str, step: int):
        super().__init__(*quiet(num_classes))
        self.event, self.step, self.calls = EVENTS[event], step, -_SETTLING_PASSES

    def forward(self, images: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and (dist.get_rank(), self.calls) == (1, self.step):
            self.event(self.get_parameter("1.weight"))
        return super().forward(images)


def change_last_bit(weight: Tensor) -> None:
    with torch.no_grad():
        weight[-1, -1, -1, -1] = torch.nextafter(weight[-1, -1, -1, -1], torch.tensor(9.0))


def run_out_of_memory(_: Tensor) -> None:
    """As on a GPU."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")


EVENTS = {"changed bit": change_last_bit, "memory": run_out_of_memory}


def inline(settings: dict[str, Any]) -> str:
    """A mapping of a config on one line."""
    return "{" + ", ".join(f"{name}: {value}" for name, value in settings.items()) + "}"


def own_loss(**kwargs: Any) -> dict[str, Any]:
    return {"loss__name": f"{HERE}:nonfinite_loss", "loss__kwargs": inline(kwargs)}


def disturbed(**kwargs: Any) -> dict[str, Any]:
    return {"model__name": f"{HERE}:Disturbed", "model__kwargs": inline(kwargs)}


DIVERGING = disturbed(event="changed bit", step=5)
CASES: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "one NaN": own_loss(rank=1, first_step=6, last_step=6),
    "NaN in the last step": own_loss(rank=1, first_step=12, last_step=12),
    "NaN to the end": own_loss(rank=1, first_step=6, last_step=99)
    | {"train__max_nonfinite_steps": 3, "train__global_batch_size": UNEVEN_BATCH},
    "gradient to the end": own_loss(rank=1, first_step=2, last_step=99, gradient="true")
    | {"train__max_nonfinite_steps": 2, "train__micro_batch_size": 2},
    "diverged": DIVERGING | {"parallel__check_every_steps": 4, "checkpoint__every_steps": "null"},
    "diverged, saved": DIVERGING,
    "other code": {},
}


def change_code(folder: Path) -> None:
    """As on a machine that was not set up like the others: a line of the package differs, and a
    version.
    """
    copy = folder / "imagenet_cls"
    shutil.copytree(
        Path(imagenet_cls.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    with (copy / "seeding.py").open("a") as file:
        file.write("# a line more\n")
    agreement.__file__ = str(copy / "guards" / "agreement.py")
    safetensors.__version__ = "0.0.1"


def every_case(rank: int, world_size: int, folder: Path) -> None:
    """One run after the other, and what each ended with."""
    ends = {}
    for name, changes in CASES.items():
        words = words_for(
            folder / name, parallel__init_method=f"file://{folder}/store {name}", **changes
        )
        arguments = train_parser().parse_intermixed_args(words)
        loaded, rank_info = (
            load_for_training(arguments),
            RankInfo(rank, rank, world_size, world_size),
        )
        context = join_ranks(loaded, rank_info)
        ends[name] = [0, ""]
        if name == "other code" and rank == 1:
            change_code(folder)
        try:
            check_on_all_ranks(loaded, context, training=True)
            run_training(loaded, run_options(arguments, loaded), context)
        except UserError as error:
            ends[name] = [error.exit_code, str(error)]
            assert error.printed_elsewhere == (rank > 0), "only rank 0 prints"
        destroy_process_groups(context)
    (folder / f"ends{rank}.json").write_text(json.dumps(ends))


@pytest.fixture(scope="module")
def runs(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apart")
    rank_server.call(every_case, RANKS, folder)
    return folder


def end_of(runs: Path, name: str) -> tuple[int, list[str]]:
    """The exit code of a case on all ranks, and the lines of rank 0, which are printed."""
    by_rank = [json.loads((runs / f"ends{rank}.json").read_text())[name] for rank in range(RANKS)]
    assert by_rank[0][0] == by_rank[1][0]
    return by_rank[0][0], by_rank[0][1].splitlines()


def saved(folder: Path, step: int) -> dict[str, bytes]:
    """The bits of a checkpoint's weights and optimizer, but for BatchNorm's counts of batches,
    which count every one that it saw.
    """
    checkpoint = folder / "checkpoints" / f"step-{step:07d}"
    tensors = load_file(checkpoint / "model.safetensors")
    tensors |= load_file(checkpoint / "optimizer.safetensors")
    return {
        name: tensor.view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
        if not name.endswith("num_batches_tracked")
    }


def samples(step: int, rank: int, batch: int = BATCH) -> list[str]:
    """What a rank sees in a step (from 1 on), by the definition of the order."""
    order = torch.randperm(IMAGES, generator=generator("permutation", SEED, 0)).tolist()
    return [
        f"synthetic/train[{index}]"
        for index in order[(step - 1) * batch : step * batch][rank::RANKS]
    ]


def test_nan_on_one_rank_skips_the_update_on_all(runs: Path) -> None:
    """That ranks still agree, the checks before each checkpoint tell. Such a step is saved only if
    it is the last.
    """
    assert end_of(runs, "one NaN") == end_of(runs, "NaN in the last step") == (0, [])
    folder, ended = runs / "one NaN", runs / "NaN in the last step"
    undisturbed = runs / "undisturbed"
    assert saved(ended, 12) == saved(ended, 11) == saved(undisturbed, 11)
    assert saved(folder, 5) == saved(undisturbed, 5) != saved(folder, 7)
    assert saved(folder, 7) != saved(undisturbed, 7)
    assert not (folder / "checkpoints" / "step-0000006").exists()
    steps = records(folder, "train")
    assert [step["step"] for step in steps if step.get("skipped")] == [6] and len(steps) == 12
    assert len(records(folder, "event")) == 1


def test_repeated_nan_exits_6_and_names_rank_and_samples(runs: Path) -> None:
    code, lines = end_of(runs, "NaN to the end")
    mine = samples(8, 1, UNEVEN_BATCH)
    assert code == 6 and "step 8 (" in lines[0]
    assert "rank 1 of 2" in lines[1] and ", ".join(mine[:3]) in lines[1]
    logs = [
        (runs / "NaN to the end" / "logs" / f"rank{rank}.log").read_text() for rank in range(RANKS)
    ]
    listed = re.findall(r"the samples of step 8 on this rank: (.*)", logs[1])
    assert [line.split(", ") for line in listed] == [mine] and "the samples of step" not in logs[0]


def test_repeated_nonfinite_gradient_exits_6_and_names_all_ranks(runs: Path) -> None:
    """It is the same on all ranks once it is reduced, so all are named. From a second micro-batch
    on.
    """
    code, lines = end_of(runs, "gradient to the end")
    assert code == 6 and "step 2 (" in lines[0]
    assert "ranks 0, 1 of 2" in lines[1] and samples(2, 0)[0] in lines[1]


def test_diverged_rank_exits_5_and_is_named(runs: Path) -> None:
    """In step 5 on rank 1 one bit changes; every fourth step is checked."""
    code, lines = end_of(runs, "diverged")
    expected = r".*rank 1 \(.+\) of 2 and rank 0 differ after step 8, in 1\.weight\b.*"
    assert code == 5 and re.fullmatch(expected, lines[0]) and "after step 4," in lines[2]


def test_diverged_replicas_are_not_saved(runs: Path) -> None:
    code, lines = end_of(runs, "diverged, saved")
    assert code == 5 and "after step 4," in lines[2]
    assert max((runs / "diverged, saved" / "checkpoints").glob("step-*")).name == "step-0000004"


def test_ranks_with_different_code_or_libraries_exit_2(runs: Path) -> None:
    code, lines = end_of(runs, "other code")
    assert code == 2 and "rank 1 of 2" in lines[0]
    assert "safetensors" in lines[0] and "the code of imagenet_cls" in lines[0]
    assert not (runs / "other code").exists()


def test_out_of_memory_on_one_rank_ends_all(rank_server: RankServer, tmp_path: Path) -> None:
    words = words_for(tmp_path / "run", **disturbed(event="memory", step=4))
    codes = rank_server.run(words, tmp_path / "output.txt", 2)
    printed = (tmp_path / "output.txt").read_text()
    assert codes[1] == 5 and codes[0] != 0, printed
    assert "train.micro_batch_size" in printed
