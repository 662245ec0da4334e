"""Build the components of a run (model, optimizer, schedule, loaders and others) from its config."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from imagenet_cls.config.schema import Config, EmaConfig
from imagenet_cls.data import (
    DataSets,
    Preprocess,
    SyntheticLoader,
    TrainLoader,
    TrainPreprocess,
    build_mixing,
    check_shared_memory,
    open_datasets,
    samples_per_epoch,
)
from imagenet_cls.engine.evaluate import EvaluationParts
from imagenet_cls.engine.loaders import build_train_loader, build_val_batches, prefetched_images
from imagenet_cls.engine.model import (
    build_distillation_teacher,
    build_training_model,
    choose_mean_std,
    pretrained_mismatch,
    run_on_main_first,
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
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.losses import Criterion, build_criterion, build_loss
from imagenet_cls.optim.schedule import Schedule, build_schedule, scaled_lr
from imagenet_cls.parallel.data_parallel import Devices, choose_devices, wrap_data_parallel
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.wrap import BatchNormStatistics, warm_up_buckets, wrap_model


@dataclass
class TrainingParts:
    """Everything that the loop uses.

    model: not wrapped. wrapped: the module to call in training (DDP, DataParallel or the model itself). devices: of
    this rank; several with DataParallel only. lr: the peak learning rate, scaled for the batch. messages: for the log
    at the start. teacher_digest: of the teacher's weights, where there is a teacher.
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
    batch_norm_statistics: BatchNormStatistics
    train_loader: TrainLoader | SyntheticLoader
    evaluation: EvaluationParts


def data_parallel_devices(config: Config) -> Devices:
    """The devices of a DataParallel run; the first holds the parameters. Raises UsageError for missing GPUs."""
    parallel = config.parallel
    return choose_devices(config.device, parallel.device_ids, parallel.output_device, torch.cuda.device_count())


def num_devices(config: Config, world_size: int) -> int:
    """The number of devices of all ranks together."""
    return world_size * (len(data_parallel_devices(config).all) if config.parallel.mode == "dp" else 1)


def rank_devices(config: Config, group: Group) -> Devices:
    """The devices of this rank."""
    return data_parallel_devices(config) if config.parallel.mode == "dp" else Devices((group.device,), group.device)


def build(config: Config, group: Group, load_initial_weights: bool = True) -> TrainingParts:
    """Build everything that a training run uses, in its state at step 0. A collective: every rank calls it.

    load_initial_weights: whether to load the weights that the config names; false for a run that resumes. Raises
    DataError, ConfigError, CheckpointError, UsageError or ResourceError.
    """
    device, train = group.device, config.train
    for name in config.imports:  # stage 2 of the checks imported them in the launching process or on rank 0 only
        import_from_here(name)
    set_deterministic(train.deterministic, device)
    dtype = choose_precision(train.precision, device)
    data = run_on_main_first(group, lambda: open_datasets(config.data))
    assert data.train is not None and data.val is not None
    check_same_data({"training images": data.train.digest(), "validation images": data.val.digest()}, group)
    num_classes = choose_num_classes(config.model.num_classes, len(data.classes))
    devices = rank_devices(config, group)
    samples = samples_per_epoch(len(data.train), config.data.repeats_multiple)
    plan = plan_run(train, samples, group.world_size, len(devices.all))
    check_ema_updates(config.ema, plan)
    check_shared_memory(prefetched_images(config, data, plan, group), group.rank_info.local_world_size)
    lr, scaling = scaled_lr(config.optimizer, train.global_batch_size)
    messages = [note for note in (devices.note, data.note, scaling) if note]

    model, model_messages = build_training_model(
        config, num_classes, group, load_initial_weights, batch_norm_images(config, plan)
    )
    messages += model_messages
    mean, std = choose_mean_std(config, model)
    if group.is_main and load_initial_weights:
        messages += pretrained_mismatch(config, model, (mean, std), data.classes)
    teacher = build_distillation_teacher(config, num_classes, data.classes, group, (mean, std))
    wrapped = wrap_data_parallel(wrap_model(model, group, config.parallel.mode), devices)
    check_same_weights(model, group)
    ema = build_ema(model, config.ema, train.global_batch_size)
    if train.compile:
        model.compile()  # in place, so no name gets a prefix
    criterion = build_criterion(build_loss(config.loss, num_classes, config.augment.splits), config.distill, teacher)
    optimizer = build_optimizer(config.optimizer, parameter_groups(model, config.optimizer))
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    preprocess = Preprocess(mean, std, device, train.channels_last)

    def forward_backward() -> None:
        size_px, splits = config.augment.size_px, config.augment.splits
        images = preprocess(torch.zeros(plan.loader_batch * splits, 3, size_px, size_px, dtype=torch.uint8))
        targets = torch.zeros(plan.loader_batch, dtype=torch.int64, device=device)
        with autocast(device, dtype):
            loss = criterion(wrapped(images), targets, images)
        loss.backward()

    warm_up_buckets(wrapped, forward_backward)
    return TrainingParts(
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
        batch_norm_statistics=BatchNormStatistics(model, group),
        train_loader=build_train_loader(config, data.train, plan, group, mean),
        evaluation=EvaluationParts(
            batches=partial(build_val_batches, config, data.val, group, len(devices.all)),
            on_devices=partial(wrap_data_parallel, devices=devices),
            num_images=len(data.val),
            preprocess=preprocess,
            autocast_dtype=dtype,
            mean=mean,
            std=std,
        ),
    )


def batch_norm_images(config: Config, plan: Plan) -> int:
    """The number of images over which a BatchNorm layer computes its statistics in training."""
    images = plan.micro_batch * (1 if config.model.split_bn else config.augment.splits)
    return images * (plan.world_size if config.parallel.sync_bn else 1)


def check_ema_updates(ema: EmaConfig, plan: Plan) -> None:
    """Raise ConfigError if `ema.every_steps` exceeds the steps of all epochs (`max_steps` may end a run earlier)."""
    steps = plan.epochs * plan.steps_per_epoch
    if (ema.decay is not None or ema.half_life_images is not None) and ema.every_steps > steps:
        text = f"{ema.every_steps} is more than the {steps} steps of the run, so the EMA would never be updated"
        raise ConfigError([f"ema.every_steps: {text}; give at most that"])


def choose_num_classes(configured: int | None, in_data: int) -> int:
    """The number of outputs of the head. Raises ConfigError if the data has more classes than `model.num_classes`."""
    if configured is not None and configured < in_data:
        raise ConfigError(
            [f"model.num_classes: {configured}, but the dataset has {in_data} classes; give at least that, or null"]
        )
    return configured if configured is not None else in_data
