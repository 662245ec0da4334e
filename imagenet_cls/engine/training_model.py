"""Build the model and the teacher of a run, with their initial weights, and check both."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from imagenet_cls.config.schema import (
    Config,
    DataConfig,
    Size,
    TrainConfig,
    format_size,
)
from imagenet_cls.data.classes import IMAGENET_CLASSES, class_difference, imagenet_order
from imagenet_cls.data.transforms import sizes_px
from imagenet_cls.engine.stored_weights import open_weights
from imagenet_cls.errors import ConfigError, DataError
from imagenet_cls.models.adapt import (
    checkpoint_activations,
    freeze,
    output_shape,
    set_training,
    split_batch_norm,
)
from imagenet_cls.models.factory import (
    build_model,
    describe_initial_weights,
    model_mean_std,
    published_weights,
)
from imagenet_cls.models.head import permute_outputs
from imagenet_cls.models.teacher import MeanStd, Teacher, build_teacher, enable_distillation_token
from imagenet_cls.models.weights import load_weights, prefix_errors
from imagenet_cls.parallel.collectives import run_on_main, run_on_main_first
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.parallel.sync_bn import synchronize_batch_norm
from imagenet_cls.parallel.wrap import preserve_values
from imagenet_cls.seeding import hash_key, preserve_rng_state, seed_generators
from imagenet_cls.text import first_line, format_value


def build_training_model(
    config: Config,
    num_classes: int,
    classes: Sequence[str],
    context: RankContext,
    load_initial_weights: bool,
    smallest_norm_batch: int,
) -> tuple[nn.Module, list[str]]:
    """The model on this rank's device, not yet wrapped, and messages about its weights. A
    collective.

    classes: the classes of the data. load_initial_weights: whether to load the weights that the
    config names. smallest_norm_batch: see `check_model_outputs`.
    """
    # Only rank 0 reads weights from disk or network; the others get them by broadcast when DDP
    # wraps the model.
    to_build = config
    if not (context.is_main and load_initial_weights):
        to_build = replace(config, model=replace(config.model, pretrained=False, checkpoint=None))
    model, messages = run_on_main_first(
        context, lambda: build_initial_model(to_build, num_classes, classes)
    )
    if not load_initial_weights:
        messages = []
    model = split_batch_norm(model, config.model, config.augment.splits)
    if message := freeze(model, config.model, num_classes):
        messages.append(message)
    model.to(context.device, memory_format=memory_format(config.train))  # type: ignore[call-overload]
    check_model_outputs(model, config, num_classes, smallest_norm_batch)
    if config.distill.kind != "none":
        enable_distillation_token(model)
    if config.parallel.sync_bn:
        model = synchronize_batch_norm(model, context)
    if config.train.grad_checkpointing:
        checkpoint_activations(model)
    set_training(model, config.model)  # the modes show which BatchNorm layers are frozen
    return model, messages


def build_initial_model(
    config: Config, num_classes: int, classes: Sequence[str] = ()
) -> tuple[nn.Module, list[str]]:
    """The model on the CPU with its initial weights (random, published or from a file), and
    messages about them and about differences between this run and their training. classes: the
    classes of the data.
    """
    seed_generators(hash_key("init", config.seed))
    model = build_model(config.model, num_classes, config.data.channels)
    check_model_parameters(model, config.model.name)
    trained_mean_std: MeanStd | None = None
    if config.model.checkpoint is not None:
        with prefix_errors("model.checkpoint"):
            stored = open_weights(config.model.checkpoint)
            difference = class_difference(stored.classes, classes)
            known = [*(stored.classes or ())]
            has_same = sorted(known) == sorted(classes)
            keep_head = has_same or not difference
            sentence = load_weights(model, stored.tensors, num_classes, keep_head=keep_head)
            if has_same:
                order = [*map(known.index, classes), *range(len(known), num_classes)]
                sentence += permute_outputs(model, order)
            elif difference:
                sentence += f"; the head is for other classes: {difference}"
        sentence = f"starts from the weights of {stored.origin} ({stored.kind}): {sentence}"
        messages = [*stored.warnings, *sentence.split("\n")]
        trained_mean_std = stored.mean_std
    else:
        messages = [describe_initial_weights(config.model, model, num_classes)]
        if config.model.pretrained:
            trained_mean_std = model_mean_std(model, config.data.channels)
            _, published_classes = published_weights(config.model, model)
            if published_classes == num_classes == IMAGENET_CLASSES:
                try:
                    messages[0] += permute_outputs(model, imagenet_order(classes))
                except DataError as error:  # a new task with as many classes
                    messages.append(
                        f"the head of the published weights is kept, but {first_line(error)}"
                    )
    mean_std = choose_mean_std(config.data, model)
    if trained_mean_std is not None and trained_mean_std != mean_std:
        messages.append(
            f"the initial weights were trained with data.mean={trained_mean_std[0]} "
            f"data.std={trained_mean_std[1]}, and this run uses data.mean={mean_std[0]} "
            f"data.std={mean_std[1]}"
        )
    return model, messages


def build_distillation_teacher(
    config: Config,
    num_classes: int,
    classes: Sequence[str],
    context: RankContext,
    mean_std: MeanStd,
) -> Teacher | None:
    """The teacher that the config names, if any. Raises ConfigError if its classes are not the
    classes of the data. A collective.

    classes: the classes of the data. mean_std: the normalization of the images that the teacher
    gets.
    """
    if config.distill.kind == "none":
        return None

    def read(path: str) -> tuple[dict[str, Tensor], MeanStd | None]:
        stored = open_weights(path)
        if difference := class_difference(stored.classes, classes):
            raise ConfigError(
                [
                    f"distill.teacher.checkpoint: {path}: {difference}; use a teacher "
                    "of the same classes"
                ]
            )
        return stored.tensors, stored.mean_std

    teacher = config.distill.teacher
    order: list[int] = []
    if teacher.pretrained and num_classes == IMAGENET_CLASSES:
        order = run_on_main(context, lambda: imagenet_order(classes))
    return build_teacher(
        teacher,
        num_classes,
        context,
        read,
        mean_std,
        sizes_px(config.augment),
        config.seed,
        memory_format(config.train),
        order,
    )


def memory_format(train: TrainConfig) -> torch.memory_format:
    return torch.channels_last if train.channels_last else torch.preserve_format


def choose_mean_std(data: DataConfig, model: nn.Module) -> tuple[list[float], list[float]]:
    """The config's normalization, else the model's."""
    mean, std = model_mean_std(model, data.channels)
    return list(data.mean or mean), list(data.std or std)


def check_model_parameters(model: nn.Module, name: str) -> None:
    """Raise ConfigError for a newly built model without parameters, or with uninitialized (lazy)
    ones.
    """
    for parameter_name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                [
                    f"model.name: {name} has uninitialized parameters ({parameter_name}); call the "
                    "model once on a batch of images before you return it"
                ]
            )
    if next(model.parameters(), None) is None:
        raise ConfigError([f"model.name: {name} has no parameters to train; name another"])


def check_model_outputs(
    model: nn.Module, config: Config, num_classes: int, smallest_norm_batch: int
) -> None:
    """Raise ConfigError where the model does not map an input of zeros, (1, C, H, W), of each of
    the config's sizes to (1, num_classes).

    smallest_norm_batch: the smallest number of images over which BatchNorm computes its statistics
    in training. If it is 1, a pass in training mode checks that each BatchNorm layer gets more than
    one value per channel, since torch can't normalize a single value.

    Leaves the model in training mode.
    """
    size_px = config.augment.size_px
    sizes = [
        ("augment.progressive.sizes_px", size)
        for size in sizes_px(config.augment)
        if size != size_px
    ]
    sizes += [("augment.size_px", size_px), ("eval.crop_px", config.eval.crop_px)]
    model.eval()
    for key, size in sizes:
        shape = _output_shape(model, config, key, size, "images")
        if shape != (1, num_classes):
            raise ConfigError(
                [
                    f"model.name: {config.model.name} returns {shape} for one image, not "
                    f"{(1, num_classes)}"
                ]
            )
    set_training(model, config.model)
    if smallest_norm_batch == 1:
        with preserve_rng_state(), preserve_values(model.buffers()):
            smallest = sizes_px(config.augment)[0]
            _output_shape(
                model, config, "train.micro_batch_size", smallest, "a single training image"
            )


def _output_shape(
    model: nn.Module, config: Config, key: str, size_px: Size, input_name: str
) -> tuple[int, ...] | str:
    """`output_shape`, which raises ConfigError for `key` where the model fails. input_name: what
    the model gets, for the message.
    """
    try:
        return output_shape(model, size_px, config.data.channels)
    except (AttributeError, ValueError) as error:
        # An AttributeError is a bug of the model, unless `model.kwargs` cause it: a timm ResNet
        # that is built with two stages still calls the third one.
        if isinstance(error, AttributeError):
            if not config.model.kwargs:
                raise
            key = "model.kwargs"
        name = config.model.name
        if config.model.kwargs:
            name += f" with model.kwargs={format_value(config.model.kwargs)}"
        raise ConfigError(
            [f"{key}: {name} does not take {input_name} of {format_size(size_px)}: {error}"]
        ) from error
