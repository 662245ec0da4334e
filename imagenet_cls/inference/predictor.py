"""Prediction with a checkpoint or an exported ONNX file alone, without a config and data."""

import glob
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import (
    config_from_state,
    invalid_content_errors,
    stored_mean_std,
)
from imagenet_cls.config.load import load_config
from imagenet_cls.config.rules import check_value
from imagenet_cls.config.schema import SHARE, format_size
from imagenet_cls.data.decode import decode_rgb, decode_upright, rgb_tensor
from imagenet_cls.data.device import Normalize
from imagenet_cls.data.image_set import named_errors
from imagenet_cls.data.index import images_of_tree, list_tree
from imagenet_cls.data.transforms import EvalTransform
from imagenet_cls.engine.evaluate import compute_logits
from imagenet_cls.entry_points import load_extra
from imagenet_cls.errors import CheckpointError, DataError, UsageError
from imagenet_cls.files import check_regular, read_regular
from imagenet_cls.inference.load_weights import TrainedModels, load_alone
from imagenet_cls.lookup import check_packages, suggest_keywords
from imagenet_cls.models.adapt import value_errors
from imagenet_cls.parallel.cpus import cpu_threads
from imagenet_cls.parallel.devices import choose_device, explain_start_errors
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.tasks import task_of

AnyImage = str | Path | Image.Image | np.ndarray | Tensor
"""A file, a Pillow image, a uint8 array (H, W, 3), or a uint8 tensor (3, H, W)."""

_BATCH = 64
_MAX_IMAGE_PIXELS = 2**26  # of one image; 0.8 GB in float32
_MAX_PIXELS = 2**25  # of a batch of small images or of one large one; 0.4 GB in float32
# A module may keep state of a forward pass, as `FeatureModel` does.
_ONE_PASS = Lock()


@dataclass
class ImageBatch:
    """Images that were read and cropped together.

    names: the path of a file, else the position in the list of images. crops: uint8
    (C, *crop_px), without the files that can't be read. errors: about these files.
    """

    names: list[str | int] = field(default_factory=list)
    crops: list[Tensor] = field(default_factory=list)
    errors: list[DataError] = field(default_factory=list)


class Predictor:
    """Classifies images, without a dataset. They are prepared, and mirrored with `eval.flip_tta`,
    as in the evaluations of the run, or as for the published weights of the model.

    checkpoint: any source of `engine.stored_weights.open_weights`: a run folder or a checkpoint, a
    file, or a model's name. model: the name of the model, for a file that is no checkpoint. config:
    a config file, in place of `model`. device: as in the config. weights: `raw` or `ema`. By
    default a run folder or a checkpoint gives the kind of weights that evaluated best in the run;
    otherwise it is the EMA if there is one. allow_import: factories and modules that
    the config may name, besides the models of libraries. threshold: with `data.labels` multi, the
    minimum probability (0 to 1) of a predicted class; by default the one with the highest
    micro F1 on the validation images if the checkpoint was evaluated, else `eval.threshold`. Raises
    CheckpointError, and UsageError for a threshold with one label for each image.

    model: in evaluation mode, on the device; maps the images of `prepare` to logits (B, C).
    classes: the names of the outputs. threshold: the one that is used, None with one label.
    """

    @suggest_keywords
    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        device: str = "auto",
        weights: str | None = None,
        allow_import: Collection[str] = (),
        threshold: float | None = None,
        model: str | None = None,
        config: str | os.PathLike[str] | None = None,
    ):
        if str(checkpoint).endswith(".onnx"):
            raise UsageError(
                f"{checkpoint}: a Predictor takes weights, not an ONNX file.",
                "Use tools/predict.py, or onnxruntime as in docs/export.md.",
            )
        torch_device = choose_device(device, RankInfo())
        if torch_device.type == "cuda":
            with explain_start_errors(torch_device):
                torch.ones(1, device=torch_device)
        loaded = None if config is None else load_config(Path(config)).config
        trained = load_alone(os.fspath(checkpoint), weights, allow_import, model, loaded)
        network = trained.models[trained.kind].to(torch_device)
        self._set_up(trained, network, torch_device, threshold)

    def _set_up(
        self,
        trained: TrainedModels,
        model: nn.Module,
        device: torch.device,
        threshold: float | None,
    ) -> None:
        assert trained.path is not None
        self.path = trained.path
        self.state = trained.state
        self.weights = trained.kind
        self.model = model
        self.config = trained.config
        self.warnings = trained.warnings
        self.num_classes = trained.num_classes
        self.classes = trained.classes or ()
        self.mean = trained.mean
        self.std = trained.std
        with invalid_content_errors(self.path):  # a stored config was read without this check
            for key in ("crop_px", "resize_px", "crop_pct", "threshold"):
                check_value(f"eval.{key}", getattr(self.config.eval, key))
        if threshold is not None and threshold not in SHARE:
            raise UsageError(f"threshold {threshold:g} is out of range.", f"Give {SHARE}.")
        self.task = task_of(self.config)
        if threshold is None and self.task.is_multilabel:
            threshold = trained.best_thresholds.get(trained.kind)
        if threshold is not None:
            self.task = self.task.with_threshold(threshold)
        self.threshold = self.task.threshold
        self.transform = EvalTransform(self.config.eval, self.mean)
        pixels = math.prod(map(max, self.transform.crop, self.transform.resized))
        if pixels > _MAX_IMAGE_PIXELS:
            raise CheckpointError(
                f"{self.path}: eval.crop_px and eval.resize_px ask for images of {pixels:,} "
                f"pixels, more than {_MAX_IMAGE_PIXELS:,}.",
                "Use another checkpoint.",
            )
        self.normalize = Normalize(self.mean, self.std, device, self.config.train.channels_last)

    def crop(self, image: AnyImage) -> Tensor:
        """An image of any size as uint8 (C, *crop_px) on the CPU. Raises DataError with its name if
        it can't be read or its resized image would be too large, TypeError as `read_image`, and
        ValueError for one without pixels.
        """
        is_file = isinstance(image, str | Path)
        with named_errors(image if is_file else f"a {type(image).__name__}"):
            pixels = read_image(image, self.config.data.exif)
            if pixels.numel() == 0:
                raise ValueError(f"an image of {tuple(pixels.shape)} has no pixels")
            return self.transform(pixels)

    def prepare(self, images: Sequence[AnyImage]) -> Tensor:
        """Images of any sizes as float32 (B, C, *crop_px) on the device of the model."""
        return self.model_input(self._crops(images))

    def _crops(self, images: Sequence[AnyImage]) -> list[Tensor]:
        """The `crop` of each image. Raises TypeError for an empty list, and for a path in place of
        a list.
        """
        crops = [] if isinstance(images, str | Path) else [self.crop(image) for image in images]
        if not crops:
            raise TypeError(f"give a list of images, not {images!r}")
        return crops

    def model_input(self, crops: list[Tensor]) -> Tensor:
        """Images of `crop` as `prepare` gives them."""
        return self.normalize(torch.stack(crops))

    def logits(self, images: Sequence[AnyImage]) -> Tensor:
        """fp32 logits (B, C) on the CPU.

        Raises CheckpointError if the model can't take images of the run's size, or returns another
        shape.
        """
        return self._logits(self._crops(images))

    def features(self, images: Sequence[AnyImage]) -> Tensor:
        """fp32 features (B, D) on the CPU, see `extras.weights.feature_model.FeatureModel`.

        Raises as `logits`, and UsageError for a model without a known classifier.
        """
        return self._compute(self._feature_model, self._crops(images))

    def _logits(self, crops: list[Tensor]) -> Tensor:
        logits = self._compute(self.model, crops)
        # An ONNX file may have more outputs than it names classes, but not fewer.
        fewest = max(len(self.classes), 1)
        if logits.shape[:-1] != (len(crops),) or logits.shape[1] < fewest:
            raise CheckpointError(
                f"{self.path}: its model returns outputs of shape {tuple(logits.shape)}, "
                f"not {(len(crops), fewest)}.",
                "Use another checkpoint or exported file.",
            )
        return logits

    @cached_property
    def _feature_model(self) -> nn.Module:
        feature_model: nn.Module = load_extra("Predictor.features")(self.model, self.num_classes)
        return feature_model

    @torch.no_grad()
    def _compute(self, model: nn.Module, crops: list[Tensor]) -> Tensor:
        images = self.model_input(crops)
        try:
            with value_errors(), _ONE_PASS:
                return compute_logits(model, images, self.config.eval.flip_tta).cpu()
        except ValueError as error:
            size = format_size(self.config.eval.crop_px)
            raise CheckpointError(
                f"{self.path}: its model does not take images of {size}: {error}",
                "Use another checkpoint.",
            ) from error

    def __call__(
        self, images: AnyImage | Sequence[AnyImage], top: int | None = None
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """A list of the rows of `predict`; for a single image its row."""
        if isinstance(images, str | Path):
            rows = list(self.predict(find_images([str(images)]), top))
            return rows[0] if Path(images).is_file() else rows
        if isinstance(images, Image.Image | np.ndarray | Tensor):
            return next(self.predict([images], top))
        return list(self.predict(images, top))

    def __repr__(self) -> str:
        return f"Predictor({str(self.path)!r}, {self.weights} weights, {self.num_classes} classes)"

    def predict(
        self,
        images: Iterable[AnyImage],
        top: int | None = None,
        with_logits: bool = False,
        batch_size: int = _BATCH,
        workers: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield a row for each image, in their order: image (the path of a file, else the position
        in `images`), top (pairs of class and probability, likeliest first), logits.

        images: also an endless generator, of which one batch is read ahead. workers: the threads
        that read images, by default one for each CPU.

        top: the number of classes, by default 5. With `data.labels` multi, the probabilities are
        sigmoids, and a row has the classes whose probability is at least `threshold`: perhaps none,
        and by default all of them, else the `top` likeliest. A logit of -inf is None.

        Raises DataError for a file that can't be read, and CheckpointError for outputs without
        finite probabilities.
        """
        if isinstance(images, str | Path):
            raise TypeError(f"give a list of images, not {images!r}")
        for batch in self.read_batches(images, batch_size, workers):
            if batch.errors:
                raise batch.errors[0]
            yield from self.predict_batch(batch, top, with_logits)

    iter = predict

    def predict_batch(
        self, batch: ImageBatch, top: int | None = None, with_logits: bool = False
    ) -> Iterator[dict[str, Any]]:
        """`predict` for the images that were read."""
        if not batch.crops:
            return
        logits = self._logits(batch.crops)
        self._check_finite(batch, self.task.has_probabilities(logits), "outputs")
        ranked = self.task.top_classes(logits, self.classes, top)
        for name, best, outputs in zip(batch.names, ranked, logits.tolist(), strict=True):
            row: dict[str, Any] = {"image": name, "top": best}
            if with_logits:
                row["logits"] = [value if math.isfinite(value) else None for value in outputs]
            yield row

    def batch_features(self, batch: ImageBatch) -> Tensor:
        """`features` of the images that were read. Raises CheckpointError for features that are NaN
        or infinite.
        """
        values = self._compute(self._feature_model, batch.crops)
        self._check_finite(batch, values.isfinite().all(dim=1), "features")
        return values

    def _check_finite(self, batch: ImageBatch, are_finite: Tensor, name: str) -> None:
        """Raise CheckpointError unless all values of a batch are finite. are_finite: bool (B,).
        name: the name of the values, for the error.
        """
        is_finite = are_finite.tolist()
        if not all(is_finite):
            raise CheckpointError(
                f"{self.path}: the {name} of its {self.weights} weights are NaN or infinite for "
                f"{batch.names[is_finite.index(False)]}.",
                "Use another checkpoint or exported file.",
            )

    def read_batches(
        self, images: Iterable[AnyImage], batch_size: int = _BATCH, workers: int | None = None
    ) -> Iterator[ImageBatch]:
        """Read images in batches, each while the caller uses the previous one. Each image is
        cropped at once: files of large photographs would not fit in memory together.

        workers: as for `iter`. Raises TypeError for arrays of other shapes and types than
        `AnyImage`.
        """
        size = max(min(batch_size, _MAX_PIXELS // math.prod(self.transform.crop)), 1)
        numbered = enumerate(images)

        def start_batch() -> list[tuple[str | int, Future[Tensor]]]:
            return [
                (
                    str(image) if isinstance(image, str | Path) else number,
                    pool.submit(self.crop, image),
                )
                for number, image in islice(numbered, size)
            ]

        with ThreadPoolExecutor(workers or cpu_threads()) as pool:
            following = start_batch()
            while current := following:
                following = start_batch()
                batch = ImageBatch()
                for name, crop in current:
                    try:
                        batch.crops.append(crop.result())
                    except DataError as error:
                        batch.errors.append(error)
                    else:
                        batch.names.append(name)
                yield batch


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
    """A Predictor for a file of `tools/export.py`, on the CPU. threshold: by default
    the one that the exported Predictor used. Raises as `Predictor`.
    """

    def __init__(self, file: Path, threshold: float | None = None):
        check_packages("onnx", "onnxruntime")
        with invalid_content_errors(
            file, "not an ONNX file of this project", "Write it with tools/export.py."
        ):
            check_regular(file)
            model = OnnxModel(file.read_bytes())
            stored = model.session.get_modelmeta().custom_metadata_map
            values = {key: json.loads(value) for key, value in stored.items()}
            # the learning rate is not used, but a config needs one
            sections = {
                "eval": values["eval"],
                "data": {"exif": values["exif"]},
                "optimizer": {"lr": 1.0},
            }
            if values.get("labels") == "multi":
                sections["data"]["labels"] = "multi"
                sections["eval"]["threshold"] = values["threshold"]
            config = config_from_state({"config": sections}, file)
            classes = tuple(map(str, values["classes"]))
            mean, std = stored_mean_std({"preprocessing": values})
            trained = TrainedModels(
                {}, values["weights"], config, len(classes), classes, mean, std, str(file), file
            )
            self._set_up(trained, model, torch.device("cpu"), threshold)
            self.graph_preprocess = values["preprocess"]

    def _compute(self, model: nn.Module, crops: list[Tensor]) -> Tensor:
        with invalid_content_errors(self.path):  # onnxruntime finds some only in a run
            return super()._compute(model, crops)

    def model_input(self, crops: list[Tensor]) -> Tensor:
        """The input of the graph: uint8 (B, C, *crop_px) if it normalizes, else as of
        `Predictor`.
        """
        if self.graph_preprocess == "normalize":
            return torch.stack(crops)
        return super().model_input(crops)


def read_image(image: AnyImage, exif: str = "ignore") -> Tensor:
    """An image as uint8 (3, H, W) on the CPU. exif: `data.exif`. Raises OSError, or DataError
    with the reason alone, for one that can't be read, and TypeError for arrays of other shapes and
    types.
    """
    if isinstance(image, Image.Image):
        return rgb_tensor(ImageOps.exif_transpose(image) if exif == "apply" else image)
    if isinstance(image, np.ndarray | Tensor):
        if isinstance(image, Tensor):
            pixels = image
        else:  # a copy, since torch's tensors are always writable, and Pillow's arrays are not
            pixels = torch.from_numpy(image.copy()).movedim(-1, 0)
        if pixels.dtype != torch.uint8 or pixels.ndim != 3 or len(pixels) != 3:
            raise TypeError(
                f"{image.dtype} {tuple(image.shape)} is neither a uint8 tensor (3, H, W) nor a "
                "uint8 array (H, W, 3)"
            )
        return pixels.cpu()
    data = read_regular(str(image))
    return decode_upright(data) if exif == "apply" else decode_rgb(data)


def find_images(arguments: Sequence[str]) -> list[Path]:
    """The image files that the arguments name: files, folders (searched as those of a dataset) and
    patterns. The files of each argument are sorted.

    Raises DataError if an argument names no image, or a folder can't be read.
    """
    found: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            tree = list_tree(os.fsencode(path), b".")
            files = [path / os.fsdecode(name) for name in images_of_tree(tree)]
        elif path.is_file():
            files = [path]
        else:
            files = [Path(name) for name in glob.glob(argument, recursive=True)]  # noqa: PTH207 (absolute ones)
        matches = sorted(file for file in files if file.is_file())
        if not matches:
            missing = "no images in it or below" if path.is_dir() else "no file has this name"
            raise DataError(
                f"{argument}: {missing}.",
                "Name image files, folders of images, or quoted patterns like 'photos/*.jpg'.",
            )
        found += matches
    return found
