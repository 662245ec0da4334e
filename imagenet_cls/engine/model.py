"""The model of a run: its weights, what the config changes about it, and the teacher."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import Snapshot
from imagenet_cls.checkpoint.select import load_best
from imagenet_cls.config.schema import Config, ModelConfig, TrainConfig
from imagenet_cls.data import sizes_px
from imagenet_cls.engine.model_checks import check_model_outputs, check_model_parameters
from imagenet_cls.errors import CheckpointError, ConfigError
from imagenet_cls.models.adapt import checkpoint_activations, freeze, set_training, split_batch_norm
from imagenet_cls.models.build import build_model, model_mean_std, weights_source
from imagenet_cls.models.teacher import MeanStd, Teacher, build_teacher, enable_distillation_token
from imagenet_cls.models.weights import load_weights, prefix_errors, read_weights, read_weights_and_origin
from imagenet_cls.parallel.process_group import Group, run_on_main
from imagenet_cls.parallel.sync_bn import synchronize_batch_norm
from imagenet_cls.seeding import hash_key, seed_generators

T = TypeVar("T")


def build_training_model(
    config: Config, num_classes: int, group: Group, load_initial_weights: bool, batch_norm_images: int
) -> tuple[nn.Module, list[str]]:
    """The model on this rank's device, not yet wrapped, and messages about its weights. A collective.

    load_initial_weights: whether to load the weights that the config names; false for a run that resumes.
    batch_norm_images: see `check_model_outputs`.
    """
    # Only rank 0 reads weights from disk or network; the others get them by broadcast when DDP wraps the model.
    reads = group.is_main and load_initial_weights
    model_config = config.model if reads else replace(config.model, pretrained=False, checkpoint=None)
    model, messages = run_on_main_first(group, lambda: build_initial_model(model_config, num_classes, config.seed))
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
    if config.train.grad_checkpointing:
        checkpoint_activations(model)
    set_training(model, config.model)  # the modes show which BatchNorm layers are frozen
    return model, messages


def build_initial_model(model: ModelConfig, num_classes: int, seed: int) -> tuple[nn.Module, list[str]]:
    """The model on the CPU with its initial weights (random, published or from a file), and messages about them."""
    seed_generators(hash_key("init", seed))
    built = build_model(model, num_classes)
    check_model_parameters(built, model.name)
    if model.checkpoint is None:
        return built, [weights_source(model, built, num_classes)]
    with prefix_errors("model.checkpoint"):
        weights, origin, damage = weights_and_origin(Path(model.checkpoint))
        return built, [*damage, f"starts from the weights of {origin}: {load_weights(built, weights, num_classes)}"]


def build_distillation_teacher(
    config: Config, num_classes: int, classes: Sequence[str], group: Group, mean_std: MeanStd
) -> Teacher | None:
    """The teacher that the config names, if any. A collective.

    classes: of the data. mean_std: the normalization of the images that the teacher gets. Raises ConfigError for a
    checkpoint that was trained on other classes, or on the same in another order.
    """
    if config.distill.kind == "none":
        return None

    def read(path: Path) -> tuple[dict[str, Tensor], MeanStd | None]:
        if not path.is_dir():
            return read_weights(path), None
        snapshot, kind, _ = load_best(path)
        if difference := _first_difference(snapshot.state["classes"], classes):
            index, known, name = difference
            text = f"its class {index} is {known!r}, that of the data {name!r}"
            raise ConfigError([f"distill.teacher.checkpoint: {path}: {text}; use a teacher of the same classes"])
        preprocessing = snapshot.state["preprocessing"]
        return best_weights(snapshot, kind), (preprocessing["mean"], preprocessing["std"])

    sizes, layout = sizes_px(config.augment), memory_format(config.train)
    return build_teacher(config.distill.teacher, num_classes, group, read, mean_std, sizes, config.seed, layout)


def memory_format(train: TrainConfig) -> torch.memory_format:
    return torch.channels_last if train.channels_last else torch.preserve_format


def weights_and_origin(path: Path) -> tuple[dict[str, Tensor], str, list[str]]:
    """The weights in a file, checkpoint or run folder; where they come from; a line for each damaged checkpoint.

    Of trained weights and their EMA in one file or checkpoint the EMA is taken, and the origin names it. Raises
    CheckpointError.
    """
    if not path.suffix and not path.exists():
        raise CheckpointError(f"no checkpoint {str(path)!r}: no such folder; check the path, or train that run first")
    if not path.is_dir():
        return *read_weights_and_origin(path), []
    snapshot, kind, damage = load_best(path)
    chosen = "raw" if kind == "raw" or snapshot.ema is None else "ema"
    origin = f"{path} (step {snapshot.state['progress']['step']}, {chosen}{', its best' if kind else ''})"
    return best_weights(snapshot, kind), origin, damage


def best_weights(snapshot: Snapshot, kind: str | None) -> dict[str, Tensor]:
    """kind: `raw` or `ema`, whichever evaluated best; None takes the EMA where there is one."""
    return snapshot.model if kind == "raw" or snapshot.ema is None else snapshot.ema


def pretrained_mismatch(config: Config, model: nn.Module, mean_std: MeanStd, classes: Sequence[str]) -> list[str]:
    """A line for each way in which this run's images or classes differ from those of its initial weights.

    Known for published weights and for checkpoints of this project. mean_std, classes: of this run.
    """
    start = config.model
    if start.checkpoint is not None and Path(start.checkpoint).is_dir():
        state = load_best(Path(start.checkpoint))[0].state
        trained, known = (state["preprocessing"]["mean"], state["preprocessing"]["std"]), list(state["classes"])
    elif start.checkpoint is None and start.pretrained:
        trained, known = model_mean_std(model), []
    else:
        return []
    lines = []
    theirs, ours = _format_mean_std(trained), _format_mean_std(mean_std)
    if theirs != ours:
        lines.append(f"the initial weights were trained with {theirs}, and this run uses {ours}")
    if difference := _first_difference(known, classes):
        index, old, new = difference
        lines.append(
            f"the head of the initial weights is kept, but its classes differ: {index} was {old!r}, is {new!r}"
        )
    return lines


def _format_mean_std(mean_std: MeanStd) -> str:
    mean, std = (json.dumps([float(value) for value in values]).replace(" ", "") for values in mean_std)
    return f"data.mean={mean} data.std={std}"


def _first_difference(known: Sequence[str], classes: Sequence[str]) -> tuple[int, str, str] | None:
    """The first index at which two lists of classes of the same length differ, with both names."""
    if len(known) != len(classes):
        return None
    pairs = enumerate(zip(known, classes, strict=True))
    return next(((index, old, new) for index, (old, new) in pairs if old != new), None)


def run_on_main_first(group: Group, action: Callable[[], T]) -> T:
    """Run `action` on rank 0, then on the others: an error of rank 0 (a missing file, no network) is raised once."""
    result: T | None = None

    def on_main() -> None:
        nonlocal result
        result = action()

    run_on_main(group, on_main)
    return cast(T, result) if group.is_main else action()


def choose_mean_std(config: Config, model: nn.Module) -> tuple[list[float], list[float]]:
    """The config's normalization, else the model's."""
    mean, std = model_mean_std(model)
    return list(config.data.mean or mean), list(config.data.std or std)
