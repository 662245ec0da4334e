"""The same crops, pixels and losses for each `data.num_workers` and `data.decode`."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN
from torchvision.transforms import v2

from benchmarks.compare import Row, check
from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.config import keys
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import AugmentConfig, Config
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.decode import decode_region, decode_rgb
from imagenet_cls.data.transforms import TrainTransform
from imagenet_cls.data.turbojpeg import find_turbojpeg
from imagenet_cls.engine.build import build
from imagenet_cls.engine.loaders import build_train_loader
from imagenet_cls.engine.meter import StepResult
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.plan import plan_run
from imagenet_cls.engine.train import train
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.seeding import hash_key, seed_generators

CPU = RankContext(RankInfo(), torch.device("cpu"))


def decode_options() -> list[str]:
    """The values of `data.decode`; none where the key does not exist."""
    if "data.decode" not in keys.value_types():
        return []
    return list(keys.choices(keys.split_optional(keys.value_types()["data.decode"])[0]))


def loader_options(workers: int) -> list[list[str]]:
    """Overrides that must not change a batch: numbers of workers, and each value of
    `data.decode`.
    """
    counts = [[f"data.num_workers={count}"] for count in sorted({0, 1, workers})]
    return counts + [
        [f"data.num_workers={workers}", f"data.decode={value}"] for value in decode_options()
    ]


def reference_image(path: Path) -> torch.Tensor:
    """The whole image as uint8 (3, H, W), decoded by torchvision; by Pillow if it is CMYK."""
    data = torch.from_numpy(np.fromfile(path, np.uint8))
    try:
        return torch.ops.image.decode_jpeg(data, 3)
    except RuntimeError:
        with Image.open(path) as image:
            return v2.functional.pil_to_tensor(image.convert("RGB"))


def decode_rows(folder: Path, images: int) -> Iterator[Row]:
    """Whether whole images and regions have the pixels of torchvision's decoder."""
    paths = sorted((folder / "train").glob("*/*"))[:images]
    transform = TrainTransform(AugmentConfig())
    torch.manual_seed(0)
    same = same_regions = 0
    for path in paths:
        data, expected = path.read_bytes(), reference_image(path)
        same += torch.equal(decode_rgb(data), expected)
        image, (top, left, height, width) = decode_region(data, transform.draw_crop)
        rows, columns = slice(top, top + height), slice(left, left + width)
        same_regions += torch.equal(image[:, rows, columns], expected[:, rows, columns])
    yield check(
        "pixels of torchvision's decoder", same == len(paths), f"{same} of {len(paths)} images"
    )
    library = "without libjpeg-turbo 3" if find_turbojpeg() is None else "with libjpeg-turbo 3"
    note = f"{same_regions} of {len(paths)} images, {library}"
    yield check("the same in random regions", same_regions == len(paths), note)


def config_of(folder: Path, batch_size: int, overrides: Sequence[str]) -> Config:
    options = [
        f"data.root={folder}",
        f"train.global_batch_size={batch_size}",
        f"eval.batch_size={batch_size}",
    ]
    return load_config("resnet50", [*options, *overrides]).config


def pixel_rows(folder: Path, batch_size: int, workers: int, images: int) -> Iterator[Row]:
    """Whether crops and pixels are those of torchvision's v2 transforms on whole images, for each
    option.
    """
    reference: dict[Any, torch.Tensor] = {}
    same_crops = True
    crop, flip = v2.RandomResizedCrop([224, 224]), v2.RandomHorizontalFlip()
    for overrides in loader_options(workers):
        config = config_of(folder, batch_size, overrides)
        source = open_datasets(config.data).train
        loader = build_train_loader(
            config, source, plan_run(config.train, len(source), 1), CPU, IMAGENET_DEFAULT_MEAN
        )
        transform, differing, total = TrainTransform(config.augment), 0, 0
        loader.sampler.set_epoch(0, 0)
        sample_keys = iter(list(loader.sampler))
        for batch in islice(loader.epoch(0), max(images // batch_size, 1)):
            for pixels, (epoch, index, repeat) in zip(
                batch.images, islice(sample_keys, len(batch.images)), strict=True
            ):
                key = hash_key("sample", config.seed, epoch, index, repeat)
                if key not in reference:
                    image = reference_image(source.files.index.path(index))
                    seed_generators(key)
                    ours = transform.draw_crop(*image.shape[1:])
                    seed_generators(key)
                    drawn = crop.make_params([image])
                    same_crops &= ours == (
                        drawn["top"],
                        drawn["left"],
                        drawn["height"],
                        drawn["width"],
                    )
                    seed_generators(key)
                    reference[key] = flip(crop(image))
                differing += not torch.equal(pixels, reference[key])
                total += 1
        loader.close()
        yield check(
            f"pixels of torchvision's v2 transform on whole images, {' '.join(overrides)}",
            differing == 0,
            f"{total - differing} of {total} images",
        )
    yield check("crops of torchvision's RandomResizedCrop", same_crops, f"{len(reference)} crops")


class LossRecorder:
    """What `engine.train.train` needs of a run, without reports, evaluations and saves: collects
    the losses.
    """

    def __init__(self, parts: TrainingParts):
        self.parts, self.progress = parts, Progress()
        self.losses: list[torch.Tensor] = []

    def epoch_batches(self, epoch: int, first_step: int) -> Iterator[Any]:
        return self.parts.train_loader.epoch(epoch, first_step)

    def after_step(self, result: StepResult) -> None:
        self.losses.append(result.loss_and_metric[0])

    def after_epoch(self) -> None:
        pass


def loss_rows(folder: Path, workers: int, steps: int) -> Iterator[Row]:
    """Whether all losses of a ResNet-18 are the same bits with each option."""
    small = [
        "model.name=resnet18",
        "model.kwargs={}",
        "augment.size_px=32",
        "eval.crop_px=32",
        "eval.resize_px=36",
    ]
    small += [f"train.max_steps={steps}", f"train.epochs={steps}", "optimizer.lr=0.01"]
    torch.set_num_threads(1)
    first: list[float] | None = None
    for overrides in loader_options(workers):
        parts = build(config_of(folder, 8, [*small, *overrides]), CPU)
        run = LossRecorder(parts)
        train(run)
        parts.train_loader.close()
        losses = torch.stack(run.losses).tolist()
        first = first or losses
        assert len(losses) == steps
        yield check(
            f"losses of {steps} steps, {' '.join(overrides)}",
            losses == first,
            f"last loss {losses[-1]:.6f}",
        )
