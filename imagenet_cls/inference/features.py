"""How well frozen features classify: k-nearest neighbors and logistic regression.

They are fitted to the training images, and evaluated on the validation images.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from imagenet_cls.config.schema import Config, DataConfig
from imagenet_cls.data.datasets import has_training_part, open_datasets
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.data.test_set import describe_images
from imagenet_cls.engine.build import rank_devices
from imagenet_cls.engine.evaluate import Evaluation
from imagenet_cls.engine.evaluation_labels import EvaluationLabels
from imagenet_cls.errors import CheckpointError, DataError, UsageError
from imagenet_cls.inference.evaluate_weights import check_not_trained_on, open_images
from imagenet_cls.inference.load_weights import (
    TrainedModels,
    WeightsSource,
    describe_weights,
    load_on_all_ranks,
    prepare_models,
)
from imagenet_cls.models.features import FeatureModel
from imagenet_cls.parallel.collectives import gather_shards, run_on_main
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.text import first_line

_TEMPERATURE = 0.07
_CHUNK = 1024
_PROBE_ITERATIONS = 1000


def evaluate_features(
    config: Config,
    weights: WeightsSource,
    context: RankContext,
    test_set: DataConfig | None = None,
    neighbors: int | None = None,
    probe_c: float | None = None,
) -> list[str]:
    """Classify the validation images by the features of the training images, both prepared as for
    evaluation. A collective.

    test_set: classify these images instead. neighbors: for `knn_classes`; None to leave it out.
    probe_c: for `linear_probe`; None to leave it out. Returns messages about the weights, and on
    rank 0 a line for each result. Raises UsageError with `data.labels` multi.
    """
    if config.data.labels == "multi":
        raise UsageError(
            "--knn and --linear-probe are for one label, and the config has data.labels multi.",
            "Leave them out, or write the features with predict.py --features.",
        )
    if not has_training_part(config.data):
        place = Path(config.data.root) / config.data.train
        raise DataError(
            f"--knn and --linear-probe need training images, and there is no {place}.",
            "Set data.root and data.train.",
        )
    subset = config.eval.classes == "present"
    if test_set is None:
        data = open_datasets(config.data, ("train", "val"), allow_missing=subset)
        images = data.val
    else:
        data = open_datasets(config.data, ("train",), allow_missing=subset)
        images = open_images(config, test_set, data.classes)
    assert data.train is not None and images is not None
    if neighbors is not None and neighbors > len(data.train):
        raise UsageError(
            f"--knn {neighbors}: there are {len(data.train)} training images.",
            f"Give a number up to {len(data.train)}.",
        )
    trained = load_on_all_ranks(config, weights, data.classes, context, ignore_head=True)
    messages = [
        describe_images(test_set or config.data, images),
        *describe_weights(config, trained),
    ]
    if test_set is not None:
        messages += run_on_main(
            context, lambda: check_not_trained_on(config, trained, test_set, images)
        )
    if data.note is not None:
        messages.append(data.note)
    messages += prepare_models(trained, config, context)
    models = {
        name: FeatureModel(model, trained.num_classes) for name, model in trained.models.items()
    }
    train, train_targets = compute_features(config, trained, models, data.train, context)
    val, targets = compute_features(config, trained, models, images, context)
    if not context.is_main:
        return messages
    for name in models:
        if not (train[name].isfinite().all() and val[name].isfinite().all()):
            raise CheckpointError(
                f"The features of the {name} weights are NaN or infinite.",
                "Use another checkpoint.",
            )
        if neighbors is not None:
            predicted = knn_classes(
                train[name], train_targets, val[name], neighbors, context.device
            )
            messages.append(f"{name}: k-NN {format_accuracy(predicted, targets)}, k={neighbors}")
        if probe_c is not None:
            predicted, note = linear_probe(train[name], train_targets, val[name], probe_c)
            messages.append(
                f"{name}: linear probe {format_accuracy(predicted, targets)}, C={probe_c:g}, {note}"
            )
    return messages


def format_accuracy(predicted: Tensor, targets: Tensor) -> str:
    return f"top-1 {100 * (predicted == targets).double().mean():.3f} % over {len(targets)} images"


def compute_features(
    config: Config,
    trained: TrainedModels,
    models: Mapping[str, nn.Module],
    source: ImageSource,
    context: RankContext,
) -> tuple[dict[str, Tensor], Tensor]:
    """The features of all images by each model, fp32 (N, D), and their targets, int64 (N,), in the
    order of `source`. Other ranks than 0 return their shards. A collective.
    """
    shard: dict[str, list[Tensor]] = {name: [] for name in (*models, "targets", "indices")}
    evaluation = Evaluation(
        config,
        source,
        context,
        rank_devices(config, context),
        trained.mean,
        trained.std,
        EvaluationLabels(),
    )
    for features, targets, indices in evaluation.outputs(models):
        for name, rows in {**features, "targets": targets, "indices": indices}.items():
            shard[name].append(rows.cpu())
    gathered = {}
    for name, parts in shard.items():
        rows = torch.cat(parts) if parts else torch.empty(0)  # a shard may be empty
        parts.clear()
        gathered[name] = gather_shards(rows, len(source), context)
    targets = gathered.pop("targets")
    indices = gathered.pop("indices")
    assert not context.is_main or torch.equal(indices, torch.arange(len(source)))
    return gathered, targets


def knn_classes(
    train: Tensor, targets: Tensor, val: Tensor, neighbors: int, device: torch.device
) -> Tensor:
    """The class of each image of `val` by a vote of its nearest images of `train` by cosine
    similarity, weighted by exp(similarity / 0.07), as int64 (M,) on the CPU.

    train, val: features (N, D) and (M, D) on the CPU. targets: int64 (N,). Wu et al., "Unsupervised
    feature learning via non-parametric instance discrimination", 2018, as in eval_knn.py of DINO
    (Caron et al. 2021), but the training images are compared in parts, so that they need not fit on
    the device.
    """
    queries = functional.normalize(val.to(device))
    best = torch.empty(len(val), 0, device=device)
    classes = torch.empty(len(val), 0, dtype=torch.int64, device=device)
    chunks = zip(train.split(_CHUNK), targets.to(device).split(_CHUNK), strict=True)
    for features, chunk_targets in chunks:
        similarity = queries @ functional.normalize(features.to(device)).T
        # the nearest images so far, and of this chunk
        similarity = torch.cat([best, similarity], dim=1)
        candidates = torch.cat([classes, chunk_targets.expand(len(val), -1)], dim=1)
        best, columns = similarity.topk(min(neighbors, similarity.shape[1]), dim=1)
        classes = candidates.gather(1, columns)
    weights = best.div(_TEMPERATURE).exp().cpu()
    votes = torch.zeros(len(val), int(targets.max()) + 1)
    return votes.scatter_add_(1, classes.cpu(), weights).argmax(dim=1)


def linear_probe(train: Tensor, targets: Tensor, val: Tensor, c: float) -> tuple[Tensor, str]:
    """The class of each image of `val` by logistic regression on `train`, int64 (M,), and a note on
    its iterations.

    train, targets, val: as for `knn_classes`. c: inverse of the L2 penalty. L-BFGS of at most 1,000
    iterations on features that are not normalized, as in Radford et al., "Learning transferable
    visual models from natural language supervision" (CLIP), 2021; but c is not searched on the
    validation images. Raises UsageError.
    """
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=c, max_iter=_PROBE_ITERATIONS)
    try:
        with warnings.catch_warnings(action="ignore"):  # the note says what they say
            model.fit(train.numpy(), targets.numpy())
    except ValueError as error:  # such as a single class
        raise UsageError(
            f"--linear-probe: scikit-learn can't fit the features: {first_line(error)}.",
            "Use other training images or another checkpoint.",
        ) from error
    iterations = model.n_iter_.max()
    note = f"{iterations} iterations"
    if iterations >= _PROBE_ITERATIONS:
        note += ", not converged"
    return torch.from_numpy(model.predict(val.numpy())), note
