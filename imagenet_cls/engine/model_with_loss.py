"""The model and the loss in one module, so that torch.compile compiles both together."""

import torch
from torch import Tensor, nn

from imagenet_cls.optim.losses import Outputs, TrainingLoss


class ModelWithLoss(nn.Module):
    """Callable: images, targets -> the loss (scalar), and a detached tensor of loss and top-1
    accuracy, (2,). Both are divided by `divisor`.

    images: float (N, C, H, W). targets: as `criterion` takes them. The parameters are the model's.
    """

    def __init__(self, model: nn.Module, criterion: TrainingLoss):
        """model: may be wrapped in DataParallel. The loss is outside of it, because DataParallel
        splits the batch, and `jsd` needs all splits of an image.
        """
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(
        self, images: Tensor, targets: Tensor, divisor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        outputs = self.model(images)
        loss = self.criterion(outputs, targets, images)
        loss_and_top1 = torch.stack([loss.detach(), top1_accuracy(outputs, targets)])
        if divisor == 1:  # saves three kernels
            return loss, loss_and_top1
        return loss / divisor, loss_and_top1 / divisor


def top1_accuracy(outputs: Outputs, targets: Tensor) -> Tensor:
    """The share of images (0 to 1) whose highest logit is the target's: a float32 scalar on the
    device.

    outputs, targets: as the criterion takes them. A mixed target counts as the class with the
    largest share, as in torchvision's reference scripts; one with several labels as each class with
    the largest share. With `augment.splits` only the first split of each image counts.
    """
    logits = (outputs if isinstance(outputs, Tensor) else outputs[0])[: len(targets)]
    targets = targets.to(logits.device, non_blocking=True)
    if not targets.is_floating_point():
        return (logits.argmax(1) == targets).mean(dtype=torch.float32)
    largest = targets.amax(1)
    predicted = targets.gather(1, logits.argmax(1, keepdim=True)).squeeze(1)
    return ((predicted == largest) & (largest > 0)).mean(dtype=torch.float32)
