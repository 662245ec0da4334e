"""What is minimised.

Owns the built-in losses and the check of the section. Called by `engine.check`, `engine.build` (to make it) and
`engine.train` (to apply it). A loss sees logits in float32 whatever the model computed in: half precision has too few
digits for a log-softmax over 1,000 classes.

**Every loss is a plain mean over the images**, so that the mean over micro-batches and ranks is that over the whole
batch. Class weights follow from it: w_c is divided by the mean of all weights, and the loss of an image is

    - sum_c w_c t_c log p_c,    t: its target, one-hot or mixed, smoothed;    p: softmax of its logits

and then comes the mean over the images. torch's CrossEntropyLoss divides by the sum of the batch's own weights instead
where targets are class indices (not where they are probabilities), which depends on how a batch is cut. As there, only
the ratios of the weights count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn

from imagenet_cls.config.schema import LossConfig
from imagenet_cls.errors import ConfigError, Problem, UserError
from imagenet_cls.lookup import did_you_mean, import_factory, is_factory_name, kwargs_problems, missing_kwargs_problems

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """What a built-in loss is made for, besides its own numbers.

    weights: float32 (classes,) with mean 1, or None. splits: views of an image in a batch.
    """

    smoothing: float
    weights: Tensor | None
    splits: int


def smooth_targets(targets: Tensor, logits: Tensor, smoothing: float) -> Tensor:
    """Targets as probabilities (N, classes) like `logits`, with s = smoothing spread: (1 - s) * target + s / classes.

    targets: (N,) int64 class indices, or (N, classes) probabilities. Szegedy et al., "Rethinking the Inception
    Architecture", 2016, section 7.
    """
    if not targets.is_floating_point():
        targets = torch.zeros_like(logits).scatter_(1, targets.unsqueeze(1), 1.0)
    return (1 - smoothing) * targets + smoothing / logits.shape[1]


class WeightedCrossEntropy(nn.Module):
    """Cross-entropy with class weights as the module's docstring has it: torch's terms, divided by the images."""

    def __init__(self, weights: Tensor, smoothing: float):
        super().__init__()
        self.terms = nn.CrossEntropyLoss(weights, reduction="none", label_smoothing=smoothing)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        terms: Tensor = self.terms(logits, targets)
        return terms.mean()


class SmoothedBinaryCrossEntropy(nn.Module):
    """timm's BinaryCrossEntropy, that smooths mixed targets, too.

    timm leaves that to its Mixup; here smoothing is the loss's, for mixed and for plain targets alike. The numbers are
    the same: smoothing first, then the threshold (Wightman et al., "ResNet strikes back", 2021, section 2).
    """

    def __init__(self, setting: Setting, target_threshold: float | None, sum_classes: bool):
        super().__init__()
        self.smoothing = setting.smoothing
        self.loss = BinaryCrossEntropy(0.0, target_threshold, setting.weights, sum_classes=sum_classes)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.loss(logits, smooth_targets(targets, logits, self.smoothing))
        return loss


class FocalLoss(nn.Module):
    """- sum_c w_c t_c (1 - p_c)^gamma log p_c: Lin et al., "Focal Loss for Dense Object Detection", 2017, section 3,
    with the softmax in place of the sigmoid, and class weights as its alpha."""

    weights: Tensor | None

    def __init__(self, setting: Setting, gamma: float):
        super().__init__()
        self.gamma, self.smoothing = gamma, setting.smoothing
        self.register_buffer("weights", setting.weights)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        log_p = logits.log_softmax(1)
        # 1 - p without cancellation, and not 0: for gamma < 1 the power's slope there is infinite.
        others = (-log_p.expm1()).clamp(min=torch.finfo(log_p.dtype).tiny)
        terms = smooth_targets(targets, logits, self.smoothing) * others.pow(self.gamma) * log_p
        if self.weights is not None:
            terms = terms * self.weights
        return -terms.sum(1).mean()


class JensenShannonLoss(nn.Module):
    """Cross-entropy of the first views + alpha times the Jensen-Shannon divergence between all views of an image.

    Hendrycks et al., "AugMix", 2020, section 3. All images' first views come first, then all second ones, and so on;
    targets are those of the first views, (images,), or the same repeated for the others. The numbers are timm's
    JsdCrossEntropy, whose clamp of the mean (from the authors' script) is kept; but the views' logarithms are taken of
    logits: timm takes them of probabilities, and where one is 0 its gradients are NaN.
    """

    def __init__(self, setting: Setting, alpha: float):
        super().__init__()
        self.splits, self.alpha = setting.splits, alpha
        self.cross_entropy = nn.CrossEntropyLoss(label_smoothing=setting.smoothing)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        assert len(logits) % self.splits == 0, (logits.shape, self.splits)
        images = len(logits) // self.splits
        log_p = logits.log_softmax(1).unflatten(0, (self.splits, images))
        p = log_p.exp()
        log_mean = p.mean(0).clamp(1e-7, 1).log()
        divergence = (p * (log_p - log_mean)).sum(2).mean()
        clean: Tensor = self.cross_entropy(logits[:images], targets[:images])
        return clean + self.alpha * divergence


def _cross_entropy(setting: Setting, /) -> nn.Module:
    if setting.weights is None:
        return nn.CrossEntropyLoss(label_smoothing=setting.smoothing)
    return WeightedCrossEntropy(setting.weights, setting.smoothing)


def _bce(setting: Setting, /, target_threshold: float | None = None, sum_classes: bool = False) -> nn.Module:
    return SmoothedBinaryCrossEntropy(setting, target_threshold, sum_classes)


def _focal(setting: Setting, /, gamma: float = 2.0) -> nn.Module:
    return FocalLoss(setting, gamma)


def _jsd(setting: Setting, /, alpha: float = 12.0) -> nn.Module:
    return JensenShannonLoss(setting, alpha)


# name -> what makes it of a setting and the config's kwargs.
BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "cross_entropy": _cross_entropy,
    "bce": _bce,
    "focal": _focal,
    "jsd": _jsd,
}

# Arguments of the built-in losses: what each may be, in words, and the test for it.
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "target_threshold": ("a number from 0 to less than 1, or null", lambda x: x is None or (_number(x) and 0 <= x < 1)),
    "sum_classes": ("true or false", lambda x: isinstance(x, bool)),
    "gamma": ("a number, at least 0", lambda x: _number(x) and x >= 0),
    "alpha": ("a number, at least 0", lambda x: _number(x) and x >= 0),
}
_HAVE_KEYS = ("label_smoothing", "class_weights")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def build_loss(loss: LossConfig, num_classes: int, splits: int = 1) -> Loss:
    """The mean loss over a batch, as a function of logits and targets; a scalar in float32.

    logits: (N, classes), any floating dtype. targets: (N,) int64 class indices, or (N, classes) probabilities from
    mixing. num_classes: the model's outputs. splits: views of an image in a batch, for `jsd`.

    A factory of the user's is called as `factory(**kwargs)`, and what it returns as `loss(logits, targets)`: it, too,
    must give the mean. Raises UserError where it returns no function, ConfigError for another number of class weights.
    """
    if loss.name in BUILT_IN:
        setting = Setting(loss.label_smoothing, _weights(loss, num_classes), splits)
        compute: Any = BUILT_IN[loss.name](setting, **loss.kwargs)
    else:
        compute = import_factory(loss.name)(**loss.kwargs)
        if not callable(compute):
            returned = type(compute).__name__
            raise UserError(
                f"loss.name: {loss.name!r} returned {returned}; let it return a function of logits and targets"
            )

    def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
        if isinstance(compute, nn.Module):
            compute.to(logits.device)  # class weights; nothing to do after the first time
        mean: Tensor = compute(logits.float(), targets.float() if targets.is_floating_point() else targets)
        return mean

    return mean_loss


def _weights(loss: LossConfig, num_classes: int) -> Tensor | None:
    if loss.class_weights is None:
        return None
    given = len(loss.class_weights)
    if given != num_classes:
        text = f"{given} numbers, but there are {num_classes} classes; give one for each, in the order of the classes"
        raise ConfigError([f"loss.class_weights: {text}"])
    weights = torch.tensor(loss.class_weights, dtype=torch.float64, device="cpu")
    return (weights / weights.mean()).float()


def loss_problems(loss: LossConfig) -> list[Problem]:
    """Everything wrong with the section that shows without data."""
    if loss.name in BUILT_IN:
        return _check_built_in(loss)
    if not is_factory_name(loss.name):
        allowed = f"(built in: {', '.join(BUILT_IN)}; or my_module:my_factory)"
        return [Problem("loss.name", f"unknown loss {loss.name!r}{did_you_mean(loss.name, BUILT_IN)} {allowed}")]
    try:
        factory = import_factory(loss.name)
    except LookupError as error:
        return [Problem("loss.name", str(error))]
    problems = kwargs_problems("loss", factory, loss.kwargs) + missing_kwargs_problems("loss", factory, loss.kwargs)
    for name in _HAVE_KEYS:
        if getattr(loss, name):
            text = f"is for the built-in losses; {loss.name!r} is given its numbers in loss.kwargs"
            problems.append(Problem(f"loss.{name}", text))
    return problems


def _check_built_in(loss: LossConfig) -> list[Problem]:
    misplaced = [name for name in _HAVE_KEYS if name in loss.kwargs]
    problems = [Problem(f"loss.kwargs.{name}", f"has a key of its own: loss.{name}") for name in misplaced]
    others = {name: value for name, value in loss.kwargs.items() if name not in misplaced}
    refused = kwargs_problems("loss", BUILT_IN[loss.name], others)
    problems += refused
    for name, value in others.items():
        if f"loss.kwargs.{name}" not in {problem.key for problem in refused}:
            allowed, fits = _ALLOWED[name]
            if not fits(value):
                problems.append(Problem(f"loss.kwargs.{name}", f"{value!r} is not {allowed}"))
    if loss.class_weights is not None:
        if loss.name == "jsd":
            names = "cross_entropy, bce and focal"
            problems.append(Problem("loss.class_weights", f"'jsd' has no class weights; they are for {names}"))
        elif not any(loss.class_weights):
            problems.append(Problem("loss.class_weights", "are all 0: nothing would be learnt; give one above 0"))
    return problems
