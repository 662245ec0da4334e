"""This rank's loaders for training and evaluation."""

from collections.abc import Iterable, Sequence

from imagenet_cls.config.schema import Config
from imagenet_cls.data.builtin import SyntheticLoader, synthetic_eval_batches
from imagenet_cls.data.datasets import DataSets
from imagenet_cls.data.loader import BatchLoader, TrainLoader, WorkerOptions, eval_batches
from imagenet_cls.data.samplers import EpochSampler, shard_for_eval
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.data.transforms import EvalTransform, TrainTransform
from imagenet_cls.engine.evaluate import Batch
from imagenet_cls.engine.plan import Plan
from imagenet_cls.parallel.environment import cpu_threads
from imagenet_cls.parallel.process_group import Group

_MAX_WORKERS = 16


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
    )
    if config.data.name == "synthetic":
        return SyntheticLoader(len(source.classes), sampler, config.augment, config.seed, group.device)
    transform = TrainTransform(config.augment, mean)
    return TrainLoader(source, transform, sampler, config.seed, worker_options(config, group))


def build_val_batches(config: Config, source: ImageSource, group: Group, num_devices: int) -> Iterable[Batch]:
    """This rank's shard, unpadded, in batches for all of its devices together."""
    shard = shard_for_eval(len(source), group.rank, group.world_size)
    batch_size = config.eval.batch_size * num_devices
    if config.data.name == "synthetic":
        num_classes, size_px = len(source.classes), config.eval.crop_px
        return synthetic_eval_batches(num_classes, shard, batch_size, size_px, config.seed, group.device)
    return eval_batches(source, EvalTransform(config.eval), shard, batch_size, worker_options(config, group))


def prefetched_images(config: Config, data: DataSets, plan: Plan, group: Group) -> list[tuple[int, int]]:
    """The most that this rank's workers hold in shared memory, in training and in evaluation: (images, side in px)."""
    assert data.train is not None and data.val is not None
    if config.data.name == "synthetic":
        return []
    options = worker_options(config, group)
    batches = options.num_workers * options.prefetch_batches
    per_epoch = plan.steps_per_epoch * plan.accumulation
    val_batch, val_shard = config.eval.batch_size * plan.devices, -(-len(data.val) // group.world_size)
    return [
        (min(batches, per_epoch) * plan.loader_batch * config.augment.splits, config.augment.size_px),
        (min(batches * val_batch, val_shard), config.eval.crop_px),
    ]


def worker_options(config: Config, group: Group) -> WorkerOptions:
    """Options of this rank's loaders. The default of `data.num_workers` is this rank's share of the CPU cores."""
    data, num_workers = config.data, config.data.num_workers
    if num_workers is None:
        num_workers = min(_MAX_WORKERS, cpu_threads(group.rank_info.local_world_size))
    return WorkerOptions(num_workers, data.prefetch_batches, group.device.type == "cuda", data.timeout_sec)
