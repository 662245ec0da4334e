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
from imagenet_cls.parallel.environment import cpus_per_rank
from imagenet_cls.parallel.process_group import Group

_MAX_WORKERS = 16
_ENOUGH_CPUS = 4  # of a rank: one is left to the process that trains


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
    return TrainLoader(source, transform, sampler, config.seed, train_worker_options(config, plan, group))


def build_val_batches(config: Config, source: ImageSource, group: Group, num_devices: int) -> Iterable[Batch]:
    """This rank's shard, unpadded, in batches for all of its devices together."""
    shard = shard_for_eval(len(source), group.rank, group.world_size)
    batch_size = config.eval.batch_size * num_devices
    if config.data.name == "synthetic":
        num_classes, size_px = len(source.classes), config.eval.crop_px
        return synthetic_eval_batches(num_classes, shard, batch_size, size_px, config.seed, group.device)
    options = worker_options(config, group, -(-len(shard) // batch_size))
    return eval_batches(source, EvalTransform(config.eval), shard, batch_size, options)


def prefetched_images(config: Config, data: DataSets, plan: Plan, group: Group) -> list[tuple[int, int]]:
    """The most that this rank's workers hold in shared memory, in training and in evaluation: (images, side in px)."""
    assert data.train is not None and data.val is not None
    if config.data.name == "synthetic":
        return []
    per_epoch = plan.steps_per_epoch * plan.accumulation
    val_batch, val_shard = config.eval.batch_size * plan.devices, -(-len(data.val) // group.world_size)
    of_train = train_worker_options(config, plan, group)
    of_val = worker_options(config, group, -(-val_shard // val_batch))
    train_batches, val_batches = (options.num_workers * options.prefetch_batches for options in (of_train, of_val))
    return [
        (min(train_batches, per_epoch) * plan.loader_batch * config.augment.splits, config.augment.size_px),
        (min(val_batches * val_batch, val_shard), config.eval.crop_px),
    ]


def train_worker_options(config: Config, plan: Plan, group: Group) -> WorkerOptions:
    """Options of this rank's training loader."""
    return worker_options(config, group, plan.steps_per_epoch * plan.accumulation)


def worker_options(config: Config, group: Group, num_batches: int) -> WorkerOptions:
    """Options of a loader of this rank. num_batches: that the loader has in an epoch."""
    data, num_workers = config.data, config.data.num_workers
    if not isinstance(num_workers, int):
        num_workers = auto_workers(cpus_per_rank(group.rank_info), num_batches)
    return WorkerOptions(num_workers, data.prefetch_batches, group.device.type == "cuda", data.timeout_sec)


def auto_workers(cpus: float, num_batches: int) -> int:
    """The workers of `data.num_workers=auto`: one per CPU, without the CPU of the training process if there are enough.

    cpus: of the rank. num_batches: of the loader in an epoch; more workers would have nothing to do.
    """
    whole_cpus = max(1, int(cpus))
    return min(whole_cpus - (whole_cpus >= _ENOUGH_CPUS), _MAX_WORKERS, num_batches)


def describe_workers(config: Config, plan: Plan, group: Group) -> str:
    """The number of workers for the start-up table; empty for data without workers."""
    if config.data.name == "synthetic":
        return ""
    workers = f"{train_worker_options(config, plan, group).num_workers} per rank"
    if isinstance(config.data.num_workers, int):
        return workers
    return f"{workers} (data.num_workers=auto: {cpus_per_rank(group.rank_info):g} CPUs per rank)"
