"""Trained models from a checkpoint, a run folder, a file of weights, or published weights; on all ranks."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import nn

from imagenet_cls.checkpoint.format import config_from_state, invalid_content_errors, mean_std
from imagenet_cls.checkpoint.select import load_best
from imagenet_cls.config.load import removed_key_warnings
from imagenet_cls.config.schema import Config, format_size
from imagenet_cls.data.classes import join_names
from imagenet_cls.engine.build import choose_num_classes
from imagenet_cls.engine.model import (
    choose_kind,
    choose_mean_std,
    memory_format,
    read_stored_weights,
)
from imagenet_cls.errors import CheckpointError, ConfigError, UsageError, command_line, format_value
from imagenet_cls.lookup import import_from_cwd
from imagenet_cls.models.adapt import resize_model, size_remedy
from imagenet_cls.models.build import build_model, check_trusted, published_weights
from imagenet_cls.models.imagenet import IMAGENET_CLASSES, match_outputs
from imagenet_cls.models.weights import (
    load_weights,
    prefix_errors,
    state_dict_mismatch,
    without_split_bn,
)
from imagenet_cls.parallel.collectives import broadcast_tensors, run_on_main
from imagenet_cls.parallel.process_group import Group

# Keys that decide which images are evaluated and how they are prepared; not those of speed and batches.
EVALUATION_KEYS = (
    "data.name", "data.root", "data.train", "data.val", "data.val_fraction", "data.fold", "data.group", "data.kwargs",
    "data.exif", "data.classes", "eval.classes",
    "eval.mode", "eval.crop_px", "eval.crop_pct", "eval.resize_px", "eval.interpolation", "eval.flip_tta",
)  # fmt: skip


@dataclass(frozen=True)
class TrainedModels:
    """Models by the name of their weights (`raw`, `ema`), on the CPU in evaluation mode, and how they were trained.

    classes: None if unknown. path: of a checkpoint, or for `OnnxPredictor` of its file. warnings: skipped checkpoints,
    and removed keys of the config. best: the weights that evaluated best in their run, if known.
    data_digest: of the training images of their run, if known.
    """

    models: dict[str, nn.Module]
    config: Config
    num_classes: int
    classes: tuple[str, ...] | None
    mean: list[float]
    std: list[float]
    origin: str
    path: Path | None = None
    warnings: Sequence[str] = ()
    best: str | None = None
    data_digest: str | None = None


def load_on_all_ranks(
    config: Config,
    checkpoint: Path | None,
    classes: Sequence[str],
    group: Group,
    allow_import: Collection[str] = (),
    weights: str | None = None,
    ignore_head: bool = False,
) -> tuple[TrainedModels, list[str]]:
    """Read the weights on rank 0 and broadcast them: the other ranks need no file and no network. A collective.

    classes: of the data. weights: `raw` or `ema`, to load only these. ignore_head: see `load_foreign_weights`. Also
    returns messages.
    """
    loaded: TrainedModels | None = None

    def read() -> tuple[TrainedModels, list[str], list[str]]:
        nonlocal loaded
        if checkpoint is not None and checkpoint.is_dir():
            loaded = load_checkpoint(
                checkpoint, {config.model.name, *config.imports, *allow_import}
            )
        else:
            loaded = load_foreign_weights(config, checkpoint, classes, ignore_head, weights)
        if weights is not None:
            loaded = replace(
                loaded, models={weights: loaded.models[choose_weights(loaded, weights)]}
            )
        differences = evaluation_differences(config, loaded)
        return (
            replace(loaded, models={}),
            list(loaded.models),
            [*loaded.warnings, loaded.origin, *differences],
        )

    received, names, messages = run_on_main(group, read)
    trained = loaded or replace(
        received,
        models={name: build_bare_model(received.config, received.num_classes) for name in names},
    )
    for model in trained.models.values():
        model.load_state_dict(broadcast_tensors(model.state_dict(), group))
    return trained, messages


def choose_weights(trained: TrainedModels, weights: str | None) -> str:
    """`raw` or `ema`: `weights`, or those that evaluated best in their run, or else the EMA if there is one.

    Raises CheckpointError for weights that are not there.
    """
    kind = weights or trained.best or list(trained.models)[-1]
    return choose_kind(trained.models, kind, trained.origin)


def load_checkpoint(path: Path, trusted: Collection[str]) -> TrainedModels:
    """The models of a checkpoint, or of the best one of a run folder. Raises CheckpointError.

    trusted: code that its config may use besides the libraries' models.
    """
    snapshot, best, damage = load_best(path)
    assert snapshot.path is not None
    config = config_from_state(snapshot.state, snapshot.path)
    check_trusted(config.model, config.imports, trusted, str(snapshot.path))
    with invalid_content_errors(snapshot.path):
        averaged = len(snapshot.state.get("averaged", []))
        note = f", an average of {averaged} checkpoints" if averaged else ""
        mean, std = mean_std(snapshot.state)
        trained = TrainedModels(
            models={},
            config=config,
            num_classes=snapshot.state["num_classes"],
            classes=tuple(map(str, snapshot.state["classes"])),
            mean=mean,
            std=std,
            origin=f"{snapshot.path}, step {snapshot.state['step']}{note}",
            path=snapshot.path,
            warnings=[*damage, *removed_key_warnings(snapshot.state["config"])],
            best=best,
            data_digest=snapshot.state.get("data_digest"),
        )
    remedy = "Start from the folder that has its module, with the library versions named in its state.json."
    for name, stored in (("raw", snapshot.model), ("ema", snapshot.ema)):
        if stored is None:
            continue
        with invalid_content_errors(
            snapshot.path, f"its model {config.model.name} can't be built here", remedy
        ):
            model = build_bare_model(config, trained.num_classes)
        tensors = without_split_bn(stored)
        if mismatch := state_dict_mismatch(model.state_dict(), tensors):
            raise CheckpointError(
                f"{snapshot.path}: does not fit {config.model.name} as the installed library builds it: {mismatch}\n"
                "Install the versions named in its state.json."
            )
        model.load_state_dict(tensors)
        trained.models[name] = model
    return trained


def build_bare_model(config: Config, num_classes: int) -> nn.Module:
    """The config's model without its weights, on the CPU, in evaluation mode."""
    for name in config.imports:
        import_from_cwd(name)
    model = replace(config.model, pretrained=False, checkpoint=None)
    return build_model(model, num_classes, config.data.channels).eval()


def load_foreign_weights(
    config: Config,
    file: Path | None,
    classes: Sequence[str],
    ignore_head: bool = False,
    weights: str | None = None,
) -> TrainedModels:
    """The config's model with the weights of a file, else with those that the config names.

    classes: in the order of the outputs. ignore_head: the head is not used, so it may be missing or
    have other outputs. weights: see `read_stored_weights`. Raises CheckpointError if the weights do
    not fit the model, UsageError if there are none, DataError for published weights of others.
    """
    if file is None and not config.model.pretrained and config.model.checkpoint is None:
        raise UsageError(
            "no weights to evaluate.\n"
            f"Name a checkpoint ({command_line('test')} CONFIG CHECKPOINT), or set model.pretrained=true for the "
            "published ones."
        )
    path = file or config.model.checkpoint
    count = choose_num_classes(config.model.num_classes, len(classes))
    model = build_model(
        replace(config.model, pretrained=path is None), count, config.data.channels
    ).eval()
    mean, std = choose_mean_std(config, model)
    if path is None:
        source, had = published_weights(config.model, model)
        if had != count and not ignore_head:
            raise CheckpointError(
                f"model.pretrained: the published weights ({source}) have {had} outputs, not {count}.\n"
                f"Set model.num_classes={had}, or evaluate a checkpoint that was trained on these classes."
            )
        note = match_outputs(model, classes) if had == IMAGENET_CLASSES and not ignore_head else ""
        return TrainedModels(
            {"raw": model}, config, count, None, mean, std, f"published weights ({source}){note}"
        )
    with nullcontext() if file is not None else prefix_errors("model.checkpoint"):
        stored = read_stored_weights(path, weights)
        # A new, random head is fine for training, but its predictions are chance.
        sentence = load_weights(model, stored.tensors, count, head_may_differ=ignore_head)
    origin, known = f"{stored.origin}: {sentence}", None
    if not ignore_head and stored.classes is not None:
        known = tuple(stored.classes)
    elif not ignore_head:
        origin += f"; its outputs are taken for the classes in this order: {join_names(classes)}"
    models = {stored.kind: model}
    return TrainedModels(models, config, count, known, mean, std, origin, warnings=stored.warnings)


def evaluation_differences(config: Config, trained: TrainedModels) -> list[str]:
    """A line for each key of `config` that makes this evaluation differ from that of the checkpoint's run."""
    if trained.path is None:
        return []
    used: dict[str, Any] = {
        "model.name": trained.config.model.name,
        "data.channels": len(trained.mean),
    }
    used |= {"data.mean": trained.mean, "data.std": trained.std}
    lines = []
    for key in (*EVALUATION_KEYS, *used):
        here, there = attrgetter(key)(config), used.get(key, attrgetter(key)(trained.config))
        # The training part matters only if the held-out images are taken from it.
        ignored = (
            config.data.val is not None if key == "data.train" else key in used and here is None
        )
        if here != there and not ignored:
            note = ", which is used" if key in used else ""
            lines.append(
                f"{key}: {format_value(here)}, and {format_value(there)} in the run of the checkpoint{note}"
            )
    run_config = trained.path.parent.parent / "config.yaml"
    if lines and run_config.is_file():
        lines.append(f"{run_config} as CONFIG evaluates as the run did")
    return lines


def prepare_models(trained: TrainedModels, config: Config, group: Group) -> list[str]:
    """Fit the models to the images of `config.eval` and move them to the device, in place. Returns messages."""
    crop_px, notes = config.eval.crop_px, []
    for model in trained.models.values():
        try:
            notes.append(resize_model(model, crop_px, len(trained.mean)))
        except ValueError as error:
            text = f"can't take {format_size(crop_px)}: {error}{size_remedy(model, crop_px)}"
            raise ConfigError([f"eval.crop_px: {trained.config.model.name} {text}"]) from error
        model.to(group.device, memory_format=memory_format(config.train))  # type: ignore[call-overload]
    return sorted({note for note in notes if note is not None})
