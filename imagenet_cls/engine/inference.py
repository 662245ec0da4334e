"""Trained weights in use: evaluation of any weights on a config's data, and prediction with a checkpoint alone."""

import glob
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import Snapshot, config_of
from imagenet_cls.checkpoint.select import load_best
from imagenet_cls.config.schema import Config, DataConfig, ModelConfig
from imagenet_cls.data import EvalTransform, ImageSource, Preprocess, decode_rgb, open_datasets
from imagenet_cls.data.index import is_image
from imagenet_cls.engine.build import choose_num_classes, rank_devices
from imagenet_cls.engine.evaluate import Outputs, compute_logits, evaluate, model_outputs
from imagenet_cls.engine.loaders import build_val_batches
from imagenet_cls.engine.model import choose_mean_std, memory_format, weights_and_origin
from imagenet_cls.engine.step import choose_precision
from imagenet_cls.errors import CheckpointError, ConfigError, DataError, UsageError, first_line, format_value
from imagenet_cls.lookup import import_from_here
from imagenet_cls.models.adapt import resize_model, size_remedy
from imagenet_cls.models.build import build_model, check_trusted
from imagenet_cls.models.weights import load_weights, prefix_errors, state_dict_mismatch, without_split_bn
from imagenet_cls.parallel.collectives import broadcast_tensors, gather_to_main
from imagenet_cls.parallel.data_parallel import wrap_data_parallel
from imagenet_cls.parallel.process_group import Group, run_on_main

_BATCH = 32

# Keys that decide which images are evaluated and how they are prepared; not those of speed and batches.
_EVALUATION_KEYS = {
    "data": ("name", "root", "train", "val", "val_fraction", "kwargs"),
    "eval": ("crop_px", "crop_pct", "resize_px", "interpolation", "flip_tta"),
}


@dataclass(frozen=True)
class Weights:
    """Models to evaluate by kind (`raw`, `ema`), and how they were built. classes: None if unknown.

    origin: where they come from. damage: a line for each damaged checkpoint that was skipped. differences: a line for
    each difference from the evaluations of the run that made them.
    """

    models: dict[str, nn.Module]
    config: ModelConfig
    imports: list[str]
    num_classes: int
    classes: tuple[str, ...] | None
    mean: list[float]
    std: list[float]
    origin: str
    damage: list[str]
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EvaluationResult:
    """messages: about the weights. metrics: by kind of weights, see `evaluate`. predictions: see `evaluate_weights`."""

    messages: list[str]
    metrics: dict[str, dict[str, Any]]
    predictions: list[dict[str, Any]]


def evaluate_weights(
    config: Config, checkpoint: Path | None, group: Group, keep_predictions: bool, allow_import: Collection[str] = ()
) -> EvaluationResult:
    """Evaluate weights on the config's validation images; every image counts exactly once. A collective.

    checkpoint: a checkpoint or run folder, foreign weights, or None for the weights that the config names.
    allow_import: what a checkpoint may import beyond what the config names. With keep_predictions, rank 0 gets one row
    for each image: image, target, top-5 classes and probabilities, of the EMA weights if there are any.
    """
    data = open_datasets(config.data, ("val",))
    assert data.val is not None
    weights = load_on_all_ranks(config, checkpoint, len(data.classes), group, allow_import)
    if weights.classes is not None and weights.classes != data.classes:
        here, there = (", ".join(names[:3]) + ", ..." * (len(names) > 3) for names in (data.classes, weights.classes))
        raise DataError(
            f"the validation images have {len(data.classes)} classes ({here}), the checkpoint was "
            f"trained on {len(weights.classes)} ({there}).\n"
            "Use the config and the data that it was trained with."
        )
    devices = rank_devices(config, group)
    notes = [resize(model, weights.config.name, config.eval.crop_px) for model in weights.models.values()]
    for model in weights.models.values():
        model.to(group.device, memory_format=memory_format(config.train))  # type: ignore[call-overload]
    outputs = model_outputs(
        {kind: wrap_data_parallel(model, devices) for kind, model in weights.models.items()},
        build_val_batches(config, data.val, group, len(devices.all)),
        Preprocess(weights.mean, weights.std, group.device, config.train.channels_last),
        group.device,
        choose_precision(config.train.precision, group.device),
        flip=config.eval.flip_tta,
    )
    recorder = PredictionRecorder(list(weights.models)[-1], data.val, data.classes)
    metrics = evaluate(recorder.record(outputs) if keep_predictions else outputs, list(weights.models), group)
    predictions = sorted(gather_to_main(recorder.rows, group), key=lambda row: row["index"])
    origin = ", ".join(filter(None, [weights.origin, notes[0]]))
    return EvaluationResult([*weights.damage, origin, *weights.differences], metrics, predictions)


class PredictionRecorder:
    """Collects a row for each image of an evaluation in `rows`, of one kind of weights."""

    def __init__(self, kind: str, source: ImageSource, classes: Sequence[str]):
        self.kind, self.source, self.classes = kind, source, classes
        self.rows: list[dict[str, Any]] = []

    def record(self, outputs: Iterable[Outputs]) -> Iterator[Outputs]:
        """Yield the outputs of an evaluation unchanged."""
        for logits, targets, indices in outputs:
            ranked = top_classes(logits[self.kind], self.classes)
            for index, target, top in zip(indices.tolist(), targets.tolist(), ranked, strict=True):
                row = {"index": index, "image": self.source.name(index), "target": self.classes[target], "top": top}
                self.rows.append(row)
            yield logits, targets, indices


def resize(model: nn.Module, name: str, size_px: int) -> str | None:
    """Let a model take images of `size_px`; returns a note if it was resized. Raises ConfigError if it can't be."""
    try:
        return resize_model(model, size_px)
    except ValueError as error:
        text = f"{name} can't take {size_px} px: {error}{size_remedy(model, size_px)}"
        raise ConfigError([f"eval.crop_px: {text}"]) from error


def load_on_all_ranks(
    config: Config, checkpoint: Path | None, num_classes: int, group: Group, allow_import: Collection[str] = ()
) -> Weights:
    """Read the weights on rank 0 and broadcast them: the other ranks need no file and no network. A collective."""
    loaded: Weights | None = None

    def read() -> tuple[Weights, list[str]]:
        nonlocal loaded
        loaded = load_any_weights(config, checkpoint, num_classes, allow_import)
        return replace(loaded, models={}), list(loaded.models)

    weights, kinds = run_on_main(group, read)
    if loaded is not None:
        models = loaded.models
    else:
        models = {kind: _build(weights.config, weights.imports, weights.num_classes) for kind in kinds}
    for model in models.values():
        model.load_state_dict(broadcast_tensors(model.state_dict() if loaded is not None else None, group))
    return replace(weights, models=models)


def load_any_weights(
    config: Config, checkpoint: Path | None, num_classes: int, allow_import: Collection[str] = ()
) -> Weights:
    """See `evaluate_weights`. A checkpoint may use the code that the config or allow_import names.

    Raises CheckpointError if the weights do not fit the model, UsageError if there are none.
    """
    if checkpoint is not None and checkpoint.is_dir():
        snapshot, _, damage = load_best(checkpoint)
        assert snapshot.path is not None
        stored = config_of(snapshot.state, snapshot.path)
        averaged = len(snapshot.state.get("averaged", []))
        note = f", an average of {averaged} checkpoints" if averaged else ""
        return Weights(
            models=_checkpoint_models(snapshot, stored, {config.model.name, *config.imports, *allow_import}),
            config=replace(stored.model, pretrained=False, checkpoint=None),
            imports=stored.imports,
            num_classes=snapshot.state["num_classes"],
            classes=tuple(snapshot.state["classes"]),
            mean=snapshot.state["preprocessing"]["mean"],
            std=snapshot.state["preprocessing"]["std"],
            origin=f"{snapshot.path}, step {snapshot.state['step']}{note}",
            damage=damage,
            differences=evaluation_differences(config, stored, snapshot.state["preprocessing"], snapshot.path),
        )
    if checkpoint is None and not config.model.pretrained and config.model.checkpoint is None:
        raise UsageError(
            "no weights to evaluate.\n"
            "Name a checkpoint (test.py CONFIG CHECKPOINT), or set model.pretrained=true for the published ones."
        )
    path = checkpoint or (Path(config.model.checkpoint) if config.model.checkpoint else None)
    count = choose_num_classes(config.model.num_classes, num_classes)
    model = build_model(replace(config.model, pretrained=path is None), count)
    origin, damage = f"published weights of {config.model.name}", []
    if path is not None:
        # A new, random head is fine for training, but its predictions are chance.
        with nullcontext() if checkpoint is not None else prefix_errors("model.checkpoint"):
            weights, origin, damage = weights_and_origin(path)
            origin += f": {load_weights(model, weights, count, head_may_differ=False)}"
    mean, std = choose_mean_std(config, model)
    bare = replace(config.model, pretrained=False, checkpoint=None)
    return Weights({"raw": model}, bare, config.imports, count, None, mean, std, origin, damage)


def evaluation_differences(
    config: Config, stored: Config, preprocessing: Mapping[str, Sequence[float]], checkpoint: Path
) -> list[str]:
    """One line for each key that makes this evaluation differ from the run's own, with a remedy and a warning.

    config: the user's, which is evaluated. stored: of the checkpoint in the folder `checkpoint`. preprocessing: its
    `mean` and `std`, which are used, not the config's, as is its model.
    """
    pairs = [
        (f"{section}.{name}", getattr(getattr(config, section), name), getattr(getattr(stored, section), name))
        for section, names in _EVALUATION_KEYS.items()
        for name in names
        # The training part matters only if the held-out images are taken from it.
        if (section, name) != ("data", "train") or config.data.val is None
    ]
    lines = [
        f"{key}: {format_value(here)}, and {format_value(there)} in the run that made the checkpoint"
        for key, here, there in pairs
        if here != there
    ]
    run_config = checkpoint.parent.parent / "config.yaml"
    if lines and run_config.is_file():
        lines.append(f"{run_config} as CONFIG evaluates as the run did")
    if _may_hold_training_images(config.data, stored.data):
        lines.append("warning: images that the run trained on may be among those evaluated: this is no test of it")
    used: dict[str, tuple[Any, Any]] = {"model.name": (config.model.name, stored.model.name)}
    used |= {f"data.{name}": (getattr(config.data, name), list(preprocessing[name])) for name in ("mean", "std")}
    unused = [
        f"{key}: {format_value(here)} is not used, but {format_value(there)}, with which the checkpoint was trained"
        for key, (here, there) in used.items()
        if here is not None and here != there
    ]
    return [*lines, *unused]


def _may_hold_training_images(data: DataConfig, trained: DataConfig) -> bool:
    """Whether the part evaluated is the one trained on, or more of it than that run held out.

    What is held out by a smaller fraction is part of what a larger one holds out (`data.index.held_out`).
    """

    def place(data: DataConfig, part: str) -> tuple[str, str]:
        return data.name, os.path.realpath(Path(data.root).expanduser() / part)

    part = data.val if data.val is not None else data.train
    same_part = (data.name, part) == (trained.name, trained.train)
    evaluated = 1.0 if data.val is not None else data.val_fraction or 0.0
    held_out = 0.0 if trained.val is not None else trained.val_fraction or 0.0
    return (same_part or place(data, part) == place(trained, trained.train)) and evaluated > held_out


def _checkpoint_models(snapshot: Snapshot, config: Config, trusted: Collection[str]) -> dict[str, nn.Module]:
    """The models of a checkpoint, on the CPU: raw, and EMA if it has one. Raises CheckpointError.

    config: the checkpoint's own. trusted: code that it may use besides the libraries' models.
    """
    check_trusted(config.model, config.imports, trusted, str(snapshot.path))
    models = {}
    for kind, tensors in (("raw", snapshot.model), ("ema", snapshot.ema)):
        if tensors is None:
            continue
        try:
            models[kind] = _build(config.model, config.imports, snapshot.state["num_classes"])
        except (LookupError, ImportError, RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"{snapshot.path}: its model {config.model.name} can't be built here: {first_line(error)}\n"
                "Start from the folder that has its module, with the library versions named in its state.json."
            ) from error
        tensors = without_split_bn(tensors)
        if mismatch := state_dict_mismatch(models[kind].state_dict(), tensors):
            raise CheckpointError(
                f"{snapshot.path}: does not fit {config.model.name} as the installed library builds it: {mismatch}\n"
                "Install the versions named in its state.json."
            )
        models[kind].load_state_dict(tensors)
    return models


def _build(model: ModelConfig, imports: Sequence[str], num_classes: int) -> nn.Module:
    """A model without its weights, in evaluation mode."""
    for name in imports:
        import_from_here(name)
    return build_model(replace(model, pretrained=False, checkpoint=None), num_classes).eval()


def top_classes(logits: Tensor, classes: Sequence[str], count: int = 5) -> list[list[tuple[str, float]]]:
    """For each row of logits (B, C) the `count` likeliest classes with their probabilities, likeliest first.

    A head may be wider than the list of classes.
    """
    best = logits.softmax(dim=1).topk(min(count, logits.shape[1]), dim=1)
    names = [*classes, *(f"class {index}" for index in range(len(classes), logits.shape[1]))]
    return [
        [(names[index], probability) for index, probability in zip(indices, probabilities, strict=True)]
        for indices, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


class Predictor:
    """Classifies images with a checkpoint folder alone, prepared as its run evaluated them (`eval.flip_tta`, too).

    checkpoint: one, or a run folder, which stands for its best one. weights: `raw`, `ema`, or None for those that made
    a run's checkpoint the best, or of a single checkpoint the EMA if it has one. allow_import: factories and modules
    that its config may name besides the libraries' models. damage: a line for each damaged checkpoint that was
    skipped. Raises CheckpointError.
    """

    def __init__(
        self,
        checkpoint: Path,
        device: torch.device,
        weights: str | None = None,
        allow_import: Collection[str] = (),
    ):
        snapshot, best, self.damage = load_best(checkpoint)
        assert snapshot.path is not None
        config = config_of(snapshot.state, snapshot.path)
        models = _checkpoint_models(snapshot, config, allow_import)
        kind = weights or best or ("ema" if "ema" in models else "raw")
        if kind not in models:
            raise CheckpointError(f"{snapshot.path} holds no {kind} weights.\nIt holds: {', '.join(models)}.")
        self.model = models[kind].to(device)
        self.classes = tuple(snapshot.state["classes"])
        self.transform, self.flip = EvalTransform(config.eval), config.eval.flip_tta
        preprocessing = snapshot.state["preprocessing"]
        self.preprocess = Preprocess(preprocessing["mean"], preprocessing["std"], device, config.train.channels_last)

    @torch.no_grad()
    def logits(self, images: Sequence[Tensor]) -> Tensor:
        """images: uint8 (3, H, W) of any sizes. Returns fp32 logits (B, C) on the CPU."""
        batch = torch.stack([self.transform(image) for image in images])
        return compute_logits(self.model, self.preprocess(batch), self.flip).cpu()

    def predict(self, paths: Sequence[Path], count: int = 5, with_logits: bool = False) -> Iterator[dict[str, Any]]:
        """A row for each file, in order: image, top (class, probability), and logits on request. Raises DataError."""
        for start in range(0, len(paths), _BATCH):
            chunk = paths[start : start + _BATCH]
            logits = self.logits([read_image(path) for path in chunk])
            ranked = top_classes(logits, self.classes, count)
            for path, top, outputs in zip(chunk, ranked, logits.tolist(), strict=True):
                yield {"image": str(path), "top": top} | ({"logits": outputs} if with_logits else {})


def read_image(path: Path) -> Tensor:
    """One file as uint8 (3, H, W). Raises DataError that names it."""
    try:
        return decode_rgb(path.read_bytes())
    except (OSError, DataError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: {reason}\nLeave it out, or give another file.") from error


def find_images(arguments: Sequence[str]) -> list[Path]:
    """The images of files, folders (recursively) and patterns, sorted for each. Raises DataError if one has none."""
    found: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            matches = sorted(f for f in path.rglob("*") if is_image(os.fsencode(f.name)) and f.is_file())
        else:
            names = [argument] if path.is_file() else glob.glob(argument, recursive=True)  # noqa: PTH207 (absolute ones)
            matches = sorted(Path(name) for name in names if Path(name).is_file())
        if not matches:
            reason = "no image in this folder" if path.is_dir() else "no such file, folder or pattern"
            raise DataError(
                f"{argument}: {reason}.\nName image files, folders of images, or quoted patterns like 'photos/*.jpg'."
            )
        found += matches
    return found
