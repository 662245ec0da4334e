"""Exports trained models to ONNX and torch.export, and compares them with PyTorch."""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.errors import CheckpointError, UsageError
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


@dataclass(frozen=True)
class Export:
    """An exported model: the content of its file, and a function from the input to logits.

    preprocess: of `ExportedModel`.
    """

    content: bytes
    run: Callable[[Tensor], Tensor]
    preprocess: str


def export_model(predictor: Predictor, format: str, preprocess: str, opset: int | None) -> Export:
    """Export a model. Raises CheckpointError if that fails, UsageError if torch can't export it
    with this opset.

    predictor: on the CPU. opset: version of ONNX's operators; None for torch's default.
    """
    exported = ExportedModel(predictor, preprocess).eval()
    shape = (_EXAMPLE_BATCH, len(predictor.mean), *predictor.transform.crop)
    images = torch.zeros(shape, dtype=torch.uint8 if exported.normalizes else torch.float32)
    values = metadata(predictor, preprocess)
    dynamic = ({0: torch.export.Dim("batch")},)
    remedy = "Control flow in the model must not depend on pixel values or the batch size."
    with _export_errors(predictor, format, remedy):
        program = torch.export.export(exported, (images,), dynamic_shapes=dynamic)
    if format == "torch":
        file = io.BytesIO()
        torch.export.save(program, file, extra_files={METADATA: json.dumps(values)})
        return Export(file.getvalue(), program.module(), preprocess)
    remedy = "Replace that operator in the model, or give another --opset, or use --format torch."
    with _export_errors(predictor, format, remedy):
        onnx = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=dynamic,
            verbose=False,
        )
        assert onnx is not None
        onnx.model.metadata_props.update({key: json.dumps(value) for key, value in values.items()})
        content = onnx.model_proto.SerializeToString()
        run = OnnxModel(content)
    found = onnx.model.opset_imports[""]
    if opset not in (None, found):  # torch keeps its own version if it can't convert the model
        raise UsageError(
            f"--opset {opset}: torch exports this model with {found} instead.",
            f"Give --opset {found}.",
        )
    return Export(content, run, preprocess)


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
def compare(predictor: Predictor, export: Export) -> str:
    """Compare the logits of an export with PyTorch's for random images, in batches of the sizes
    `BATCHES`.

    Returns a line about the largest difference. Raises CheckpointError if logits differ by more
    than the tolerance, or if logits of PyTorch are not finite.
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
        if not expected.isfinite().all():
            raise CheckpointError(
                f"{predictor.path}: logits of PyTorch are NaN or infinite. No file was written.",
                "The cause are its weights and not the export: use another checkpoint.",
            )
        actual = export.run(prepared if export.preprocess == "none" else pixels)
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
