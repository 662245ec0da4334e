"""Load weights as models.

From a checkpoint, the best one of a run folder, a file of weights, or published weights. One rank
reads them, and the others receive them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import nn

from imagenet_cls.checkpoint.format import (
    config_from_state,
    invalid_content_errors,
)
from imagenet_cls.checkpoint.progress import read_progress
from imagenet_cls.config.keys import keys_without_recipe, value_types
from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.rules import check_trusted, check_value
from imagenet_cls.config.schema import Config, ModelConfig, format_size
from imagenet_cls.data.classes import IMAGENET_CLASSES, imagenet_ids, imagenet_order
from imagenet_cls.engine.stored_weights import Weights, open_published, open_weights
from imagenet_cls.engine.training_model import choose_mean_std, memory_format
from imagenet_cls.errors import (
    CheckpointError,
    ConfigError,
    ResourceError,
    UsageError,
    out_of_memory_line,
)
from imagenet_cls.lookup import import_from_cwd
from imagenet_cls.models.adapt import resize_model
from imagenet_cls.models.factory import (
    RESERVED,
    build_model,
    model_problems,
    published_evaluation,
)
from imagenet_cls.models.head import permute_outputs
from imagenet_cls.models.weights import (
    count_outputs,
    load_weights,
    prefix_errors,
    set_tensors,
)
from imagenet_cls.parallel.collectives import broadcast_tensors, run_on_main
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.tasks import task_of
from imagenet_cls.text import command_line, first_line, format_value, join_names

_RECIPE_KEYS = value_types().keys() - keys_without_recipe()
# Keys that decide which images are evaluated and how they are prepared. Keys of speed and batches
# do not change a result.
EVALUATION_KEYS = (
    "data.name",
    "data.root",
    "data.train",
    "data.val",
    "data.val_fraction",
    "data.fold",
    "data.stratify",
    "data.group",
    "data.exclude",
    "data.kwargs",
    "data.exif",
    "data.classes",
    "data.labels",
    *sorted(key for key in _RECIPE_KEYS if key.startswith("eval.")),
)


@dataclass(frozen=True)
class WeightsSource:
    """Which weights to load.

    path: a checkpoint, a run folder or a file of weights; None for the weights that the config
    names. kind: `raw` or `ema`, to load only these. allow_import: factories and modules that the
    config in a checkpoint may name, besides the models of libraries and what the config of the
    command names.
    """

    path: Path | None = None
    kind: str | None = None
    allow_import: Collection[str] = ()


@dataclass(frozen=True)
class TrainedModels:
    """Loaded models, on the CPU in evaluation mode, and how they were trained.

    models: by the name of their weights, `raw` or `ema`. kind: which of them to use. classes: None
    if unknown. origin: where the weights are from, for messages. path: the checkpoint, or the file
    of an `OnnxPredictor`. warnings: about damaged checkpoints that were skipped, and a run without
    an evaluation. state: `state.json` of a checkpoint. best_thresholds: by weights,
    `best_threshold` of the evaluation of this step, if there was one and images have several
    labels.
    """

    models: dict[str, nn.Module]
    kind: str
    config: Config
    num_classes: int
    classes: tuple[str, ...] | None
    mean: list[float]
    std: list[float]
    origin: str
    path: Path | None = None
    warnings: Sequence[str] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    best_thresholds: Mapping[str, float] = field(default_factory=dict)


def open_source(config: Config, source: WeightsSource) -> Weights:
    """The weights to load. Raises UsageError if there are none."""
    if source.path is not None:
        return open_weights(source.path, source.kind)
    if config.model.checkpoint is not None:
        with prefix_errors("model.checkpoint"):
            return open_weights(config.model.checkpoint, source.kind)
    if not config.model.pretrained or source.kind == "ema":
        raise UsageError(
            f"No {source.kind or ''} weights to evaluate.",
            f"Name a checkpoint ({command_line('test')} CONFIG CHECKPOINT), or set "
            "model.pretrained=true for the published ones, which have no EMA.",
        )
    return open_published(config.model, config.data.channels)


def load_on_all_ranks(
    config: Config,
    source: WeightsSource,
    opened: Callable[[], Weights],
    classes: Sequence[str],
    context: RankContext,
) -> TrainedModels:
    """Load the weights on rank 0 and broadcast them: the other ranks need no file and no network. A
    collective.

    opened: returns the result of `open_source`; called on rank 0. classes: the names of the data's
    classes, for weights that do not name their own.
    """

    @cache  # rank 0 uses the models that it has read for the others
    def load() -> TrainedModels:
        weights = opened()
        if weights.state is None or source.path is None:
            return models_of_config(config, weights, classes)
        trusted = {config.model.name, *config.imports, *source.allow_import}
        return models_of_checkpoint(weights, trusted)

    def describe() -> tuple[list[str], TrainedModels]:
        return list(load().models), replace(load(), models={})

    names, described = run_on_main(context, describe)
    if context.is_main:
        trained = load()
    else:
        build = partial(build_untrained_model, described.config, described.num_classes)
        trained = replace(described, models={name: build() for name in names})
    for model in trained.models.values():
        set_tensors(model, broadcast_tensors(model.state_dict(), context))
    return trained


def load_alone(
    source: str | Path,
    kind: str | None = None,
    trusted: Collection[str] = (),
    name: str | None = None,
    config: Config | None = None,
) -> TrainedModels:
    """The models of any source of `open_weights`, without data.

    name: of the model, for a file that is no checkpoint. config: in place of the name; without one,
    images are prepared as those of the published weights of the model. Raises UsageError without
    both for such a file, CheckpointError, ConfigError and ResourceError.
    """
    weights = open_weights(source, kind)
    stated = weights.model
    if weights.state is not None or config is not None:
        stated = "that of the checkpoint or the config"
    if (name is None) == (stated is None):
        raise UsageError(
            f"{source}: the model is {stated or 'not stated'}.",
            "Leave out --model."
            if stated
            else f"Name it: --model resnet50; or its config: {command_line('predict')} CONFIG "
            f"{source} IMAGES. In Python: Predictor({str(source)!r}, model='resnet50').",
        )
    if config is None and weights.state is not None:
        return models_of_checkpoint(weights, trusted)
    name = name or weights.model
    section = config.model if config is not None else ModelConfig(str(name))
    if problems := model_problems(section):
        raise ConfigError([f"{problem.key}: {problem.message}" for problem in problems])
    network = build_model(replace(section, pretrained=False, checkpoint=None), section.num_classes)
    warnings = [*weights.warnings]
    if config is None:
        evaluation = published_evaluation(network)
        config = config_from_dict(
            {"model": {"name": name}, "eval": evaluation, "optimizer": {"lr": 1.0}}
        )
        values = " ".join(f"eval.{key}={format_value(value)}" for key, value in evaluation.items())
        warnings.append(f"images are prepared as for the published weights of {name}: {values}")
    count = section.num_classes or count_outputs(network, weights.tensors)
    classes = weights.classes
    if not classes:
        classes = imagenet_ids(count)
        note = "are assumed to be the classes of ImageNet" if classes else "have no names"
        warnings.append(f"its {count} outputs {note}")
    names = classes or [*map(str, range(count))]
    trained = models_of_config(config, weights, names)
    return replace(trained, classes=tuple(classes), warnings=warnings, path=Path(source))


def models_of_checkpoint(weights: Weights, trusted: Collection[str]) -> TrainedModels:
    """The models of a checkpoint. Raises CheckpointError.

    trusted: factories and modules that its config may name, besides the models of libraries.
    """
    path, state = weights.path, weights.state
    assert state is not None and weights.mean_std is not None
    mean, std = weights.mean_std
    config = config_from_state(state, path)
    check_trusted(config, ("model.",), trusted, path)
    for name in RESERVED:
        if name in config.model.kwargs:
            raise CheckpointError(
                f"{path}: its config sets model.kwargs.{name}, which is not allowed in a "
                "checkpoint; nothing was run.",
                "Use another checkpoint.",
            )
    with invalid_content_errors(path):
        num_classes = state["num_classes"]
        progress = read_progress(state["progress"])
        best_thresholds = {}
        for name, result in progress.latest.items():
            if progress.evaluated_step == progress.step and "best_threshold" in result:
                best_thresholds[name] = float(result["best_threshold"])
                check_value("eval.threshold", best_thresholds[name])
    models = {}
    for name, stored in weights.by_kind.items():
        try:
            models[name] = build_untrained_model(config, num_classes)
        except Exception as error:
            if isinstance(error, ResourceError) or out_of_memory_line(error) is not None:
                raise
            raise CheckpointError(
                f"{path}: its model {config.model.name} can't be built here "
                f"({type(error).__name__}: {first_line(error)[:200]}).",
                "Start from the folder that has its module, with the library versions named in its "
                "state.json.",
            ) from error
        with prefix_errors(str(path)):
            load_weights(models[name], stored, num_classes, head_may_differ=False)
    return TrainedModels(
        models,
        weights.kind,
        config,
        num_classes,
        tuple(weights.classes or ()),
        [*mean],
        [*std],
        origin=weights.origin,
        path=path,
        warnings=weights.warnings,
        state=state,
        best_thresholds=best_thresholds,
    )


def build_untrained_model(config: Config, num_classes: int) -> nn.Module:
    """The config's model without its weights, on the CPU, in evaluation mode."""
    for name in config.imports:
        import_from_cwd(name)
    model = replace(config.model, pretrained=False, checkpoint=None)
    return build_model(model, num_classes, config.data.channels).eval()


def models_of_config(config: Config, weights: Weights, classes: Sequence[str]) -> TrainedModels:
    """The config's model with these weights.

    classes: names of the outputs, in their order, for weights that do not name them. Raises
    CheckpointError if the weights do not fit the model, DataError if published weights are for
    other classes.
    """
    count = task_of(config).num_outputs(config.model.num_classes, len(classes))
    model = build_untrained_model(config, count)
    mean, std = choose_mean_std(config.data, model)
    # A new, random head is fine for training, but its predictions are chance.
    sentence = load_weights(model, weights.tensors, count, head_may_differ=False)
    origin = f"{weights.origin} ({weights.kind}): {sentence}"
    known = None
    if weights.classes is not None:
        known = tuple(weights.classes)
    elif weights.model is not None and count == IMAGENET_CLASSES:
        origin += permute_outputs(model, imagenet_order(classes))
    else:
        origin += f"; its outputs are taken for the classes in this order: {join_names(classes)}"
    models = {weights.kind: model}
    return TrainedModels(
        models, weights.kind, config, count, known, mean, std, origin, warnings=weights.warnings
    )


def evaluation_differences(config: Config, trained: TrainedModels) -> list[str]:
    """A line for each key of `config` by which this evaluation differs from the evaluations of the
    checkpoint's run.
    """
    if trained.path is None:
        return []
    there = {key: attrgetter(key)(trained.config) for key in EVALUATION_KEYS}
    if config.data.val is not None:
        # The training part matters only if the held-out images are taken from it.
        del there["data.train"]
    # The checkpoint's values of these keys are used, whatever `config` says.
    used: dict[str, Any] = {
        "model.name": trained.config.model.name,
        "data.channels": len(trained.mean),
        "data.mean": trained.mean,
        "data.std": trained.std,
    }
    lines = []
    for key, value in (there | used).items():
        here = attrgetter(key)(config)
        if here != value and not (here is None and key in used):
            end = ", which is used" if key in used else ""
            lines.append(
                f"{key}: {format_value(here)}, and {format_value(value)} in the run of the "
                f"checkpoint{end}"
            )
    return lines


def prepare_models(trained: TrainedModels, config: Config, context: RankContext) -> list[str]:
    """Fit the models to the image size `eval.crop_px` and move them to the device, in place.
    Returns messages. Raises ConfigError for a size that a model can't take.
    """
    crop_px = config.eval.crop_px
    messages = []
    for model in trained.models.values():
        try:
            message = resize_model(model, crop_px, len(trained.mean))
        except ValueError as error:
            raise ConfigError(
                [
                    f"eval.crop_px: {trained.config.model.name} can't take {format_size(crop_px)}: "
                    f"{error}"
                ]
            ) from error
        if message is not None and message not in messages:  # raw and EMA models have the same
            messages.append(message)
        model.to(context.device, memory_format=memory_format(config.train))  # type: ignore[call-overload]
    return messages
