"""The transform of an evaluation with operators that ONNX and torch.export have, for images of any size.

One `F.interpolate` of float images with antialiasing does not clamp the values between the two sides, as the kernels
for uint8 do: pixels of upsampled noise differed by 20 of 255 with `bicubic`.
"""

import torch
from torch import Tensor, nn

from imagenet_cls.data.transforms import EvalTransform

MAX_PIXEL_DIFFERENCE = 2
"""Between the bytes of `ExportTransform` and of `EvalTransform`."""


class ExportTransform(nn.Module):
    """`EvalTransform` with the operators of ONNX: uint8 (N, C, H, W) -> whole numbers, float32 (N, C, *crop_px).

    Resize and crop are the product with one matrix for each side. As in the kernels for uint8 of torch and Pillow, the
    width is resized first, and both results are rounded to bytes; those kernels round the weights, too.
    """

    fill: Tensor

    def __init__(self, transform: EvalTransform):
        super().__init__()
        self.transform = transform
        fill = transform.fill if transform.mode == "pad" else [0] * transform.channels
        self.register_buffer("fill", torch.tensor(fill, dtype=torch.float32).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        sides = [torch.scalar_tensor(side, dtype=torch.float64) for side in images.shape[2:]]
        parts = zip(images.shape[2:], sides, self._resized(*sides), self.transform.crop, strict=True)
        (vertical, is_row), (horizontal, is_column) = (self._weights(*part) for part in parts)
        images = _to_bytes(vertical @ _to_bytes(images.float() @ horizontal.T))
        return torch.where(is_row[:, None] & is_column, images, self.fill)

    def _resized(self, height: Tensor, width: Tensor) -> list[Tensor]:
        """`EvalTransform.resized_size` of tensors."""
        rows, columns = self.transform.resized
        if self.transform.mode == "squash":
            return [torch.full_like(height, rows), torch.full_like(width, columns)]
        if self.transform.mode == "pad" or rows != columns:
            larger = torch.maximum if self.transform.mode == "pad" else torch.minimum
            scale = larger(height / rows, width / columns)
            return [(side / scale).round().clamp(min=1) for side in (height, width)]
        return [(rows * side / torch.minimum(height, width)).floor() for side in (height, width)]

    def _weights(self, count: int, side: Tensor, resized: Tensor, crop: int) -> tuple[Tensor, Tensor]:
        """Weights (crop, count) of the pixels of a side, and whether each output is in the image: bool (crop,)."""
        excess = resized - crop  # halved as by `F.center_crop` and `F.pad`
        first = torch.where(excess < 0, (excess / 2).ceil(), (excess / 2).round())
        outputs = torch.arange(crop, dtype=torch.float64) + first
        inputs = torch.arange(count, dtype=torch.float64)
        if self.transform.interpolation == "nearest":  # in float32 as in torch: halves are rounded by its error
            nearest = ((outputs + 0.5).float() * (side.float() / resized.float())).floor()
            weights = inputs == torch.minimum(nearest, side - 1)[:, None]
        else:
            scale = side / resized
            x = ((inputs + 0.5 - scale * (outputs[:, None] + 0.5)) / scale.clamp(min=1)).abs()
            weights = (1 - x).clamp(min=0)
            if self.transform.interpolation == "bicubic":  # Keys, "Cubic convolution interpolation", 1981; a = -0.5
                outer = torch.where(x < 2, ((2.5 - 0.5 * x) * x - 4) * x + 2, 0.0)
                weights = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, outer)
            weights = weights / weights.sum(dim=1, keepdim=True)
        return weights.float(), (outputs >= 0) & (outputs < resized)


def _to_bytes(values: Tensor) -> Tensor:
    return (values + 0.5).floor().clamp(0, 255)
