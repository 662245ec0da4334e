"""Models for images of 32 px, registered with timm.

timm's own reduce such images too early. No weights are published.

Import this module before `timm.create_model`.
"""

from collections.abc import Sequence
from typing import Any

import timm
import torch.nn.functional as F
from timm.models import register_model
from timm.models.resnet import BasicBlock, downsample_conv
from torch import Tensor, nn

# Of the training images of CIFAR-10. Without "url" and "hf_hub_id", `model.pretrained` is an error.
CFG = {
    "input_size": (3, 32, 32),
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2470, 0.2435, 0.2616),
    "first_conv": "conv1",
    "classifier": "fc",
}


@register_model
def resnet18_cifar(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """timm's ResNet-18 with a 3x3 convolution of stride 1 in place of the 7x7 one, and without
    max-pooling.
    """
    model: nn.Module = timm.models.resnet18(
        **{**kwargs, "pretrained_cfg": {**CFG, "architecture": "resnet18_cifar"}}
    )
    model.conv1 = nn.Conv2d(kwargs.get("in_chans", 3), 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


@register_model
def resnet20_cifar(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ResNet-20. kwargs: `num_classes`, `in_chans`, `layers` and `channels` (blocks and channels of
    each stage).
    """
    return CifarResNet(**_constructor_arguments(kwargs))


@register_model
def wrn28_10_cifar(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """WRN-28-10. kwargs: `num_classes`, `in_chans`, `drop_rate` (within the blocks)."""
    return WideResNet(**_constructor_arguments(kwargs))


def _constructor_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """kwargs without those that timm adds for pretrained weights."""
    return {
        key: value
        for key, value in kwargs.items()
        if not key.startswith("pretrained") and key != "cache_dir"
    }


def _initialize(module: nn.Module) -> None:
    """Initialize a convolution as He et al. 2015."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class CifarResNet(nn.Module):
    """He et al. 2015, Deep Residual Learning for Image Recognition, arXiv:1512.03385, section 4.2.

    A 3x3 convolution and three stages of basic blocks; the second and third stage halve the
    resolution. Where the shape changes, the shortcut is a 1x1 convolution with BatchNorm (the
    paper's option B; its own results are of option A).
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        layers: Sequence[int] = (3, 3, 3),
        channels: Sequence[int] = (16, 32, 64),
    ):
        super().__init__()
        self.pretrained_cfg = {**CFG, "architecture": "resnet20_cifar", "num_classes": num_classes}
        self.conv1 = nn.Conv2d(in_chans, channels[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        blocks = []
        previous = channels[0]
        for stage, (depth, width) in enumerate(zip(layers, channels, strict=True)):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                shortcut = (
                    downsample_conv(previous, width, 1, stride)
                    if previous != width or stride > 1
                    else None
                )
                blocks.append(BasicBlock(previous, width, stride, shortcut))
                previous = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(previous, num_classes)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, num_classes)"""
        features = self.blocks(F.relu(self.bn1(self.conv1(images))))
        return self.fc(features.mean((2, 3)))


class WideResNet(nn.Module):
    """Zagoruyko and Komodakis 2016, Wide Residual Networks, arXiv:1605.07146: three groups of
    pre-activation blocks.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        depth: int = 28,
        width: int = 10,
        drop_rate: float = 0.0,
    ):
        super().__init__()
        self.pretrained_cfg = {**CFG, "architecture": "wrn28_10_cifar", "num_classes": num_classes}
        self.conv1 = nn.Conv2d(in_chans, 16, 3, padding=1, bias=False)
        blocks = []
        channels = 16
        for group in range(3):
            for block in range((depth - 4) // 6):
                out = 16 * width * 2**group
                blocks.append(WideBlock(channels, out, 2 if group and not block else 1, drop_rate))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, num_classes)
        self.apply(_initialize)
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, num_classes)"""
        features = F.relu(self.norm(self.blocks(self.conv1(images))))
        return self.fc(features.mean((2, 3)))


class WideBlock(nn.Module):
    """BatchNorm, ReLU and 3x3 convolution, twice; where the shape changes, a 1x1 convolution beside
    them.
    """

    def __init__(self, channels: int, out: int, stride: int, drop_rate: float):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.bn2 = nn.BatchNorm2d(out)
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.drop = nn.Dropout(drop_rate)
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False) if channels != out else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        residual = self.conv2(self.drop(F.relu(self.bn2(self.conv1(active)))))
        return residual + (x if self.shortcut is None else self.shortcut(active))
