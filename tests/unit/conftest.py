"""Small real image folders for the tests of the data package and of commands."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images


@pytest.fixture(scope="session")
def photographs() -> list[Image.Image]:
    """scikit-learn's two photographs, 640 x 427."""
    return [Image.fromarray(image) for image in load_sample_images().images]


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory, photographs: list[Image.Image]) -> Path:
    """train: 3 classes with 8, 12 and 20 JPEGs of different sizes; val: the same classes with 3
    each.
    """
    root = tmp_path_factory.mktemp("images")
    draws = np.random.default_rng(0)
    for part, counts in (("train", (8, 12, 20)), ("val", (3, 3, 3))):
        for class_name, count in zip(("cat", "dog", "eel"), counts, strict=True):
            folder = root / part / class_name
            folder.mkdir(parents=True)
            for i in range(count):
                left, top = (int(n) for n in draws.integers(0, 300, 2))
                width, height = (int(n) for n in draws.integers(40, 120, 2))
                crop = photographs[i % 2].crop((left, top, left + width, top + height))
                crop.save(folder / f"{i:03d}.JPEG", quality=90)
    return root
