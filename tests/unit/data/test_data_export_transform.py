"""`ExportTransform`: the pixels of `EvalTransform`, also as torch.export and ONNX."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from imagenet_cls.config.schema import EvalConfig
from imagenet_cls.data.export_transform import MAX_PIXEL_DIFFERENCE, ExportTransform
from imagenet_cls.data.transforms import EvalTransform

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
SIZES = ((640, 427), (427, 640), (100, 300), (301, 77), (224, 224), (50, 1), (1, 1), (1000, 900))


@pytest.fixture(scope="module")
def images(photographs: Sequence[Image.Image]) -> list[torch.Tensor]:
    """Two photographs in several sizes, uint8 (3, H, W)."""
    resized = [photograph.resize(size) for photograph in photographs for size in SIZES]
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in resized]


def check_pixels(transform: EvalTransform, module: nn.Module, images: list[torch.Tensor]) -> None:
    most = 0 if transform.interpolation == "nearest" else MAX_PIXEL_DIFFERENCE
    for image in images:
        pixels, expected = module(image[None])[0], transform(image)
        assert pixels.shape == expected.shape and (pixels - expected.float()).abs().max() <= most, image.shape


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"crop_px": 128},
        {"crop_px": [96, 128]},
        {"crop_px": 65, "resize_px": 64},  # zeros around the image
        {"crop_px": 64, "resize_px": 65},  # half a pixel is cropped on each side
    ],
)
def test_export_transform_has_the_pixels_of_the_evaluation(
    sizes: dict[str, Any], mode: Any, interpolation: Any, images: list[torch.Tensor]
) -> None:
    transform = EvalTransform(EvalConfig(mode=mode, interpolation=interpolation, **sizes))
    check_pixels(transform, ExportTransform(transform), images)
    same = [image for image in images if image.shape[1:] == (77, 301)]
    batch = ExportTransform(transform)(torch.stack(same))
    assert len(batch) == 2
    check_pixels(transform, lambda image: batch[[torch.equal(image[0], one) for one in same].index(True)][None], same)


@pytest.mark.parametrize(("mode", "interpolation"), [("crop", "bilinear"), ("squash", "nearest"), ("pad", "bicubic")])
def test_exported_transform_takes_images_of_any_size(mode: Any, interpolation: Any, images: list[torch.Tensor]) -> None:
    import onnxruntime

    transform = EvalTransform(EvalConfig(mode=mode, interpolation=interpolation, crop_px=[96, 128]))
    dynamic = ({0: torch.export.Dim("batch"), 2: torch.export.Dim("height"), 3: torch.export.Dim("width")},)
    example = torch.zeros(2, 3, 96, 128, dtype=torch.uint8)
    program = torch.export.export(ExportTransform(transform), (example,), dynamic_shapes=dynamic)
    check_pixels(transform, program.module(), images)
    onnx = torch.onnx.export(program, dynamo=True, input_names=["images"], dynamic_shapes=dynamic, verbose=False)
    assert onnx is not None
    session = onnxruntime.InferenceSession(onnx.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    check_pixels(transform, lambda image: torch.from_numpy(session.run(None, {"images": image.numpy()})[0]), images)
