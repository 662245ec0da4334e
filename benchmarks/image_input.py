"""Time of the stages of a training sample, next to torchvision's functions: `python benchmarks/image_input.py`.

On generated JPEGs of about 460 x 425 pixels, in one thread. Each round measures both, one after the other, on all
images, and compares the results. The time is the CPU time of the thread, since something else may run on the machine.
"""

import io
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from imagenet_cls.config.schema import AugmentConfig
from imagenet_cls.data.decode import decode_rgb
from imagenet_cls.data.transforms import TrainTransform, draw_bernoulli, resize

IMAGES, ROUNDS = 48, 30
SIZE = [224, 224]
CROP = v2.RandomResizedCrop(SIZE)
TRAIN = TrainTransform(AugmentConfig(interpolation="bilinear"))


def generated_files() -> list[bytes]:
    """JPEGs, 4:2:0, from scikit-learn's two photographs."""
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    draws, files = np.random.default_rng(0), []
    for number in range(IMAGES):
        size = int(draws.integers(430, 490)), int(draws.integers(395, 455))
        left, top = int(draws.integers(0, 120)), int(draws.integers(0, 30))
        file = io.BytesIO()
        photograph = photographs[number % 2].crop((left, top, left + 520, top + 397)).resize(size)
        photograph.save(file, "JPEG", quality=95, subsampling=2)
        files.append(file.getvalue())
    return files


class Sample(NamedTuple):
    data: bytes
    image: torch.Tensor
    crop: dict[str, int]


def reference_resize(sample: Sample) -> torch.Tensor:
    return F.resized_crop(sample.image, **sample.crop, size=SIZE, antialias=True).contiguous()


def our_resize(sample: Sample) -> torch.Tensor:
    top, left, height, width = sample.crop.values()
    return resize(sample.image[:, top : top + height, left : left + width], SIZE, "bilinear").contiguous()


def reference_sample(sample: Sample) -> torch.Tensor:
    image = decode_rgb(sample.data)
    image = F.resized_crop(image, **CROP.make_params([image]), size=SIZE, antialias=True)
    return (F.horizontal_flip(image) if draw_bernoulli(0.5) else image).contiguous()


STAGES: dict[str, tuple[Callable[[Sample], Any], Callable[[Sample], Any]]] = {
    "decode": (lambda sample: decode_rgb(sample.data), lambda sample: decode_rgb(sample.data)),
    "draw the crop": (
        lambda sample: tuple(CROP.make_params([sample.image]).values()),
        lambda sample: TRAIN.draw_crop(*sample.image.shape[1:]),
    ),
    "crop and resize": (reference_resize, our_resize),
    "whole sample": (reference_sample, lambda sample: TRAIN.crop_and_flip(decode_rgb(sample.data), 0)),
}


def main() -> None:
    torch.set_num_threads(1)
    images = [(data, decode_rgb(data)) for data in generated_files()]
    samples = [Sample(data, image, CROP.make_params([image])) for data, image in images]
    print(f"{IMAGES} images of {np.mean([len(sample.data) for sample in samples]) / 1000:.0f} KB, {ROUNDS} rounds")
    print("| stage | torchvision us | us | ratio | quartiles |")
    for stage, functions in STAGES.items():
        times_us = np.zeros((ROUNDS, 2))
        for number in range(ROUNDS):
            results: list[Any] = [None, None]
            for which in [0, 1] if number % 2 == 0 else [1, 0]:
                torch.manual_seed(number)
                begin = time.thread_time()
                results[which] = [functions[which](sample) for sample in samples]
                times_us[number, which] = (time.thread_time() - begin) / IMAGES * 1e6
            assert all(np.array_equal(*pair) for pair in zip(*results, strict=True)), stage
        low, ratio, high = np.quantile(times_us[:, 1] / times_us[:, 0], [0.25, 0.5, 0.75])
        reference_us, our_us = np.median(times_us, 0)
        print(f"| {stage} | {reference_us:.0f} | {our_us:.0f} | {ratio:.2f} | {low:.2f} to {high:.2f} |")


if __name__ == "__main__":
    main()
