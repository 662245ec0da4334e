"""This rank's loaders for training and evaluation, their workers, and a warning if the loop waits for them."""

from collections.abc import Iterable, Sequence
from math import prod
from statistics import fmean
from typing import Any

from torch import Tensor

from imagenet_cls.config.schema import Config, height_width
from imagenet_cls.data.builtin import BatchLoader, SyntheticLoader, synthetic_eval_batches
from imagenet_cls.data.datasets import DataSets
from imagenet_cls.data.loader import TrainLoader, WorkerOptions, eval_batches
from imagenet_cls.data.samplers import EpochSampler, shard_for_eval
from imagenet_cls.data.sources import ImageSource, required_targets
from imagenet_cls.data.transforms import EvalTransform, TrainTransform
from imagenet_cls.data.turbojpeg import find_turbojpeg
from imagenet_cls.engine.plan import Plan
from imagenet_cls.parallel.environment import cpus_per_rank
from imagenet_cls.parallel.process_group import Group

Batch = tuple[Tensor, Tensor, Tensor]
"""uint8 images (B, 3, S, S), targets (B,), indices of the images (B,)."""

_MAX_WORKERS = 16
_MIN_CPUS_TO_RESERVE = (
    4  # with at least this many CPUs, a rank reserves one for the process that trains
)
# The run warns if it waits for more than this share of the time in this many consecutive logging intervals.
_MAX_WAIT_PCT = 20.0
_WARNING_INTERVALS = 5


def build_train_loader(
    config: Config, source: ImageSource, plan: Plan, group: Group, mean: Sequence[float]
) -> BatchLoader:
    """The training loader of this rank. mean: fill color (0 to 1) of policies that move pixels out of the image."""
    data = config.data
    sampler = EpochSampler(
        len(source),
        plan.global_batch,
        group.rank,
        group.world_size,
        config.seed,
        data.repeats,
        data.repeats_multiple,
        accumulation=plan.accumulation,
        devices=plan.devices,
        balance=data.balance,
        targets=required_targets(source, "data.balance") if data.balance > 0 else None,
    )
    if config.data.name == "synthetic":
        return SyntheticLoader(
            len(source.classes), sampler, config.augment, config.seed, group.device, data.channels
        )
    transform = TrainTransform(config.augment, mean)
    options = train_worker_options(config, plan, group)
    return TrainLoader(source, transform, sampler, config.seed, options, plan.epochs)


def build_val_batches(
    config: Config, source: ImageSource, group: Group, num_devices: int, mean: Sequence[float]
) -> Iterable[Batch]:
    """This rank's shard, unpadded, in batches for all of its devices together. mean: fill color of `eval.mode: pad`."""
    shard = shard_for_eval(len(source), group.rank, group.world_size)
    batch_size = config.eval.batch_size * num_devices
    if config.data.name == "synthetic":
        num_classes, size_px, channels = (
            len(source.classes),
            config.eval.crop_px,
            config.data.channels,
        )
        return synthetic_eval_batches(
            num_classes, shard, batch_size, size_px, config.seed, group.device, channels
        )
    options = worker_options(config, group, -(-len(shard) // batch_size))
    return eval_batches(source, EvalTransform(config.eval, mean), shard, batch_size, options)


def prefetched_images(
    config: Config, data: DataSets, plan: Plan, group: Group
) -> list[tuple[int, int]]:
    """The most that this rank's workers hold in shared memory, in training and evaluation: (images, bytes of one)."""
    assert data.train is not None and data.val is not None
    if config.data.name == "synthetic":
        return []
    channels, num_batches = (
        config.data.channels,
        plan.epochs * plan.steps_per_epoch * plan.accumulation,
    )
    train_batch = plan.micro_batch * plan.devices * config.augment.splits
    val_batch, val_shard = (
        config.eval.batch_size * plan.devices,
        -(-len(data.val) // group.world_size),
    )
    train = train_worker_options(config, plan, group)
    val = worker_options(config, group, -(-val_shard // val_batch))
    train_batches, val_batches = (
        options.num_workers * options.prefetch_batches for options in (train, val)
    )
    return [
        (
            min(train_batches, num_batches) * train_batch,
            channels * prod(height_width(config.augment.size_px)),
        ),
        (
            min(val_batches * val_batch, val_shard),
            channels * prod(height_width(config.eval.crop_px)),
        ),
    ]


def train_worker_options(config: Config, plan: Plan, group: Group) -> WorkerOptions:
    return worker_options(config, group, plan.steps_per_epoch * plan.accumulation)


def worker_options(config: Config, group: Group, num_batches: int) -> WorkerOptions:
    """Options of a loader of this rank with `num_batches` in an epoch."""
    data, num_workers = config.data, config.data.num_workers
    if not isinstance(num_workers, int):
        num_workers = auto_workers(cpus_per_rank(group.rank_info), num_batches)
    return WorkerOptions(
        num_workers, data.prefetch_batches, group.device.type == "cuda", data.timeout_sec
    )


def auto_workers(cpus: float, num_batches: int) -> int:
    """`data.num_workers=auto`: one per CPU of the rank, less one for the training process from 4 CPUs on."""
    whole_cpus = max(1, int(cpus))
    return min(whole_cpus - (whole_cpus >= _MIN_CPUS_TO_RESERVE), _MAX_WORKERS, num_batches)


def describe_workers(config: Config, plan: Plan, group: Group) -> str:
    """The number of workers for the start-up table; "" for data without workers."""
    if config.data.name == "synthetic":
        return ""
    workers = f"{train_worker_options(config, plan, group).num_workers} per rank"
    if isinstance(config.data.num_workers, int):
        return workers
    return f"{workers} (data.num_workers=auto: {cpus_per_rank(group.rank_info):g} CPUs per rank)"


class DataWaitCheck:
    """Warns once if the loop of this rank keeps waiting for data."""

    def __init__(self, config: Config, plan: Plan, group: Group):
        self.num_workers = train_worker_options(config, plan, group).num_workers
        self.cpus = cpus_per_rank(group.rank_info)
        self.decode = config.data.decode
        self.is_done = config.data.name == "synthetic"  # made on the device
        self.epoch: int | None = None
        self.waits_pct: list[float] = []

    def warning(self, records: Sequence[dict[str, Any]]) -> str | None:
        """The warning, or None. records: of one logging interval, from `Meter.flush`.

        The first interval of an epoch does not count: the workers start, or have no batch ready.
        """
        if self.is_done or not records:
            return None
        last, is_first = records[-1], records[-1]["epoch"] != self.epoch
        self.epoch = last["epoch"]
        if is_first:
            return None
        self.waits_pct = (
            [*self.waits_pct, last["data_wait_pct"]]
            if last["data_wait_pct"] > _MAX_WAIT_PCT
            else []
        )
        if len(self.waits_pct) < _WARNING_INTERVALS:
            return None
        self.is_done = True
        return (
            f"warning: the loop waited for data {fmean(self.waits_pct):.0f} % of the time in {_WARNING_INTERVALS} "
            f"consecutive logging intervals; {self._remedy()} (docs/scaling.md)"
        )

    def _remedy(self) -> str:
        if self.num_workers == 0:
            return "set data.num_workers=auto, so that workers read ahead"
        if self.num_workers < int(self.cpus) - 1:
            return f"increase data.num_workers: {self.num_workers} workers of a rank that may use {self.cpus:g} CPUs"
        decodes_regions = self.decode == "auto" and find_turbojpeg() is not None
        decoder = "" if decodes_regions else "use data.decode=auto with libjpeg-turbo 3, "
        cpus = f"the rank may use {self.cpus:g} CPUs for {self.num_workers} workers, so give it more CPUs"
        return f"{cpus}, {decoder}store smaller images, or store them on a faster disk"
