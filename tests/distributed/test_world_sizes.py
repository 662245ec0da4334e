"""One to seven real ranks: they count the same, and start from the same weights.

They also have the same losses and the same first gradient, with equal shares of a batch and with
uneven ones. Also as many micro-batches in turn instead: the groups of images that go through the
model together are the same; what mixes them is drawn for each by itself.
"""

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import MULTILABEL, arguments
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import EvalConfig
from imagenet_cls.data.image_set import Images, all_images
from imagenet_cls.data.loader import WorkerOptions, eval_batches
from imagenet_cls.data.samplers import shard_for_eval
from imagenet_cls.data.transforms import EvalTransform
from imagenet_cls.engine.evaluate import compute_results, model_outputs
from imagenet_cls.engine.meter import StepResult
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.short_run import run_steps
from imagenet_cls.engine.user_metrics import build_metrics, compute_metrics
from imagenet_cls.errors import ConfigError, ResourceError
from imagenet_cls.guards.replicas import check_same_weights
from imagenet_cls.parallel.collectives import all_reduce_mean, run_once_per_machine
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.parallel.sync_bn import synchronize_batch_norm
from imagenet_cls.parallel.wrap import BatchNormStatistics, wrap_ddp
from imagenet_cls.tasks.multi_label import MultiLabel
from imagenet_cls.tasks.single_label import SingleLabel

WORLD_SIZES = (1, 2, 3, 4)
TEST_IMAGES = (2, 359, 361)  # with two, some ranks have no image


class Numbered(Images):
    """Images of 2 x 2 pixels whose pixels and target spell their own number."""

    classes = tuple("abcdefg")

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def load(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([i // 256, i % 256, 7 * i % 256], dtype=torch.uint8).view(
            3, 1, 1
        ).expand(3, 2, 2), i % 7

    def name(self, i: int) -> str:
        return str(i)

    def digest(self) -> str:
        return "numbered"


def numbers_of(images: torch.Tensor) -> list[int]:
    """Which of `Numbered`'s images these are."""
    return (images[:, 0, 0, 0].int() * 256 + images[:, 1, 0, 0].int()).tolist()


class Outputs(nn.Module):
    """The outputs of each image of `Numbered`. Those of a network depend on the images beside it,
    in the last bits.
    """

    def __init__(self, outputs: torch.Tensor):
        super().__init__()
        self.register_buffer("outputs", outputs)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.outputs[numbers_of(images)]


def results(context: RankContext, num_images: int) -> dict[str, Any]:
    """The results of images with one label, and those of two models with several labels, of which
    many have equal scores.
    """
    draws = torch.Generator().manual_seed(0)
    rows = shard_for_eval(num_images, context.rank, context.world_size)
    model = Outputs(torch.randn(num_images, 7, generator=draws))
    unchanged = EvalTransform(EvalConfig(crop_px=2, resize_px=2))
    batches = eval_batches(
        all_images(Numbered(num_images), None), unchanged, rows, 50, WorkerOptions()
    )
    outputs = model_outputs({"single": model}, batches, lambda images: images, context.device, None)
    own = build_metrics(OWN_METRICS, 7, ["single"], context)
    found = compute_results(outputs, ["single"], context, 7, SingleLabel(), own)

    logits = torch.randn(num_images, 7, generator=draws).round(decimals=1)
    targets = (torch.rand(num_images, 7, generator=draws) < 0.3).float()
    label_outputs = [
        ({"raw": logits[part], "ema": -logits[part]}, targets[part], part)
        for part in torch.tensor(list(rows)).long().split(50)
        if len(part)
    ]
    kinds, labels = ["raw", "ema"], MultiLabel(0.5)
    own = build_metrics(["helpers:label_precision"], 7, kinds, context)
    found |= compute_results(label_outputs, kinds, context, 7, labels, own)
    for result in found.values():
        del result["seconds"]
    return found


class Hits(nn.Module):
    """Hits and images, in a buffer and, with `local`, in an attribute that no other rank sees."""

    def __init__(self, num_classes: int, local: bool = False):
        super().__init__()
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.local = local
        self.images = 0

    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        self.counts += torch.tensor([(logits.argmax(1) == targets).sum(), len(targets)])
        self.images += len(targets)

    def compute(self) -> dict[str, Any]:
        return {"hits": self.counts[0], "hit_images": self.images if self.local else self.counts[1]}

    def reset(self) -> None:
        self.counts.zero_()
        self.images = 0


def local_hits(num_classes: int) -> Hits:
    return Hits(num_classes, local=True)


# Of torchmetrics: sums, and all outputs in lists.
OWN_METRICS = [
    *(
        "torchmetrics.classification:MulticlassF1Score",
        "torchmetrics.classification:MulticlassAUROC",
    ),
    "test_world_sizes:Hits",
]


def models_in_metrics_are_not_summed(context: RankContext) -> None:
    """The weights of a model that a metric of torchmetrics contains."""
    from torchmetrics import SumMetric

    metric = SumMetric()
    metric.model = nn.Linear(1, 1)
    weight = metric.model.weight.item()
    metric.update(context.rank + 1.0)
    expected = sum(range(context.world_size + 1))
    assert compute_metrics({"a:total": metric}, context) == {"total": expected}
    assert metric.model.weight.item() == weight


def counts_of_each_rank_alone_end_the_run(context: RankContext) -> None:
    own = build_metrics(["test_world_sizes:local_hits"], 7, ["raw"], context)
    batches = [
        (
            {"raw": torch.eye(7)[: context.rank]},
            torch.arange(context.rank),
            torch.arange(context.rank),
        )
    ]
    with pytest.raises(ConfigError, match=r"eval\.metrics: 'hit_images' differs between ranks"):
        compute_results(batches, ["raw"], context, 7, SingleLabel(), own)


def starting_weights(context: RankContext) -> None:
    """After `wrap_ddp` all ranks have the weights and buffers of rank 0, of any dtype and memory
    format.
    """
    torch.manual_seed(context.rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    model.register_buffer("table", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    model.register_buffer("mask", torch.rand(5) > 0.5)
    model.register_buffer("nothing", torch.empty(0))
    own = model.table.clone()
    wrap_ddp(model, context, "auto")
    assert model.table.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.table, own) == context.is_main
    for name in ("0.weight", "1.running_var", "mask"):
        check_same_weights(model, context)
        values = model.state_dict()[name].view(-1)
        kept = values.clone()
        if context.rank in (1, 3):
            values[0] = values[0] == 0
        listing = "rank 1" if context.world_size < 4 else "ranks 1, 3"
        with pytest.raises(ResourceError, match=rf" {listing} .* and rank 0 .*, in {name}\."):
            check_same_weights(model, context)
        values.copy_(kept)


def statistics_are_averaged(context: RankContext) -> None:
    """The running means of BatchNorm over each rank's own images.

    Those that are equal on all ranks stay to the bit, which averaging would change on three ranks:
    of SyncBN, and of frozen layers.
    """
    layer = nn.BatchNorm1d(64, momentum=1.0)
    equal = nn.Sequential(synchronize_batch_norm(nn.BatchNorm1d(64), context), deepcopy(layer))
    draws = torch.Generator().manual_seed(0)
    equal[1].eval().running_mean.normal_(generator=draws)
    images = torch.randn(context.world_size, 5, 64, generator=draws)
    averages = [BatchNormStatistics(model, context) for model in (layer, equal)]
    for model in (layer, equal):
        model(images[context.rank])
    before = deepcopy(equal.state_dict())
    for statistics in averages:
        statistics.sync(torch.tensor(False))
    torch.testing.assert_close(layer.running_mean, images.mean((0, 1)))
    check_same_weights(layer, context)
    assert all(torch.equal(value, before[name]) for name, value in equal.state_dict().items())


def one_rank_of_a_machine_lists(context: RankContext) -> None:
    """The others get what it sends, or list, too. Machines have two ranks."""
    for is_sent in (True, False):
        called: list[int] = []

        def call(called: list[int] = called) -> int:
            called.append(context.rank)
            return context.rank

        with patch("socket.gethostname", lambda: f"machine {context.rank // 2}"):
            sent = (lambda rank: rank + 10) if is_sent else (lambda rank: None)
            result = run_once_per_machine(context, call, "key", sent)
        is_first = context.rank % 2 == 0
        assert bool(called) == (is_first or not is_sent)
        assert result == (context.rank if called else context.rank - 1 + 10)


def everything(rank: int, world_size: int, folder: Path) -> None:
    """One world size after the other, on the first of four ranks."""
    for size in WORLD_SIZES:
        if rank < size:
            context = join_ranks(rank, size, folder / f"store{size}")
            found = {number: results(context, number) for number in TEST_IMAGES}
            if rank == 0:
                (folder / f"{size}.json").write_text(json.dumps(found))
            if size > 1:
                starting_weights(context)
                counts_of_each_rank_alone_end_the_run(context)
                models_in_metrics_are_not_summed(context)
                statistics_are_averaged(context)
                one_rank_of_a_machine_lists(context)
                destroy_process_groups(context)


@pytest.fixture(scope="module")
def found(
    rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """What rank 0 of each world size saw; the ranks' own assertions have passed then."""
    folder = tmp_path_factory.mktemp("ranks")
    rank_server.call(everything, max(WORLD_SIZES), folder)
    return {size: json.loads((folder / f"{size}.json").read_text()) for size in WORLD_SIZES}


@pytest.mark.parametrize("images", TEST_IMAGES)
def test_evaluations_count_the_same_on_any_ranks(
    found: dict[int, dict[str, Any]], images: int
) -> None:
    of_all = {size: found[size][str(images)] for size in WORLD_SIZES}
    alone = of_all[1]["single"]
    assert alone["images"] == alone["hit_images"] == images
    assert alone["top1_pct"] == 100 * alone["hits"] / images
    assert images == 2 or 0 < alone["top1_pct"] < 100
    assert of_all[1]["raw"] != of_all[1]["ema"]
    # all others are equal to the last bit
    rounded = {"loss", "MulticlassF1Score", "MulticlassAUROC", "label_precision"}
    for kinds in of_all.values():
        for kind, result in kinds.items():
            expected = of_all[1][kind]
            assert result.keys() == expected.keys()
            assert result == {
                name: pytest.approx(value, rel=1e-6) if name in rounded else value
                for name, value in expected.items()
            }


@dataclass(frozen=True)
class Case:
    """A short run, without what depends on the number of ranks: dropout, mixing, and BatchNorm over
    other images. accumulation: 0 for one micro-batch of each of three ranks, or three in turn.
    """

    batch: int
    accumulation: int
    steps: int
    model: str = "plain"
    settings: tuple[str, ...] = ()
    tolerance: float = 1e-5


NO_DROPOUT = ("model.kwargs.dropout=0.0",)
SYNC_BN = ("parallel.sync_bn=true", *NO_DROPOUT)
FROZEN_BN = ("model.name=test_resnet", "model.freeze=[conv1.*]", "model.freeze_bn=true")
# The collectives of SyncBN run within backward, between those of the gradients.
RECOMPUTED = ("model.name=test_resnet", "parallel.sync_bn=true", "train.grad_checkpointing=true")
BALANCED = ("data.balance=0.5", "loss.class_weights=balanced")
SAM = ("train.sam_rho=0.05", "train.clip_agc=0.1")
QUICK_CASES = (
    *(Case(64, accumulation, 5) for accumulation in (1, 2)),
    *(Case(64, accumulation, 5, settings=BALANCED) for accumulation in (1, 2)),
    *(Case(64, accumulation, 5, settings=SAM) for accumulation in (1, 2)),
    *(Case(64, accumulation, 5, settings=MULTILABEL) for accumulation in (1, 2)),
    Case(20, 1, 5, "noisy", SYNC_BN, 1e-4),
    Case(24, 0, 5, "noisy", NO_DROPOUT),
    Case(64, 2, 5, settings=FROZEN_BN),
    Case(64, 1, 5, settings=RECOMPUTED, tolerance=1e-4),
)
# The groups of the case with 0 are those of three ranks only.
ALL_CASES = (
    *(Case(256, accumulation, 30) for accumulation in (1, 2)),
    *(case for case in QUICK_CASES if case.accumulation > 0),
)


def run_case(case: Case, context: RankContext, folder: Path) -> list[Any]:
    """The loss of each step, over all ranks, and the first gradient."""
    losses: list[float] = []
    gradient: list[torch.Tensor] = []
    accumulation = case.accumulation or 3 // context.world_size
    sizes = {
        "train.global_batch_size": case.batch,
        "train.micro_batch_size": -(-case.batch // (context.world_size * accumulation)),
        "train.max_steps": case.steps,
        "train.epochs": 10,
    }
    demo, *overrides = arguments(folder / "digits", folder, case.model, **sizes)[:-2]

    def keep_loss(result: StepResult, parts: TrainingParts) -> None:
        assert parts.plan.accumulation == accumulation
        losses.append(all_reduce_mean(result.loss_and_metric, context)[0].item())

    def keep_gradient(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradient[:] = gradient or [weight.grad.clone() for weight in weights]

    hook = register_optimizer_step_pre_hook(keep_gradient)
    run_steps(load_config(demo, [*overrides, *case.settings]).config, context, keep_loss)
    hook.remove()
    return [losses, gradient]


# By the number of ranks that are started: the world sizes, the largest first, since no rank has to
# wait then, and the runs.
RUNS = {3: ((3, 1), QUICK_CASES), 7: ((7, 5, 3, 2, 1), ALL_CASES)}


def run_cases(rank: int, ranks: int, folder: Path) -> None:
    """Run every case on one world size after the other, on the first ranks."""
    world_sizes, cases = RUNS[ranks]
    for size in [size for size in world_sizes if rank < size]:
        context = join_ranks(rank, size, folder / f"curves{size}")
        for number, case in enumerate(cases):
            found = run_case(case, context, folder)
            if rank == 0:
                torch.save(found, folder / f"{size}-{number}.pt")
        if size > 1:
            destroy_process_groups(context)


@pytest.mark.parametrize("ranks", [3, pytest.param(7, marks=pytest.mark.nightly)])
def test_losses_and_first_gradient_are_the_same_on_any_ranks(
    rank_server: RankServer, digits: Path, tmp_path: Path, ranks: int
) -> None:
    """Shares are uneven on 3, 5 and 7 ranks. References: one rank with the fewest micro-batches."""
    world_sizes, cases = RUNS[ranks]
    (tmp_path / "digits").symlink_to(digits)
    rank_server.call(run_cases, ranks, tmp_path)
    references: dict[Any, Any] = {}
    for size in reversed(world_sizes):
        for number, case in enumerate(cases):
            found, gradient = torch.load(tmp_path / f"{size}-{number}.pt")
            key = (case.batch, case.model, case.settings)
            expected, expected_gradient = references.setdefault(key, (found, gradient))
            loss_difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
            differences = [
                (a - b).abs().max().item() for a, b in zip(gradient, expected_gradient, strict=True)
            ]
            print(
                f"{size} ranks, {case}: loss {loss_difference:.1e}, first gradient "
                f"{max(differences):.1e}"
            )
            assert len(set(found)) == case.steps
            assert loss_difference <= case.tolerance and max(differences) <= 0.1 * case.tolerance
