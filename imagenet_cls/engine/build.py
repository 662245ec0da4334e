"""Build the components of a run (model, optimizer, loaders and others) from its config."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from imagenet_cls.config.schema import (
    AugmentConfig,
    Config,
    EmaConfig,
    TrainConfig,
    height_width,
)
from imagenet_cls.data.classes import may_lack_classes
from imagenet_cls.data.datasets import DataSets, files_only, open_datasets
from imagenet_cls.data.device import DevicePrefetch, Normalize, TrainPreprocess, build_mixing
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.data.samplers import class_quotas, samples_per_epoch
from imagenet_cls.data.targets import class_sizes
from imagenet_cls.engine.evaluate import Evaluation
from imagenet_cls.engine.loaders import build_train_loader
from imagenet_cls.engine.model_with_loss import ModelWithLoss
from imagenet_cls.engine.parts import ModelParts, Optimization, TrainingParts
from imagenet_cls.engine.plan import Plan, part_sizes, plan_run
from imagenet_cls.engine.precision import choose_precision, set_deterministic
from imagenet_cls.engine.step import Sam, Updater
from imagenet_cls.engine.train import forward_backward
from imagenet_cls.engine.training_model import (
    build_distillation_teacher,
    build_training_model,
    choose_mean_std,
)
from imagenet_cls.engine.user_metrics import build_metrics
from imagenet_cls.engine.user_step import build_user_step
from imagenet_cls.errors import ConfigError, UsageError
from imagenet_cls.guards.agreement import check_same_data
from imagenet_cls.guards.replicas import check_same_weights, model_digest
from imagenet_cls.lookup import component, import_from_cwd
from imagenet_cls.models.ema import build_ema
from imagenet_cls.models.head import head_names
from imagenet_cls.models.teacher import Teacher
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.losses import TrainingLoss, build_loss, build_training_loss
from imagenet_cls.optim.optimizers import build_optimizer
from imagenet_cls.optim.schedule import build_schedule, scaled_lr
from imagenet_cls.parallel.collectives import run_once_per_machine
from imagenet_cls.parallel.devices import Devices, choose_devices
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.parallel.wrap import (
    BatchNormStatistics,
    rebuild_ddp_buckets,
    wrap_data_parallel,
    wrap_ddp,
)
from imagenet_cls.tasks import task_of


def data_parallel_devices(config: Config) -> Devices:
    """The devices of a DataParallel run; the first holds the parameters. Raises UsageError for
    missing GPUs.
    """
    return choose_devices(config.device, config.parallel.device_ids, torch.cuda.device_count())


def devices_per_rank(config: Config) -> int:
    """The number of devices of each rank."""
    return len(data_parallel_devices(config).all) if config.parallel.mode == "dp" else 1


def rank_devices(config: Config, context: RankContext) -> Devices:
    """The devices of this rank."""
    if config.parallel.mode == "dp":
        return data_parallel_devices(config)
    return Devices((context.device,))


def build(
    config: Config,
    context: RankContext,
    load_initial_weights: bool = True,
    data: DataSets | None = None,
) -> TrainingParts:
    """Build everything that a training run uses, in its state at step 0. A collective: every rank
    calls it.

    load_initial_weights: whether to load the weights that the config names; false for a run that
    resumes. data: the images of the config if they are open. Raises UserError.
    """
    device = context.device
    train = config.train
    # They may register models.
    for name in config.imports:
        import_from_cwd(name)
    set_deterministic(train.deterministic, device)
    check_compiler(train, device)
    autocast_dtype = choose_precision(train, device)
    devices = rank_devices(config, context)
    data, num_classes, plan = build_data(config, context, len(devices.all), data)
    built = build_model_parts(
        config, context, devices, data, num_classes, plan, load_initial_weights
    )
    optimization = build_optimization(config, built.model, num_classes, plan, autocast_dtype)
    mean, std = built.mean_std
    train_loader = build_train_loader(config, data.train, plan, context, mean)
    normalize = Normalize(mean, std, device, train.channels_last)

    task = task_of(config)
    messages = [devices.note, data.note, optimization.lr_note]
    if train.precision == "auto" and device.type == "cuda" and autocast_dtype != torch.bfloat16:
        used = "fp32" if autocast_dtype is None else "fp16"
        messages.append(f"train.precision=auto uses {used}: this GPU only emulates bf16")
    built.messages = [message for message in [*messages, *built.messages] if message]
    weight_kinds = ["raw"] if built.ema.module is None else ["raw", "ema"]
    parts = TrainingParts(
        **vars(built),
        **vars(optimization),
        config=config,
        context=context,
        devices=devices,
        plan=plan,
        data=data,
        num_classes=num_classes,
        prefetch=DevicePrefetch(device),
        preprocess=TrainPreprocess(
            normalize,
            config.augment.erasing,
            build_mixing(config.mix, num_classes, task.is_multilabel),
            config.seed,
            context.rank,
            config.mix.off_epoch,
        ),
        autocast_dtype=autocast_dtype,
        updater=Updater(
            built.model,
            optimization.optimizer,
            train,
            optimization.scaler,
            head_names(built.model, num_classes),
            keeps_gradients(train, plan),
            partial(component, "optimizer.name", config.optimizer.name, config.optimizer.kwargs),
        ),
        train_loader=train_loader,
        evaluation=Evaluation(
            config,
            data.val,
            context,
            devices,
            mean,
            std,
            is_compiled=bool(train.compile),
            keep_workers=True,
        ),
        metrics=build_metrics(config.eval.metrics, num_classes, weight_kinds, context),
        forward_backward=forward_backward if train.step is None else build_user_step(train.step),
    )
    rebuild_buckets_with_zeros(parts)
    parts.updater.allocate_gradients()  # the steps over zeros have cleared them
    return parts


def build_data(
    config: Config, context: RankContext, num_devices: int, data: DataSets | None
) -> tuple[DataSets, int, Plan]:
    """The images, the number of the model's outputs, and the plan of the run. num_devices: of each
    rank. data: the images if they are open. Raises UserError.
    """
    if data is None:
        may_lack = may_lack_classes(config)
        data = run_once_per_machine(
            context,
            lambda: open_datasets(config.data, allow_missing=may_lack),
            repr(config.data),
            files_only,
        )
    sources = {"training images": data.train, "validation images": data.val}
    digests = {
        name: f"{source.digest} {source.size_fingerprint()}" for name, source in sources.items()
    }
    check_same_data(digests, context)
    num_classes = task_of(config).num_outputs(config.model.num_classes, len(data.classes))
    samples = samples_per_epoch(len(data.train), config.data.repeats_multiple)
    plan = plan_run(config.train, samples, context.world_size, num_devices)
    check_ema_updates(config.ema, plan)
    return data, num_classes, plan


def build_model_parts(
    config: Config,
    context: RankContext,
    devices: Devices,
    data: DataSets,
    num_classes: int,
    plan: Plan,
    load_initial_weights: bool,
) -> ModelParts:
    """The model with its loss, in DDP, DataParallel or by itself. A collective.

    The order matters:
    * DDP gives all ranks the weights of rank 0, and then the EMA copies them;
    * the EMA copies the model before it is compiled;
    * BatchNorm's buffers get their final addresses before the compiled model runs.
    """
    parallel = config.parallel
    smallest_norm_batch = min(batch_norm_images(config, plan))
    model, messages = build_training_model(
        config, num_classes, data.classes, context, load_initial_weights, smallest_norm_batch
    )
    mean_std = choose_mean_std(config.data, model)
    teacher = build_distillation_teacher(config, num_classes, data.classes, context, mean_std)
    criterion = build_run_criterion(config, data.train, num_classes, teacher, context.device)
    metric = task_of(config).step_metric
    model_with_loss = ModelWithLoss(wrap_data_parallel(model, devices), criterion, metric)
    wrapped = wrap_ddp(model_with_loss, context, parallel.mode, parallel.find_unused_parameters)
    check_same_weights(model, context)
    ema = build_ema(model, config.ema, config.train.global_batch_size)
    statistics = BatchNormStatistics(model, context)
    for module in (model, model_with_loss):  # evaluations call the model alone
        compile_module(module, config.train, config.augment)
    teacher_digest = None if teacher is None else model_digest(teacher.network)
    return ModelParts(
        model, wrapped, criterion, ema, statistics, mean_std, teacher_digest, messages
    )


def build_optimization(
    config: Config,
    model: nn.Module,
    num_classes: int,
    plan: Plan,
    autocast_dtype: torch.dtype | None,
) -> Optimization:
    """The optimizer of the model's parameters, and its schedule. Raises ConfigError."""
    train = config.train
    lr, note = scaled_lr(config.optimizer, train.global_batch_size)
    # Some of timm's optimizers decay by lr ** 2 / max_lr, and take this lr as the highest.
    settings = replace(config.optimizer, lr=lr)
    head = head_names(model, num_classes)
    optimizer = build_optimizer(settings, parameter_groups(model, config.optimizer, head))
    device_type = next(model.parameters()).device.type
    return Optimization(
        optimizer,
        build_schedule(config.schedule, lr, plan.steps_per_epoch, train.epochs),
        Sam(model, optimizer, train.sam_rho, train.sam_every_steps, keeps_gradients(train, plan)),
        torch.amp.GradScaler(device_type, enabled=autocast_dtype == torch.float16),
        note,
    )


def build_run_criterion(
    config: Config,
    source: ImageSet,
    num_classes: int,
    teacher: Teacher | None,
    device: torch.device,
) -> TrainingLoss:
    """The loss of the run. source: the training images. device: of the model's outputs."""
    class_samples = None
    if isinstance(config.loss.class_weights, str):  # a rule that needs the sizes of classes
        class_samples = samples_of_classes(source, num_classes, config.data.balance)
    label_loss = build_loss(
        config.loss,
        num_classes,
        config.augment.splits,
        config.data.labels,
        class_samples,
        len(source),
        device,
    )
    return build_training_loss(label_loss, config.distill, teacher)


def samples_of_classes(source: ImageSet, num_classes: int, balance: float) -> np.ndarray:
    """The samples of each class in an epoch, for `loss.class_weights`: int64 (num_classes,).
    balance: `data.balance`.
    """
    targets = source.required_targets("loss.class_weights")
    counts = class_sizes(targets, num_classes)
    if balance == 0:
        return counts
    return class_quotas(counts, balance, len(source))


def check_compiler(train: TrainConfig, device: torch.device) -> None:
    """Raise UsageError if the model is compiled for a GPU and there is no C compiler for Triton."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if train.compile and device.type == "cuda" and not compiler:
        raise UsageError(
            "train.compile needs a C compiler on GPUs, and there is no gcc or clang here.",
            "Install one (apt-get install gcc libc6-dev), or use train.compile=false.",
        )


def compile_module(module: nn.Module, train: TrainConfig, augment: AugmentConfig) -> None:
    """Compile `module` as `train.compile` says, in place, so that no name gets a prefix.

    Shapes are static, because torch would otherwise compile kernels for dynamic shapes when it sees
    a second batch size. With progressive resizing there are too many sizes to compile each of them,
    so torch decides.
    """
    if train.compile:
        mode = "default" if train.compile is True else train.compile
        is_static = augment.progressive.epochs is None
        module.compile(mode=mode, dynamic=False if is_static else None)


def rebuild_buckets_with_zeros(parts: TrainingParts) -> None:
    """Make DDP rebuild its gradient buckets, by steps over images of zeros. They have the batch
    sizes of training, so that torch.compile compiles the model once.
    """
    config = parts.config
    image_shape = (config.data.channels, *height_width(config.augment.size_px))

    def zeros() -> Iterator[TrainBatch]:
        for samples in parts.train_loader.sampler.micro_batch_sizes:
            images = torch.zeros(samples * config.augment.splits, *image_shape, dtype=torch.uint8)
            classes = torch.zeros(samples, dtype=torch.int64)
            targets = task_of(config).targets_of_classes(classes, parts.num_classes)
            yield TrainBatch(images, targets)

    rebuild_ddp_buckets(parts.wrapped, lambda: parts.forward_backward(parts, zeros(), 0, 0))


def keeps_gradients(train: TrainConfig, plan: Plan) -> bool:
    """Whether `.grad` stays in its memory between the backward passes of a step.

    With CUDA graphs each pass returns its gradients in the same memory. A `.grad` that is None
    before a pass becomes that memory. One that exists stays in its own, and the gradient is added
    to it.
    """
    uses_cuda_graphs = train.compile in ("reduce-overhead", "max-autotune")
    return uses_cuda_graphs and plan.accumulation > 1


def batch_norm_images(config: Config, plan: Plan) -> list[int]:
    """The numbers of images over which a BatchNorm layer computes its statistics in training: one
    number, or two if micro-batches differ by one image.
    """
    num_batches = plan.accumulation if config.parallel.sync_bn else plan.forward_passes
    splits_per_layer = 1 if config.model.split_bn else config.augment.splits
    return [images * splits_per_layer for images in part_sizes(plan.global_batch, num_batches)]


def check_ema_updates(ema: EmaConfig, plan: Plan) -> None:
    """Raise ConfigError if `ema.every_steps` exceeds the steps of all epochs (`max_steps` may end a
    run earlier).
    """
    steps = plan.epochs * plan.steps_per_epoch
    averages = ema.decay is not None or ema.half_life_images is not None
    if averages and ema.every_steps > steps:
        raise ConfigError(
            [
                f"ema.every_steps: {ema.every_steps} is more than the {steps} steps of the run, so "
                f"the EMA would never be updated; give at most {steps}"
            ]
        )
