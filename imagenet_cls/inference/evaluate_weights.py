"""Evaluate any weights on a config's validation images or on a separate test set."""

import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from imagenet_cls.config.reader import dump_inline
from imagenet_cls.config.schema import Config, DataConfig
from imagenet_cls.data.classes import (
    classes_of_outputs,
    may_lack_classes,
    natural_key,
    with_readable_name,
)
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.files import has_training_part
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.targets import class_sizes
from imagenet_cls.data.test_set import describe_images, open_test_set
from imagenet_cls.engine.build import rank_devices
from imagenet_cls.engine.evaluate import Evaluation
from imagenet_cls.engine.stored_weights import Weights
from imagenet_cls.engine.user_metrics import build_metrics
from imagenet_cls.errors import CheckpointError, DataError
from imagenet_cls.inference.load_weights import (
    EVALUATION_KEYS,
    TrainedModels,
    WeightsSource,
    evaluation_differences,
    load_on_all_ranks,
    open_source,
    prepare_models,
)
from imagenet_cls.parallel.collectives import (
    all_reduce_sum,
    gather_to_main,
    mark_printed_by_main,
    run_on_main,
)
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.tasks import Task
from imagenet_cls.tasks.outputs import EvalOutputs
from imagenet_cls.text import format_columns, join_names, printable

_MAX_CLASSES_IN_TABLE = 50


@dataclass(frozen=True)
class WeightsEvaluation:
    """The result of an evaluation."""

    messages: list[str]  # lines about the images and the weights
    results: dict[str, dict[str, Any]]  # of `compute_results`, for `raw` and `ema`
    model_name: str
    origin: str  # where the weights are from
    kind: str  # the kind of weights whose outputs `rows` describes
    images: ImageSet
    task: Task
    # On rank 0 a record of `Task.rows` for each image in their order, if they were recorded.
    rows: np.ndarray | None
    present: torch.Tensor | None  # see `Evaluation`
    settings: dict[str, str]  # values of `EVALUATION_KEYS` as text


def evaluate_weights(
    config: Config,
    weights: WeightsSource,
    context: RankContext,
    test_set: DataConfig | None = None,
    record: bool = False,
) -> WeightsEvaluation:
    """Evaluate weights on the validation images of the config, or on a separate test set. A
    collective.

    test_set: the result of `locate_test_set`. record: keep what `prediction_rows` and a report
    need; up to 50 outputs this is kept in any case, for `class_table`. Raises CheckpointError if
    outputs are NaN or infinite.
    """
    trained, images = load_weights_and_images(config, weights, context, test_set)
    data_messages = run_on_main(
        context, lambda: check_not_trained_on(config, trained, test_set, images)
    )
    # Before a test set replaces the images, whose place differs from that of the run on purpose.
    differences = evaluation_differences(config, trained)
    if test_set is not None:
        config = replace(config, data=test_set)
    messages = [
        describe_images(config.data, images),
        *trained.warnings,
        trained.origin,
        *differences,
        *data_messages,
        *prepare_models(trained, config, context),
    ]
    kind = trained.kind
    kinds = list(trained.models)
    record |= trained.num_classes <= _MAX_CLASSES_IN_TABLE
    evaluation = Evaluation(
        config, images, context, rank_devices(config, context), trained.mean, trained.std
    )
    # The images without finite probabilities for each kind, and rows of `Task.rows` for each batch.
    nonfinite = torch.zeros(len(kinds), dtype=torch.int64, device=context.device)
    recorded: list[np.ndarray] = []

    def watched_outputs() -> Iterator[EvalOutputs]:
        for logits, targets, indices in evaluation.outputs(trained.models):
            for number, name in enumerate(kinds):
                is_finite = evaluation.task.has_probabilities(logits[name])
                nonfinite[number] += is_finite.logical_not().sum()
            if record:
                recorded.append(evaluation.task.rows(logits[kind], targets, indices))
            yield logits, targets, indices

    user_metrics = build_metrics(config.eval.metrics, trained.num_classes, kinds, context)
    results = evaluation.results(watched_outputs(), kinds, trained.num_classes, user_metrics)
    counts = all_reduce_sum(nonfinite, context).tolist()
    if any(counts):
        bad = " and ".join(
            f"{count} ({kind})" for kind, count in zip(kinds, counts, strict=True) if count
        )
        error = CheckpointError(
            f"The outputs are NaN or infinite for {bad} of {len(images)} images.",
            "Evaluate other weights, or with train.precision=fp32.",
        )
        raise mark_printed_by_main(error, context)
    rows = None
    gathered = gather_to_main(recorded, context)
    if gathered:
        rows = np.concatenate(gathered)
        rows = rows[np.argsort(rows["index"])]
        assert np.array_equal(rows["index"], np.arange(len(images)))  # each image exactly once
    return WeightsEvaluation(
        messages=messages,
        results=results,
        model_name=trained.config.model.name,
        origin=trained.origin,
        kind=kind,
        images=images,
        rows=rows,
        present=evaluation.present,
        task=evaluation.task,
        settings={key: dump_inline(attrgetter(key)(config)) for key in EVALUATION_KEYS},
    )


def load_weights_and_images(
    config: Config, weights: WeightsSource, context: RankContext, test_set: DataConfig | None
) -> tuple[TrainedModels, ImageSet]:
    """The weights, and the images to evaluate, whose targets are in the order of the weights'
    classes.
    """

    @cache
    def opened() -> Weights:
        return open_source(config, weights)

    stated = run_on_main(context, lambda: opened().classes)
    images = open_images(config, test_set, stated)
    classes = stated
    if classes is None:
        has_training = test_set is None and has_training_part(config.data)
        classes = classes_of_outputs(config, images.classes, has_training)
        data = test_set or config.data
        run_on_main(context, lambda: check_order(data, classes, opened()))
    trained = load_on_all_ranks(config, weights, opened, classes, context)
    allow_missing = stated is None or may_lack_classes(config)
    # by name, since match_classes would also take numbers for positions
    others = sorted({*classes} ^ {*images.classes})
    if others and not allow_missing:
        raise DataError(
            f"Only the images or only the checkpoint has the classes {join_names(others)}.",
            "Evaluate images of the classes that it was trained on. If only some of these have "
            "images, set eval.classes=present.",
        )
    return trained, images.with_classes(classes, "the images", allow_missing=allow_missing)


def check_order(data: DataConfig, classes: Sequence[str], weights: Weights) -> None:
    """Raise CheckpointError if the classes of weights that don't name them are the sorted names of
    class folders or labels, and timm sorts these in another order. Writes both orders to files for
    `data.classes`.

    classes: as of `classes_of_outputs`. weights: published ones have the order of ImageNet.
    """
    plain = sorted(classes)
    natural = sorted(classes, key=natural_key)
    is_stated = data.classes is not None or data.name not in ("folder", "list") or weights.model
    if is_stated or plain == natural or [*classes] != plain:
        return
    folder = Path(tempfile.mkdtemp(prefix="classes-"))
    overrides = []
    for file, order in ((folder / "plain.txt", plain), (folder / "natural.txt", natural)):
        file.write_bytes(os.fsencode("\n".join(order)))
        overrides.append(shlex.quote(f"data.classes={dump_inline(str(file))}"))
    first = next(i for i, name in enumerate(plain) if name != natural[i])
    raise CheckpointError(
        f"{weights.origin}: these weights don't name their classes. Output {first} is "
        f"{plain[first]} in the order of torchvision and imagenet-cls, and {natural[first]} in "
        "timm's.",
        f"Add the order of their training. torchvision, imagenet-cls: {overrides[0]}\n"
        f"timm: {overrides[1]}",
    )


def open_images(
    config: Config, test_set: DataConfig | None, known: Sequence[str] | None
) -> ImageSet:
    """The images to evaluate. known: the classes of the weights; None if they don't name them.

    Raises DataError if images of the test set are missing for some of the classes.
    """
    data = config.data
    may_lack = may_lack_classes(config)
    if test_set is not None:
        images = open_test_set(test_set, known, allow_missing=may_lack)
        if known is not None and not may_lack:
            check_all_classes(images)
        return images
    if known is not None and data.val is not None and data.name in ("folder", "list"):
        return open_test_set(data, known, allow_missing=may_lack)
    return open_datasets(data, ("val",), allow_missing=may_lack).val


def check_all_classes(images: ImageSet) -> None:
    """Raise DataError if a class has no image. A list need not name all classes."""
    if images.targets is None:
        return
    sizes = class_sizes(images.targets, len(images.classes))
    missing = [images.classes[k] for k in np.flatnonzero(sizes == 0)]
    if missing:
        raise DataError(
            f"The test set has no image of {len(missing)} of {len(images.classes)} classes "
            f"({join_names(missing)}).",
            "Add them. To evaluate only the classes that have images: eval.classes=present",
        )


def check_not_trained_on(
    config: Config,
    trained: TrainedModels,
    test_set: DataConfig | None,
    images: ImageSet,
) -> list[str]:
    """A warning if the images to evaluate are the training images of the checkpoint's run.

    images: the images of the validation part, or of the test set. Raises DataError if they are held
    out of the training images, and are not those that the run held out.
    """
    data, state = config.data, trained.state
    if images.digest == state.get("data_digest"):
        return ["warning: these images have the names and classes of the run's training images"]
    is_held_out = test_set is None and data.val is None and data.name != "synthetic"
    if is_held_out and images.digest != state.get("val_digest", images.digest):
        raise DataError(
            f"{Path(data.root) / data.train}: the part that is held out of these images is not "
            "that of the run, which may have been trained on some of it.",
            f"To evaluate all of them: --data {data.root}. To evaluate a folder in it: "
            "data.val=FOLDER",
        )
    return []


def class_table(evaluation: WeightsEvaluation) -> list[str]:
    """The lines of `Task.class_table`; none for more than 50 classes."""
    names = [printable(with_readable_name(name)) for name in evaluation.images.classes]
    if evaluation.rows is None or len(names) > _MAX_CLASSES_IN_TABLE:
        return []
    header, *rows = evaluation.task.class_table(evaluation.rows, names)
    text = format_columns([[f"class ({evaluation.kind})", *header], *rows])
    return text.splitlines()


def prediction_rows(evaluation: WeightsEvaluation) -> Iterator[dict[str, Any]]:
    """A row for each recorded image: see `Task.predictions`."""
    images = evaluation.images
    assert evaluation.rows is not None
    return evaluation.task.predictions(evaluation.rows, images.classes, images.name)
