"""The built-in losses, the distillation loss, and the check of the `loss` section.

Every loss is a plain mean over the images, so that the mean over micro-batches and ranks is that
over the whole batch. With class weights w_c the loss of an image is

    - sum_c w_c t_c log p_c

with its target t (one-hot or mixed, smoothed) and p, the softmax of its logits.

torch's CrossEntropyLoss divides by the sum of the batch's weights instead if targets are class
indices, which depends on how a batch is split. Only the ratios of listed weights matter, as in
torch: they are divided by their mean.

For `bce`, the loss of an image is multiplied by sum_c w_c t_c, with t not smoothed. The `weight` of
torch's and timm's loss multiplies the terms of a class in all images, whether they show it or not,
so it does not change the ratio of positive and negative images.
"""

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from imagenet_cls.config.schema import SHARE_BELOW_1, DistillConfig, LossConfig
from imagenet_cls.errors import ConfigError, Problem, UserError
from imagenet_cls.lookup import NameNotFoundError, find_factory, kwargs_problems
from imagenet_cls.optim.multilabel_losses import asymmetric_loss, multilabel_bce, positive_weights
from imagenet_cls.optim.signature_check import NotNegative, value_problems
from imagenet_cls.text import describe_type

Loss = Callable[[Tensor, Tensor], Tensor]  # a function of logits and targets
# Logits (N, classes). A model with a distillation token has two: of the class token and of the
# distillation token.
Outputs = Tensor | tuple[Tensor, Tensor]
# A function of outputs, targets and the images that the model saw. Includes the distillation.
TrainingLoss = Callable[[Outputs, Tensor, Tensor], Tensor]


def smooth_targets(targets: Tensor, logits: Tensor, smoothing: float) -> Tensor:
    """(1 - smoothing) * target + smoothing / classes, (N, classes); targets: class indices or
    probabilities.

    Szegedy et al., "Rethinking the Inception Architecture", 2016, section 7.
    """
    if not targets.is_floating_point():
        targets = torch.zeros_like(logits).scatter_(1, targets.unsqueeze(1), 1.0)
    return (1 - smoothing) * targets + smoothing / logits.shape[1]


# The built-in losses. logits: float32 (N, classes). weights: float32 (classes,), or None. splits:
# `augment.splits`.


def cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None, splits: int
) -> Tensor:
    """torch's cross-entropy, but divided by the number of images also with class weights."""
    if weights is None:
        return functional.cross_entropy(logits, targets, label_smoothing=smoothing)
    losses = functional.cross_entropy(
        logits, targets, weights, reduction="none", label_smoothing=smoothing
    )
    return losses.mean()


def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    weights: Tensor | None,
    splits: int,
    target_threshold: Annotated[float | None, SHARE_BELOW_1] = None,
    sum_classes: bool = False,
) -> Tensor:
    """timm's BinaryCrossEntropy, with smoothing of mixed targets too (Wightman et al., "ResNet
    strikes back", 2021).
    """
    smoothed = smooth_targets(targets, logits, smoothing)
    if target_threshold is not None:
        smoothed = smoothed.gt(target_threshold).to(smoothed.dtype)
    if weights is None and not sum_classes:
        return functional.binary_cross_entropy_with_logits(logits, smoothed)
    terms = functional.binary_cross_entropy_with_logits(logits, smoothed, reduction="none")
    losses = terms.sum(1) if sum_classes else terms.mean(1)
    if weights is not None:
        if targets.is_floating_point():
            losses = losses * (targets * weights).sum(1)  # autocast would compute `@` in its dtype
        else:
            losses = losses * weights[targets]
    return losses.mean()


def focal_loss(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    weights: Tensor | None,
    splits: int,
    gamma: NotNegative = 2.0,
) -> Tensor:
    """- sum_c w_c t_c (1 - p_c)^gamma log p_c, with the softmax p: Lin et al., "Focal Loss", 2017,
    section 3.
    """
    log_p = logits.log_softmax(1)
    # 1 - p without cancellation, and not 0: for gamma < 1 the power's slope there is infinite.
    others = (-log_p.expm1()).clamp(min=torch.finfo(log_p.dtype).tiny)
    terms = smooth_targets(targets, logits, smoothing) * others.pow(gamma) * log_p
    return -(terms if weights is None else terms * weights).sum(1).mean()


def jensen_shannon_loss(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    weights: Tensor | None,
    splits: int,
    alpha: NotNegative = 12.0,
) -> Tensor:
    """Cross-entropy of the first split + alpha times the Jensen-Shannon divergence between the
    splits of an image.

    Hendrycks et al., "AugMix", 2020, section 3. The logits are ordered by split, as in
    `TrainBatch`. Only the first targets, one for each image, are used. Equal to timm's
    JsdCrossEntropy, whose gradients are NaN where a probability is 0.
    """
    assert len(logits) % splits == 0, (logits.shape, splits)
    images = len(logits) // splits
    log_p = logits.log_softmax(1).unflatten(0, (splits, images))
    p = log_p.exp()
    log_mean = p.mean(0).clamp(1e-7, 1).log()
    divergence = (p * (log_p - log_mean)).sum(2).mean()
    clean = functional.cross_entropy(logits[:images], targets[:images], label_smoothing=smoothing)
    return clean + alpha * divergence


# By `data.labels`.
LOSSES: dict[str, dict[str, Callable[..., Tensor]]] = {
    "single": {
        "cross_entropy": cross_entropy,
        "bce": binary_cross_entropy,
        "focal": focal_loss,
        "jsd": jensen_shannon_loss,
    },
    "multi": {"bce": multilabel_bce, "asymmetric": asymmetric_loss},
}
# Arguments of built-in losses that the program passes.
RESERVED = ("logits", "targets", "smoothing", "weights", "splits")
# Keys of the section that only built-in losses use.
BUILT_IN_KEYS = ("label_smoothing", "class_weights")


def build_loss(
    loss: LossConfig,
    num_classes: int,
    splits: int = 1,
    labels: str = "single",
    class_samples: np.ndarray | None = None,
    num_images: int = 0,
    device: torch.device | str = "cpu",
) -> Loss:
    """The mean loss over a batch, as a function of logits and targets; a scalar in float32.

    logits: (N, classes), any floating dtype. targets: (N,) int64 class indices, or (N, classes)
    probabilities. num_classes: the number of the model's outputs. splits: `augment.splits`, for
    `jsd`. labels: `data.labels`; with multi the targets are float (N, classes). class_samples,
    num_images: the number of images of each class in an epoch, int64 (classes,), and of all, for
    class weights by size. device: of the logits.

    A user's factory is called as `factory(**kwargs)`, and what it returns as `loss(logits,
    targets)`; a module is moved to `device`. Raises UserError if it returns no function,
    ConfigError for a wrong number of class weights.
    """
    losses = LOSSES[labels]
    if loss.name in losses:
        built_in = losses[loss.name]
        weights = None
        if loss.class_weights is not None:
            given = loss.class_weights
            if isinstance(given, list) and len(given) != num_classes:
                problem = f"{len(given)} numbers, but there are {num_classes} classes"
                remedy = "give one for each, in the order of the classes"
                raise ConfigError([f"loss.class_weights: {problem}; {remedy}"])
            weights = _WEIGHTS[labels](loss, class_samples, num_images).to(device)

        def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
            return built_in(logits, targets, loss.label_smoothing, weights, splits, **loss.kwargs)

    else:
        factory = find_factory("loss", loss.name, losses)
        loss_function = factory(**loss.kwargs)
        if not callable(loss_function):
            raise UserError(
                f"loss.name: {loss.name!r} returned {type(loss_function).__name__}.",
                "Return a function of logits and targets.",
            )
        if isinstance(loss_function, nn.Module):
            loss_function.to(device)
        # A loss that counts its calls would make `train.compile` compile the model for each count.
        loss_function = torch.compiler.disable(loss_function)

    def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            targets = targets.float()
        mean: Any = loss_function(logits.float(), targets)
        # Of a user's loss: None, one with reduction="none" or one that is not derived from logits.
        is_scalar = isinstance(mean, Tensor) and mean.ndim == 0 and mean.is_floating_point()
        if not is_scalar or (logits.requires_grad and not mean.requires_grad):
            raise ConfigError(
                [
                    f"loss.name: {loss.name!r} returned {describe_type(mean)}; return the mean "
                    "over the images, a float tensor of shape () with a gradient"
                ]
            )
        return mean

    return mean_loss


def _class_weights(loss: LossConfig, class_samples: np.ndarray, num_images: int) -> Tensor:
    if isinstance(loss.class_weights, str):
        is_balanced = loss.class_weights == "balanced"
        return weights_by_size(class_samples, None if is_balanced else loss.effective_beta)
    weights = torch.tensor(loss.class_weights, dtype=torch.float64, device="cpu")
    return (weights / weights.mean()).float()


def _label_weights(loss: LossConfig, class_samples: np.ndarray, num_images: int) -> Tensor:
    if isinstance(loss.class_weights, str):
        return positive_weights(class_samples, num_images)
    return torch.tensor(loss.class_weights, dtype=torch.float32, device="cpu")


# By `data.labels`.
_WEIGHTS: dict[str, Callable[..., Tensor]] = {"single": _class_weights, "multi": _label_weights}


def weights_by_size(counts: np.ndarray, beta: float | None) -> Tensor:
    """Weights of the classes from their number of samples n, float32 (classes,), with mean 1 over
    the samples.

    Proportional to 1 / n, or with beta to (1 - beta) / (1 - beta^n): Cui et al., "Class-Balanced
    Loss Based on Effective Number of Samples", 2019, section 3.2 (there with mean 1 over the
    classes). Classes without samples have weight 1.
    """
    known = counts[counts > 0].astype(np.float64)
    inverse = 1 / known if beta is None else (1 - beta) / (1 - beta**known)
    weights = np.ones(len(counts))
    weights[counts > 0] = inverse * known.sum() / (inverse * known).sum()
    return torch.from_numpy(weights).float()


def build_training_loss(
    label_loss: Loss, distill: DistillConfig, teacher: Callable[[Tensor], Tensor] | None = None
) -> TrainingLoss:
    """The mean loss as a function of outputs, targets and the images that the model saw, normalized
    and mixed.

    With a teacher (images -> logits; called without gradients) it is

        (1 - alpha) * label_loss(logits, targets) + alpha * distillation_loss

    soft: T^2 * KL(softmax(teacher / T) || softmax(logits / T)), the sum over the classes, the mean
    over the images (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, section
    2). DeiT's script divides by the classes as well, so its values of alpha can't be used here.
    hard: cross-entropy with the teacher's top class (Touvron et al., "Training data-efficient image
    transformers", 2021, section 4). Of two outputs the first is compared with the targets, the
    second with the teacher (ibid.).
    """
    alpha = distill.alpha
    temperature = distill.temperature

    def training_loss(outputs: Outputs, targets: Tensor, images: Tensor) -> Tensor:
        if isinstance(outputs, Tensor):
            logits = outputs
            token_logits = outputs
        elif distill.kind == "none" or type(outputs) is not tuple or len(outputs) != 2:
            # torchvision's auxiliary outputs are named tuples
            raise UserError(
                f"model.name: in training, the model returns a {type(outputs).__name__}.",
                "Return a tensor of logits, (images, classes); for a model of torchvision with "
                "auxiliary outputs set model.kwargs.aux_logits=false.",
            )
        else:
            logits, token_logits = outputs
        targets = targets.to(logits.device, non_blocking=True)
        if distill.kind == "none":
            return label_loss(logits, targets)
        assert teacher is not None
        with torch.no_grad():
            teacher_logits = teacher(images).to(logits.device, non_blocking=True)
        supervised_loss = label_loss(logits, targets)
        if distill.kind == "hard":
            distillation_loss = functional.cross_entropy(
                token_logits.float(), teacher_logits.argmax(1)
            )
        else:
            log_p = (token_logits.float() / temperature).log_softmax(1)
            log_q = (teacher_logits.float() / temperature).log_softmax(1)
            distillation_loss = functional.kl_div(
                log_p, log_q, reduction="batchmean", log_target=True
            )
            distillation_loss = distillation_loss * temperature**2
        return (1 - alpha) * supervised_loss + alpha * distillation_loss

    return training_loss


def loss_problems(loss: LossConfig, labels: str = "single") -> list[Problem]:
    """All problems of the section that can be found without data. labels: `data.labels`."""
    losses = LOSSES[labels]
    try:
        factory = find_factory("loss", loss.name, losses)
    except NameNotFoundError as error:
        return [Problem("loss.name", str(error))]
    reserved = RESERVED if loss.name in losses else ()
    problems = kwargs_problems("loss.kwargs", factory, loss.kwargs, reserved)
    if loss.name not in losses:
        text = f"is for built-in losses only; {loss.name!r} gets its arguments from loss.kwargs"
        return problems + [
            Problem(f"loss.{name}", text) for name in BUILT_IN_KEYS if getattr(loss, name)
        ]
    return problems or value_problems("loss.kwargs", factory, loss.kwargs)
