"""Build the components of a run (model, optimizer, schedule, loaders and others) from its config."""

import os
import shutil
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from imagenet_cls.config.schema import Config, EmaConfig, height_width
from imagenet_cls.data.builtin import BatchLoader
from imagenet_cls.data.datasets import DataSets, open_datasets
from imagenet_cls.data.device import TrainPreprocess, build_mixing
from imagenet_cls.data.loader import check_shared_memory
from imagenet_cls.data.samplers import class_quotas, samples_per_epoch
from imagenet_cls.data.sources import ImageSource, describe_sizes, exif_warning, required_targets
from imagenet_cls.engine.evaluate import Evaluation
from imagenet_cls.engine.labels import evaluation_labels
from imagenet_cls.engine.loaders import build_train_loader, prefetched_images
from imagenet_cls.engine.metrics import Metrics, build_metrics
from imagenet_cls.engine.model import (
    build_distillation_teacher,
    build_training_model,
    choose_mean_std,
    run_on_main_first,
)
from imagenet_cls.engine.plan import Plan, part_sizes, plan_run
from imagenet_cls.engine.step import Sam, Updater, autocast, choose_precision, set_deterministic
from imagenet_cls.errors import ConfigError, UsageError
from imagenet_cls.guards.agreement import check_same_data
from imagenet_cls.guards.replicas import check_same_weights, model_digest
from imagenet_cls.lookup import import_from_cwd
from imagenet_cls.models.adapt import head_names
from imagenet_cls.models.ema import ModelEma, build_ema
from imagenet_cls.optim.build import build_optimizer
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.losses import Criterion, build_criterion, build_loss
from imagenet_cls.optim.schedule import Schedule, build_schedule, scaled_lr
from imagenet_cls.parallel.devices import Devices, choose_devices
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.wrap import (
    BatchNormStatistics,
    rebuild_ddp_buckets,
    wrap_data_parallel,
    wrap_model,
)


@dataclass
class TrainingParts:
    """Everything that the loop uses.

    wrapped: the module to call in training (DDP, DataParallel or the model itself). devices: of this rank. lr: the peak
    learning rate, scaled for the batch. messages: for the log at the start. teacher_digest: of the teacher's weights.
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
    preprocess: TrainPreprocess
    criterion: Criterion
    teacher_digest: str | None
    optimizer: torch.optim.Optimizer
    lr: float
    schedule: Schedule
    sam: Sam
    scaler: torch.amp.GradScaler
    updater: Updater
    batch_norm_statistics: BatchNormStatistics
    train_loader: BatchLoader
    evaluation: Evaluation
    metrics: dict[str, Metrics]


def data_parallel_devices(config: Config) -> Devices:
    """The devices of a DataParallel run; the first holds the parameters. Raises UsageError for missing GPUs."""
    parallel = config.parallel
    return choose_devices(
        config.device, parallel.device_ids, parallel.output_device, torch.cuda.device_count()
    )


def num_devices(config: Config, world_size: int) -> int:
    """The number of devices of all ranks."""
    return world_size * (
        len(data_parallel_devices(config).all) if config.parallel.mode == "dp" else 1
    )


def rank_devices(config: Config, group: Group) -> Devices:
    return (
        data_parallel_devices(config)
        if config.parallel.mode == "dp"
        else Devices((group.device,), group.device)
    )


def build(config: Config, group: Group, load_initial_weights: bool = True) -> TrainingParts:
    """Build everything that a training run uses, in its state at step 0. A collective: every rank calls it.

    load_initial_weights: whether to load the weights that the config names; false for a run that resumes. Raises
    UserError.
    """
    device, train = group.device, config.train
    for name in (
        config.imports
    ):  # stage 2 of the checks imported them in the launching process or on rank 0 only
        import_from_cwd(name)
    set_deterministic(train.deterministic, device)
    check_compiler(config, device)
    dtype = choose_precision(train, device)
    data = run_on_main_first(
        group, lambda: open_datasets(config.data, subset=config.eval.classes == "present")
    )
    assert data.train is not None and data.val is not None
    parts = {"training images": data.train, "validation images": data.val}
    check_same_data(
        {name: f"{part.digest()} {describe_sizes(part)}" for name, part in parts.items()}, group
    )
    num_classes = choose_num_classes(config.model.num_classes, len(data.classes))
    devices = rank_devices(config, group)
    samples = samples_per_epoch(len(data.train), config.data.repeats_multiple)
    plan = plan_run(train, samples, group.world_size, len(devices.all))
    check_ema_updates(config.ema, plan)
    check_shared_memory(
        prefetched_images(config, data, plan, group), group.rank_info.local_world_size
    )
    lr, scaling = scaled_lr(config.optimizer, train.global_batch_size)
    rotated = exif_warning(data.train) if group.is_main else None
    messages = [note for note in (devices.note, data.note, scaling, rotated) if note]
    if train.precision == "auto" and device.type == "cuda" and dtype != torch.bfloat16:
        messages.append("train.precision=auto does not use bf16, which this GPU only emulates")

    model, model_messages = build_training_model(
        config,
        num_classes,
        data.classes,
        group,
        load_initial_weights,
        min(batch_norm_images(config, plan)),
    )
    messages += model_messages
    mean, std = choose_mean_std(config, model)
    labels = evaluation_labels(config.eval, data.val, data.classes)
    evaluation = Evaluation(config, data.val, group, devices, mean, std, labels)
    teacher = build_distillation_teacher(config, num_classes, data.classes, group, (mean, std))
    wrapped = wrap_data_parallel(wrap_model(model, group, config.parallel.mode), devices)
    check_same_weights(model, group)
    ema = build_ema(model, config.ema, train.global_batch_size)
    names = ["raw"] if ema.module is None else ["raw", "ema"]
    compile_model(model, config)
    class_samples = samples_of_classes(config, data.train, num_classes)
    loss = build_loss(config.loss, num_classes, config.augment.splits, class_samples)
    criterion = build_criterion(loss, config.distill, teacher)
    head = head_names(model, num_classes)
    optimizer = build_optimizer(config.optimizer, parameter_groups(model, config.optimizer, head))
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    train_loader = build_train_loader(config, data.train, plan, group, mean)

    def warm_up_ddp() -> None:
        image_shape, splits = (
            (config.data.channels, *height_width(config.augment.size_px)),
            config.augment.splits,
        )
        size = train_loader.sampler.micro_batch_sizes[
            0
        ]  # torch.compile compiles again for another size
        images = evaluation.preprocess(torch.zeros(size * splits, *image_shape, dtype=torch.uint8))
        targets = torch.zeros(size, dtype=torch.int64, device=device)
        with autocast(device, dtype):
            loss = criterion(wrapped(images), targets, images)
        loss.backward()

    rebuild_ddp_buckets(wrapped, warm_up_ddp)
    keep_gradients = overwrites_gradients(config) and plan.accumulation > 1
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
        preprocess=TrainPreprocess(
            evaluation.preprocess,
            config.augment.erasing,
            build_mixing(config.mix, num_classes),
            config.seed,
            group.rank,
            config.mix.off_epoch,
        ),
        criterion=criterion,
        teacher_digest=None if teacher is None else model_digest(teacher.network),
        optimizer=optimizer,
        lr=lr,
        schedule=build_schedule(config.schedule, lr, plan.steps_per_epoch, train.epochs),
        sam=Sam(model, optimizer, train.sam_rho, train.sam_every_steps, keep_gradients),
        scaler=scaler,
        updater=Updater(model, optimizer, train, scaler, head, keep_gradients),
        batch_norm_statistics=BatchNormStatistics(model, group),
        train_loader=train_loader,
        evaluation=evaluation,
        metrics=build_metrics(config.eval.metrics, num_classes, names, group),
    )


def samples_of_classes(config: Config, source: ImageSource, num_classes: int) -> np.ndarray | None:
    """The samples of each class in an epoch, int64 (num_classes,), for class weights that depend on them, else None."""
    if not isinstance(config.loss.class_weights, str):
        return None
    counts = np.bincount(required_targets(source, "loss.class_weights"), minlength=num_classes)
    return class_quotas(counts, config.data.balance, len(source))


def check_compiler(config: Config, device: torch.device) -> None:
    """Raise UsageError if the model is compiled for a GPU and there is no C compiler for Triton."""
    is_present = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if config.train.compile and device.type == "cuda" and not is_present:
        raise UsageError(
            "train.compile needs a C compiler on GPUs, and there is no gcc or clang here.\n"
            "Install one (apt-get install gcc libc6-dev), or use train.compile=false."
        )


def compile_model(model: nn.Module, config: Config) -> None:
    """Compile `model` as `train.compile` says, in place, so that no name gets a prefix.

    Shapes are static: otherwise torch would compile kernels for dynamic shapes at the second batch size. Progressive
    resizing has too many sizes for that.
    """
    mode = config.train.compile
    if mode:
        static = config.augment.progressive.epochs is None
        model.compile(mode="default" if mode is True else mode, dynamic=False if static else None)


def overwrites_gradients(config: Config) -> bool:
    """Whether each backward pass of the compiled model returns its gradients in the same memory.

    CUDA graphs do. A `.grad` that is None before a backward pass becomes that memory. One that
    exists stays in its own, and the gradient is added to it.
    """
    return config.train.compile in ("reduce-overhead", "max-autotune")


def batch_norm_images(config: Config, plan: Plan) -> list[int]:
    """The numbers of images over which a BatchNorm layer computes its statistics in training: one, or two."""
    parts = plan.accumulation if config.parallel.sync_bn else plan.forward_passes
    views = 1 if config.model.split_bn else config.augment.splits
    return [images * views for images in part_sizes(plan.global_batch, parts)]


def check_ema_updates(ema: EmaConfig, plan: Plan) -> None:
    """Raise ConfigError if `ema.every_steps` exceeds the steps of all epochs (`max_steps` may end a run earlier)."""
    steps = plan.epochs * plan.steps_per_epoch
    if (ema.decay is not None or ema.half_life_images is not None) and ema.every_steps > steps:
        text = f"{ema.every_steps} is more than the {steps} steps of the run, so the EMA would never be updated"
        raise ConfigError([f"ema.every_steps: {text}; give at most {steps}"])


def choose_num_classes(configured: int | None, in_data: int) -> int:
    """The number of outputs of the head. Raises ConfigError if the data has more classes than `model.num_classes`."""
    if configured is not None and configured < in_data:
        raise ConfigError(
            [
                f"model.num_classes: {configured}, but the dataset has {in_data} classes; give {in_data} or more, or null"
            ]
        )
    return configured if configured is not None else in_data
