"""Trained models as files of other programs: ONNX, run by onnxruntime, and torch.export; compared with PyTorch."""

import io
import json
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import config_from_state, invalid_content_errors, mean_std, size_bytes
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.engine.inference import AnyImage, Predictor, TrainedModels, read_image
from imagenet_cls.errors import CheckpointError, DataError, UsageError, first_line
from imagenet_cls.files import check_regular
from imagenet_cls.lookup import is_factory_name

BATCHES = (1, 7)
"""Sizes of the batches that are compared."""
TOLERANCE = 1e-4
"""Of the difference of two logits, as a share of the largest absolute logit."""
METADATA = "imagenet_cls.json"
"""The extra file of a torch.export archive; an ONNX file has the same values in its metadata_props."""
_EVAL_KEYS = ("mode", "crop_px", "crop_pct", "resize_px", "interpolation", "flip_tta")
_ONNX_BYTES = 2**31  # of a protobuf message
_EXAMPLE_BATCH = 2  # the exporter takes sizes of 0 and 1 for constants


class ExportedModel(nn.Module):
    """A model with one input, `images`: normalized float32, or with `preprocess` uint8 (N, C, H, W)."""

    shift: Tensor
    scale: Tensor

    def __init__(self, predictor: Predictor, preprocess: bool):
        super().__init__()
        self.model = predictor.model.requires_grad_(False)
        self.preprocess = preprocess
        if preprocess:
            self.register_buffer("shift", predictor.preprocess.shift)
            self.register_buffer("scale", predictor.preprocess.scale)

    def forward(self, images: Tensor) -> Tensor:
        if self.preprocess:
            images = images.to(torch.float32).sub(self.shift).mul(self.scale)
        return self.model(images).float()


def export_model(predictor: Predictor, form: str, preprocess: bool, opset: int | None) -> tuple[bytes, Callable]:
    """The content of a file, and a function from its input to its logits, which runs what is in the file.

    predictor: on the CPU. form: `onnx` or `torch`. preprocess: whether the graph normalizes. opset: of ONNX; None for
    torch's default. Raises CheckpointError if the model can't be exported.
    """
    exported = ExportedModel(predictor, preprocess).eval()
    if form == "onnx" and size_bytes(exported.state_dict()) >= _ONNX_BYTES:
        raise UsageError(f"{predictor.path}: an ONNX file holds at most 2 GiB.\nUse --format torch.")
    shape = (_EXAMPLE_BATCH, len(predictor.mean), *predictor.transform.crop)
    images = torch.zeros(shape, dtype=torch.uint8 if preprocess else torch.float32)
    batch = ({0: torch.export.Dim("batch")},)
    remedy = "Its code may depend neither on the values of images nor on the size of a batch."
    with _export_errors(predictor, form, remedy):
        program = torch.export.export(exported, (images,), dynamic_shapes=batch)
    values = metadata(predictor, preprocess)
    if form == "torch":
        file = io.BytesIO()
        torch.export.save(program, file, extra_files={METADATA: json.dumps(values)})
        return file.getvalue(), program.module()
    remedy = "Replace that operator in the model, or give another --opset, or use --format torch."
    with _export_errors(predictor, form, remedy):
        onnx = torch.onnx.export(
            program, dynamo=True, opset_version=opset, input_names=["images"], output_names=["logits"],
            dynamic_shapes=batch, verbose=False,
        )  # fmt: skip
        assert onnx is not None
        onnx.model.metadata_props.update({key: json.dumps(value) for key, value in values.items()})
        content = onnx.model_proto.SerializeToString()
        return content, OnnxModel(content)


def metadata(predictor: Predictor, preprocess: bool) -> dict[str, Any]:
    """What a program needs to prepare images and to name classes. normalizes: whether the graph does."""
    config = predictor.config
    evaluation = {key: value for key, value in asdict(config.eval).items() if key in _EVAL_KEYS}
    return {
        "model": config.model.name,
        "classes": predictor.classes,
        "input_size": [len(predictor.mean), *predictor.transform.crop],
        "mean": predictor.mean,
        "std": predictor.std,
        "eval": evaluation,
        "exif": config.data.exif,
        "normalizes": preprocess,
    }


def check_packages(*names: str) -> None:
    """Raise UsageError if one is not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise UsageError(f"ONNX needs {', '.join(missing)}.\nInstall: pip install {' '.join(missing)}")


@contextmanager
def _export_errors(predictor: Predictor, form: str, remedy: str) -> Iterator[None]:
    """Turn the errors of exporters into a CheckpointError with the reason of the first one, without their output."""
    logging.disable()
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        name = predictor.config.model.name
        raise CheckpointError(f"{name} can't be exported ({form}): {first_line(first)}\n{remedy}") from error
    finally:
        logging.disable(logging.NOTSET)


def comparison_images(predictor: Predictor, allow_import: Collection[str] = ()) -> tuple[Tensor, str]:
    """Images of the run's validation data, uint8 (7, C, H, W) of the crop, and a description; random ones without it.

    Data that code of the user reads is opened only if `allow_import` names that code.
    """
    data, transform = predictor.config.data, predictor.transform
    count = max(BATCHES)
    is_code = is_factory_name(data.name) and not data.name.startswith("torchvision:") and data.name not in allow_import
    try:
        if is_code or not Path(data.root).expanduser().exists():
            raise DataError(f"data.name={data.name} is not opened" if is_code else f"no {data.root} here")
        source = open_datasets(data, ("val",), subset=True).val
        assert source is not None
        indices = [i * len(source) // count for i in range(count)]
        return torch.stack([transform(source.load(i)[0]) for i in indices]), f"{count} held-out images"
    except (DataError, OSError) as error:
        shape = (count, len(predictor.mean), *transform.crop)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        return images, f"{count} random images ({first_line(error)})"


@torch.no_grad()
def compare(predictor: Predictor, run: Callable[[Tensor], Tensor], images: Tensor, preprocess: bool) -> list[str]:
    """Lines about the difference of the logits of `run` and of PyTorch, in batches of `BATCHES`.

    images: uint8, as of `comparison_images`. Raises CheckpointError if they differ by more than the tolerance.
    """
    largest = scale = 0.0
    lines = []
    for size in BATCHES:
        prepared = predictor.preprocess(images[:size]).contiguous()
        expected = predictor.model(prepared).float()
        got = run(images[:size] if preprocess else prepared)
        # NaN must not compare as equal: it is neither larger nor smaller than a tolerance.
        difference = (got - expected).abs().nan_to_num(nan=float("inf")).max().item()
        largest, scale = max(largest, difference), max(scale, expected.abs().max().item())
        for number, (ours, theirs) in enumerate(zip(expected, got.argmax(dim=1), strict=True)):
            if theirs != (best := ours.argmax()):
                margin = (ours[best] - ours[theirs]).item()
                lines.append(f"image {number} of {size}: another top-1; its logit is {margin:.3g} lower in PyTorch")
    tolerance = TOLERANCE * scale
    verdict = f"logits differ by up to {largest:.3g}; tolerance {tolerance:.3g} ({TOLERANCE:g} of the largest logit)"
    if not largest <= tolerance:
        shown = [f"{verdict}.", *lines[:1], "No file was written. Other versions of torch or onnxruntime may agree."]
        raise CheckpointError(f"{predictor.config.model.name}: " + "\n".join(shown))
    return [*lines, verdict]


class OnnxModel(nn.Module):
    """An ONNX model as a module: its input as a tensor on the CPU -> logits. It runs on the CPU."""

    def __init__(self, content: bytes):
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def forward(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(None, {"images": images.contiguous().numpy()})[0])


class OnnxPredictor(Predictor):
    """A Predictor for a file of `tools/export.py --format onnx`, on the CPU. Raises CheckpointError."""

    def __init__(self, file: Path):
        check_packages("onnxruntime")
        with invalid_content_errors(file, "not an ONNX file of this project", "Write it with tools/export.py."):
            check_regular(file)
            model = OnnxModel(file.read_bytes())
            stored = model.session.get_modelmeta().custom_metadata_map
            values = {key: json.loads(value) for key, value in stored.items()}
            parts = {"eval": values["eval"], "data": {"exif": values["exif"]}, "optimizer": {"lr": 1.0}}
            config = config_from_state({"config": parts}, file)
            classes, (mean, std) = tuple(map(str, values["classes"])), mean_std({"preprocessing": values})
            trained = TrainedModels({}, config, len(classes), classes, mean, std, origin=str(file))
            self._set_up(file, trained, model, torch.device("cpu"))
            self.normalizes = bool(values["normalizes"])

    def prepare(self, images: Sequence[AnyImage]) -> Tensor:
        """As of Predictor, or cropped uint8 images where the graph normalizes."""
        if not self.normalizes:
            return super().prepare(images)
        return torch.stack([self.transform(read_image(image, self.exif)) for image in images])
