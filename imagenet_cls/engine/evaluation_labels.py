"""Which classes an evaluation counts."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from imagenet_cls.config.schema import Config
from imagenet_cls.data.sources import ImageSource, required_targets


@dataclass(frozen=True)
class EvaluationLabels:
    """Which classes count.

    present: int64 (P,), the classes that the validation images have; None: all. left_out: the
    number of images that `data.exclude` has left out. threshold: `eval.threshold` if images have
    several labels (`data.labels`), else None.
    """

    present: Tensor | None = None
    left_out: int = 0
    threshold: float | None = None

    def mask(self, logits: Tensor) -> Tensor:
        """Logits (B, outputs) with -inf for the classes that are not present."""
        if self.present is None:
            return logits
        absent = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
        absent[self.present.to(logits.device)] = False
        return logits.masked_fill(absent, -torch.inf)


def evaluation_labels(config: Config, source: ImageSource) -> EvaluationLabels:
    """The labels of an evaluation of `source`. Raises DataError."""
    present = None
    threshold = config.eval.threshold if config.data.labels == "multi" else None
    if config.eval.classes == "present":
        present = torch.from_numpy(np.unique(required_targets(source, "eval.classes")))
    return EvaluationLabels(present, source.left_out, threshold)
