"""Config -> parts: each part is handed its own section.

`build` makes the parts that `engine.train` runs. (`engine.check` asks the parts beforehand whether their sections are
good.)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from imagenet_cls.config.schema import Config, EmaConfig
from imagenet_cls.data import (
    DataSets,
    EpochSampler,
    ImageSource,
    Preprocess,
    SyntheticLoader,
    SyntheticSource,
    TrainLoader,
    TrainPreprocess,
    build_mixing,
    check_shared_memory,
    eval_batches,
    eval_transform,
    open_datasets,
    samples_per_epoch,
    shard_for_eval,
    synthetic_eval_batches,
    train_transform,
)
from imagenet_cls.engine.evaluate import Batch, EvaluationParts
from imagenet_cls.engine.model import (
    choose_mean_std,
    chosen_teacher,
    on_main_first,
    prepared_model,
    pretrained_mismatch,
)
from imagenet_cls.engine.plan import Plan, plan_run
from imagenet_cls.engine.sam import Sam
from imagenet_cls.engine.step import Updater, autocast, choose_precision, set_deterministic
from imagenet_cls.errors import ConfigError
from imagenet_cls.guards.agreement import check_same_data
from imagenet_cls.guards.replicas import check_same_weights, model_digest
from imagenet_cls.lookup import import_from_here
from imagenet_cls.models.build import head_names
from imagenet_cls.models.ema import ModelEma, build_ema
from imagenet_cls.optim.build import build_optimizer
from imagenet_cls.optim.distillation import Criterion, build_criterion
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.losses import build_loss
from imagenet_cls.optim.scaling import scaled_lr
from imagenet_cls.optim.schedule import Schedule, build_schedule
from imagenet_cls.parallel.data_parallel import Devices, choose_devices, spread
from imagenet_cls.parallel.environment import cpu_threads
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.wrap import BatchNormStatistics, warm_up_buckets, wrap_model

_MOST_WORKERS = 16


@dataclass
class Parts:
    """Everything that the loop touches. `model` is the model itself, `wrapped` what forward and backward go through.

    devices: this rank's; several with DataParallel only. lr: the highest rate, scaled for the batch. teacher_digest: of
    the weights that a distillation learns from, where there is one.
    """

    config: Config
    group: Group
    devices: Devices
    plan: Plan
    data: DataSets
    num_classes: int
    messages: list[str]
    model: nn.Module
    wrapped: nn.Module
    ema: ModelEma
    prepare: TrainPreprocess
    criterion: Criterion
    teacher_digest: str | None
    optimizer: torch.optim.Optimizer
    lr: float
    schedule: Schedule
    sam: Sam
    scaler: torch.amp.GradScaler
    updater: Updater
    statistics: BatchNormStatistics
    train_loader: TrainLoader | SyntheticLoader
    evaluation: EvaluationParts


def data_parallel_devices(config: Config) -> Devices:
    """The devices of a DataParallel run, whose first one holds the parameters. Raises UsageError for absent GPUs."""
    parallel = config.parallel
    return choose_devices(config.device, parallel.device_ids, parallel.output_device, torch.cuda.device_count())


def rank_devices(config: Config, group: Group) -> Devices:
    """What this rank computes on."""
    return data_parallel_devices(config) if config.parallel.mode == "dp" else Devices((group.device,), group.device)


def build(config: Config, group: Group, start_weights: bool = True) -> Parts:
    """All parts of a training run, in their state at step 0. A collective: every rank calls it.

    start_weights: whether the model gets the weights that the config has it start from. A run that goes on has its own,
    and asks for no file and no network. Raises DataError, ConfigError, CheckpointError, UsageError or ResourceError.
    """
    device, train = group.device, config.train
    for name in config.imports:  # `check` ran in the launching process, or on rank 0 only
        import_from_here(name)
    set_deterministic(train.deterministic, device)
    dtype = choose_precision(train.precision, device)
    data = on_main_first(group, lambda: open_datasets(config.data))
    assert data.train is not None and data.val is not None
    check_same_data(data, group)
    num_classes = choose_num_classes(config.model.num_classes, len(data.classes))
    devices = rank_devices(config, group)
    samples = samples_per_epoch(len(data.train), config.data.repeats_multiple)
    plan = plan_run(train, samples, group.world_size, len(devices.all))
    check_ema_updates(config.ema, plan)
    check_shared_memory(images_held(config, data, plan, group), group.rank_info.local_world_size)
    messages = [note for note in (devices.note, data.note) if note]
    lr, scaling = scaled_lr(config.optimizer, train.global_batch_size)
    messages += [scaling] if scaling else []

    model = prepared_model(config, num_classes, group, messages, start_weights, batch_norm_sees(config, plan))
    mean, std = choose_mean_std(config, model)
    if group.is_main and start_weights:
        messages += pretrained_mismatch(config, model, (mean, std), data.classes)
    teacher = chosen_teacher(config, num_classes, data.classes, group, (mean, std))
    wrapped = spread(wrap_model(model, group, config.parallel.mode), devices)
    check_same_weights(model, group)
    ema = build_ema(model, config.ema, train.global_batch_size)
    if train.compile:
        model.compile()  # in place: adds no prefix to any name
    criterion = build_criterion(build_loss(config.loss, num_classes, config.augment.splits), config.distill, teacher)
    optimizer = build_optimizer(config.optimizer, parameter_groups(model, config.optimizer))
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    preprocess = Preprocess(mean, std, device, train.channels_last)

    def throw_away_pass() -> None:
        size_px, splits = config.augment.size_px, config.augment.splits
        images = preprocess(torch.zeros(plan.loader_batch * splits, 3, size_px, size_px, dtype=torch.uint8))
        targets = torch.zeros(plan.loader_batch, dtype=torch.int64, device=device)
        with autocast(device, dtype):
            loss = criterion(wrapped(images), targets, images)
        loss.backward()

    warm_up_buckets(wrapped, throw_away_pass)
    return Parts(
        config=config,
        group=group,
        devices=devices,
        plan=plan,
        data=data,
        num_classes=num_classes,
        messages=messages,
        model=model,
        wrapped=wrapped,
        ema=ema,
        prepare=TrainPreprocess(
            preprocess, config.augment.erasing, build_mixing(config.mix, num_classes), config.seed, group.rank
        ),
        criterion=criterion,
        teacher_digest=None if teacher is None else model_digest(teacher.network),
        optimizer=optimizer,
        lr=lr,
        schedule=build_schedule(config.schedule, lr, plan.steps_per_epoch, train.epochs),
        sam=Sam(model, optimizer, train.sam_rho, train.sam_every_steps),
        scaler=scaler,
        updater=Updater(model, optimizer, train, scaler, head_names(model, num_classes)),
        statistics=BatchNormStatistics(model, group),
        train_loader=build_train_loader(config, data.train, plan, group, mean),
        evaluation=EvaluationParts(
            batches=partial(build_val_batches, config, data.val, group, len(devices.all)),
            on_devices=partial(spread, devices=devices),
            num_images=len(data.val),
            preprocess=preprocess,
            autocast_dtype=dtype,
            mean=mean,
            std=std,
        ),
    )


def batch_norm_sees(config: Config, plan: Plan) -> int:
    """Images that a BatchNorm layer normalises together in training."""
    at_once = plan.micro_batch * (1 if config.model.split_bn else config.augment.splits)
    return at_once * (plan.world_size if config.parallel.sync_bn else 1)


def check_ema_updates(ema: EmaConfig, plan: Plan) -> None:
    """Raise ConfigError for an average that no step of all epochs would update. (A run may be cut by max_steps.)"""
    steps = plan.epochs * plan.steps_per_epoch
    if (ema.decay is not None or ema.half_life_images is not None) and ema.every_steps > steps:
        text = f"{ema.every_steps} is more than the {steps} steps of all epochs, so no average would be made"
        raise ConfigError([f"ema.every_steps: {text}; give at most that"])


def choose_num_classes(asked: int | None, in_data: int) -> int:
    """The head's outputs. Raises ConfigError where the data has more classes than the config asks for."""
    if asked is not None and asked < in_data:
        raise ConfigError(
            [f"model.num_classes: {asked}, but the data set has {in_data} classes; give at least {in_data}, or null"]
        )
    return asked if asked is not None else in_data


def build_train_loader(
    config: Config, source: ImageSource, plan: Plan, group: Group, mean: Sequence[float]
) -> TrainLoader | SyntheticLoader:
    """This rank's micro-batches. mean: the colour (in 0..1) that policies fill what is moved out of sight with."""
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
        train_transform(config.augment, mean),
        sampler,
        plan.loader_batch,
        config.seed,
        num_workers_for(config, group),
        prefetch_batches=config.data.prefetch_batches,
        pin_memory=group.device.type == "cuda",
        timeout_sec=config.data.timeout_sec,
    )


def build_val_batches(config: Config, source: ImageSource, group: Group, num_devices: int) -> Iterable[Batch]:
    """This rank's shard of an evaluation, unpadded, in batches for all of its devices together."""
    shard = shard_for_eval(len(source), group.rank, group.world_size)
    batch_size = config.eval.batch_size * num_devices
    if isinstance(source, SyntheticSource):
        return synthetic_eval_batches(source, shard, batch_size, config.eval.crop_px, config.seed, group.device)
    return eval_batches(
        source,
        eval_transform(config.eval),
        shard,
        batch_size,
        num_workers_for(config, group),
        prefetch_batches=config.data.prefetch_batches,
        pin_memory=group.device.type == "cuda",
        timeout_sec=config.data.timeout_sec,
    )


def images_held(config: Config, data: DataSets, plan: Plan, group: Group) -> list[tuple[int, int]]:
    """What this rank's data workers hold ready at most, in training and in evaluation: images, and their side in px."""
    assert data.train is not None and data.val is not None
    if isinstance(data.train, SyntheticSource):
        return []
    ready = num_workers_for(config, group) * config.data.prefetch_batches
    of_epoch = plan.steps_per_epoch * plan.accumulation
    val_batch, val_share = config.eval.batch_size * plan.devices, -(-len(data.val) // group.world_size)
    return [
        (min(ready, of_epoch) * plan.loader_batch * config.augment.splits, config.augment.size_px),
        (min(ready * val_batch, val_share), config.eval.crop_px),
    ]


def num_workers_for(config: Config, group: Group) -> int:
    """Data workers of this rank: as the config says, else one for each CPU core that it can call its own."""
    chosen = config.data.num_workers
    return min(_MOST_WORKERS, cpu_threads(group.rank_info.local_world_size)) if chosen is None else chosen
