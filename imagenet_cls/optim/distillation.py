"""Knowledge distillation: how a teacher's outputs enter the loss, and what the training loop calls.

Owns the arithmetic of the `distill` section. Knows no models: a teacher is any function from images to logits
(`models.teacher` builds one), and a model with a distillation token is one that gives two logits for an image. Called
by `engine.build` (to make it) and by the training loop.
"""

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
    classes as well, which makes its part a thousand times smaller on ImageNet: its numbers for alpha do not carry
    over. hard: cross-entropy with the teacher's top class, not smoothed (Touvron et al., "Training data-efficient image
    transformers", 2021, section 4).

    Of two outputs the first learns from the targets and the second from the teacher (ibid.); a single one from both.
    """
    alpha, temperature = distill.alpha, distill.temperature

    def soft(logits: Tensor, teacher_logits: Tensor) -> Tensor:
        log_p = (logits.float() / temperature).log_softmax(1)
        log_q = (teacher_logits.float() / temperature).log_softmax(1)
        return functional.kl_div(log_p, log_q, reduction="batchmean", log_target=True) * temperature**2

    def hard(logits: Tensor, teacher_logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), teacher_logits.argmax(1))

    teach = {"soft": soft, "hard": hard}[distill.kind]

    def loss(outputs: Outputs, targets: Tensor, teacher_logits: Tensor) -> Tensor:
        logits, token_logits = (outputs, outputs) if isinstance(outputs, Tensor) else outputs
        return (1 - alpha) * base_loss(logits, targets) + alpha * teach(token_logits, teacher_logits)

    return loss


def build_criterion(
    base_loss: Loss, distill: DistillConfig, teacher: Callable[[Tensor], Tensor] | None = None
) -> Criterion:
    """What the loop calls, inside its autocast: outputs, targets and the images that the model saw -> the mean loss.

    images: as the model takes them, normalised and mixed. teacher: images -> logits; runs without gradients, and only
    where `distill.kind` is not none. Targets and the teacher's logits go to where the model's logits are, which with
    DataParallel may be another device.
    """
    if distill.kind == "none":

        def plain(outputs: Outputs, targets: Tensor, images: Tensor) -> Tensor:
            assert isinstance(outputs, Tensor), "a model learns its distillation token from a teacher only"
            return base_loss(outputs, targets.to(outputs.device, non_blocking=True))

        return plain

    assert teacher is not None
    with_teacher = distillation_loss(distill, base_loss)

    def taught(outputs: Outputs, targets: Tensor, images: Tensor) -> Tensor:
        device = outputs.device if isinstance(outputs, Tensor) else outputs[0].device
        with torch.no_grad():
            teacher_logits = teacher(images).to(device, non_blocking=True)
        return with_teacher(outputs, targets.to(device, non_blocking=True), teacher_logits)

    return taught
