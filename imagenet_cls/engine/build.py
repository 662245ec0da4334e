"""Config -> parts: the only module that sees every section.

`check` is the second stage of checking (names, signatures, batch arithmetic): in the launching process, before any
rank is started or any image read. `build` makes the parts that `engine.train` runs. Each part is handed its own
section.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from imagenet_cls.config.schema import Config, ModelConfig, TrainConfig
from imagenet_cls.data import (
    DataSets,
    EpochSampler,
    ImageSource,
    Preprocess,
    SyntheticLoader,
    SyntheticSource,
    TrainLoader,
    check_data,
    eval_batches,
    eval_transform,
    open_datasets,
    shard_for_eval,
    synthetic_eval_batches,
    train_transform,
)
from imagenet_cls.engine.agree import refuse_differing_data
from imagenet_cls.engine.checkpoint import find_checkpoint
from imagenet_cls.engine.evaluate import Batch
from imagenet_cls.engine.plan import Plan, batch_problem, plan_run
from imagenet_cls.engine.resources import out_of_memory
from imagenet_cls.engine.step import Updater, autocast, choose_precision, set_deterministic
from imagenet_cls.errors import ConfigError, Problem
from imagenet_cls.lookup import import_from_here
from imagenet_cls.models.build import build_model, first_line, model_mean_std
from imagenet_cls.models.check import check_model
from imagenet_cls.models.ema import ModelEma, build_ema
from imagenet_cls.models.weights import load_weights, read_weights
from imagenet_cls.optim.build import build_optimizer, check_optimizer
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.losses import build_loss, check_loss
from imagenet_cls.optim.schedule import build_schedule, check_schedule
from imagenet_cls.parallel.data_parallel import Devices, choose_devices, spread
from imagenet_cls.parallel.group import Group, on_main
from imagenet_cls.parallel.place import cpu_threads
from imagenet_cls.parallel.sync_bn import synchronize_batch_norm
from imagenet_cls.parallel.wrap import RunningStatistics, settle_buckets, wrap
from imagenet_cls.seeding import hash_key, seed_generators

T = TypeVar("T")

_MOST_WORKERS = 16


@dataclass
class EvaluationParts:
    """What an evaluation needs besides a model. `batches` makes this rank's shard anew at each call.

    on_devices: a model as this rank runs it, which is the model itself but for DataParallel.
    """

    batches: Callable[[], Iterable[Batch]]
    on_devices: Callable[[nn.Module], nn.Module]
    num_images: int
    preprocess: Preprocess
    autocast_dtype: torch.dtype | None
    mean: list[float]
    std: list[float]


@dataclass
class Parts:
    """Everything that the loop touches. `model` is the model itself, `wrapped` what forward and backward go through.

    devices: this rank's; several with DataParallel only.
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
    ema: ModelEma | None
    criterion: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    schedule: Callable[[int], float]
    scaler: torch.amp.GradScaler
    updater: Updater
    statistics: RunningStatistics
    train_loader: TrainLoader | SyntheticLoader
    evaluation: EvaluationParts


def check(config: Config, world_size: int | None, training: bool = True) -> list[Problem]:
    """Stage 2: everything that can be known without data or ranks.

    world_size: None where it is not known yet. training: false for an evaluation, which any number of ranks can share.
    """
    for name in config.imports:
        try:
            import_from_here(name)
        except LookupError as error:
            return [Problem("imports", str(error))]
    problems = check_model(config.model) + check_data(config.data) + check_loss(config.loss)
    problems += check_optimizer(config.optimizer) + check_schedule(config.schedule, config.train.epochs)
    if world_size is not None:
        problems += check_ranks(config, world_size, training)
    return problems


def check_ranks(config: Config, world_size: int, training: bool = True) -> list[Problem]:
    """What is wrong with this many ranks: for the mode, and in training for the batch."""
    mode = config.parallel.mode
    if world_size > 1 and mode in ("none", "dp"):
        purpose = {"none": "is for one device", "dp": "runs all GPUs from one process"}[mode]
        return [Problem("parallel.mode", f"{mode!r} {purpose}, but {world_size} ranks were started; use 'ddp'")]
    if not training:
        return []
    if mode == "dp":
        gpus = len(data_parallel_devices(config).all)
        problem = batch_problem(config.train, gpus, "GPUs")
    else:
        problem = batch_problem(config.train, world_size)
    return [problem] if problem is not None else []


def data_parallel_devices(config: Config) -> Devices:
    """The devices of a DataParallel run, whose first one holds the parameters. Raises UsageError for absent GPUs."""
    parallel = config.parallel
    return choose_devices(config.device, parallel.device_ids, parallel.output_device, torch.cuda.device_count())


def rank_devices(config: Config, group: Group) -> Devices:
    """What this rank computes on."""
    return data_parallel_devices(config) if config.parallel.mode == "dp" else Devices((group.device,), group.device)


def build(config: Config, group: Group) -> Parts:
    """All parts of a training run, in their state at step 0. A collective: every rank calls it.

    Raises DataError, ConfigError, CheckpointError, UsageError or ResourceError.
    """
    device, train = group.device, config.train
    for name in config.imports:  # `check` ran in the launching process, or on rank 0 only
        import_from_here(name)
    set_deterministic(train.deterministic, device)
    dtype = choose_precision(train.precision, device)
    data = on_main_first(group, lambda: open_datasets(config.data))
    assert data.train is not None and data.val is not None
    refuse_differing_data(data, group)
    num_classes = choose_num_classes(config.model.num_classes, len(data.classes))
    devices = rank_devices(config, group)
    plan = plan_run(train, len(data.train), group.world_size, len(devices.all))
    messages = [devices.note] if devices.note else []

    # Rank 0 reads weights from disk or network, and DDP hands them out when it wraps: the others need neither.
    own = config.model if group.is_main else replace(config.model, pretrained=False, checkpoint=None)
    model = on_main_first(group, lambda: build_weights(own, num_classes, config.seed, messages))
    mean, std = choose_mean_std(config, model)
    model.to(device, memory_format=memory_format(train))  # type: ignore[call-overload]
    refuse_unfit_sizes(model, config, num_classes)
    if config.parallel.sync_bn:
        model = synchronize_batch_norm(model, group)
    wrapped = spread(wrap(model, group, config.parallel.mode), devices)
    ema = build_ema(model, config.ema, train.global_batch_size)
    if train.compile:
        model.compile()  # in place: adds no prefix to any name
    criterion = build_loss(config.loss)
    groups = parameter_groups(model, config.optimizer)
    optimizer = build_optimizer(config.optimizer, groups)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    preprocess = Preprocess(mean, std, device, train.channels_last)

    def throw_away_pass() -> None:
        images = torch.zeros(plan.loader_batch, 3, config.augment.size_px, config.augment.size_px, dtype=torch.uint8)
        targets = torch.zeros(plan.loader_batch, dtype=torch.int64, device=device)
        with autocast(device, dtype):
            loss = criterion(wrapped(preprocess(images)), targets)
        loss.backward()

    settle_buckets(wrapped, throw_away_pass)
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
        criterion=criterion,
        optimizer=optimizer,
        schedule=build_schedule(config.schedule, config.optimizer.lr, plan.steps_per_epoch, train.epochs),
        scaler=scaler,
        updater=Updater(model, optimizer, train, scaler),
        statistics=RunningStatistics(model, group),
        train_loader=build_train_loader(config, data.train, plan, group),
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


def memory_format(train: TrainConfig) -> torch.memory_format:
    return torch.channels_last if train.channels_last else torch.preserve_format


def build_weights(model: ModelConfig, num_classes: int, seed: int, messages: list[str]) -> nn.Module:
    """The model on the CPU, with the weights that it starts from: drawn by key, published, or from a file."""
    seed_generators(hash_key("init", seed))
    built = build_model(model, num_classes)
    if model.checkpoint is not None:
        messages.append(load_weights(built, weights_in(Path(model.checkpoint)), num_classes))
    return built


def refuse_unfit_sizes(model: nn.Module, config: Config, num_classes: int) -> None:
    """Raise ConfigError where the model can't take the config's images, or gives other outputs than one for each class.

    One forward pass in evaluation mode for each size, of a single black image.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    for key, size_px in (("augment.size_px", config.augment.size_px), ("eval.crop_px", config.eval.crop_px)):
        try:
            with torch.no_grad():
                shape = tuple(model(torch.zeros(1, 3, size_px, size_px, device=device)).shape)
        except (AssertionError, RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and out_of_memory(error) is not None:
                raise
            raise ConfigError([f"{key}: {config.model.name} can't take {size_px} px: {first_line(error)}"]) from error
        if shape != (1, num_classes):
            expected = (1, num_classes)
            raise ConfigError([f"model.name: {config.model.name} gives {shape} for one image, not {expected}"])
    model.train(was_training)


def weights_in(path: Path) -> dict[str, Tensor]:
    """The weights in a file, or in a checkpoint (or run folder) of ours, verified. Raises CheckpointError."""
    return find_checkpoint(path)[0].model if path.is_dir() else read_weights(path)


def on_main_first(group: Group, action: Callable[[], T]) -> T:
    """Rank 0 does it (and may fail: a missing file, no network) before the others do, so that one error is shown."""
    done: list[T] = []
    on_main(group, lambda: done.append(action()))
    return done[0] if done else action()


def choose_num_classes(asked: int | None, in_data: int) -> int:
    """The head's outputs. Raises ConfigError where the data has more classes than the config asks for."""
    if asked is not None and asked < in_data:
        raise ConfigError(
            [f"model.num_classes: {asked}, but the data set has {in_data} classes; give at least {in_data}, or null"]
        )
    return asked if asked is not None else in_data


def choose_mean_std(config: Config, model: nn.Module) -> tuple[list[float], list[float]]:
    """The config's normalisation, else the model's own."""
    own_mean, own_std = model_mean_std(model)
    return list(config.data.mean or own_mean), list(config.data.std or own_std)


def build_train_loader(config: Config, source: ImageSource, plan: Plan, group: Group) -> TrainLoader | SyntheticLoader:
    """This rank's micro-batches."""
    sampler = EpochSampler(len(source), plan.global_batch, group.rank, group.world_size, config.seed)
    if isinstance(source, SyntheticSource):
        return SyntheticLoader(source, sampler, plan.loader_batch, config.augment.size_px, config.seed, group.device)
    return TrainLoader(
        source,
        train_transform(config.augment),
        sampler,
        plan.loader_batch,
        config.seed,
        num_workers_for(config, group),
        prefetch_batches=config.data.prefetch_batches,
        pin_memory=group.device.type == "cuda",
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
    )


def num_workers_for(config: Config, group: Group) -> int:
    """Data workers of this rank: as the config says, else one for each CPU core that it can call its own."""
    chosen = config.data.num_workers
    return min(_MOST_WORKERS, cpu_threads(group.place.local_world_size)) if chosen is None else chosen
