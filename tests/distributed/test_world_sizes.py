"""One to seven real ranks: they read the same samples, count the same, and start from the same
weights.

They also have the same losses and the same first gradient, with equal shares of a batch and with
uneven ones. Also as many micro-batches in turn instead: the groups of images that go through the
model together are the same; what mixes them is drawn for each by itself.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import MULTILABEL, arguments, losses, train_here
from torch import nn

from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import AugmentConfig, EvalConfig
from imagenet_cls.data.loader import TrainBatch, TrainLoader, WorkerOptions, eval_batches
from imagenet_cls.data.samplers import EpochSampler, shard_for_eval
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.data.transforms import EvalTransform, TrainTransform
from imagenet_cls.engine.build import TrainingParts, build
from imagenet_cls.engine.evaluate import EvaluationLabels, compute_results, model_outputs
from imagenet_cls.engine.meter import StepResult
from imagenet_cls.engine.train import train
from imagenet_cls.engine.user_metrics import build_metrics, compute_metrics
from imagenet_cls.errors import ConfigError, ResourceError
from imagenet_cls.guards.replicas import check_same_weights
from imagenet_cls.parallel.collectives import all_reduce_mean, gather_to_main
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.parallel.sync_bn import synchronize_batch_norm
from imagenet_cls.parallel.wrap import BatchNormStatistics, broadcast_buffers, wrap_ddp

WORLD_SIZES = (1, 2, 3, 4)
BATCHES = {12: 1, 48: 2, 25: 2}  # and in how many micro-batches each
TEST_IMAGES = (2, 359, 361)  # with two, some ranks have no image


class Numbered(ImageSource):
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


def steps_read(context: RankContext, batch: int, accumulation: int) -> list[list[int]]:
    """On rank 0, for each step of an epoch the sorted numbers that all ranks' loaders read; from
    step 1 on.
    """
    sampler = EpochSampler(
        103, batch, context.rank, context.world_size, seed=3, accumulation=accumulation
    )
    whole = TrainTransform(AugmentConfig(size_px=2, scale=[1.0, 1.0], ratio=[1.0, 1.0]))
    loader = TrainLoader(Numbered(103), whole, sampler, 3, WorkerOptions())
    micro_batches = [numbers_of(batch.images) for batch in loader.epoch(epoch=2, start_step=1)]
    rows = [
        (index // accumulation, number)
        for index, numbers in enumerate(micro_batches)
        for number in numbers
    ]
    gathered = gather_to_main(rows, context)
    steps = max((step for step, _ in gathered), default=-1) + 1
    return [
        sorted(number for step, number in gathered if step == wanted) for wanted in range(steps)
    ]


class Outputs(nn.Module):
    """The outputs of each image of `Numbered`. Those of a network depend on the images beside it,
    in the last bits.
    """

    def __init__(self, outputs: torch.Tensor):
        super().__init__()
        self.register_buffer("outputs", outputs)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.outputs[numbers_of(images)]


def counts(context: RankContext, num_images: int) -> dict[str, Any]:
    source, shard = (
        Numbered(num_images),
        shard_for_eval(num_images, context.rank, context.world_size),
    )
    model = Outputs(torch.randn(num_images, 7, generator=torch.Generator().manual_seed(0)))
    unchanged = EvalTransform(EvalConfig(crop_px=2, resize_px=2))
    batches = eval_batches(source, unchanged, shard, 50, WorkerOptions())
    outputs = model_outputs({"raw": model}, batches, lambda images: images, context.device, None)
    own = build_metrics(OWN_METRICS, 7, ["raw"], context)
    result = compute_results(outputs, ["raw"], context, 7, EvaluationLabels(), own)["raw"]
    return {name: value for name, value in result.items() if name != "seconds"}


def label_scores(context: RankContext, num_images: int) -> dict[str, Any]:
    """The results of images with several labels, of which many have equal scores."""
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(num_images, 7, generator=draws).round(decimals=1)
    targets = (torch.rand(num_images, 7, generator=draws) < 0.3).float()
    shard = torch.tensor(list(shard_for_eval(num_images, context.rank, context.world_size)))
    outputs = [
        ({"raw": logits[rows], "ema": -logits[rows]}, targets[rows], rows)
        for rows in shard.long().split(50)
        if len(rows)
    ]
    labels = EvaluationLabels(threshold=0.5)
    metric = ["helpers:label_precision"]
    own = build_metrics(metric, 7, ["raw", "ema"], context)
    results = compute_results(outputs, ["raw", "ema"], context, 7, labels, own)
    for result in results.values():
        del result["seconds"]
    return results


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


def metrics_of_torchmetrics_are_not_summed(context: RankContext) -> None:
    """Neither a state that is in `state_dict()`, here a list, nor the weights of a model that a
    metric contains.
    """
    from torchmetrics import CatMetric

    class Total(CatMetric):
        def compute(self) -> torch.Tensor:
            return super().compute().sum()

    metric = Total()
    metric.persistent(True)
    metric.model = nn.Linear(1, 1)
    weight = metric.model.weight.item()
    metric.update(torch.tensor(context.rank + 1.0))
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
        compute_results(batches, ["raw"], context, 7, EvaluationLabels(), own)


def starting_weights(context: RankContext) -> None:
    """After `wrap_ddp` all ranks have the weights and buffers of rank 0, of any dtype and memory
    format.
    """
    torch.manual_seed(context.rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    model.register_buffer("table", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    model.register_buffer("mask", torch.rand(5) > 0.5)
    model.register_buffer("nothing", torch.empty(0))
    model[1].running_mean.fill_(context.rank + 1.0)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    wrap_ddp(model, context, "auto")
    assert model[1].running_mean.tolist() == [1.0] * 4
    assert model.table.is_contiguous(memory_format=torch.channels_last)
    broadcast = {name: value.clone() for name, value in model.state_dict().items()}
    assert (broadcast["table"] == own["table"]).all() == (context.rank == 0)
    for name in ("0.weight", "1.running_var", "mask"):
        model.load_state_dict(broadcast)
        check_same_weights(model, context)
        if context.rank in (1, 3):
            value = model.state_dict()[name].view(-1)
            value[0] = (
                not value[0]
                if value.dtype is torch.bool
                else torch.nextafter(value[0], torch.tensor(9.0))
            )
        if context.world_size > 1:
            listing = "rank 1" if context.world_size < 4 else "ranks 1, 3"
            diverged = (
                rf"{listing} \(.*\) of {context.world_size} and rank 0 differ at the "
                rf"start, in {name}\.\n"
            )
            with pytest.raises(ResourceError, match=diverged):
                check_same_weights(model, context)
    broadcast_buffers(model)
    model[0].load_state_dict(
        {name[2:]: value for name, value in broadcast.items() if name.startswith("0.")}
    )
    check_same_weights(model, context)


def synchronized_statistics_stay(context: RankContext) -> None:
    """They are equal on all ranks as they come; averaging them would change last bits on three
    ranks.
    """
    model = synchronize_batch_norm(nn.BatchNorm1d(64), context)
    statistics = BatchNormStatistics(model, context)
    model(torch.randn(5, 64, generator=torch.Generator().manual_seed(context.rank)))
    before = [buffer.clone() for buffer in model.buffers()]
    statistics.sync(torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
    check_same_weights(model, context)


def statistics_are_averaged(context: RankContext) -> None:
    """The running means of BatchNorm over each rank's own images."""
    layer = nn.BatchNorm1d(4, momentum=1.0)
    statistics = BatchNormStatistics(layer, context)
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(context.world_size, 5, 4, generator=draws)
    layer(images[context.rank])
    statistics.sync(torch.tensor(False))
    torch.testing.assert_close(layer.running_mean, images.mean((0, 1)))
    check_same_weights(layer, context)


def everything(rank: int, world_size: int, folder: Path) -> None:
    """One world size after the other, on the first of four ranks."""
    for size in WORLD_SIZES:
        if rank < size:
            context = join_ranks(rank, size, folder / f"store{size}")
            found = {
                "read": {
                    batch: steps_read(context, batch, micro) for batch, micro in BATCHES.items()
                },
                "counted": {number: counts(context, number) for number in TEST_IMAGES},
                "scored": {number: label_scores(context, number) for number in TEST_IMAGES},
            }
            if rank == 0:
                (folder / f"{size}.json").write_text(json.dumps(found))
            if size > 1:
                starting_weights(context)
                counts_of_each_rank_alone_end_the_run(context)
                metrics_of_torchmetrics_are_not_summed(context)
                synchronized_statistics_stay(context)
                statistics_are_averaged(context)
                destroy_process_groups(context)


@pytest.fixture(scope="module")
def found(
    rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """What rank 0 of each world size saw; the ranks' own assertions have passed then."""
    folder = tmp_path_factory.mktemp("ranks")
    rank_server.call(everything, max(WORLD_SIZES), folder)
    return {size: json.loads((folder / f"{size}.json").read_text()) for size in WORLD_SIZES}


@pytest.mark.parametrize("batch", BATCHES)
def test_steps_read_the_same_samples_on_any_ranks(
    found: dict[int, dict[str, Any]], batch: int
) -> None:
    alone = found[1]["read"][str(batch)]
    assert len(alone) == 103 // batch - 1 and all(len(set(step)) == batch for step in alone)
    assert all(found[size]["read"][str(batch)] == alone for size in WORLD_SIZES)


@pytest.mark.parametrize("images", TEST_IMAGES)
def test_evaluations_count_the_same_on_any_ranks(
    found: dict[int, dict[str, Any]], images: int
) -> None:
    alone = found[1]["counted"][str(images)]
    assert alone["images"] == alone["hit_images"] == images
    assert alone["top1_pct"] == 100 * alone["hits"] / images and (
        images == 2 or 0 < alone["top1_pct"] < 100
    )
    for size in WORLD_SIZES:
        result = found[size]["counted"][str(images)]
        assert result.keys() == alone.keys() >= {"MulticlassF1Score", "MulticlassAUROC"}
        assert result == pytest.approx(alone, rel=1e-6)
        assert all(
            result[name] == alone[name] for name in result.keys() - {"loss", "MulticlassAUROC"}
        )
    assert 0 < alone["balanced_accuracy_pct"] <= 100 or images == 2


@pytest.mark.parametrize("images", TEST_IMAGES)
def test_results_of_multilabel_are_the_same_on_any_ranks(
    found: dict[int, dict[str, Any]], images: int
) -> None:
    alone = found[1]["scored"][str(images)]
    assert alone["raw"] != alone["ema"] and alone["raw"]["images"] == images
    for size in WORLD_SIZES:
        for kind, result in found[size]["scored"][str(images)].items():
            assert result.keys() == alone[kind].keys() >= {"label_precision"}
            expected = pytest.approx(alone[kind]["label_precision"], rel=1e-6)
            metric = {"label_precision": expected}
            assert result == alone[kind] | metric  # the others to the last bit


@dataclass(frozen=True)
class Case:
    """A short run, without what depends on the number of ranks: BatchNorm over one rank, dropout,
    mixing.
    """

    batch: int
    accumulation: int
    steps: int
    model: str = "plain"
    settings: tuple[str, ...] = ()
    tolerance: float = 1e-5


SYNC_BN = ("parallel.sync_bn=true", "model.kwargs.dropout=0.0")
BALANCED = ("data.balance=0.5", "loss.class_weights=balanced")
SAM = ("train.sam_rho=0.05", "train.clip_agc=0.1")
QUICK_CASES = (
    *(Case(64, accumulation, 5) for accumulation in (1, 2)),
    *(Case(64, accumulation, 5, settings=BALANCED) for accumulation in (1, 2)),
    *(Case(64, accumulation, 5, settings=SAM) for accumulation in (1, 2)),
    *(Case(64, accumulation, 5, settings=MULTILABEL) for accumulation in (1, 2)),
    Case(20, 1, 5, "noisy", SYNC_BN, 1e-4),
)
ALL_CASES = (
    *(Case(batch, accumulation, 30) for batch in (64, 256) for accumulation in (1, 2)),
    *(Case(64, accumulation, 10, settings=SAM) for accumulation in (1, 2)),
    Case(64, 1, 10, "noisy", SYNC_BN, 1e-4),
)


@dataclass
class RecordedRun:
    """In place of `engine.run.Run`: the training loop without a folder. gradient: the first one."""

    parts: TrainingParts
    progress: Progress = field(default_factory=Progress)
    losses: list[float] = field(default_factory=list)
    gradient: list[torch.Tensor] = field(default_factory=list)

    def epoch_batches(self, epoch: int, first_step: int) -> Iterator[TrainBatch]:
        return self.parts.train_loader.epoch(epoch, first_step)

    def after_step(self, result: StepResult) -> None:
        self.losses.append(all_reduce_mean(result.loss_and_top1, self.parts.context)[0].item())

    def after_epoch(self) -> None:
        pass

    def train(self) -> None:
        update = self.parts.updater.update

        def recorded_update(*arguments: Any) -> Any:
            gradients = [weight.grad for weight in self.parts.model.parameters()]
            self.gradient = self.gradient or [
                gradient.clone() for gradient in gradients if gradient is not None
            ]
            return update(*arguments)

        self.parts.updater.update = recorded_update  # type: ignore[method-assign, assignment]
        train(self)


def run_cases(
    cases: Sequence[Case], world_sizes: Sequence[int], rank: int, _: int, folder: Path
) -> None:
    """Run every case on one world size after the other, on the first ranks. The largest first: no
    rank has to wait.
    """
    for size in [size for size in sorted(world_sizes, reverse=True) if rank < size]:
        context = join_ranks(rank, size, folder / f"curves{size}")
        for number, case in enumerate(cases):
            limit = -(-case.batch // (size * case.accumulation))
            sizes = {"train.global_batch_size": case.batch, "train.micro_batch_size": limit}
            demo, *overrides = arguments(
                folder / "digits",
                folder,
                case.model,
                **sizes,
                train__max_steps=case.steps,
                train__epochs=10,
            )[:-2]
            run = RecordedRun(
                build(load_config(demo, [*overrides, *case.settings]).config, context)
            )
            assert run.parts.plan.accumulation == case.accumulation
            run.train()
            if rank == 0:
                torch.save([run.losses, run.gradient], folder / f"{size}-{number}.pt")
        if size > 1:
            destroy_process_groups(context)


def run_quick_cases(rank: int, world_size: int, folder: Path) -> None:
    run_cases(QUICK_CASES, (1, world_size), rank, world_size, folder)


def run_all_cases(rank: int, world_size: int, folder: Path) -> None:
    run_cases(ALL_CASES, (1, 2, 3, 5, 7), rank, world_size, folder)


@pytest.mark.parametrize(
    ("run_on_ranks", "cases", "world_sizes"),
    [
        (run_quick_cases, QUICK_CASES, (1, 3)),
        pytest.param(run_all_cases, ALL_CASES, (1, 2, 3, 5, 7), marks=pytest.mark.nightly),
    ],
)
def test_losses_and_first_gradient_are_the_same_on_any_ranks(
    rank_server: RankServer,
    digits: Path,
    tmp_path: Path,
    run_on_ranks: Any,
    cases: Any,
    world_sizes: Any,
) -> None:
    """Shares are uneven on 3, 5 and 7 ranks. References: one rank with the fewest micro-batches."""
    (tmp_path / "digits").symlink_to(digits)
    rank_server.call(run_on_ranks, max(world_sizes), tmp_path)
    references: dict[Any, Any] = {}
    for size in world_sizes:
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
            assert found[-1] < found[0] and len(found) == case.steps
            assert loss_difference <= case.tolerance and max(differences) <= 0.1 * case.tolerance


def test_two_ranks_have_the_losses_of_two_micro_batches(
    digits: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    """The losses: BatchNorm normalizes the same groups. (Its running statistics move once a step on
    ranks, and twice in turn; training never reads them.)
    """
    settings = {
        "model__kwargs": "{dropout: 0.0}",
        "data__repeats": 4,
        "train__max_steps": 5,
        "schedule__warmup_epochs": 0,
    }
    words = partial(arguments, digits, model="noisy", train__global_batch_size=64, **settings)
    for folder, micro_batch in (("accumulated", 32), ("other", 16)):
        train_here(words(work_dir=tmp_path / folder, train__micro_batch_size=micro_batch))
    store = tmp_path / "store"
    two = words(work_dir=tmp_path / "two", parallel__init_method=f"file://{store}")
    rank_server.train(two, 2)
    assert not store.exists()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "accumulated"), rel=1e-5)
    assert losses(tmp_path / "other") != pytest.approx(losses(tmp_path / "accumulated"), rel=1e-3)


def soft_cross_entropy() -> Any:
    """A loss that takes mixed targets only."""
    return lambda logits, targets: -(targets * logits.log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("ranks", [1, 2])
def test_own_loss_of_mixed_targets_gets_no_others(
    rank_server: RankServer, digits: Path, tmp_path: Path, ranks: int
) -> None:
    """Also in the passes over zeros before the first step on two ranks."""
    changes = {"loss__name": f"{Path(__file__).stem}:soft_cross_entropy", "train__max_steps": 1}
    words = arguments(digits, tmp_path / "run", mix__mixup_alpha=0.2, **changes)
    rank_server.train(words, ranks)
    assert len(losses(tmp_path / "run")) == 1


class Unused(nn.Module):
    """A model with a layer that its forward pass does not use."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.used = nn.Linear(3 * 16 * 16, num_classes)
        self.other = nn.Linear(2, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.used(images.flatten(1))


def test_unused_parameters_are_an_error_with_a_remedy_on_two_ranks(
    rank_server: RankServer, digits: Path, tmp_path: Path
) -> None:
    model = f"{Path(__file__).stem}:Unused"
    words = arguments(digits, tmp_path / "run", model__name=model, train__max_steps=1)
    codes = rank_server.run(words, tmp_path / "output", 2)
    printed = (tmp_path / "output").read_text()
    assert codes == [2, 2] and "model.freeze" in printed and "other.weight" in printed, printed
    frozen = arguments(
        digits, tmp_path / "run", model__name=model, train__max_steps=1, model__freeze="[other.*]"
    )
    rank_server.train(frozen, 2)
