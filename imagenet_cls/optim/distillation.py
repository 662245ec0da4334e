"""The distillation loss (`distill`), and the criterion that the training loop calls."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from imagenet_cls.config.schema import DistillConfig
from imagenet_cls.optim.losses import Loss

# Logits (N, classes); of a model with a distillation token, those of the class token and those of that one.
Outputs = Tensor | tuple[Tensor, Tensor]
Criterion = Callable[[Outputs, Tensor, Tensor], Tensor]


def distillation_loss(distill: DistillConfig, base_loss: Loss) -> Criterion:
    """The loss as a function of outputs, targets and the teacher's logits (N, classes); a scalar in float32.

        (1 - alpha) * base_loss(logits, targets) + alpha * teacher's part

    soft: T^2 * KL(softmax(teacher / T) || softmax(logits / T)), the sum over the classes, the mean over the images
    (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, section 2). DeiT's script divides by the
    classes as well, so its part is a thousand times smaller on ImageNet: its values of alpha can't be used here.
    hard: cross-entropy with the teacher's top class, without smoothing (Touvron et al., "Training data-efficient image
    transformers", 2021, section 4).

    Of two outputs the first is compared with the targets, the second with the teacher (ibid.); a single one with both.
    """
    alpha, temperature = distill.alpha, distill.temperature

    def soft(logits: Tensor, teacher_logits: Tensor) -> Tensor:
        log_p = (logits.float() / temperature).log_softmax(1)
        log_q = (teacher_logits.float() / temperature).log_softmax(1)
        return functional.kl_div(log_p, log_q, reduction="batchmean", log_target=True) * temperature**2

    def hard(logits: Tensor, teacher_logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), teacher_logits.argmax(1))

    teacher_loss = {"soft": soft, "hard": hard}[distill.kind]

    def loss(outputs: Outputs, targets: Tensor, teacher_logits: Tensor) -> Tensor:
        logits, token_logits = (outputs, outputs) if isinstance(outputs, Tensor) else outputs
        return (1 - alpha) * base_loss(logits, targets) + alpha * teacher_loss(token_logits, teacher_logits)

    return loss


def build_criterion(
    base_loss: Loss, distill: DistillConfig, teacher: Callable[[Tensor], Tensor] | None = None
) -> Criterion:
    """The mean loss as a function of outputs, targets and the images that the model saw; called under autocast.

    images: as the model takes them, normalised and mixed. teacher: images -> logits; called without gradients, and only
    if `distill.kind` is not none. Targets and the teacher's logits are moved to the device of the model's logits, which
    with DataParallel may be another.
    """
    if distill.kind == "none":

        def without_teacher(outputs: Outputs, targets: Tensor, images: Tensor) -> Tensor:
            assert isinstance(outputs, Tensor), "two outputs need a teacher"
            return base_loss(outputs, targets.to(outputs.device, non_blocking=True))

        return without_teacher

    assert teacher is not None
    loss = distillation_loss(distill, base_loss)

    def with_teacher(outputs: Outputs, targets: Tensor, images: Tensor) -> Tensor:
        device = outputs.device if isinstance(outputs, Tensor) else outputs[0].device
        with torch.no_grad():
            teacher_logits = teacher(images).to(device, non_blocking=True)
        return loss(outputs, targets.to(device, non_blocking=True), teacher_logits)

    return with_teacher
