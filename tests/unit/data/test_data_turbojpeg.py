"""Decoding of regions: the pixels of the whole decode, also for damaged files."""

import io
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from forked_ranks import RankServer
from PIL import Image
from sklearn.datasets import load_sample_images

from imagenet_cls.config.schema import EvalConfig
from imagenet_cls.data import turbojpeg
from imagenet_cls.data.decode import decode_region, decode_rgb
from imagenet_cls.data.transforms import EvalTransform
from imagenet_cls.data.turbojpeg import LIBRARY_VARIABLE, Box, TurboJpeg, find_turbojpeg
from imagenet_cls.errors import DataError

KINDS: dict[str, dict[str, Any]] = {
    "4:4:4": {"quality": 95, "subsampling": 0},
    "4:2:2": {"quality": 90, "subsampling": 1},
    "4:2:0": {"quality": 75, "subsampling": 2},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_blocks": 3},
    "gray": {},
}


@pytest.fixture(scope="module")
def library() -> TurboJpeg:
    """libjpeg-turbo 3, which the extra `test` installs where a wheel exists."""
    found = find_turbojpeg()
    if found is None:
        pytest.skip("no libjpeg-turbo 3")
    return found


def encode(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.convert("L" if kind == "gray" else "RGB").save(file, "JPEG", **KINDS[kind])
    return file.getvalue()


def random_box(draws: np.random.Generator, height: int, width: int) -> Box:
    box_height, box_width = int(draws.integers(1, height + 1)), int(draws.integers(1, width + 1))
    return Box(
        int(draws.integers(height - box_height + 1)),
        int(draws.integers(width - box_width + 1)),
        box_height,
        box_width,
    )


def cut(image: torch.Tensor, box: Box) -> torch.Tensor:
    return image[:, box.top : box.top + box.height, box.left : box.left + box.width]


def random_files(
    photographs: list[Image.Image], number: int
) -> Iterator[tuple[bytes, int, int, Box]]:
    """Files of all kinds and odd sizes, their height and width, and a box."""
    draws = np.random.default_rng(0)
    for i in range(number):
        width, height = (int(side) for side in draws.integers(1, 200, 2))
        data = encode(photographs[i % 2].resize((width, height)), list(KINDS)[i % len(KINDS)])
        yield data, height, width, random_box(draws, height, width)


def test_region_has_the_pixels_of_the_whole_image(
    library: TurboJpeg, photographs: list[Image.Image]
) -> None:
    for data, height, width, box in random_files(photographs, 300):
        region = library.decode(data, height, width, box)
        assert region.shape == (3, height, width)
        assert torch.equal(cut(region, box), cut(decode_rgb(data), box))


@pytest.mark.parametrize("subsampling", ["4:2:0", "4:2:2"])
def test_narrow_region_at_each_column_has_the_pixels_of_the_whole_image(
    library: TurboJpeg, subsampling: str
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 40, 3), np.uint8)
    data = encode(Image.fromarray(pixels), subsampling)
    whole = decode_rgb(data)
    for left in range(40):
        for width in range(1, 41 - left):
            box = Box(3, left, 9, width)
            region = library.decode(data, 20, 40, box)
            assert region is not None and torch.equal(cut(region, box), cut(whole, box)), box


def without_quantization(data: bytes) -> bytes:
    """A JPEG without its quantization tables, the segments of the marker 0xDB."""
    kept, position = bytearray(data[:2]), 2
    while data[position + 1] != 0xDA:
        length = 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if data[position + 1] != 0xDB:
            kept += data[position : position + length]
        position += length
    return bytes(kept + data[position:])


def test_file_after_damaged_ones_is_decoded_with_its_own_tables(
    library: TurboJpeg, photographs: list[Image.Image]
) -> None:
    good, box = encode(photographs[0].resize((120, 90)), "4:2:0"), Box(0, 0, 90, 120)
    for damaged in (without_quantization(good), good[: len(good) // 2]):
        with pytest.raises(DataError):
            decode_region(damaged, lambda *_: box)
        region, _ = decode_region(good, lambda *_: box)
        assert torch.equal(region, decode_rgb(good))


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [("CMYK", "JPEG", {}), ("RGB", "JPEG", {"keep_rgb": True}), ("RGB", "PNG", {})],
)
def test_unusual_kinds_are_decoded_whole(
    library: TurboJpeg, photographs: list[Image.Image], mode: str, kind: str, options: dict
) -> None:
    box, file = Box(8, 8, 16, 16), io.BytesIO()
    photographs[1].resize((64, 48)).convert(mode).save(file, kind, **options)
    pixels, chosen = decode_region(file.getvalue(), lambda *_: box)
    assert chosen == box and torch.equal(pixels, decode_rgb(file.getvalue()))


GUARD = 4096


def mutate(data: bytes, draws: np.random.Generator) -> bytes:
    mutated = bytearray(data)
    for _ in range(int(draws.integers(1, 8))):
        mutated[int(draws.integers(len(mutated)))] = int(draws.integers(256))
    return bytes(mutated[: int(draws.integers(len(mutated)))] if draws.random() < 0.2 else mutated)


def decode_mutated_files(rank: int, ranks: int, folder: Path) -> None:
    """Run in a process of its own: compare regions of mutated files, and check the memory around
    the pixels.
    """
    number = 300
    draws, equal = np.random.default_rng(1), 0
    guarded: list[torch.Tensor] = []
    boxes: list[Box] = []

    def empty_with_guards(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        size = int(np.prod(shape))
        guarded[:] = [torch.full((GUARD + size + GUARD,), 77, dtype=dtype)]
        return guarded[0][GUARD : GUARD + size].view(shape)

    def choose(height: int, width: int) -> Box:
        boxes.append(random_box(draws, height, width))
        return boxes[-1]

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for data, *_ in random_files(photographs, number):
        data = mutate(data, draws)
        with patch.object(turbojpeg.torch, "empty", empty_with_guards), suppress(DataError):
            region, _ = decode_region(data, choose)
        for memory in guarded:
            assert (memory[:GUARD] == 77).all(), "written before the pixels"
            assert (memory[-GUARD:] == 77).all(), "written after the pixels"
        with suppress(DataError):  # damage outside of the region may not be noticed
            whole = decode_rgb(data)
            assert torch.equal(cut(region, boxes[-1]), cut(whole, boxes[-1]))
            equal += 1
    assert equal > number / 20


def test_mutated_files_equal_pixels_or_error_and_no_write_past_the_buffer(
    library: TurboJpeg, rank_server: RankServer, tmp_path: Path
) -> None:
    rank_server.call(decode_mutated_files, 1, tmp_path)


@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_evaluation_depends_on_no_pixel_outside_of_the_needed_region(
    photographs: list[Image.Image], interpolation: str, mode: str
) -> None:
    draws, smaller = np.random.default_rng(2), 0
    for number in range(60):
        height, width, crop_px, resize_px = (int(side) for side in draws.integers(8, 200, 4))
        config = EvalConfig(mode, crop_px, resize_px=resize_px, interpolation=interpolation)
        pixels = np.array(photographs[number % 2].resize((width, height)))
        image, transform = torch.from_numpy(pixels).permute(2, 0, 1), EvalTransform(config)
        box = transform.needed_region(height, width)
        changed = torch.randint_like(image, 0, 256)
        cut(changed, box).copy_(cut(image, box))
        assert torch.equal(transform(changed), transform(image))
        smaller += not torch.equal(changed, image)
    assert smaller > (10 if mode != "pad" else 0)


def test_library_that_can_not_be_used_is_ignored(
    library: TurboJpeg, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.so").write_text("no library")
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "text.so"))
    assert find_turbojpeg.__wrapped__().path == library.path
