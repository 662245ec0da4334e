"""`OnnxPredictor`: predict with an exported ONNX file, by onnxruntime."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import config_from_state, invalid_content_errors, mean_std
from imagenet_cls.data.transforms import to_channels
from imagenet_cls.engine.predictor import AnyImage, Predictor, read_image
from imagenet_cls.engine.trained import TrainedModels
from imagenet_cls.errors import UsageError
from imagenet_cls.files import check_regular


def check_packages(*names: str) -> None:
    """Raise UsageError if one is not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise UsageError(f"ONNX needs {', '.join(missing)}.\nInstall: pip install {' '.join(missing)}")


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
            trained = TrainedModels({}, config, len(classes), classes, mean, std, origin=str(file), path=file)
            self._set_up(trained, values["weights"], model, torch.device("cpu"))
            self.in_graph = str(values["preprocess"])

    def prepare(self, images: Sequence[AnyImage]) -> Tensor:
        """Same as `Predictor.prepare`; uint8 if the graph normalizes, and also of any one size if the graph resizes."""
        if self.in_graph == "none":
            return super().prepare(images)
        pixels = [read_image(image, self.exif) for image in images]
        if self.in_graph == "resize":
            return torch.stack([to_channels(image, len(self.mean)) for image in pixels])
        return torch.stack([self.transform(image) for image in pixels])

    def logits(self, images: Sequence[AnyImage]) -> Tensor:
        """Same as `Predictor.logits`; images that the graph resizes are passed one by one, since their sizes differ."""
        batches = [[image] for image in images] if self.in_graph == "resize" else [images]
        return torch.cat([super(OnnxPredictor, self).logits(batch) for batch in batches])
