"""Evaluates any weights on a config's validation images; writes predictions and the report of `tools/test.py`."""

import csv
import io
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from imagenet_cls.config.schema import Config, DataConfig
from imagenet_cls.data.archives import find_archives
from imagenet_cls.data.classes import join_names
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.decode import ChooseBox
from imagenet_cls.data.sources import ImageSource, SubsetSource, with_classes
from imagenet_cls.data.test_set import describe_images, open_test_set
from imagenet_cls.data.turbojpeg import Box
from imagenet_cls.engine.build import rank_devices
from imagenet_cls.engine.evaluate import Evaluation, Outputs, evaluate
from imagenet_cls.engine.labels import evaluation_labels
from imagenet_cls.engine.metrics import build_metrics
from imagenet_cls.engine.model import class_difference
from imagenet_cls.engine.predictor import top_classes
from imagenet_cls.engine.trained import (
    EVALUATION_KEYS,
    TrainedModels,
    choose_weights,
    load_on_all_ranks,
    prepare_models,
)
from imagenet_cls.errors import CheckpointError, DataError, format_value
from imagenet_cls.files import explain_write_errors, write_file
from imagenet_cls.models.imagenet import IMAGENET_CLASSES, imagenet_outputs
from imagenet_cls.parallel.collectives import (
    all_reduce_sum,
    gather_to_main,
    mark_printed_by_main,
    run_on_main,
)
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.report.evaluation import ROW, evaluation_page, evaluation_statistics
from imagenet_cls.report.page import to_jpeg

_THUMBNAIL_PX = 160


def evaluate_weights(
    config: Config,
    checkpoint: Path | None,
    group: Group,
    keep_predictions: bool,
    allow_import: Collection[str] = (),
    report: Path | None = None,
    weights: str | None = None,
    test_set: DataConfig | None = None,
) -> tuple[list[str], dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Evaluate weights on the config's validation images, or on a separate test set. A collective.

    checkpoint: a checkpoint or run folder, foreign weights, or None for the weights that the config names.
    allow_import: what a checkpoint may import beyond what the config names. report: the folder of the report. weights:
    `raw` or `ema`, to evaluate only these. test_set: of `locate_test_set`.

    Returns messages about the images and the weights, the metrics of `evaluate`, and with
    keep_predictions on rank 0 one row for each image: image, target, top-5 classes and
    probabilities. Rows and report are of the weights of `choose_weights`.
    """
    subset = config.eval.classes == "present"
    loaded = None
    if run_on_main(group, lambda: checkpoint is not None and checkpoint.is_dir()):
        # The classes of a checkpoint are those of the images, so that it is read before them.
        loaded = load_on_all_ranks(config, checkpoint, (), group, allow_import, weights)
    val = open_images(config, test_set, loaded and loaded[0].classes)
    if loaded is None:
        has_training = test_set is None and has_training_part(config.data)
        classes = classes_of_outputs(config, val.classes, has_training)
        loaded = load_on_all_ranks(config, checkpoint, classes, group, allow_import, weights)
        val = with_classes(val, classes, "the images", subset=True)
    trained, messages = loaded
    known = trained.classes or val.classes
    if known != val.classes and not subset:
        difference = class_difference(known, val.classes)
        raise DataError(
            f"the validation images have {len(val.classes)} classes ({join_names(val.classes)}), "
            f"the checkpoint was trained on {len(known)} ({join_names(known)})"
            f"{difference and f': {difference}'}.\n"
            "Use the config and the data that it was trained with; "
            "for some of its classes, eval.classes=present."
        )
    val = with_classes(val, known, f"data.val {config.data.val}", subset)
    messages += run_on_main(group, lambda: check_not_trained_on(config, trained, test_set, val))
    if test_set is not None:
        config = replace(config, data=test_set)
    messages.insert(0, describe_images(config.data, val))
    chosen, classes = choose_weights(trained, weights), val.classes
    labels = evaluation_labels(config.eval, val, classes)
    messages += prepare_models(trained, config, group)
    source = val if report is None else MeasuredSource(val)
    evaluation = Evaluation(
        config, source, group, rank_devices(config, group), trained.mean, trained.std, labels
    )
    names = list(trained.models)
    nonfinite = torch.zeros(len(names), dtype=torch.int64, device=group.device)
    by_name = dict(zip(names, nonfinite, strict=True))
    outputs = count_nonfinite(evaluation.outputs(trained.models), by_name)
    rows: list[dict[str, Any]] = []
    if keep_predictions:
        outputs = record_predictions(outputs, chosen, val, classes, rows)
    parts: list[np.ndarray] = []
    if isinstance(source, MeasuredSource):
        outputs = record_rows(outputs, chosen, source.sizes, parts)
    user_metrics = build_metrics(config.eval.metrics, trained.num_classes, names, group)
    metrics = evaluate(outputs, names, group, trained.num_classes, labels, user_metrics)
    counts = dict(zip(names, all_reduce_sum(nonfinite, group).tolist(), strict=True))
    if any(counts.values()):
        raise mark_printed_by_main(nonfinite_error(counts, len(val)), group)
    if report is not None and (gathered := gather_to_main(parts, group)):
        about = {
            "model": trained.config.model.name,
            "weights": chosen,
            "messages": messages,
            "metrics": metrics,
        }
        about["settings"] = {key: format_value(attrgetter(key)(config)) for key in EVALUATION_KEYS}
        write_report(report, np.concatenate(gathered), val, labels.present, about)
    return messages, metrics, sorted(gather_to_main(rows, group), key=lambda row: row["index"])


def open_images(
    config: Config,
    test_set: DataConfig | None,
    known: Sequence[str] | None,
) -> ImageSource:
    """The images to evaluate. known: the classes of the weights, None if these don't name them."""
    data, subset = test_set or config.data, config.eval.classes == "present"
    has_files = data.val is not None and data.name in ("folder", "list")
    if test_set is not None or (known is not None and has_files):
        return open_test_set(data, known, subset)
    val = open_datasets(data, ("val",), subset).val
    assert val is not None
    return val


def check_not_trained_on(
    config: Config,
    trained: TrainedModels,
    test_set: DataConfig | None,
    source: ImageSource,
) -> list[str]:
    """A warning if the images to evaluate are training images of the checkpoint's run, or may be.

    Raises DataError as `check_split`.
    """
    data = config.data
    warning = "warning: these images have the names and classes of the run's training images"
    if trained.data_digest is None:
        return []
    if source.digest() == trained.data_digest:
        return [warning]
    if test_set is not None:
        location = replace(test_set, train=test_set.val or "", exclude=data.exclude)
        return [warning] if has_training_images(trained, location) else []
    if data.val is None and data.name != "synthetic":
        return check_split(data, trained)
    return []


def check_split(data: DataConfig, trained: TrainedModels) -> list[str]:
    """A warning if the images that `data` holds out are not those that the run held out.

    Raises DataError if they would be held out of other images than those of the run.
    """
    run_data, is_same = trained.config.data, has_training_images(trained, data)
    splits = [(part.val_fraction, part.fold, part.group) for part in (data, run_data)]
    if is_same and splits[0] == splits[1]:
        return []
    folders = [Path(part.root).expanduser() / part.train for part in (data, run_data)]
    places = [
        (data.name, os.path.realpath(folders[0])),
        (run_data.name, os.path.realpath(folders[1])),
    ]
    if is_same or places[0] == places[1]:
        return ["warning: the run held out other images, and may have been trained on these"]
    raise DataError(
        f"{Path(data.root) / data.train}: these are not the images that the run was trained on, "
        "and only a part of them would be evaluated.\n"
        f"To evaluate all of them: --data {data.root}. To evaluate a folder in it: data.val=FOLDER"
    )


def has_training_images(trained: TrainedModels, location: DataConfig) -> bool:
    """Whether the training part at a location, divided as in the run, has the run's digest."""
    data = replace(
        trained.config.data,
        name=location.name,
        root=location.root,
        train=location.train,
        exclude=location.exclude,
    )
    try:
        train = open_datasets(data, ("train",)).train
    except DataError:
        return False
    return train is not None and train.digest() == trained.data_digest


def classes_of_outputs(
    config: Config,
    found: tuple[str, ...],
    has_training: bool,
) -> tuple[str, ...]:
    """The classes of weights that don't name them, in the order of their outputs.

    found: the classes of the data. has_training: whether they are those of a training part. There
    are `model.num_classes` outputs, else as many as classes, or with `eval.classes=present` those
    of ImageNet-1k. The classes of ImageNet are recognized by their names. Raises DataError where
    neither these names nor `data.classes` tell which outputs are the classes.
    """
    given, chosen = config.model.num_classes, config.data.classes is not None
    is_subset = config.eval.classes == "present" and not has_training
    count = given or (IMAGENET_CLASSES if is_subset else len(found))
    names = () if chosen and len(found) == count else imagenet_outputs(found, count)
    if not names and len(found) < (given or 0) and not chosen:
        raise DataError(
            f"model.num_classes={count}: it is unknown which of these outputs are the {len(found)} "
            f"classes of the images ({join_names(found)}).\n"
            "List the classes in the order of the outputs, one a line: data.classes=FILE; "
            "or name the folders by WordNet ids."
        )
    return names or found


def has_training_part(data: DataConfig) -> bool:
    """Whether there is a training part, whose classes are those of the data, beside the validation part."""
    root = Path(data.root).expanduser()
    is_named = data.name != "folder" or data.val is None
    return is_named or (root / data.train).exists() or bool(find_archives(root, data.train))


def count_nonfinite(
    outputs: Iterable[Outputs],
    counts: Mapping[str, torch.Tensor],
) -> Iterator[Outputs]:
    """Yield outputs unchanged, and count the images without finite probabilities for each model.

    counts: int64 scalars. An output of -inf, as of an absent class, is a probability of 0.
    """
    for logits, targets, indices in outputs:
        for name, count in counts.items():
            count += logits[name].logsumexp(dim=1).isfinite().logical_not().sum()
        yield logits, targets, indices


def nonfinite_error(counts: Mapping[str, int], images: int) -> CheckpointError:
    """The error for weights with NaN or infinite outputs. counts: the images that have them."""
    bad = " and ".join(f"{count} ({name})" for name, count in counts.items() if count)
    finite = [f"--weights {name}, or " for name, count in counts.items() if not count]
    return CheckpointError(
        f"The outputs are NaN or infinite for {bad} of {images} images.\n"
        f"Evaluate {''.join(finite)}another checkpoint, or with train.precision=fp32."
    )


def record_predictions(
    outputs: Iterable[Outputs],
    name: str,
    source: ImageSource,
    classes: Sequence[str],
    rows: list[dict[str, Any]],
) -> Iterator[Outputs]:
    """Yield the outputs of an evaluation unchanged, and append a row for each image. name: of the weights."""
    for logits, targets, indices in outputs:
        ranked = top_classes(logits[name], classes)
        for index, target, top in zip(indices.tolist(), targets.tolist(), ranked, strict=True):
            rows.append(
                {"index": index, "image": source.name(index), "target": classes[target], "top": top}
            )
        yield logits, targets, indices


class MeasuredSource(SubsetSource):
    """All images of another source, of which it records the size of each that is read for a batch.

    sizes: int32 (N, 2), height and width, in memory that the workers share; 0 for images that were not read.
    """

    def __init__(self, source: ImageSource):
        super().__init__(source, np.arange(len(source)))
        self.sizes = torch.zeros(len(source), 2, dtype=torch.int32).share_memory_()

    def load_region(self, i: int, choose: ChooseBox) -> tuple[torch.Tensor, Box, int]:
        def choose_and_record(height: int, width: int) -> Box:
            self.sizes[i] = torch.tensor((height, width))
            return choose(height, width)

        return super().load_region(i, choose_and_record)


def record_rows(
    outputs: Iterable[Outputs], name: str, sizes: torch.Tensor, parts: list[np.ndarray]
) -> Iterator[Outputs]:
    """Yield outputs unchanged, and append an array of `ROW` for each batch. name: of the weights."""
    for logits, targets, indices in outputs:
        own = logits[name]
        best = own.topk(min(5, own.shape[1]), dim=1).indices[:, 0]  # as `evaluate`, also for ties
        rows = np.empty(len(targets), ROW)
        rows["index"], rows["target"], rows["prediction"] = indices.cpu(), targets.cpu(), best.cpu()
        rows["height"], rows["width"] = sizes[indices.cpu()].T
        rows["confidence"] = own.softmax(dim=1).gather(1, best[:, None])[:, 0].cpu()
        rows["loss"] = functional.cross_entropy(own, targets, reduction="none").cpu()
        parts.append(rows)
        yield logits, targets, indices


def write_report(
    folder: Path,
    rows: np.ndarray,
    source: ImageSource,
    present: torch.Tensor | None,
    about: Mapping[str, Any],
) -> None:
    """Write report.json, report.html and confusion.csv. Raises ResourceError.

    rows: of all images, in any order. present: the report has only these classes, see `EvaluationLabels`.
    """
    rows = np.sort(rows, order="index")
    assert np.array_equal(rows["index"], np.arange(len(source)))  # each image exactly once
    classes = source.classes
    if present is not None:
        classes = tuple(classes[i] for i in present.tolist())
        for name in ("target", "prediction"):
            rows[name] = np.searchsorted(present.numpy(), rows[name])
    statistics, confusion = evaluation_statistics(rows, classes, source.name)
    statistics = {**about, **statistics}
    shown = {row["index"] for row in [*statistics["mistakes"], *statistics["hits"]]}
    pictures = {i: Image.fromarray(source.load(i)[0].permute(1, 2, 0).numpy()) for i in shown}
    thumbnails = {i: to_jpeg(picture, _THUMBNAIL_PX) for i, picture in pictures.items()}
    page = evaluation_page(statistics, confusion, thumbnails)
    table = io.StringIO(newline="")
    names = [row["name"] for row in statistics["classes"]]
    csv.writer(table, lineterminator="\n").writerows(
        [
            ["true \\ predicted", *names],
            *([name, *row] for name, row in zip(names, confusion.tolist(), strict=True)),
        ]
    )
    finite = json.loads(
        json.dumps(statistics), parse_constant=lambda _: None
    )  # JSON has no NaN and infinity
    with explain_write_errors(folder, "Name another folder with --report."):
        write_file(folder / "confusion.csv", table.getvalue())
        write_file(folder / "report.json", json.dumps(finite, indent=1) + "\n")
        write_file(folder / "report.html", page)
