"""Exports trained models to ONNX and torch.export, and compares them with PyTorch."""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.errors import CheckpointError
from imagenet_cls.inference.predictor import OnnxModel, Predictor
from imagenet_cls.text import first_line

BATCHES = (1, 7)
"""Sizes of the batches whose logits are compared with PyTorch's."""
TOLERANCE = 1e-4
"""Largest allowed difference of two logits, relative to the largest absolute logit."""
METADATA = "imagenet_cls.json"
"""The extra file of a torch.export archive. An ONNX file has the same values in its
metadata_props.
"""
_EVAL_KEYS = ("mode", "crop_px", "crop_pct", "resize_px", "interpolation", "flip_tta")
_EXAMPLE_BATCH = 2  # the exporter takes sizes of 0 and 1 for constants


class ExportedModel(nn.Module):
    """A model with one input, `images` (N, C, *crop_px).

    preprocess: `none` for normalized images in float32, `normalize` for uint8 images, which the
    graph normalizes.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, predictor: Predictor, preprocess: str):
        super().__init__()
        self.model = predictor.model.requires_grad_(False)
        self.normalizes = preprocess != "none"
        if self.normalizes:
            self.register_buffer("shift", predictor.normalize.shift)
            self.register_buffer("scale", predictor.normalize.scale)

    def forward(self, images: Tensor) -> Tensor:
        if self.normalizes:
            images = images.to(torch.float32).sub(self.shift).mul(self.scale)
        return self.model(images).float()


def export_model(
    predictor: Predictor, is_onnx: bool, preprocess: str
) -> tuple[bytes, Callable[[Tensor], Tensor]]:
    """Export a model as ONNX or torch.export: the content of the file, and a function from the
    input to logits. Raises CheckpointError if that fails.

    predictor: on the CPU. preprocess: of `ExportedModel`.
    """
    exported = ExportedModel(predictor, preprocess).eval()
    shape = (_EXAMPLE_BATCH, len(predictor.mean), *predictor.transform.crop)
    images = torch.zeros(shape, dtype=torch.uint8 if exported.normalizes else torch.float32)
    values = metadata(predictor, preprocess)
    dynamic = ({0: torch.export.Dim("batch")},)
    remedy = "Control flow in the model must not depend on pixel values or the batch size."
    with _export_errors(predictor, "torch.export", remedy):
        program = torch.export.export(exported, (images,), dynamic_shapes=dynamic)
    if not is_onnx:
        file = io.BytesIO()
        torch.export.save(program, file, extra_files={METADATA: json.dumps(values)})
        return file.getvalue(), program.module()
    remedy = "Replace that operator in the model, or use --out model.pt2."
    with _export_errors(predictor, "ONNX", remedy):
        onnx = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=dynamic,
            verbose=False,
        )
        assert onnx is not None
        onnx.model.metadata_props.update({key: json.dumps(value) for key, value in values.items()})
        content = onnx.model_proto.SerializeToString()
        return content, OnnxModel(content)


def metadata(predictor: Predictor, preprocess: str) -> dict[str, Any]:
    """What a program needs to prepare images and to name the classes. threshold: None with one
    label for each image.
    """
    config = predictor.config
    return {
        "model": config.model.name,
        "weights": predictor.weights,
        "classes": predictor.classes,
        "labels": config.data.labels,
        "threshold": predictor.threshold,
        "input_size": [len(predictor.mean), *predictor.transform.crop],
        "resize_size": list(predictor.transform.resized),
        "mean": predictor.mean,
        "std": predictor.std,
        "eval": {key: getattr(config.eval, key) for key in _EVAL_KEYS},
        "exif": config.data.exif,
        "preprocess": preprocess,
    }


@contextmanager
def _export_errors(predictor: Predictor, format: str, remedy: str) -> Iterator[None]:
    """Silence the exporters, and turn their errors into a CheckpointError with the first cause."""
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        problem = f"{predictor.config.model.name} can't be exported ({format}): {first_line(first)}"
        raise CheckpointError(problem, remedy) from error
    finally:
        logging.disable(disabled)


@torch.no_grad()
def compare(predictor: Predictor, run: Callable[[Tensor], Tensor], preprocess: str) -> str:
    """Compare the logits of an exported model with PyTorch's for random images, in batches of the
    sizes `BATCHES`. run, preprocess: see `export_model`.

    Returns a line about the largest difference. Raises CheckpointError if logits differ by more
    than the tolerance, or are not finite.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (max(BATCHES), len(predictor.mean), *predictor.transform.crop)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    largest = 0.0
    scale = 0.0
    for size in BATCHES:
        pixels = images[:size]
        prepared = predictor.normalize(pixels).contiguous()
        expected = predictor.model(prepared).float()
        actual = run(prepared if preprocess == "none" else pixels)
        # NaN must not compare as equal: it is neither larger nor smaller than a tolerance.
        difference = (actual - expected).abs().nan_to_num(nan=float("inf")).max().item()
        largest = max(largest, difference)
        scale = max(scale, expected.abs().max().item())
    tolerance = TOLERANCE * scale
    verdict = (
        f"logits differ by up to {largest:.3g}; tolerance {tolerance:.3g} ({TOLERANCE:g} of the "
        "largest logit)"
    )
    if not largest <= tolerance:
        raise CheckpointError(
            f"{predictor.config.model.name}: {verdict}.",
            "No file was written. Other versions of torch or onnxruntime may agree.",
        )
    return verdict
