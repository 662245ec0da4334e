"""The model of a run: its weights, and what the config changes about it.

Owns the order of these steps; what is refused about a model is in `fit`. Called by `engine.build`, and in part by
`engine.inference`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import Snapshot
from imagenet_cls.checkpoint.select import load_best
from imagenet_cls.config.schema import Config, ModelConfig, TrainConfig
from imagenet_cls.data import sizes_px
from imagenet_cls.engine.fit import check_model_outputs, check_model_parameters
from imagenet_cls.errors import CheckpointError, ConfigError
from imagenet_cls.models.adapt import checkpoint_activations, split_batch_norm
from imagenet_cls.models.build import build_model, model_mean_std, origin_of_weights
from imagenet_cls.models.freeze import freeze, set_training
from imagenet_cls.models.teacher import MeanStd, Teacher, build_teacher, enable_distillation_token
from imagenet_cls.models.weights import load_weights, naming_the_key, read_weights, read_weights_and_origin
from imagenet_cls.parallel.process_group import Group, run_on_main
from imagenet_cls.parallel.sync_bn import synchronize_batch_norm
from imagenet_cls.seeding import hash_key, seed_generators

T = TypeVar("T")


def prepared_model(
    config: Config, num_classes: int, group: Group, messages: list[str], start_weights: bool, images_at_once: int
) -> nn.Module:
    """The model on this rank's device, ready to be wrapped. A collective: every rank calls it.

    messages: receives a sentence about the weights that it starts from, and one about what is frozen. start_weights:
    whether it gets those that the config names, published or in a file; false for a run that goes on, whose weights are
    another's to tell. images_at_once: that BatchNorm will see.
    """
    # Rank 0 reads weights from disk or network, and DDP hands them out when it wraps: the others need neither.
    reads = group.is_main and start_weights
    own = config.model if reads else replace(config.model, pretrained=False, checkpoint=None)
    said = messages if start_weights else []
    model = on_main_first(group, lambda: build_weights(own, num_classes, config.seed, said))
    model = split_batch_norm(model, config.model, config.augment.splits)
    if frozen := freeze(model, config.model, num_classes):
        messages.append(frozen)
    model.to(group.device, memory_format=memory_format(config.train))  # type: ignore[call-overload]
    check_model_outputs(model, config, num_classes, images_at_once)
    if config.distill.kind != "none":
        enable_distillation_token(model)
    if config.parallel.sync_bn:
        model = synchronize_batch_norm(model, group)
    if config.train.grad_checkpointing:
        checkpoint_activations(model)
    set_training(model, config.model)  # the modes tell what else is built which BatchNorm layers stand still
    return model


def chosen_teacher(
    config: Config, num_classes: int, classes: Sequence[str], group: Group, mean_std: MeanStd
) -> Teacher | None:
    """The teacher that the config names, if any. mean_std: what its images are normalised with. A collective.

    classes: of the data. Raises ConfigError for a teacher of ours that was trained on others, or in another order.
    """
    if config.distill.kind == "none":
        return None

    def read(path: Path) -> tuple[dict[str, Tensor], MeanStd | None]:
        if not path.is_dir():
            return read_weights(path), None
        snapshot, kind, _ = load_best(path)
        known = snapshot.state["classes"]
        if len(known) == len(classes) and list(known) != list(classes):
            first = next(i for i, (one, other) in enumerate(zip(known, classes, strict=True)) if one != other)
            text = f"its class {first} is {known[first]!r}, that of the data {classes[first]!r}"
            raise ConfigError([f"distill.teacher.checkpoint: {path}: {text}; take a teacher of the same classes"])
        pixels = snapshot.state["preprocessing"]
        return best_weights(snapshot, kind), (pixels["mean"], pixels["std"])

    sizes, form = sizes_px(config.augment), memory_format(config.train)
    return build_teacher(config.distill.teacher, num_classes, group, read, mean_std, sizes, config.seed, form)


def memory_format(train: TrainConfig) -> torch.memory_format:
    return torch.channels_last if train.channels_last else torch.preserve_format


def build_weights(model: ModelConfig, num_classes: int, seed: int, messages: list[str]) -> nn.Module:
    """The model on the CPU, with the weights that it starts from: drawn by key, published, or from a file.

    messages: receives where they come from, and what of them could not be taken over.
    """
    seed_generators(hash_key("init", seed))
    built = build_model(model, num_classes)
    check_model_parameters(built, model.name)
    if model.checkpoint is None:
        messages.append(origin_of_weights(model, built, num_classes))
        return built
    with naming_the_key("model.checkpoint"):
        weights, origin, damage = weights_and_origin(Path(model.checkpoint))
        messages += [*damage, f"starts from the weights of {origin}: {load_weights(built, weights, num_classes)}"]
    return built


def weights_and_origin(path: Path) -> tuple[dict[str, Tensor], str, list[str]]:
    """The weights in a file, or in a checkpoint (or run folder) of ours, verified; where they lay, with step and kind
    if in a checkpoint; a line for each better one, damaged.

    Of a file with trained weights and their moving average, the average, as `best_weights` of ours; the origin says so.
    Raises CheckpointError.
    """
    if not path.suffix and not path.exists():
        raise CheckpointError(f"no checkpoint {str(path)!r}: no such folder; check the path, or train that run first")
    if not path.is_dir():
        return *read_weights_and_origin(path), []
    snapshot, kind, damage = load_best(path)
    chosen = "raw" if kind == "raw" or snapshot.ema is None else "ema"
    origin = f"{path} (step {snapshot.state['progress']['step']}, {chosen}{', its best' if kind else ''})"
    return best_weights(snapshot, kind), origin, damage


def pretrained_mismatch(config: Config, model: nn.Module, mean_std: MeanStd, classes: Sequence[str]) -> list[str]:
    """What this run makes of images and outputs in another way than its start weights learned it; a line for each.

    Known of published weights, and of a checkpoint of ours. mean_std, classes: of this run.
    """
    start = config.model
    if start.checkpoint is not None and Path(start.checkpoint).is_dir():
        state = load_best(Path(start.checkpoint))[0].state
        learned, known = (state["preprocessing"]["mean"], state["preprocessing"]["std"]), list(state["classes"])
    elif start.checkpoint is None and start.pretrained:
        learned, known = model_mean_std(model), []
    else:
        return []
    lines = []
    theirs, ours = (
        "data.mean={} data.std={}".format(
            *(json.dumps([float(value) for value in values]).replace(" ", "") for values in pair)
        )
        for pair in (learned, mean_std)
    )
    if theirs != ours:
        lines.append(f"the start weights know images normalised by {theirs}, and this run has {ours}")
    if len(known) == len(classes) and known != list(classes):
        first = next(i for i, (one, other) in enumerate(zip(known, classes, strict=True)) if one != other)
        lines.append(
            f"the head of the start weights is taken over, and knows its outputs by other names: {first} was "
            f"{known[first]!r} and is {classes[first]!r}"
        )
    return lines


def best_weights(snapshot: Snapshot, kind: str | None) -> dict[str, Tensor]:
    """Those that made a run's checkpoint the best (kind: raw or ema); else the moving average where there is one."""
    return snapshot.model if kind == "raw" or snapshot.ema is None else snapshot.ema


def on_main_first(group: Group, action: Callable[[], T]) -> T:
    """Rank 0 does it (and may fail: a missing file, no network) before the others do, so that one error is shown."""
    done: list[T] = []
    run_on_main(group, lambda: done.append(action()))
    return done[0] if done else action()


def choose_mean_std(config: Config, model: nn.Module) -> tuple[list[float], list[float]]:
    """The config's normalisation, else the model's own."""
    own_mean, own_std = model_mean_std(model)
    return list(config.data.mean or own_mean), list(config.data.std or own_std)
