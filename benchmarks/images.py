"""JPEGs like those of ImageNet, made from scikit-learn's two photographs, or a sample of those in a
given folder.

ImageNet's are on average 110 to 126 KB, of about 470x405 pixels, mostly 4:4:4 at a quality of about
96. A few are gray, CMYK or progressive.
"""

import io
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

CLASSES = 10
SIZES = ((500, 375), (375, 500), (500, 333), (500, 425), (400, 400))  # width, height
# Kind: share of the images, mode, options of Pillow's encoder.
KINDS: dict[str, tuple[float, str, dict[str, Any]]] = {
    "4:4:4": (0.85, "RGB", {"subsampling": 0}),
    "4:2:0": (0.11, "RGB", {"subsampling": 2}),
    "gray": (0.02, "L", {}),
    "progressive": (0.01, "RGB", {"subsampling": 0, "progressive": True}),
    "CMYK": (0.01, "CMYK", {}),
}


@cache
def _photographs() -> list[Image.Image]:
    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


@cache
def _noise() -> np.ndarray:
    """Gray noise, from which each image takes a window."""
    return np.random.default_rng(0).normal(0, 4.3, (600, 600, 1)).round().astype(np.int16)


def jpeg(number: int, quality: int = 95) -> bytes:
    """Image `number`. The first five have one kind each."""
    draws = np.random.default_rng(number)
    shares = [share for share, _, _ in KINDS.values()]
    kind = list(KINDS)[number if number < len(KINDS) else draws.choice(len(KINDS), p=shares)]
    _, mode, options = KINDS[kind]
    photograph = _photographs()[number % 2]
    size = SIZES[draws.choice(len(SIZES), p=[0.4, 0.15, 0.2, 0.15, 0.1])]
    scale = draws.uniform(0.5, 1.0) * min(photograph.width / size[0], photograph.height / size[1])
    width, height = round(size[0] * scale), round(size[1] * scale)
    left, top = (
        int(draws.integers(photograph.width - width + 1)),
        int(draws.integers(photograph.height - height + 1)),
    )
    crop = photograph.crop((left, top, left + width, top + height)).resize(
        size, Image.Resampling.BICUBIC
    )
    row, column = draws.integers(100, size=2)
    noise = _noise()[row : row + size[1], column : column + size[0]]
    pixels = np.roll(np.asarray(crop), draws.integers(3), axis=2) + noise
    file = io.BytesIO()
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)
    image.save(file, "JPEG", quality=quality, **options)
    return file.getvalue()


def _write(arguments: tuple[Path, int]) -> int:
    path, number = arguments
    return path.write_bytes(jpeg(number))


def prepare_images(folder: Path, count: int, root: Path | None = None) -> dict[str, Any]:
    """Fill `folder` with train/ and val/ of `count` images each, once, and return a description of
    them.

    root: a folder with train/ and val/ of class folders; about `count` images of each are linked.
    """
    wanted = {"images": count, "root": None if root is None else str(root.resolve())}
    record = folder / "images.json"
    found = json.loads(record.read_text()) if record.exists() else {}
    if found.get("wanted") == wanted:
        return found["description"]
    is_new = not folder.exists() or not any(folder.iterdir())
    assert found or is_new, f"{folder} has files and was not made by this tool: give a new --folder"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record.write_text('{"wanted": null}')
    if root is None:
        tasks = []
        for part, first in (("train", 0), ("val", count)):
            for number in range(count):
                path = folder / part / f"n{number % CLASSES:08d}" / f"{number:06d}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                tasks.append((path, number if part == "train" else first + number))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            sizes = list(pool.map(_write, tasks))
    else:
        sizes = [_link(path, folder / path.relative_to(root)) for path in _sample(root, count)]
    source = "generated" if root is None else "of --root"
    kilobytes = round(float(np.mean(sizes)) / 1000, 1)
    found = {"images": count, "source": source, "kilobytes": kilobytes, **_mean_size(folder)}
    record.write_text(json.dumps({"wanted": wanted, "description": found}))
    return found


def _sample(root: Path, count: int) -> list[Path]:
    """About `count` files of each part, as many of each class."""
    classes = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())[:count]
    per_class = -(-count // max(len(classes), 1))
    found = [
        path
        for part in ("train", "val")
        for name in classes
        for path in sorted((root / part / name).iterdir())[:per_class]
    ]
    assert found, f"{root}: no class folders with images in train/ and val/"
    return found


def _link(path: Path, link: Path) -> int:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(path.resolve())
    return path.stat().st_size


def _mean_size(folder: Path) -> dict[str, int]:
    """Mean width and height of up to 200 training images."""
    files = sorted((folder / "train").glob("*/*"))
    sizes = []
    for path in files[:: len(files) // 200 + 1]:
        with Image.open(path) as image:
            sizes.append(image.size)
    width, height = np.mean(sizes, axis=0)
    return {"width": round(width), "height": round(height)}
