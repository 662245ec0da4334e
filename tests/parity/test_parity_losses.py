"""Losses against timm's, torch's and torchvision's, and against the formulas written out; all to
1e-6.
"""

from collections.abc import Callable

import pytest
import timm
import torch
from timm.loss import (
    AsymmetricLossSingleLabel,
    BinaryCrossEntropy,
    JsdCrossEntropy,
    LabelSmoothingCrossEntropy,
    SoftTargetCrossEntropy,
)
from timm.task.distillation import LogitDistillationTask
from timm.task.token_distillation import TokenDistillationTask
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import sigmoid_focal_loss

from imagenet_cls.config.schema import DistillConfig, LossConfig
from imagenet_cls.models.teacher import Teacher, enable_distillation_token
from imagenet_cls.optim.losses import build_loss, build_training_loss, loss_problems

N, CLASSES = 12, 7
DRAWS = torch.Generator().manual_seed(0)
LOGITS = torch.randn(N, CLASSES, generator=DRAWS) * 3
TEACHER_LOGITS = torch.randn(N, CLASSES, generator=DRAWS) * 3
HARD = torch.randint(CLASSES, (N,), generator=DRAWS)
SOFT = 0.3 * functional.one_hot(HARD, CLASSES) + 0.7 * functional.one_hot(HARD.flip(0), CLASSES)
WEIGHTS = [0.5, 2.0, 1.0, 4.0, 0.0, 1.0, 3.0]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-6, atol=1e-6)


def loss_of(
    name: str, smoothing: float = 0.0, weights: list[float] | None = None, splits: int = 1, **kwargs
):
    config = LossConfig(name, smoothing, weights, kwargs=kwargs)
    assert loss_problems(config) == []
    return build_loss(config, CLASSES, splits)


def gradient(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(logits, targets), logits)
    return found


def assert_agree(
    ours: Callable, reference: Callable, targets: Tensor, reference_targets: Tensor | None = None
) -> None:
    """The same loss, and the same gradient."""
    expected_targets = targets if reference_targets is None else reference_targets
    close(ours(LOGITS, targets), reference(LOGITS, expected_targets))
    close(gradient(ours, LOGITS, targets), gradient(reference, LOGITS, expected_targets))


def test_cross_entropy_equals_timms() -> None:
    assert_agree(loss_of("cross_entropy"), SoftTargetCrossEntropy(), SOFT)
    assert_agree(
        loss_of("cross_entropy"), SoftTargetCrossEntropy(), HARD, functional.one_hot(HARD, CLASSES)
    )
    assert_agree(loss_of("cross_entropy", 0.1), LabelSmoothingCrossEntropy(0.1), HARD)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_equal_torchs_times_a_constant(smoothing: float) -> None:
    weights = torch.tensor(WEIGHTS)
    torchs = nn.CrossEntropyLoss(weights, label_smoothing=smoothing)
    ours = loss_of("cross_entropy", smoothing, WEIGHTS)
    # torch divides by the weights of the images where targets are indices, and by the images where
    # they are not.
    assert_agree(ours, lambda x, t: torchs(x, t) * weights[HARD].sum() / (N * weights.mean()), HARD)
    assert_agree(ours, lambda x, t: torchs(x, t) / weights.mean(), SOFT)


@pytest.mark.parametrize("sum_classes", [False, True])
@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_equals_timms(smoothing: float, threshold: float | None, sum_classes: bool) -> None:
    ours = loss_of("bce", smoothing, target_threshold=threshold, sum_classes=sum_classes)
    assert_agree(ours, BinaryCrossEntropy(smoothing, threshold, sum_classes=sum_classes), HARD)
    smoothed = (1 - smoothing) * SOFT + smoothing / CLASSES  # what timm's Mixup gives
    assert_agree(
        ours, BinaryCrossEntropy(smoothing, threshold, sum_classes=sum_classes), SOFT, smoothed
    )


def test_class_weights_of_bce_are_those_of_the_classes_of_an_image() -> None:
    """A mixed image has the mean of the weights of its classes."""
    weights = torch.tensor(WEIGHTS)
    weighted = loss_of("bce", 0.0, WEIGHTS, target_threshold=0.2, sum_classes=True)
    terms = BinaryCrossEntropy(0.0, 0.2, reduction="none")(LOGITS, SOFT).sum(1)
    close(weighted(LOGITS, SOFT), (terms * (SOFT @ weights) / weights.mean()).mean())
    hard = loss_of("bce", 0.0, WEIGHTS)
    each = BinaryCrossEntropy(0.0, reduction="none")(LOGITS, HARD).mean(1)
    close(hard(LOGITS, HARD), (each * weights[HARD] / weights.mean()).mean())


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0, 5.0])
def test_focal_equals_timms_and_torchvisions(gamma: float) -> None:
    ours = loss_of("focal", gamma=gamma)
    assert_agree(ours, AsymmetricLossSingleLabel(gamma_pos=gamma, gamma_neg=0, eps=0.0), HARD)
    # Of two classes, one with logit 0, the softmax is the sigmoid.
    x, positive = LOGITS[:, 0], (HARD > 3).long()
    alpha = 0.2  # of the positive class; class weights are its general form, relative to their mean
    weighted = build_loss(LossConfig("focal", 0.0, [1 - alpha, alpha], kwargs={"gamma": gamma}), 2)
    expected = (
        sigmoid_focal_loss(x, positive.float(), alpha=alpha, gamma=gamma, reduction="mean") / 0.5
    )
    close(weighted(torch.stack([0 * x, x], 1), positive), expected)


def test_focal_with_gamma_0_is_cross_entropy() -> None:
    for options in ({}, {"smoothing": 0.1}, {"smoothing": 0.1, "weights": WEIGHTS}):
        assert_agree(
            loss_of("focal", **options, gamma=0.0), loss_of("cross_entropy", **options), HARD
        )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_jensen_shannon_equals_timms(smoothing: float) -> None:
    targets = HARD[:4].repeat(3)
    ours = loss_of("jsd", smoothing, splits=3, alpha=5.0)
    assert_agree(ours, JsdCrossEntropy(3, 5.0, smoothing), targets)
    assert_agree(loss_of("jsd", splits=3), JsdCrossEntropy(3, 12, 0.0), targets)


EVERY_LOSS = {
    "cross_entropy": (loss_of("cross_entropy", 0.1), HARD),
    "mixed": (loss_of("cross_entropy", 0.1), SOFT),
    "weighted": (loss_of("cross_entropy", 0.1, WEIGHTS), HARD),
    "weighted, mixed": (loss_of("cross_entropy", 0.1, WEIGHTS), SOFT),
    "bce": (loss_of("bce", 0.1, target_threshold=0.2), SOFT),
    "bce, weighted": (loss_of("bce", 0.1, WEIGHTS, sum_classes=True), HARD),
    "focal": (loss_of("focal", 0.0, WEIGHTS), HARD),
    "focal, gamma 0.5": (loss_of("focal", gamma=0.5), HARD),
}


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_mean_over_micro_batches_is_that_over_the_batch(name: str) -> None:
    """Weighted by their images: five micro-batches have three images or two."""
    loss, targets = EVERY_LOSS[name]
    for cut in (2, 5):
        parts = list(zip(LOGITS.tensor_split(cut), targets.tensor_split(cut), strict=True))
        close(sum(loss(*part) * len(part[0]) / N for part in parts), loss(LOGITS, targets))
        joined = torch.cat([gradient(loss, *part) * len(part[0]) / N for part in parts])
        close(joined, gradient(loss, LOGITS, targets))


def test_mean_of_splits_and_teachers_is_that_over_the_batch() -> None:
    """Weighted by their images; the micro-batch of an image has all of its splits."""
    loss = loss_of("jsd", 0.1, splits=3)
    splits = LOGITS.view(3, 4, CLASSES)
    one, three = [
        loss(splits[:, part].flatten(0, 1), HARD[:4][part].repeat(3))
        for part in (slice(1), slice(1, 4))
    ]
    close(one / 4 + three * 3 / 4, loss(LOGITS, HARD[:4].repeat(3)))
    for kind in ("soft", "hard"):
        loss = build_training_loss(
            loss_of("cross_entropy"), DistillConfig(kind, 0.7, 3.0), lambda logits: logits
        )
        parts = zip(*(rows.tensor_split(5) for rows in (LOGITS, SOFT, TEACHER_LOGITS)), strict=True)
        close(
            sum(loss(*part) * len(part[0]) / N for part in parts),
            loss(LOGITS, SOFT, TEACHER_LOGITS),
        )


def distilled(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss with a teacher whose outputs are the opposite of the student's."""
    loss = build_training_loss(loss_of("cross_entropy"), DistillConfig(kind, 0.5, 0.5), torch.neg)
    return lambda logits, targets: loss(logits, targets, logits.detach())


FINITE = EVERY_LOSS | {
    "jsd": (loss_of("jsd", splits=3), HARD),
    "soft": (distilled("soft"), HARD),
    "hard": (distilled("hard"), HARD),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FINITE)
def test_half_precision_and_extreme_outputs_are_finite(name: str, dtype: torch.dtype) -> None:
    """Computed in float32, and finite where a class has all the probability, or none."""
    loss, targets = FINITE[name]
    close(loss(LOGITS.to(dtype), targets), loss(LOGITS.to(dtype).float(), targets))
    for scale in (0.0, 1e3, 5e3):
        extreme = (LOGITS * scale).to(dtype)
        assert loss(extreme, targets).dtype == torch.float32
        assert loss(extreme, targets).isfinite()
        assert gradient(loss, extreme, targets).isfinite().all()


TOKEN = "deit_tiny_distilled_patch16_224"


@pytest.mark.parametrize(
    ("student_name", "kind"), [("vit_tiny_patch16_224", "soft"), (TOKEN, "soft"), (TOKEN, "hard")]
)
def test_whole_criterion_equals_timms_task(student_name: str, kind: str) -> None:
    """A student with other pixels than its teacher, with and without a distillation token: loss and
    gradients.
    """
    torch.manual_seed(0)
    sizes = {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": CLASSES}
    student = timm.create_model(student_name, **sizes)
    network = timm.create_model("resnet10t", num_classes=CLASSES)
    cfg = student.pretrained_cfg
    images, targets = torch.randn(4, 3, 32, 32), HARD[:4]
    alpha, temperature = 0.6, 2.0

    token = student_name == TOKEN
    enable_distillation_token(student)
    ours = build_training_loss(
        loss_of("cross_entropy"),
        DistillConfig(kind, alpha, temperature),
        Teacher(
            network,
            (cfg["mean"], cfg["std"]),
            (network.pretrained_cfg["mean"], network.pretrained_cfg["std"]),
        ),
    )
    found = ours(student.train()(images), targets, images)
    parameters = list(student.parameters())
    found_gradients = torch.autograd.grad(found, parameters)

    common = {
        "criterion": nn.CrossEntropyLoss(),
        "task_loss_weight": 1 - alpha,
        "temperature": temperature,
    }
    if token:
        task = TokenDistillationTask(student, network, distill_type=kind, verbose=False, **common)
    else:
        task = LogitDistillationTask(student, network, verbose=False, **common)
    reference = task(images, targets)["loss"]
    close(found, reference)
    for gradient_found, expected in zip(
        found_gradients, torch.autograd.grad(reference, parameters), strict=True
    ):
        close(gradient_found, expected)
