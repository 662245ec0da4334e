"""Trained weights in use: evaluation of any weights on a config's data, and prediction with a checkpoint alone."""

import glob
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import config_from_state, invalid_content_errors, mean_std
from imagenet_cls.checkpoint.select import load_best
from imagenet_cls.config.load import removed_key_warnings
from imagenet_cls.config.schema import Config, DataConfig, format_size
from imagenet_cls.data.classes import is_numbered, join_names
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.decode import decode_rgb, decode_upright, rgb_tensor
from imagenet_cls.data.device import Preprocess
from imagenet_cls.data.index import is_image
from imagenet_cls.data.sources import ImageSource, with_classes
from imagenet_cls.data.transforms import EvalTransform
from imagenet_cls.engine.build import choose_num_classes, rank_devices
from imagenet_cls.engine.evaluate import Outputs, compute_logits, evaluate, model_outputs
from imagenet_cls.engine.evaluation_report import MeasuredSource, record_rows, write_report
from imagenet_cls.engine.labels import evaluation_labels
from imagenet_cls.engine.loaders import build_val_batches
from imagenet_cls.engine.metrics import build_metrics
from imagenet_cls.engine.model import choose_mean_std, class_difference, memory_format, read_stored_weights
from imagenet_cls.engine.step import choose_precision
from imagenet_cls.errors import CheckpointError, ConfigError, DataError, UsageError, command_line, format_value
from imagenet_cls.files import check_regular
from imagenet_cls.lookup import import_from_cwd
from imagenet_cls.models.adapt import resize_model, size_remedy
from imagenet_cls.models.build import build_model, check_trusted, published_weights
from imagenet_cls.models.features import FeatureModel
from imagenet_cls.models.imagenet import IMAGENET_CLASSES, imagenet_classes, match_outputs
from imagenet_cls.models.weights import load_weights, prefix_errors, state_dict_mismatch, without_split_bn
from imagenet_cls.parallel.collectives import broadcast_tensors, gather_to_main, run_on_main
from imagenet_cls.parallel.devices import choose_device
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.wrap import wrap_data_parallel

AnyImage = str | Path | Image.Image | np.ndarray | Tensor
"""A file, a Pillow image, a uint8 array (H, W, 3), or a uint8 tensor (3, H, W)."""

_BATCH = 32

# Keys that decide which images are evaluated and how they are prepared; not those of speed and batches.
_EVALUATION_KEYS = (
    "data.name", "data.root", "data.train", "data.val", "data.val_fraction", "data.fold", "data.group", "data.kwargs",
    "data.exif", "data.classes", "eval.classes",
    "eval.mode", "eval.crop_px", "eval.crop_pct", "eval.resize_px", "eval.interpolation", "eval.flip_tta",
)  # fmt: skip


@dataclass(frozen=True)
class TrainedModels:
    """Models by the name of their weights (`raw`, `ema`), on the CPU in evaluation mode, and how they were trained.

    config: with which the models are built. classes: None if unknown. origin: where the weights come from. damage: a
    line for each damaged checkpoint that was skipped, and for each removed key of its config. best: the weights that
    evaluated best in their run, if known.
    """

    models: dict[str, nn.Module]
    config: Config
    num_classes: int
    classes: tuple[str, ...] | None
    mean: list[float]
    std: list[float]
    origin: str
    damage: Sequence[str] = ()
    best: str | None = None


def evaluate_weights(
    config: Config,
    checkpoint: Path | None,
    group: Group,
    keep_predictions: bool,
    allow_import: Collection[str] = (),
    report: Path | None = None,
) -> tuple[list[str], dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Evaluate weights on the config's validation images; every image counts exactly once. A collective.

    checkpoint: a checkpoint or run folder, foreign weights, or None for the weights that the config names.
    allow_import: what a checkpoint may import beyond what the config names. report: a folder for the report, which rank
    0 writes; of the EMA weights if there are any.

    Returns messages about the weights, the metrics of `evaluate`, and with keep_predictions on rank 0 one row for each
    image: image, target, top-5 classes and probabilities, of the EMA weights if there are any.
    """
    subset = config.eval.classes == "present"
    data = open_datasets(config.data, ("val",), subset)
    assert data.val is not None
    classes = classes_of_outputs(config, data.classes)
    trained, messages = load_on_all_ranks(config, checkpoint, classes, group, allow_import)
    classes = trained.classes or classes
    is_by_position = is_numbered(data.classes, classes) and not has_training_part(config.data)
    if classes != data.classes and not (subset or is_by_position):
        assert trained.classes is not None
        difference = class_difference(trained.classes, data.classes)
        raise DataError(
            f"the validation images have {len(data.classes)} classes ({join_names(data.classes)}), the checkpoint was "
            f"trained on {len(trained.classes)} ({join_names(trained.classes)})"
            f"{difference and f': {difference}'}.\n"
            "Use the config and the data that it was trained with; for some of its classes, eval.classes=present."
        )
    val = with_classes(data.val, classes, f"data.val {config.data.val}", subset)
    labels = evaluation_labels(config.eval, val, classes)
    devices = rank_devices(config, group)
    messages += prepare_models(trained, config, group)
    source = val if report is None else MeasuredSource(val)
    outputs = model_outputs(
        {name: wrap_data_parallel(model, devices) for name, model in trained.models.items()},
        build_val_batches(config, source, group, len(devices.all), trained.mean),
        Preprocess(trained.mean, trained.std, group.device, config.train.channels_last),
        group.device,
        choose_precision(config.train.precision, group.device),
        flip=config.eval.flip_tta,
        labels=labels,
    )
    names = list(trained.models)
    rows: list[dict[str, Any]] = []
    if keep_predictions:
        outputs = record_predictions(outputs, names[-1], val, classes, rows)
    parts: list[np.ndarray] = []
    if isinstance(source, MeasuredSource):
        outputs = record_rows(outputs, names[-1], source.sizes, parts)
    own = build_metrics(config.eval.metrics, trained.num_classes, names, group)
    metrics = evaluate(outputs, names, group, trained.num_classes, labels, own)
    if shown := labels.describe(trained.num_classes):
        metrics = {name: result | {"classes": shown} for name, result in metrics.items()}
    if report is not None and (gathered := gather_to_main(parts, group)):
        settings = {key: format_value(attrgetter(key)(config)) for key in _EVALUATION_KEYS}
        about = {"model": trained.config.model.name, "weights": names[-1], "messages": messages, "metrics": metrics}
        about["settings"] = settings
        write_report(report, np.concatenate(gathered), val, labels.present, about)
    return messages, metrics, sorted(gather_to_main(rows, group), key=lambda row: row["index"])


def prepare_models(trained: TrainedModels, config: Config, group: Group) -> list[str]:
    """Fit the models to the images of `config.eval` and move them to the device, in place. Returns messages."""
    crop_px, notes = config.eval.crop_px, dict[str, None]()
    for model in trained.models.values():
        try:
            note = resize_model(model, crop_px, len(trained.mean))
        except ValueError as error:
            text = (
                f"{trained.config.model.name} can't take {format_size(crop_px)}: {error}{size_remedy(model, crop_px)}"
            )
            raise ConfigError([f"eval.crop_px: {text}"]) from error
        notes |= {note: None} if note is not None else {}
        model.to(group.device, memory_format=memory_format(config.train))  # type: ignore[call-overload]
    return list(notes)


def classes_of_outputs(config: Config, found: tuple[str, ...]) -> tuple[str, ...]:
    """The classes of weights that don't name them, in the order of their outputs. found: those of the data.

    They are ImageNet's where the data's are some of them (`eval.classes=present`) or the numbers of all, and no
    training part names them. Their number is `model.num_classes`, or 1,000. Otherwise they are `found`.
    """
    given, has_training = config.model.num_classes, has_training_part(config.data)
    if config.data.classes is not None or (has_training and given is None):
        return found
    names = imagenet_classes(given or IMAGENET_CLASSES)
    is_subset = config.eval.classes == "present" and set(found) <= set(names)
    is_by_position = is_numbered(found, names) and not has_training
    return names if names and (is_subset or is_by_position) else found


def has_training_part(data: DataConfig) -> bool:
    """Whether there is a training part, whose classes are those of the data, beside the validation part."""
    return data.name != "folder" or data.val is None or (Path(data.root).expanduser() / data.train).exists()


def record_predictions(
    outputs: Iterable[Outputs], name: str, source: ImageSource, classes: Sequence[str], rows: list[dict[str, Any]]
) -> Iterator[Outputs]:
    """Yield the outputs of an evaluation unchanged, and append a row for each image. name: of the weights."""
    for logits, targets, indices in outputs:
        ranked = top_classes(logits[name], classes)
        for index, target, top in zip(indices.tolist(), targets.tolist(), ranked, strict=True):
            rows.append({"index": index, "image": source.name(index), "target": classes[target], "top": top})
        yield logits, targets, indices


def load_on_all_ranks(
    config: Config,
    checkpoint: Path | None,
    classes: Sequence[str],
    group: Group,
    allow_import: Collection[str] = (),
    any_head: bool = False,
) -> tuple[TrainedModels, list[str]]:
    """Read the weights on rank 0 and broadcast them: the other ranks need no file and no network. A collective.

    classes: of the data. any_head: see `load_foreign_weights`. Returns messages too: damaged checkpoints, the origin,
    and what differs from the evaluations of the run.
    """
    loaded: TrainedModels | None = None

    def read() -> tuple[TrainedModels, list[str], list[str]]:
        nonlocal loaded
        if checkpoint is not None and checkpoint.is_dir():
            loaded, path = load_checkpoint(checkpoint, {config.model.name, *config.imports, *allow_import})
            differences = evaluation_differences(config, loaded, path)
        else:
            loaded, differences = load_foreign_weights(config, checkpoint, classes, any_head), []
        return replace(loaded, models={}), list(loaded.models), [*loaded.damage, loaded.origin, *differences]

    received, names, messages = run_on_main(group, read)
    trained = loaded or replace(
        received, models={name: build_bare_model(received.config, received.num_classes) for name in names}
    )
    for model in trained.models.values():
        model.load_state_dict(broadcast_tensors(model.state_dict(), group))
    return trained, messages


def load_checkpoint(path: Path, trusted: Collection[str]) -> tuple[TrainedModels, Path]:
    """The models of a checkpoint, or of the best one of a run folder: raw, and EMA if it has one; and its path.

    trusted: code that its config may use besides the libraries' models. Raises CheckpointError.
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
            damage=[*damage, *removed_key_warnings(snapshot.state["config"])],
            best=best,
        )
    for name, tensors in (("raw", snapshot.model), ("ema", snapshot.ema)):
        if tensors is not None:
            trained.models[name] = _checkpoint_model(trained, without_split_bn(tensors), snapshot.path)
    return trained, snapshot.path


def _checkpoint_model(trained: TrainedModels, tensors: dict[str, Tensor], path: Path) -> nn.Module:
    name = trained.config.model.name
    remedy = "Start from the folder that has its module, with the library versions named in its state.json."
    with invalid_content_errors(path, f"its model {name} can't be built here", remedy):
        model = build_bare_model(trained.config, trained.num_classes)
    if mismatch := state_dict_mismatch(model.state_dict(), tensors):
        raise CheckpointError(
            f"{path}: does not fit {name} as the installed library builds it: {mismatch}\n"
            "Install the versions named in its state.json."
        )
    model.load_state_dict(tensors)
    return model


def build_bare_model(config: Config, num_classes: int) -> nn.Module:
    """The config's model without its weights, on the CPU, in evaluation mode."""
    for name in config.imports:
        import_from_cwd(name)
    model = replace(config.model, pretrained=False, checkpoint=None)
    return build_model(model, num_classes, config.data.channels).eval()


def load_foreign_weights(
    config: Config, file: Path | None, classes: Sequence[str], any_head: bool = False
) -> TrainedModels:
    """The config's model with the weights of a file, else with those that the config names.

    classes: of the data. any_head: the head is not used, so that it may be missing or have other outputs. Raises
    CheckpointError if the weights do not fit the model, UsageError if there are none, and
    DataError where they were published for ImageNet-1k and the classes have other names.
    """
    if file is None and not config.model.pretrained and config.model.checkpoint is None:
        raise UsageError(
            "no weights to evaluate.\n"
            f"Name a checkpoint ({command_line('test')} CONFIG CHECKPOINT), or set model.pretrained=true for the "
            "published ones."
        )
    path = file or config.model.checkpoint
    count = choose_num_classes(config.model.num_classes, len(classes))
    model = build_model(replace(config.model, pretrained=path is None), count, config.data.channels).eval()
    mean, std = choose_mean_std(config, model)
    if path is None:
        source, had = published_weights(config.model, model)
        if had != count and not any_head:
            raise CheckpointError(
                f"model.pretrained: the published weights ({source}) have {had} outputs, not {count}.\n"
                f"Set model.num_classes={had}, or evaluate a checkpoint that was trained on these classes."
            )
        note = match_outputs(model, classes) if had == IMAGENET_CLASSES and not any_head else ""
        return TrainedModels({"raw": model}, config, count, None, mean, std, f"published weights ({source}){note}")
    with nullcontext() if file is not None else prefix_errors("model.checkpoint"):
        stored = read_stored_weights(path)
        # A new, random head is fine for training, but its predictions are chance.
        sentence = load_weights(model, stored.tensors, count, head_may_differ=any_head)
    order = "" if any_head else f"; its outputs are taken for the classes in this order: {join_names(classes)}"
    origin = f"{stored.origin}: {sentence}{order}"
    return TrainedModels({"raw": model}, config, count, None, mean, std, origin, stored.damage)


def evaluation_differences(config: Config, trained: TrainedModels, checkpoint: Path) -> list[str]:
    """One line for each key that makes this evaluation differ from the run's own, and a line with the remedy.

    config: the user's, which is evaluated. trained: of the checkpoint, whose model, mean and std are used.
    """
    used: dict[str, Any] = {"model.name": trained.config.model.name, "data.channels": len(trained.mean)}
    used |= {"data.mean": trained.mean, "data.std": trained.std}
    lines = []
    for key in (*_EVALUATION_KEYS, *used):
        here, there = attrgetter(key)(config), used.get(key, attrgetter(key)(trained.config))
        # The training part matters only if the held-out images are taken from it.
        ignored = config.data.val is not None if key == "data.train" else key in used and here is None
        if here != there and not ignored:
            note = ", which is used" if key in used else ""
            lines.append(f"{key}: {format_value(here)}, and {format_value(there)} in the run of the checkpoint{note}")
    run_config = checkpoint.parent.parent / "config.yaml"
    if lines and run_config.is_file():
        lines.append(f"{run_config} as CONFIG evaluates as the run did")
    return lines


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

    checkpoint: one, its file of raw or EMA weights, or a run folder, which stands for its best one. weights: `raw`,
    `ema`, or None for those of the file, for those that made a run's checkpoint the best, or of a single checkpoint for
    the EMA if it has one. device: a value of the config's `device`. allow_import: factories and modules that its config
    may name besides the libraries' models.

    model: in evaluation mode, on the device; maps the images of `prepare` to logits (B, C). classes: their names.
    damage: a line for each damaged checkpoint that was skipped, and for each removed key of its config. Raises
    CheckpointError.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        device: str = "auto",
        weights: str | None = None,
        allow_import: Collection[str] = (),
    ):
        on = choose_device(device, RankInfo())
        folder = Path(checkpoint)
        if folder.is_file() and (folder.parent / "manifest.json").is_file():
            weights = weights or {"model.safetensors": "raw", "ema.safetensors": "ema"}.get(folder.name)
            folder = folder.parent
        trained, path = load_checkpoint(folder, allow_import)
        name = weights or trained.best or ("ema" if "ema" in trained.models else "raw")
        if name not in trained.models:
            raise CheckpointError(f"{path} holds no {name} weights.\nIt holds: {', '.join(trained.models)}.")
        self.weights = name
        self._set_up(path, trained, trained.models[name].to(on), on)

    def _set_up(self, path: Path, trained: TrainedModels, model: nn.Module, device: torch.device) -> None:
        self.path, self.model, self.config, self.damage = path, model, trained.config, trained.damage
        self.classes, self.mean, self.std = trained.classes or (), trained.mean, trained.std
        self.num_classes = trained.num_classes
        self.exif, self.flip = self.config.data.exif, self.config.eval.flip_tta
        self.transform = EvalTransform(self.config.eval, self.mean)
        self.preprocess = Preprocess(self.mean, self.std, device, self.config.train.channels_last)

    def prepare(self, images: Sequence[AnyImage]) -> Tensor:
        """Images of any sizes, resized, cropped and normalized: float32 (B, C, S, S) on the device of the model."""
        return self.preprocess(torch.stack([self.transform(read_image(image, self.exif)) for image in images]))

    @torch.no_grad()
    def logits(self, images: Sequence[AnyImage]) -> Tensor:
        """fp32 logits (B, C) on the CPU. Raises CheckpointError if the model can't take images of the run's size."""
        pixels = self.prepare(images)
        with invalid_content_errors(self.path):
            return compute_logits(self.model, pixels, self.flip).cpu()

    @torch.no_grad()
    def features(self, images: Sequence[AnyImage]) -> Tensor:
        """fp32 features (B, D) on the CPU: the input of the classifier, see `FeatureModel`. Raises as `logits`, and
        UsageError where the model has no classifier that is known.

        With `eval.flip_tta` the mean of the features of each image and of its mirror image, as of the logits.
        """
        pixels = self.prepare(images)
        with invalid_content_errors(self.path):
            return compute_logits(self._feature_model, pixels, self.flip).cpu()

    @cached_property
    def _feature_model(self) -> FeatureModel:
        return FeatureModel(self.model, self.num_classes)

    def predict(
        self, images: Sequence[AnyImage], top: int = 5, with_logits: bool = False, bad: list[DataError] | None = None
    ) -> Iterator[dict[str, Any]]:
        """A row for each image, in order: image, top (class, probability), and logits on request.

        image: the path of a file, else the position in `images`. bad: receives the error of each file that can't be
        read, which is left out; None raises the first one. Raises TypeError for a single path.
        """
        if isinstance(images, str | Path):
            raise TypeError(f"predict takes a list of images, not {images!r}")
        for names, logits in self.in_batches(images, self.logits, bad):
            ranked = top_classes(logits, self.classes, top)
            for name, best, outputs in zip(names, ranked, logits.tolist(), strict=True):
                yield {"image": name, "top": best} | ({"logits": outputs} if with_logits else {})

    def in_batches(
        self,
        images: Sequence[AnyImage],
        compute: Callable[[Sequence[AnyImage]], Tensor],
        bad: list[DataError] | None = None,
    ) -> Iterator[tuple[list[str | int], Tensor]]:
        """For each batch of images their names, as of `predict`, and `compute` of them: `logits` or `features`."""
        for start in range(0, len(images), _BATCH):
            names: list[str | int] = []
            batch: list[Tensor] = []
            for number, image in enumerate(images[start : start + _BATCH], start):
                try:
                    batch.append(read_image(image, self.exif))
                except DataError as error:
                    if bad is None:
                        raise
                    bad.append(error)
                else:
                    names.append(str(image) if isinstance(image, str | Path) else number)
            if batch:
                yield names, compute(batch)


def load_model(
    checkpoint: str | Path, device: str = "auto", weights: str | None = None, allow_import: Collection[str] = ()
) -> tuple[nn.Module, Callable[[Sequence[AnyImage]], Tensor]]:
    """The model of a checkpoint in evaluation mode, and the function from images to its input.

    Arguments as of `Predictor`, whose `model` and `prepare` it returns. Raises CheckpointError.
    """
    predictor = Predictor(checkpoint, device, weights, allow_import)
    return predictor.model, predictor.prepare


def read_image(image: AnyImage, exif: str = "ignore") -> Tensor:
    """An image as uint8 (3, H, W) on the CPU. Raises DataError that names the file, TypeError for other arrays.

    exif: `data.exif`, for files and Pillow images.
    """
    if isinstance(image, Image.Image):
        return rgb_tensor(ImageOps.exif_transpose(image) if exif == "apply" else image)
    if isinstance(image, np.ndarray):
        image = torch.from_numpy(np.ascontiguousarray(image)).movedim(-1, 0)
    if isinstance(image, Tensor):
        if image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3:
            text = f"{image.dtype} {tuple(image.shape)}"
            raise TypeError(f"{text} is neither a uint8 tensor (3, H, W) nor a uint8 array (H, W, 3)")
        return image.cpu()
    path = Path(image)
    try:
        check_regular(path)
        return (decode_upright if exif == "apply" else decode_rgb)(path.read_bytes())
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
            remedy = "Name image files, folders of images, or quoted patterns like 'photos/*.jpg'."
            raise DataError(f"{argument}: no image there.\n{remedy}")
        found += matches
    return found
