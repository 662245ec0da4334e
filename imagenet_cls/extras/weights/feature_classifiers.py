"""How well frozen features classify: k-nearest neighbors and logistic regression.

They are fitted to the training images, and evaluated on the validation images.
"""

import warnings

import torch
from torch import Tensor
from torch.nn import functional

from imagenet_cls.config.metrics import BY_NAME
from imagenet_cls.config.schema import Config, DataConfig
from imagenet_cls.errors import CheckpointError, UsageError
from imagenet_cls.extras.weights.feature_model import FeatureModel
from imagenet_cls.inference.load_weights import WeightsSource
from imagenet_cls.inference.part_outputs import part_outputs
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
    found = part_outputs(config, weights, context, FeatureModel, test_set)
    messages = found.messages
    if not context.is_main:
        return messages
    train, train_targets = found.train, found.train_targets
    val, targets = found.val, found.val_targets
    if neighbors is not None and neighbors > len(train_targets):
        raise UsageError(
            f"--knn {neighbors}: there are {len(train_targets)} training images.",
            f"Give a number up to {len(train_targets)}.",
        )
    for name in train:
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
    images = len(targets)
    top1_pct = 100 * (predicted == targets).double().mean().item()
    return f"top-1 {BY_NAME['top1'].format(top1_pct, 3, images)} over {images} images"


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
