"""Decoding image files: whole, or only a region of them."""

import io
import logging
import struct
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from torchvision.io import ImageReadMode

from imagenet_cls.data.turbojpeg import Box, find_turbojpeg
from imagenet_cls.errors import DataError
from imagenet_cls.text import first_line

# A function of an image's height and width. Returns the box of the pixels that are needed.
ChooseBox = Callable[[int, int], Box]

# Pillow's own limit (2 * Image.MAX_IMAGE_PIXELS as it is installed). ImageNet's largest image has
# about a tenth of it.
MAX_PIXELS = 178_956_970

# The operator that torchvision.io.decode_jpeg calls; from 0.29 on, that function warns of its move
# to torchcodec.
_DECODE_JPEG = torch.ops.image.decode_jpeg

ORIENTATION = 0x0112  # the EXIF tag
# How to show an image of each orientation but 1: whether rows and columns are exchanged, then the
# dimensions to flip.
_TURNS: dict[int, tuple[bool, list[int]]] = {
    2: (False, [2]),
    3: (False, [1, 2]),
    4: (False, [1]),
    5: (True, []),
    6: (True, [2]),
    7: (True, [1, 2]),
    8: (True, [1]),
}

# Held around `catch_warnings`, which replaces a list of the process.
_WARNINGS = threading.RLock()

# The brands of HEIF files with images coded in HEVC, at bytes 8 to 12 (ISO/IEC 14496-12, `ftyp`).
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})

# baseline, extended, progressive Huffman: what torchvision decodes
_START_OF_FRAME = frozenset({0xC0, 0xC1, 0xC2})
# Tags of TIFF, and values of them: gray images whose 0 is white; signed numbers.
_PHOTOMETRIC_INTERPRETATION = 262
_SAMPLE_FORMAT = 339
# Pillow logs what it can't read, without the name of the file.
logging.getLogger("PIL").addHandler(logging.NullHandler())
# Of the text and the color profile of a PNG, which are not used. Pillow's limit is 1 MiB.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 2**26


def decode_rgb(data: bytes) -> torch.Tensor:
    """Decode an image file into uint8 (3, H, W) on the CPU, the pixels of Pillow's
    `Image.open(...).convert("RGB")`.

    Gray images of 16 bits are divided by 256 (Pillow would clip them at 255); an animation gives
    its first frame. An EXIF orientation is not applied, except to TIFF and HEIF, where Pillow
    applies it. The memory may be channels-last. Raises
    DataError with the reason, without the file's name, for broken, truncated and too large images
    (`MAX_PIXELS`), and as `rgb_tensor`.
    """
    return decode_region(data, whole_image)[0]


def whole_image(height: int, width: int) -> Box:
    return Box(0, 0, height, width)


def open_image(data: bytes) -> Image.Image:
    """Pillow's image of a file, of HEIF files with pillow-heif. Raises what Pillow raises, and
    UnidentifiedImageError for PostScript.
    """
    if data[8:12] in _HEIF_BRANDS:
        _register_heif()
    image = Image.open(io.BytesIO(data))
    if image.format == "EPS":  # its reader starts Ghostscript
        raise Image.UnidentifiedImageError
    return image


@cache
def _register_heif() -> None:
    with suppress(ImportError):  # without it, Pillow does not know the format
        import pillow_heif

        pillow_heif.register_heif_opener()


def decode_upright(data: bytes) -> torch.Tensor:
    """As `decode_rgb`, but rotated and mirrored as the EXIF orientation says: Pillow's
    `ImageOps.exif_transpose`.
    """
    image = decode_rgb(data)
    is_transposed, flipped = _TURNS.get(exif_orientation(data), (False, []))
    image = image.transpose(1, 2) if is_transposed else image
    return image.flip(flipped) if flipped else image


def exif_orientation(data: bytes) -> int:
    """The EXIF orientation of an image file, 1 to 8; 1 for TIFF and HEIF, where it is always
    applied.
    """
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with open_image(data) as image:
                found = 1 if image.format == "TIFF" else image.getexif().get(ORIENTATION, 1)
        except Exception:  # of any type, for damaged EXIF blocks
            return 1
    return found if found in _TURNS else 1


def decode_region(
    data: bytes,
    choose: ChooseBox,
    decode: str = "auto",
    exif: str = "ignore",
) -> tuple[torch.Tensor, Box]:
    """As `decode_rgb`, but only the pixels in the box that `choose` returns are defined. Also
    returns the box.

    decode, exif: keys of `data`. With `auto`, libjpeg-turbo 3 decodes only the region of most
    JPEGs, and may not notice an error elsewhere in the file. Other files, those with errors or
    warnings, and those that are rotated, are decoded whole.
    """
    if exif == "apply" and exif_orientation(data) != 1:
        image = decode_upright(data)
        return image, choose(*image.shape[1:])
    height, width, channels = _decodable_jpeg(data)
    if channels not in (1, 3) or not 0 < height * width <= MAX_PIXELS:
        image = _decode_with_pillow(data)
        return image, choose(*image.shape[1:])
    box = choose(height, width)
    library = find_turbojpeg()
    if library is None:
        found = _decode_with_torchvision(data)
    else:
        # torchvision's libjpeg would print warnings to stderr, without the name of the file.
        region = whole_image(height, width) if decode == "whole" else box
        found = library.decode(data, height, width, region)
    image = _decode_with_pillow(data) if found is None else found
    if image.shape[1:] != (height, width):
        raise DataError("the size in its header is not the size of its pixels", "Replace the file.")
    return image, box


def rgb_tensor(image: Image.Image) -> torch.Tensor:
    """A Pillow image as uint8 (3, H, W), converted to RGB as in torchvision's loader.

    Raises DataError with the reason, without a name, for gray images of signed numbers, of 32 bits
    and of floats: no range of their values is stated.
    """
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # palettes with transparency
        # Of RGB images of 16 bits Pillow keeps the high bytes. It would clip gray ones, which have
        # the mode I if they are from a PGM file.
        tags = getattr(image, "tag_v2", {})  # of a TIFF
        is_signed = 2 in tags.get(_SAMPLE_FORMAT, ())
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
            values = (np.array(image) >> 8).astype(np.uint8)
            # Pillow inverts only those of 8 bits.
            is_inverted = tags.get(_PHOTOMETRIC_INTERPRETATION) == 0
            image = Image.fromarray(255 - values if is_inverted else values)
        elif image.mode in ("I", "F") or is_signed:  # Pillow would clip them at 0 and 255
            raise DataError(
                f"gray values of an unknown range (Pillow's mode {image.mode}: signed, or of 32 "
                "bits)",
                "Convert the image to 8 or 16 bits.",
            )
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _decode_with_torchvision(data: bytes) -> torch.Tensor | None:
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        return _DECODE_JPEG(encoded, ImageReadMode.RGB.value)
    except RuntimeError:  # Pillow decides; it raises for truncated files too
        return None


def _decode_with_pillow(data: bytes) -> torch.Tensor:
    with _WARNINGS, warnings.catch_warnings():
        # EXIF blocks that cannot be parsed, sizes between Pillow's two limits
        warnings.simplefilter("ignore")
        try:
            with open_image(data) as image:
                return rgb_tensor(image)
        except Image.UnidentifiedImageError:
            reason = "an empty file, of an unknown format, or its start is damaged"
            if data[8:12] in _HEIF_BRANDS:
                reason = "a damaged HEIF image, or without pillow-heif: pip install pillow-heif"
        except Image.DecompressionBombError:
            reason = f"more than the {MAX_PIXELS} pixels allowed"
        except (MemoryError, DataError):
            raise
        except Exception as error:  # Pillow's decoders raise any for damaged files
            reason = f"damaged, truncated or not supported ({first_line(error)})"
    raise DataError(reason, "Replace the file.")


def _decodable_jpeg(data: bytes) -> tuple[int, int, int]:
    """Height, width and channels of a JPEG that torchvision can decode; zeros for other files.

    ITU T.81, annex B: segments are 0xFF, marker, length (2 bytes, included), payload. Fill bytes
    are left to Pillow.
    """
    position = 2 if data[:2] == b"\xff\xd8" else len(data)
    while position < len(data) - 9:
        start, marker, length = struct.unpack_from(">BBH", data, position)
        if start != 0xFF or marker == 0xFF:
            break
        if marker in _START_OF_FRAME:
            precision, height, width, channels = struct.unpack_from(">BHHB", data, position + 4)
            return (height, width, channels) if precision == 8 else (0, 0, 0)
        position += 2 + length
    return 0, 0, 0
