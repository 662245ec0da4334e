"""This rank's loaders for training and evaluation."""

from collections.abc import Generator, Sequence

from torch import Tensor

from imagenet_cls.config.schema import Config, DataConfig
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.loader import TrainLoader, WorkerOptions, eval_batches
from imagenet_cls.data.samplers import EpochSampler, shard_for_eval
from imagenet_cls.data.synthetic import SyntheticLoader, repeat_first_batch
from imagenet_cls.data.transforms import EvalTransform, TrainTransform
from imagenet_cls.engine.plan import Plan, ceil_div
from imagenet_cls.parallel.cpus import cpus_per_rank
from imagenet_cls.parallel.process_group import RankContext

EvalBatch = tuple[Tensor, Tensor, Tensor]
"""uint8 images (B, C, H, W), targets (see `data.targets`), indices of the images (B,)."""

_MAX_WORKERS = 16  # for each device of a rank
# with at least this many CPUs, a rank reserves one for the process that trains
_MIN_CPUS_TO_RESERVE = 4


def build_train_loader(
    config: Config, source: ImageSet, plan: Plan, context: RankContext, mean: Sequence[float]
) -> TrainLoader:
    """The training loader of this rank. mean: fill color (0 to 1) of policies that move pixels out
    of the image.
    """
    data = config.data
    sampler = EpochSampler(
        len(source),
        plan.global_batch,
        context.rank,
        context.world_size,
        config.seed,
        data.repeats,
        data.repeats_multiple,
        accumulation=plan.accumulation,
        devices=plan.devices_per_rank,
        balance=data.balance,
        targets=source.required_targets("data.balance") if data.balance > 0 else None,
    )
    transform = TrainTransform(config.augment, mean)
    if data.name == "synthetic":
        return SyntheticLoader(source, transform, sampler, config.seed, context.device)
    options = train_worker_options(data, plan, context)
    return TrainLoader(source, transform, sampler, config.seed, options, plan.epochs)


def build_val_batches(
    config: Config,
    source: ImageSet,
    context: RankContext,
    devices_per_rank: int,
    mean: Sequence[float],
    endless: bool = False,
) -> Generator[EvalBatch]:
    """This rank's shard, unpadded, in batches for all of its devices together. mean: fill color of
    `eval.mode: pad`. endless: see `eval_batches`.
    """
    data, evaluation = config.data, config.eval
    shard = shard_for_eval(len(source), context.rank, context.world_size)
    batch_size = evaluation.batch_size * devices_per_rank
    transform = EvalTransform(evaluation, mean)
    if data.name == "synthetic":
        batches = eval_batches(source, transform, shard, batch_size, WorkerOptions())
        return repeat_first_batch(batches, shard, batch_size, context.device)
    num_batches = ceil_div(len(shard), batch_size)
    options = worker_options(data, context, num_batches, devices_per_rank)
    return eval_batches(source, transform, shard, batch_size, options, endless)


def train_worker_options(data: DataConfig, plan: Plan, context: RankContext) -> WorkerOptions:
    num_batches = plan.steps_per_epoch * plan.accumulation
    return worker_options(data, context, num_batches, plan.devices_per_rank)


def worker_options(
    data: DataConfig, context: RankContext, num_batches: int, devices_per_rank: int
) -> WorkerOptions:
    """Options of a loader of this rank with `num_batches` in an epoch, each for all its devices."""
    num_workers = data.num_workers
    if not isinstance(num_workers, int):
        num_workers = auto_workers(cpus_per_rank(context.rank_info), num_batches, devices_per_rank)
    pin_memory = context.device.type == "cuda"
    return WorkerOptions(num_workers, pin_memory, data.timeout_sec)


def auto_workers(cpus: float, num_batches: int, devices: int = 1) -> int:
    """`data.num_workers=auto`: one per CPU of the rank, at most 16 for each of its devices. With 4
    or more CPUs, one is left to the training process. More workers than batches of an epoch would
    be idle.
    """
    workers = max(1, int(cpus))
    if workers >= _MIN_CPUS_TO_RESERVE:
        workers -= 1
    return min(workers, _MAX_WORKERS * devices, num_batches)


def describe_workers(data: DataConfig, plan: Plan, context: RankContext) -> str:
    """The number of workers for the start-up table; "" for data without workers."""
    if data.name == "synthetic":
        return ""
    workers = f"{train_worker_options(data, plan, context).num_workers} per rank"
    if isinstance(data.num_workers, int):
        return workers
    return f"{workers} (data.num_workers=auto: {cpus_per_rank(context.rank_info):g} CPUs per rank)"
