"""Prediction with a checkpoint or an exported ONNX file alone, without a config and data."""

import glob
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import config_from_state, invalid_content_errors, mean_std
from imagenet_cls.config.check import check_value
from imagenet_cls.config.schema import EvalConfig
from imagenet_cls.data.decode import decode_rgb, decode_upright, rgb_tensor
from imagenet_cls.data.device import Preprocess
from imagenet_cls.data.index import is_image
from imagenet_cls.data.transforms import EvalTransform
from imagenet_cls.engine.evaluate import compute_logits
from imagenet_cls.engine.trained import TrainedModels, choose_weights, load_checkpoint
from imagenet_cls.errors import CheckpointError, DataError, UsageError, format_value
from imagenet_cls.files import check_regular
from imagenet_cls.models.features import FeatureModel
from imagenet_cls.parallel.devices import choose_device, explain_start_errors
from imagenet_cls.parallel.environment import RankInfo

AnyImage = str | Path | Image.Image | np.ndarray | Tensor
"""A file, a Pillow image, a uint8 array (H, W, 3), or a uint8 tensor (3, H, W)."""

_BATCH = 32
_MAX_PIXELS = 2**25  # of a batch of small images or of one large one; 0.4 GB in float32


class Predictor:
    """Classifies images with a checkpoint folder alone, prepared as its run evaluated them (`eval.flip_tta`, too).

    checkpoint: a checkpoint folder, its file of raw or EMA weights, or a run folder, whose best
    checkpoint is read. weights: `raw` or `ema`. If it is None, a file is read as it is, a run folder
    gives the weights that evaluated best, and a checkpoint its EMA if it has one. device: as in the
    config. allow_import: factories and modules that the config may name besides the libraries'
    models. Raises CheckpointError.

    model: in evaluation mode, on the device; maps the images of `prepare` to logits (B, C). classes: their names.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        device: str = "auto",
        weights: str | None = None,
        allow_import: Collection[str] = (),
    ):
        on = choose_device(device, RankInfo())
        if on.type == "cuda":
            with explain_start_errors(on):
                torch.ones(1, device=on)
        folder = Path(checkpoint)
        if folder.is_file() and (folder.parent / "manifest.json").is_file():
            weights = weights or {"model.safetensors": "raw", "ema.safetensors": "ema"}.get(
                folder.name
            )
            folder = folder.parent
        trained = load_checkpoint(folder, allow_import)
        name = choose_weights(trained, weights)
        self._set_up(trained, name, trained.models[name].to(on), on)

    def _set_up(
        self, trained: TrainedModels, weights: str, model: nn.Module, device: torch.device
    ) -> None:
        assert trained.path is not None
        self.path, self.weights, self.model = trained.path, weights, model
        self.config, self.warnings = trained.config, trained.warnings
        self.classes, self.mean, self.std = trained.classes or (), trained.mean, trained.std
        self.num_classes = trained.num_classes
        self.exif, self.flip = self.config.data.exif, self.config.eval.flip_tta
        check_sizes(self.config.eval, self.path)
        self.transform = EvalTransform(self.config.eval, self.mean)
        self.preprocess = Preprocess(self.mean, self.std, device, self.config.train.channels_last)

    def prepare(self, images: Sequence[AnyImage]) -> Tensor:
        """Images of any sizes as float32 (B, C, *crop_px) on the device of the model."""
        return self.preprocess(
            torch.stack([self.transform(read_image(image, self.exif)) for image in images])
        )

    @torch.no_grad()
    def logits(self, images: Sequence[AnyImage]) -> Tensor:
        """fp32 logits (B, C) on the CPU.

        Raises CheckpointError if the model can't take images of the run's size, or returns another
        shape.
        """
        pixels = self.prepare(images)
        with invalid_content_errors(self.path):
            logits = compute_logits(self.model, pixels, self.flip).cpu()
        # An ONNX file may have more outputs than it names classes, but not fewer.
        if logits.shape[:-1] != pixels.shape[:1] or logits.shape[1] < max(len(self.classes), 1):
            expected = len(pixels), max(len(self.classes), 1)
            raise CheckpointError(
                f"{self.path}: Its model returns outputs of shape {tuple(logits.shape)}, "
                f"not {expected}.\n"
                "Use another checkpoint or exported file."
            )
        return logits

    @torch.no_grad()
    def features(self, images: Sequence[AnyImage]) -> Tensor:
        """fp32 features (B, D) on the CPU, see `FeatureModel`.

        Raises as `logits`, and UsageError for a model without a known classifier.
        """
        pixels = self.prepare(images)
        with invalid_content_errors(self.path):
            return compute_logits(self._feature_model, pixels, self.flip).cpu()

    @cached_property
    def _feature_model(self) -> FeatureModel:
        return FeatureModel(self.model, self.num_classes)

    def predict(
        self,
        images: Sequence[AnyImage],
        top: int = 5,
        with_logits: bool = False,
        bad: list[DataError] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """A row for each image: image (path of a file, else position in `images`), top (class, probability), logits.

        A logit of -inf is None. Raises CheckpointError for outputs without finite probabilities.
        bad: receives the error of each file that can't be read, which is left out; None raises the first one.
        """
        if isinstance(images, str | Path):
            raise TypeError(f"predict takes a list of images, not {images!r}")
        for names, logits in self.in_batches(images, self.logits, bad):
            has_probabilities = logits.logsumexp(dim=1).isfinite().tolist()
            ranked = top_classes(logits, self.classes, top)
            rows = zip(names, ranked, logits.tolist(), has_probabilities, strict=True)
            for name, best, outputs, is_finite in rows:
                if not is_finite:
                    raise CheckpointError(
                        f"{self.path}: The outputs of its {self.weights} weights are NaN or "
                        f"infinite for {name}.\nUse another checkpoint or exported file."
                    )
                finite = [value if math.isfinite(value) else None for value in outputs]
                yield {"image": name, "top": best} | ({"logits": finite} if with_logits else {})

    def in_batches(
        self,
        images: Sequence[AnyImage],
        compute: Callable[[Sequence[AnyImage]], Tensor],
        bad: list[DataError] | None = None,
    ) -> Iterator[tuple[list[str | int], Tensor]]:
        """Yield the names of a batch of images and what `compute` (`logits` or `features`) returns for them."""
        size = max(min(_BATCH, _MAX_PIXELS // math.prod(self.transform.crop)), 1)
        for start in range(0, len(images), size):
            names: list[str | int] = []
            batch: list[Tensor] = []
            for number, image in enumerate(images[start : start + size], start):
                try:
                    batch.append(read_image(image, self.exif))
                except DataError as error:
                    if bad is None:
                        raise
                    bad.append(error)
                else:
                    names.append(str(image) if isinstance(image, str | Path) else number)
            if batch:
                yield names, compute(batch)


def check_sizes(config: EvalConfig, path: Path) -> None:
    """Raise CheckpointError for sizes that no config may have, or that need gigabytes for an image.

    path: of the checkpoint, whose config was read without a check of its ranges.
    """
    for key in ("crop_px", "resize_px", "crop_pct"):
        try:
            check_value(f"eval.{key}", getattr(config, key))
        except ValueError as error:
            text = f"{path}: eval.{key}: {error}.\nUse another checkpoint."
            raise CheckpointError(text) from None
    transform = EvalTransform(config)
    for height, width in (transform.crop, transform.resized_size(1000, 1000)):
        if height * width > _MAX_PIXELS:
            raise CheckpointError(
                f"{path}: Its eval section makes images of {height} x {width} px, and a prediction "
                f"takes at most {_MAX_PIXELS:,} pixels.\nUse a checkpoint of smaller images."
            )


def check_packages(*names: str) -> None:
    """Raise UsageError if one is not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise UsageError(
            f"ONNX needs {', '.join(missing)}.\nInstall: pip install {' '.join(missing)}"
        )


class OnnxModel(nn.Module):
    """An ONNX model as a module, on the CPU."""

    def __init__(self, content: bytes):
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        self.session = onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(None, {"images": images.contiguous().numpy()})[0])


class OnnxPredictor(Predictor):
    """A Predictor for a file of `tools/export.py --format onnx`, on the CPU. Raises CheckpointError."""

    def __init__(self, file: Path):
        check_packages("onnxruntime")
        with invalid_content_errors(
            file, "not an ONNX file of this project", "Write it with tools/export.py."
        ):
            check_regular(file)
            model = OnnxModel(file.read_bytes())
            stored = model.session.get_modelmeta().custom_metadata_map
            values = {key: json.loads(value) for key, value in stored.items()}
            parts = {
                "eval": values["eval"],
                "data": {"exif": values["exif"]},
                "optimizer": {"lr": 1.0},
            }
            config = config_from_state({"config": parts}, file)
            classes, (mean, std) = (
                tuple(map(str, values["classes"])),
                mean_std({"preprocessing": values}),
            )
            trained = TrainedModels(
                {}, config, len(classes), classes, mean, std, origin=str(file), path=file
            )
            self._set_up(trained, values["weights"], model, torch.device("cpu"))
            self.in_graph = str(values["preprocess"])
            if self.in_graph not in ("none", "normalize"):
                found = format_value(self.in_graph)
                raise CheckpointError(
                    f"{file}: its graph has the preprocessing {found}, which is no longer read.\n"
                    "Export it again: tools/export.py RUN --format onnx --preprocess normalize"
                )

    def prepare(self, images: Sequence[AnyImage]) -> Tensor:
        """The input of the graph: uint8 (B, C, *crop_px) if it normalizes, else as `Predictor`."""
        if self.in_graph == "none":
            return super().prepare(images)
        return torch.stack([self.transform(read_image(image, self.exif)) for image in images])


def load_model(
    checkpoint: str | Path,
    device: str = "auto",
    weights: str | None = None,
    allow_import: Collection[str] = (),
) -> tuple[nn.Module, Callable[[Sequence[AnyImage]], Tensor]]:
    """`Predictor.model` and `Predictor.prepare` of a checkpoint."""
    predictor = Predictor(checkpoint, device, weights, allow_import)
    return predictor.model, predictor.prepare


def top_classes(
    logits: Tensor, classes: Sequence[str], count: int = 5
) -> list[list[tuple[str, float]]]:
    """For each row of logits (B, C) the `count` likeliest classes with their probabilities, likeliest first."""
    best = logits.softmax(dim=1).topk(min(count, logits.shape[1]), dim=1)
    names = [*classes, *(f"class {index}" for index in range(len(classes), logits.shape[1]))]
    return [
        [
            (names[index], probability)
            for index, probability in zip(indices, probabilities, strict=True)
        ]
        for indices, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def read_image(image: AnyImage, exif: str = "ignore") -> Tensor:
    """An image as uint8 (3, H, W) on the CPU. Raises DataError for a file, TypeError for other arrays."""
    if isinstance(image, Image.Image):
        return rgb_tensor(ImageOps.exif_transpose(image) if exif == "apply" else image)
    if isinstance(image, np.ndarray):
        image = torch.from_numpy(np.ascontiguousarray(image)).movedim(-1, 0)
    if isinstance(image, Tensor):
        if image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3:
            text = f"{image.dtype} {tuple(image.shape)}"
            raise TypeError(
                f"{text} is neither a uint8 tensor (3, H, W) nor a uint8 array (H, W, 3)"
            )
        return image.cpu()
    path = Path(image)
    try:
        check_regular(path)
        return (decode_upright if exif == "apply" else decode_rgb)(path.read_bytes())
    except (OSError, DataError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: {reason}\nLeave it out, or give another file.") from error


def find_images(arguments: Sequence[str]) -> list[Path]:
    """The images of files, folders (recursively) and patterns, sorted for each.

    Raises DataError if one has no image, and OSError if a folder can't be read.
    """
    found: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            matches = []
            for folder, _, names in os.walk(path, onerror=_raise, followlinks=False):
                images = [Path(folder, name) for name in names if is_image(os.fsencode(name))]
                matches += [image for image in images if image.is_file()]
            matches.sort()
        else:
            names = [argument] if path.is_file() else glob.glob(argument, recursive=True)  # noqa: PTH207 (absolute ones)
            matches = sorted(Path(name) for name in names if Path(name).is_file())
        if not matches:
            remedy = "Name image files, folders of images, or quoted patterns like 'photos/*.jpg'."
            raise DataError(f"{argument}: no image there.\n{remedy}")
        found += matches
    return found


def _raise(error: OSError) -> None:
    raise error
