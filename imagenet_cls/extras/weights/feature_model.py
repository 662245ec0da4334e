"""The features of images: the input of a model's classifier."""

from functools import partial

import torch
from torch import Tensor, nn

from imagenet_cls.errors import UsageError
from imagenet_cls.models.head import head_names, is_classifier


class FeatureModel(nn.Module):
    """Maps normalized images to features (B, D): what `model` passes to its classifier.

    These are timm's `forward_head(..., pre_logits=True)`, except where timm's head has more layers
    than the classifier (BatchNorm in LeViT, an MLP in CAFormer). A layer that is applied at each
    position gives the mean over the positions, unless another one is applied to a single vector
    (VOLO). The inputs of several layers are averaged (distilled DeiT), or joined where their widths
    differ (CrossViT). `forward` raises UsageError without a classifier.
    """

    def __init__(self, model: nn.Module, num_classes: int):
        super().__init__()
        self.model = model
        # By device and layer. DataParallel runs replicas in threads, which share this dictionary
        # and the hooks.
        self._inputs: dict[tuple[torch.device, str], Tensor] = {}
        head = head_names(model, num_classes)
        for name, layer in model.named_modules():
            prefix = f"{name}." if name else ""
            is_in_head = any(parameter.startswith(prefix) for parameter in head)
            if is_in_head and is_classifier(layer, num_classes):
                layer.register_forward_pre_hook(partial(self._record, name))
        self.train(model.training)

    def _record(self, name: str, layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Keep the input of a layer as (B, positions, D)."""
        inputs = arguments[0].movedim(1, -1) if isinstance(layer, nn.Conv2d) else arguments[0]
        self._inputs[inputs.device, name] = inputs.reshape(len(inputs), -1, inputs.shape[-1])

    def forward(self, images: Tensor) -> Tensor:
        self.model(images)
        inputs = [self._inputs.pop(key) for key in list(self._inputs) if key[0] == images.device]
        if not inputs:
            raise UsageError(
                f"Features are the input of the classifier, and {type(self.model).__name__} has "
                "none that is known.",
                "It must be the last nn.Linear or nn.Conv2d with an output for each class.",
            )
        inputs = [x for x in inputs if x.shape[1] == 1] or inputs
        features = [x.mean(dim=1) for x in inputs]
        have_one_width = len({x.shape[1] for x in features}) == 1
        return torch.stack(features).mean(dim=0) if have_one_width else torch.cat(features, dim=1)
