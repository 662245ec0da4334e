"""The model and the loss in one module, so that torch.compile compiles both together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.optim.losses import TrainingLoss


class ModelWithLoss(nn.Module):
    """Callable: images, targets -> the loss (scalar), and a detached tensor of loss and metric,
    (2,). Both are divided by `divisor`. Without targets: images -> the outputs of the model.

    images: float (N, C, H, W). targets: as `criterion` takes them. The parameters are the model's.
    """

    def __init__(
        self, model: nn.Module, criterion: TrainingLoss, metric: Callable[[Tensor, Tensor], Tensor]
    ):
        """model: may be wrapped in DataParallel. The loss is outside of it, because DataParallel
        splits the batch, and `jsd` needs all splits of an image. metric: `Task.step_metric`.
        """
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.metric = metric

    def forward(self, images: Tensor, targets: Tensor | None = None, divisor: float = 1.0) -> Any:
        outputs = self.model(images)
        if targets is None:
            return outputs
        loss = self.criterion(outputs, targets, images)
        # Only the first split of each image counts (`augment.splits`).
        logits = (outputs if isinstance(outputs, Tensor) else outputs[0])[: len(targets)].detach()
        metric = self.metric(logits, targets.to(logits.device, non_blocking=True))
        loss_and_metric = torch.stack([loss.detach(), metric])
        if divisor == 1:  # saves three kernels
            return loss, loss_and_metric
        return loss / divisor, loss_and_metric / divisor
