"""Decoding: Pillow's pixels for every kind of file, and errors for broken ones."""

import io
import struct
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import peak_kib
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_images

from imagenet_cls.config.schema import EvalConfig
from imagenet_cls.data.decode import (
    decode_region,
    decode_rgb,
    decode_upright,
    exif_orientation,
    rgb_tensor,
)
from imagenet_cls.data.every_image import image_problem
from imagenet_cls.data.image_set import ImageSet, all_images, indexed_images
from imagenet_cls.data.index import ImageIndex
from imagenet_cls.data.map_style import MapImages
from imagenet_cls.data.transforms import EvalTransform
from imagenet_cls.data.turbojpeg import Box
from imagenet_cls.errors import DataError


def encode(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def one_file(file: Path) -> ImageSet:
    names = np.array([file.name.encode()])
    return indexed_images(ImageIndex(file.parent, names, np.zeros(1, np.int64), ("a",)))


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """A file of each kind."""
    image = Image.fromarray(load_sample_images().images[0]).resize((161, 107))
    rgba = image.convert("RGBA")
    rgba.putalpha(image.convert("L"))
    palette = image.quantize(16)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees: to be ignored
    broken_exif = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x02" + b"\xff" * 30
    return {
        "4:2:0": encode(image, quality=90),
        "progressive": encode(image, progressive=True),
        "gray": encode(image.convert("L")),
        "cmyk": encode(image.convert("CMYK")),
        "rotated": encode(image, exif=exif),
        "broken exif": encode(image, exif=broken_exif),
        "fill bytes": b"\xff\xd8\xff" + encode(image)[2:],
        "thumbnail": encode(image, exif=b"Exif\0\0" + encode(image.resize((16, 16)))),
        "png": encode(image, "PNG"),
        "png rgba": encode(rgba, "PNG"),
        "png palette with alpha": encode(palette, "PNG", transparency=bytes(range(0, 256, 16))),
        "png bilevel": encode(image.convert("1"), "PNG"),
        "gif": encode(palette, "GIF"),
        "gif of two frames": encode(
            palette, "GIF", save_all=True, append_images=[palette.rotate(180)]
        ),
        **{kind: encode(image, kind) for kind in ("BMP", "WEBP", "TIFF", "AVIF", "JPEG2000")},
    }


@pytest.mark.parametrize("kind", ["PNG", "big-endian TIFF", "PGM"])
def test_decode_rgb_divides_gray_images_of_16_bits_by_256(kind: str) -> None:
    values = np.arange(107 * 161, dtype=np.uint16).reshape(107, 161) * 3
    if kind == "big-endian TIFF":
        data = encode(Image.frombytes("I;16B", (161, 107), values.astype(">u2").tobytes()), "TIFF")
    elif kind == "PGM":
        data = b"P5 161 107 65535\n" + values.astype(">u2").tobytes()
    else:
        data = encode(Image.fromarray(values), kind)
    expected = torch.from_numpy((values // 256).astype(np.uint8)).expand(3, -1, -1)
    assert torch.equal(decode_rgb(data), expected)
    assert torch.equal(rgb_tensor(Image.open(io.BytesIO(data))), expected)


def test_tags_of_a_tiff_say_what_its_numbers_mean() -> None:
    values = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    inverted = torch.from_numpy((255 - values // 256).astype(np.uint8))
    white_is_zero = encode(Image.fromarray(values), "TIFF", tiffinfo={262: 0})
    assert torch.equal(decode_rgb(white_is_zero)[0], inverted)
    signed = encode(Image.fromarray(values.astype(np.uint8)), "TIFF", tiffinfo={339: 2})
    with pytest.raises(DataError):
        decode_rgb(signed)


@pytest.mark.parametrize("values", [np.float32, np.int32])
def test_gray_image_without_a_stated_range_raises(values: type, tmp_path: Path) -> None:
    image = Image.fromarray(np.linspace(0, 1000, 64).reshape(8, 8).astype(values))
    file = tmp_path / "gray.tif"
    image.save(file)
    with pytest.raises(DataError):
        decode_rgb(file.read_bytes())
    with pytest.raises(DataError, match="own"):
        MapImages([(image, 0)], "own", ("a",), None, "single").load(0)


def test_image_too_thin_to_be_resized_is_named(tmp_path: Path) -> None:
    image, file = Image.new("RGB", (60_000, 1)), tmp_path / "thin.jpg"
    image.save(file)
    transform = EvalTransform(EvalConfig())
    own = MapImages([(image, 0)], "own/thin", ("a",), None, "single")
    for images in (one_file(file), all_images(own, None)):
        with pytest.raises(DataError, match="thin"):
            images.load_region(0, transform.needed_region)
    assert image_problem(one_file(file).files, 0, EvalConfig()) is not None
    assert image_problem(one_file(file).files, 0, EvalConfig(mode="pad")) is None


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_decode_upright_equals_pillows_exif_transpose(
    photographs: list[Image.Image], kind: str
) -> None:
    for orientation in range(10):  # of which 0 and 9 do not exist
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encode(photographs[0].resize((61, 37)), kind, exif=exif)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        expected = torch.from_numpy(np.array(upright.convert("RGB"))).permute(2, 0, 1)
        assert torch.equal(decode_upright(data), expected), orientation
        choose = Mock(return_value=Box(5, 6, 7, 8))
        image, _ = decode_region(data, choose, exif="apply")
        choose.assert_called_once_with(*expected.shape[1:])
        assert torch.equal(image[:, 5:12, 6:14], expected[:, 5:12, 6:14]), orientation


@pytest.mark.parametrize("kind", ["broken exif", "thumbnail", "fill bytes", "png"])
def test_broken_or_missing_exif_block_is_no_orientation(files: dict[str, bytes], kind: str) -> None:
    assert exif_orientation(files[kind]) == 1
    assert torch.equal(decode_upright(files[kind]), decode_rgb(files[kind]))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_decode_rgb_gives_pillows_pixels(
    files: dict[str, bytes], recwarn: pytest.WarningsRecorder
) -> None:
    for kind, data in files.items():
        recwarn.clear()
        pixels = decode_rgb(data)
        assert not recwarn.list, kind
        expected = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
        assert pixels.dtype == torch.uint8, kind
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), expected), kind


@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "gray", "cmyk", "png", "gif", "WEBP"])
def test_decode_rgb_truncated_image_raises(files: dict[str, bytes], kind: str) -> None:
    for share in (0.02, 0.5, 0.99):
        with pytest.raises(DataError):
            decode_rgb(files[kind][: int(len(files[kind]) * share)])


def test_postscript_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow chooses the reader by the content, and its reader of PostScript starts Ghostscript."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", None)  # a call is an error
    data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    assert Image.open(io.BytesIO(data)).format == "EPS"
    with pytest.raises(DataError):
        decode_rgb(data)


def test_decode_rgb_decompression_bomb_raises_and_takes_no_memory() -> None:
    """200 megapixels are 600 MB."""
    small = Image.new("RGB", (16, 16))
    jpeg = bytearray(encode(small, progressive=True))
    struct.pack_into(">HH", jpeg, jpeg.index(b"\xff\xc2") + 5, 20_000, 10_000)
    png = encode(small, "PNG")
    header = struct.pack(">II", 20_000, 10_000) + png[24:29]
    png = png[:8] + chunk(b"IHDR", header) + png[33:]
    before = peak_kib()
    for bomb in (bytes(jpeg), png):
        with pytest.raises(DataError, match="pixels"):
            decode_rgb(bomb)
    assert peak_kib() - before < 50_000


def test_heif_image_that_is_not_read_names_its_package() -> None:
    with pytest.raises(DataError, match="pip install pillow-heif"):
        decode_rgb(b"\0\0\0\x1cftypheic" + b"\0" * 100)


def test_heif_image_is_upright_in_both_cases(photographs: list[Image.Image]) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    photograph = photographs[0].resize((160, 108))
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    pillow_heif.from_pillow(photograph).save(file, quality=90, exif=exif.tobytes())
    data = file.getvalue()
    pixels = decode_rgb(data)
    assert exif_orientation(data) == 1 and torch.equal(decode_upright(data), pixels)
    turned = np.asarray(photograph.transpose(Image.Transpose.ROTATE_270), np.float32)
    assert np.abs(pixels.permute(1, 2, 0).numpy() - turned).mean() < 10
    with pytest.raises(DataError):
        decode_rgb(data[:-1000])


def test_png_with_a_large_text_is_read() -> None:
    image = Image.fromarray(load_sample_images().images[0]).resize((16, 16))
    plain = encode(image, "PNG")
    place = plain.index(b"IDAT") - 4
    data = (
        plain[:place] + chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(2_000_000))) + plain[place:]
    )
    assert torch.equal(decode_rgb(data), decode_rgb(plain))


@pytest.mark.parametrize("data", [b"", b"<!DOCTYPE html><html>", b"\xff\xd8", b"\xff\xd8\xff\xe0"])
def test_what_no_decoder_reads_is_an_error(data: bytes) -> None:
    with pytest.raises(DataError):
        decode_rgb(data)
    assert exif_orientation(data) == 1
