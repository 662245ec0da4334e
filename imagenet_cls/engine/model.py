"""The model of a run: its weights, what the config changes about it, whether it fits the data, and the teacher."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from unicodedata import normalize

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from imagenet_cls.checkpoint.format import invalid_content_errors, mean_std
from imagenet_cls.checkpoint.select import load_best
from imagenet_cls.config.schema import Config, Size, TrainConfig, format_size, height_width
from imagenet_cls.data.transforms import sizes_px
from imagenet_cls.errors import CheckpointError, ConfigError, DataError, first_line, format_value
from imagenet_cls.files import is_url
from imagenet_cls.guards.memory import is_out_of_memory
from imagenet_cls.models.adapt import (
    checkpoint_activations,
    freeze,
    pad_deterministically,
    set_training,
    size_remedy,
    split_batch_norm,
)
from imagenet_cls.models.build import build_model, model_mean_std, published_weights, weights_source
from imagenet_cls.models.imagenet import IMAGENET_CLASSES, match_outputs
from imagenet_cls.models.teacher import MeanStd, Teacher, build_teacher, enable_distillation_token
from imagenet_cls.models.weight_files import download_weights, read_all_weights
from imagenet_cls.models.weights import load_weights, prefix_errors
from imagenet_cls.parallel.collectives import run_on_main
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.sync_bn import synchronize_batch_norm
from imagenet_cls.seeding import hash_key, preserve_rng_state, seed_generators

T = TypeVar("T")


def build_training_model(
    config: Config,
    num_classes: int,
    classes: Sequence[str],
    group: Group,
    load_initial_weights: bool,
    batch_norm_images: int,
) -> tuple[nn.Module, list[str]]:
    """The model on this rank's device, not yet wrapped, and messages about its weights. A collective.

    classes: of the data. load_initial_weights: whether to load the weights that the config names. batch_norm_images:
    see `check_model_outputs`.
    """
    # Only rank 0 reads weights from disk or network; the others get them by broadcast when DDP wraps the model.
    reads = group.is_main and load_initial_weights
    bare = replace(config, model=replace(config.model, pretrained=False, checkpoint=None))
    initial = config if reads else bare
    model, messages = run_on_main_first(
        group, lambda: build_initial_model(initial, num_classes, classes)
    )
    if not load_initial_weights:
        messages = []
    model = split_batch_norm(model, config.model, config.augment.splits)
    if frozen := freeze(model, config.model, num_classes):
        messages.append(frozen)
    model.to(group.device, memory_format=memory_format(config.train))  # type: ignore[call-overload]
    check_model_outputs(model, config, num_classes, batch_norm_images)
    if config.distill.kind != "none":
        enable_distillation_token(model)
    if config.parallel.sync_bn:
        model = synchronize_batch_norm(model, group)
    if config.train.deterministic and group.device.type == "cuda":
        pad_deterministically(model)
    if config.train.grad_checkpointing:
        checkpoint_activations(model)
    set_training(model, config.model)  # the modes show which BatchNorm layers are frozen
    return model, messages


def build_initial_model(
    config: Config, num_classes: int, classes: Sequence[str] = ()
) -> tuple[nn.Module, list[str]]:
    """The model on the CPU with its initial weights, and messages about them. classes: of the data."""
    seed_generators(hash_key("init", config.seed))
    model = build_model(config.model, num_classes, config.data.channels)
    check_model_parameters(model, config.model.name)
    if config.model.checkpoint is None:
        messages = [weights_source(config.model, model, num_classes)]
        if (
            config.model.pretrained
            and published_weights(config.model, model)[1] == num_classes == IMAGENET_CLASSES
        ):
            try:
                messages[0] += match_outputs(model, classes)
            except DataError as error:  # a new task with as many classes
                messages.append(
                    f"the head of the published weights is kept, but {first_line(error)}"
                )
        mean_std: MeanStd | None = (
            model_mean_std(model, config.data.channels) if config.model.pretrained else None
        )
        known: Sequence[str] | None = None
    else:
        with prefix_errors("model.checkpoint"):
            stored = read_stored_weights(config.model.checkpoint)
            sentence = load_weights(model, stored.tensors, num_classes)
        messages = [*stored.warnings, f"starts from the weights of {stored.origin}: {sentence}"]
        mean_std, known = stored.mean_std, stored.classes
    own = choose_mean_std(config, model)
    if mean_std is not None and mean_std != own:
        messages.append(
            f"the initial weights were trained with data.mean={mean_std[0]} data.std={mean_std[1]}, "
            f"and this run uses data.mean={own[0]} data.std={own[1]}"
        )
    if difference := class_difference(known, classes):
        messages.append(f"the head of the initial weights is kept, but {difference}")
    return model, messages


def build_distillation_teacher(
    config: Config, num_classes: int, classes: Sequence[str], group: Group, mean_std: MeanStd
) -> Teacher | None:
    """The teacher that the config names, if any. Raises a UserError for one of other classes. A collective.

    classes: of the data. mean_std: the normalization of the images that the teacher gets.
    """
    if config.distill.kind == "none":
        return None

    def read(path: str) -> tuple[dict[str, Tensor], MeanStd | None]:
        stored = read_stored_weights(path)
        if difference := class_difference(stored.classes, classes):
            raise ConfigError(
                [
                    f"distill.teacher.checkpoint: {path}: {difference}; use a teacher of the same classes"
                ]
            )
        return stored.tensors, stored.mean_std

    sizes, layout = sizes_px(config.augment), memory_format(config.train)
    teacher = config.distill.teacher
    return build_teacher(
        teacher, num_classes, group, read, mean_std, sizes, config.seed, layout, classes
    )


def memory_format(train: TrainConfig) -> torch.memory_format:
    return torch.channels_last if train.channels_last else torch.preserve_format


@dataclass(frozen=True)
class StoredWeights:
    """Weights in a file or checkpoint folder, by name, on the CPU; how they were trained, if known.

    kind: `raw` or `ema`.
    """

    tensors: dict[str, Tensor]
    origin: str
    kind: str
    mean_std: MeanStd | None = None
    classes: Sequence[str] | None = None
    warnings: Sequence[str] = ()


def read_stored_weights(source: str | Path, kind: str | None = None) -> StoredWeights:
    """The weights in a file or at a URL, in a checkpoint, or in a run folder its best checkpoint.

    kind: `raw` or `ema`. None: the kind that evaluated best in a run folder; otherwise the EMA if
    there is one. Raises CheckpointError or ResourceError.
    """
    path = download_weights(str(source)) if is_url(source) else Path(source)
    if not path.is_dir():
        weights = read_all_weights(path)
        kind = choose_kind(weights, kind or ("ema" if "ema" in weights else "raw"), path)
        return StoredWeights(*weights[kind], kind)
    snapshot, best, damage = load_best(path)
    with invalid_content_errors(snapshot.path):
        tensors = {"raw": snapshot.model} | ({} if snapshot.ema is None else {"ema": snapshot.ema})
        default = "raw" if best == "raw" or snapshot.ema is None else "ema"
        name = choose_kind(tensors, kind or default, path)
        note = ", its best" if best == name else ""
        return StoredWeights(
            tensors=tensors[name],
            origin=f"{path} (step {snapshot.state['step']}, {name}{note})",
            kind=name,
            mean_std=mean_std(snapshot.state),
            classes=[*map(str, snapshot.state["classes"])],
            warnings=damage,
        )


def choose_kind(weights: Collection[str], kind: str, origin: Path | str) -> str:
    """`kind`, one of `weights`. Raises CheckpointError for a kind that is not there."""
    if kind not in weights:
        raise CheckpointError(f"{origin}: no {kind} weights.\nIt has: {', '.join(weights)}.")
    return kind


def class_difference(known: Sequence[str] | None, classes: Sequence[str]) -> str:
    """The first class in which the weights and the data differ, if both have equally many; else ""."""
    pairs = (
        enumerate(zip(known, classes, strict=True)) if known and len(known) == len(classes) else ()
    )
    for index, (old, new) in pairs:
        if old != new:  # é has two forms in Unicode, which look alike
            show = ascii if normalize("NFC", old) == normalize("NFC", new) else repr
            return f"class {index} was {show(old)} there and is {show(new)} here"
    return ""


def run_on_main_first(group: Group, action: Callable[[], T]) -> T:
    """Run `action` on rank 0, then on the others: an error of rank 0 (a missing file, no network) is raised once."""
    results: list[T] = []
    run_on_main(group, lambda: results.append(action()))
    return results[0] if group.is_main else action()


def choose_mean_std(config: Config, model: nn.Module) -> tuple[list[float], list[float]]:
    """The config's normalization, else the model's."""
    mean, std = model_mean_std(model, config.data.channels)
    return list(config.data.mean or mean), list(config.data.std or std)


def check_model_parameters(model: nn.Module, name: str) -> None:
    """Raise ConfigError for a newly built model without parameters, or with uninitialized (lazy) ones."""
    if lazy := [parameter for parameter, tensor in model.named_parameters() if is_lazy(tensor)]:
        remedy = "call the model once on a batch of images before you return it"
        raise ConfigError(
            [f"model.name: {name} has uninitialized parameters ({lazy[0]}); {remedy}"]
        )
    if next(model.parameters(), None) is None:
        raise ConfigError([f"model.name: {name} has no parameters to train; name another"])


def check_model_outputs(
    model: nn.Module, config: Config, num_classes: int, batch_norm_images: int
) -> None:
    """Raise ConfigError where the model does not map one black image of each of the config's sizes to (1, num_classes).

    batch_norm_images: images over which BatchNorm computes its statistics in training; with 1, a pass in training mode
    shows whether its layers get more than one value per channel. Leaves the model in training mode.
    """
    largest_px = config.augment.size_px
    smaller = [
        ("augment.progressive.sizes_px", size)
        for size in sizes_px(config.augment)
        if size != largest_px
    ]
    model.eval()
    for key, size_px in (
        *smaller,
        ("augment.size_px", largest_px),
        ("eval.crop_px", config.eval.crop_px),
    ):
        outputs = _forward_black_image(model, config, key, size_px, "images")
        shape = tuple(getattr(outputs, "shape", ())) or f"a {type(outputs).__name__}"
        if shape != (1, num_classes):
            text = f"{config.model.name} returns {shape} for one image, not {(1, num_classes)}"
            raise ConfigError([f"model.name: {text}"])
    set_training(model, config.model)
    if batch_norm_images == 1:
        before = [buffer.clone() for buffer in model.buffers()]
        with preserve_rng_state():
            key, size_px = "train.micro_batch_size", sizes_px(config.augment)[0]
            _forward_black_image(model, config, key, size_px, "a single training image")
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


def _forward_black_image(
    model: nn.Module, config: Config, key: str, size_px: Size, images: str
) -> object:
    """The output for one black image. Raises ConfigError for `key` where the model fails."""
    device, channels, kwargs = (
        next(model.parameters()).device,
        config.data.channels,
        config.model.kwargs,
    )
    try:
        with torch.no_grad():
            return model(torch.zeros(1, channels, *height_width(size_px), device=device))
    except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
        if is_out_of_memory(error) or (isinstance(error, AttributeError) and not kwargs):
            raise
        # Such as a timm ResNet of two stages, which calls a third one.
        key = "model.kwargs" if isinstance(error, AttributeError) else key
        name = config.model.name + (f" with model.kwargs={format_value(kwargs)}" if kwargs else "")
        images += " of 1 channel and" if channels == 1 else " of"
        text = f"{name} does not take {images} {format_size(size_px)}: {first_line(error)}"
        raise ConfigError([f"{key}: {text}{size_remedy(model, size_px)}"]) from error
