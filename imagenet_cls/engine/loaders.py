"""This rank's loaders for training and evaluation."""

from collections.abc import Iterable, Sequence

from imagenet_cls.config.schema import Config
from imagenet_cls.data import (
    DataSets,
    EpochSampler,
    EvalTransform,
    ImageSource,
    SyntheticLoader,
    SyntheticSource,
    TrainLoader,
    TrainTransform,
    eval_batches,
    shard_for_eval,
    synthetic_eval_batches,
)
from imagenet_cls.engine.evaluate import Batch
from imagenet_cls.engine.plan import Plan
from imagenet_cls.parallel.environment import cpu_threads
from imagenet_cls.parallel.process_group import Group

_MAX_WORKERS = 16


def build_train_loader(
    config: Config, source: ImageSource, plan: Plan, group: Group, mean: Sequence[float]
) -> TrainLoader | SyntheticLoader:
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
    )
    if isinstance(source, SyntheticSource):
        return SyntheticLoader(source, sampler, plan.loader_batch, config.augment, config.seed, group.device)
    return TrainLoader(
        source,
        TrainTransform(config.augment, mean),
        sampler,
        plan.loader_batch,
        config.seed,
        num_workers_for(config, group),
        prefetch_batches=data.prefetch_batches,
        pin_memory=group.device.type == "cuda",
        timeout_sec=data.timeout_sec,
    )


def build_val_batches(config: Config, source: ImageSource, group: Group, num_devices: int) -> Iterable[Batch]:
    """This rank's shard, unpadded, in batches for all of its devices together."""
    shard = shard_for_eval(len(source), group.rank, group.world_size)
    batch_size = config.eval.batch_size * num_devices
    if isinstance(source, SyntheticSource):
        return synthetic_eval_batches(source, shard, batch_size, config.eval.crop_px, config.seed, group.device)
    return eval_batches(
        source,
        EvalTransform(config.eval),
        shard,
        batch_size,
        num_workers_for(config, group),
        prefetch_batches=config.data.prefetch_batches,
        pin_memory=group.device.type == "cuda",
        timeout_sec=config.data.timeout_sec,
    )


def prefetched_images(config: Config, data: DataSets, plan: Plan, group: Group) -> list[tuple[int, int]]:
    """The most that this rank's workers hold in shared memory, in training and in evaluation: (images, side in px)."""
    assert data.train is not None and data.val is not None
    if isinstance(data.train, SyntheticSource):
        return []
    batches = num_workers_for(config, group) * config.data.prefetch_batches
    per_epoch = plan.steps_per_epoch * plan.accumulation
    val_batch, val_shard = config.eval.batch_size * plan.devices, -(-len(data.val) // group.world_size)
    return [
        (min(batches, per_epoch) * plan.loader_batch * config.augment.splits, config.augment.size_px),
        (min(batches * val_batch, val_shard), config.eval.crop_px),
    ]


def num_workers_for(config: Config, group: Group) -> int:
    """`data.num_workers`, else this rank's share of the CPU cores."""
    workers = config.data.num_workers
    return min(_MAX_WORKERS, cpu_threads(group.rank_info.local_world_size)) if workers is None else workers
