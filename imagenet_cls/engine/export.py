"""Exports trained models to ONNX and torch.export, and compares them with PyTorch."""

import io
import json
import logging
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import size_bytes
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.transforms import to_channels
from imagenet_cls.engine.predictor import OnnxModel, Predictor
from imagenet_cls.errors import CheckpointError, DataError, UsageError, first_line
from imagenet_cls.lookup import is_factory_name

BATCHES = (1, 7)
"""Sizes of the batches that are compared."""
TOLERANCE = 1e-4
"""Largest allowed difference of two logits, relative to the largest absolute logit."""
METADATA = "imagenet_cls.json"
"""The extra file of a torch.export archive; an ONNX file has the same values in its metadata_props."""
_EVAL_KEYS = ("mode", "crop_px", "crop_pct", "resize_px", "interpolation", "flip_tta")
_ONNX_BYTES = 2**31  # of a protobuf message
_EXAMPLE_BATCH = 2  # the exporter takes sizes of 0 and 1 for constants


class ExportedModel(nn.Module):
    """A model with one input, `images`.

    preprocess: `none`: the images are normalized, float32 (N, C, *crop_px). `normalize`: uint8.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, predictor: Predictor, preprocess: str):
        super().__init__()
        self.model = predictor.model.requires_grad_(False)
        self.normalizes = preprocess != "none"
        if self.normalizes:
            self.register_buffer("shift", predictor.preprocess.shift)
            self.register_buffer("scale", predictor.preprocess.scale)

    def forward(self, images: Tensor) -> Tensor:
        if self.normalizes:
            images = images.to(torch.float32).sub(self.shift).mul(self.scale)
        return self.model(images).float()


@dataclass(frozen=True)
class Export:
    """The content of a file, and a function from its input to logits."""

    content: bytes
    run: Callable[[Tensor], Tensor]
    preprocess: str


def export_model(predictor: Predictor, format: str, preprocess: str, opset: int | None) -> Export:
    """Export a model. Raises CheckpointError if that fails, UsageError if it has another opset.

    predictor: on the CPU. opset: of ONNX; None for torch's default.
    """
    exported = ExportedModel(predictor, preprocess).eval()
    if format == "onnx" and size_bytes(exported.state_dict()) >= _ONNX_BYTES:
        raise UsageError(
            f"{predictor.path}: an ONNX file holds at most 2 GiB.\nUse --format torch."
        )
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
            program, dynamo=True, opset_version=opset, input_names=["images"], output_names=["logits"],
            dynamic_shapes=dynamic, verbose=False,
        )  # fmt: skip
        assert onnx is not None
        onnx.model.metadata_props.update({key: json.dumps(value) for key, value in values.items()})
        content = onnx.model_proto.SerializeToString()
        run = OnnxModel(content)
    found = onnx.model.opset_imports[""]
    if opset not in (None, found):  # torch keeps its own version if it can't convert the model
        raise UsageError(
            f"--opset {opset}: torch exports this model with {found} instead.\nGive --opset {found}."
        )
    return Export(content, run, preprocess)


def metadata(predictor: Predictor, preprocess: str) -> dict[str, Any]:
    """What a program needs to prepare images and to name classes."""
    config = predictor.config
    return {
        "model": config.model.name,
        "weights": predictor.weights,
        "classes": predictor.classes,
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
    """Turn errors of exporters into a CheckpointError with the first reason and the line of the model's code."""
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first: BaseException = error
        frames = traceback.extract_tb(error.__traceback__)
        while first.__cause__ is not None:
            first = first.__cause__
            frames.extend(traceback.extract_tb(first.__traceback__))
        outside = (Path(__file__), Path(torch.__file__).parent)
        lines = [
            f"{frame.filename}, line {frame.lineno}: {frame.line}"
            for frame in frames
            if Path(frame.filename).is_file()
            and not any(map(Path(frame.filename).is_relative_to, outside))
        ]
        reason = f"{predictor.config.model.name} can't be exported ({format}): {first_line(first)}"
        raise CheckpointError("\n".join([reason, *lines[-1:], remedy])) from error
    finally:
        logging.disable(disabled)


def comparison_images(
    predictor: Predictor, allow_import: Collection[str] = ()
) -> tuple[list[Tensor], str]:
    """Images of the run's validation data, uint8 (C, H, W), and a description; random ones without it.

    Code that reads the data is run only if `allow_import` names it.
    """
    data, (height, width) = predictor.config.data, predictor.transform.crop
    count, channels = max(BATCHES), len(predictor.mean)
    is_code = (
        is_factory_name(data.name)
        and not data.name.startswith("torchvision:")
        and data.name not in allow_import
    )
    try:
        if is_code or not Path(data.root).expanduser().exists():
            raise DataError(
                f"data.name={data.name} is not opened" if is_code else f"no {data.root} here"
            )
        source = open_datasets(data, ("val",), subset=True).val
        assert source is not None
        found = min(count, len(source))
        indices = [i * len(source) // found for i in range(found)]
        return [
            to_channels(source.load(i)[0], channels) for i in indices
        ], f"{found} held-out images"
    except (DataError, OSError) as error:
        generator = torch.Generator().manual_seed(0)
        shapes = [(channels, height + 9 * i, width + 17 * i) for i in range(count)]
        images = [
            torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes
        ]
        return images, f"{count} random images ({first_line(error)})"


@torch.no_grad()
def compare(predictor: Predictor, export: Export, images: Sequence[Tensor]) -> list[str]:
    """Lines about the difference of the logits of an export and of PyTorch, in batches of `BATCHES`.

    images: uint8 (C, H, W), of any sizes. Raises CheckpointError if logits differ by more than the
    tolerance, or if logits of PyTorch are not finite.
    """
    name = predictor.config.model.name
    largest = scale = 0.0
    lines = []
    for size in BATCHES:
        batch = [i % len(images) for i in range(size)]
        pixels = torch.stack([predictor.transform(images[i]) for i in batch])
        prepared = predictor.preprocess(pixels).contiguous()
        expected = predictor.model(prepared).float()
        if not expected.isfinite().all():
            remedy = "No file was written. Its weights are the cause, not the export; use another checkpoint."
            raise CheckpointError(
                f"{predictor.path}: logits of PyTorch are NaN or infinite.\n{remedy}"
            )
        actual = export.run(prepared if export.preprocess == "none" else pixels)
        # NaN must not compare as equal: it is neither larger nor smaller than a tolerance.
        difference = (actual - expected).abs().nan_to_num(nan=float("inf")).max().item()
        largest, scale = max(largest, difference), max(scale, expected.abs().max().item())
        for i, torch_logits, exported_class in zip(
            batch, expected, actual.argmax(dim=1), strict=True
        ):
            margin = torch_logits.max() - torch_logits[exported_class]
            if exported_class != torch_logits.argmax():
                text = f"another top-1; in PyTorch its logit is {margin:.3g} below the largest"
                lines.append(f"image {i}, in a batch of {size}: the exported model has {text}")
    tolerance = TOLERANCE * scale
    verdict = f"logits differ by up to {largest:.3g}; tolerance {tolerance:.3g} ({TOLERANCE:g} of the largest logit)"
    if not largest <= tolerance:
        shown = [
            f"{verdict}.",
            *lines[:1],
            "No file was written. Other versions of torch or onnxruntime may agree.",
        ]
        raise CheckpointError(f"{name}: " + "\n".join(shown))
    return [*lines, verdict]
