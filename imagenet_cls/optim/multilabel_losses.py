"""The built-in losses of images with several labels (`data.labels` multi).

Each output is the logit of one class, and the target of an image is a row of numbers from 0 to 1.
Like the other losses, each is a plain mean over the images (see `optim.losses`).

A class weight w_c multiplies the term of the images that have the class, t_c log p_c, as
`pos_weight` of torch's BCEWithLogitsLoss does, so that it changes the ratio of positive and
negative images.
"""

from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from imagenet_cls.config.schema import SHARE_BELOW_1
from imagenet_cls.optim.signature_check import NotNegative


def multilabel_bce(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    weights: Tensor | None,
    splits: int,
    sum_classes: bool = False,
) -> Tensor:
    """Binary cross-entropy of each class with the target (1 - s) t + s / 2, the mean over the
    classes, or their sum.
    """
    smoothed = smooth_labels(targets, smoothing)
    terms = functional.binary_cross_entropy_with_logits(
        logits, smoothed, reduction="none", pos_weight=weights
    )
    losses = terms.sum(1) if sum_classes else terms.mean(1)
    return losses.mean()


def asymmetric_loss(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    weights: Tensor | None,
    splits: int,
    gamma_neg: NotNegative = 4.0,
    gamma_pos: NotNegative = 1.0,
    clip: Annotated[float, SHARE_BELOW_1] = 0.05,
) -> Tensor:
    """- sum_c [t (1 - p)^gamma_pos log p + (1 - t) q^gamma_neg log(1 - q)], p the sigmoid of the
    logit and q = max(p - clip, 0).

    Ridnik et al., "Asymmetric Loss For Multi-Label Classification", 2021, equations 4 to 6. The
    defaults are those of the authors' code, which sums over the images, too. Equal to timm's
    AsymmetricLossMultiLabel, with three differences. A positive target has a gradient also where p
    is below 1e-8. Gradients are finite for a gamma between 0 and 1. A target between 0 and 1
    weights the two terms; timm interpolates the two gammas.
    """
    tiny = torch.finfo(logits.dtype).tiny  # for gamma < 1 the slope of a power is infinite at 0
    absent = (-logits).sigmoid().clamp(min=tiny)
    # below 1, so that the logarithm of a tiny `clip` is finite
    shifted = (logits.sigmoid() - clip).clamp(tiny, 1 - torch.finfo(logits.dtype).eps)
    # With clip 0 logsigmoid is exact where the sigmoid rounds to 1.
    log_absent = functional.logsigmoid(-logits) if clip == 0 else torch.log1p(-shifted)
    positive = absent.pow(gamma_pos) * functional.logsigmoid(logits)
    negative = shifted.pow(gamma_neg) * log_absent
    smoothed = smooth_labels(targets, smoothing)
    if weights is not None:
        positive = positive * weights
    return -(smoothed * positive + (1 - smoothed) * negative).sum(1).mean()


def smooth_labels(targets: Tensor, smoothing: float) -> Tensor:
    """(1 - smoothing) * target + smoothing / 2: label smoothing of two classes, present and
    absent.
    """
    return (1 - smoothing) * targets + smoothing / 2


def positive_weights(class_images: np.ndarray, images: int) -> Tensor:
    """The images without a class for each one with it, float32 (classes,); 1 for a class that no
    image or every image has.

    class_images: the number of images with each class, int64 (classes,).
    """
    found = (class_images > 0) & (class_images < images)
    weights = np.ones(len(class_images))
    weights[found] = (images - class_images[found]) / class_images[found]
    return torch.from_numpy(weights).float()
