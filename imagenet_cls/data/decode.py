"""Image files to pixels: torchvision decodes ordinary JPEGs (1.2 times as fast, the same pixels), Pillow the rest."""

import io
import struct
import warnings

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode

from imagenet_cls.errors import DataError

# Pillow's own limit (2 * Image.MAX_IMAGE_PIXELS as it is installed). ImageNet's largest image has about a tenth of it.
MAX_PIXELS = 178_956_970

# The operator that torchvision.io.decode_jpeg calls; from 0.29 on, that function warns of its move to torchcodec.
_DECODE_JPEG = torch.ops.image.decode_jpeg

_START_OF_FRAME = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended, progressive Huffman: what torchvision decodes
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})


def decode_rgb(data: bytes) -> torch.Tensor:
    """Decode an image file into uint8 (3, H, W) on the CPU, the pixels of Pillow's `Image.open(...).convert("RGB")`.

    Grey images get three equal channels; transparency is dropped; an animation gives its first frame. An EXIF
    orientation is not applied, as in torchvision's ImageFolder and timm. The memory may be channels-last. Raises
    DataError with the reason, without the file's name, for broken, truncated and absurdly large images.
    """
    header = _jpeg_header(data)
    if header is not None:
        height, width, channels = header
        if height * width > MAX_PIXELS:
            raise DataError(f"{width} x {height} pixels, more than the {MAX_PIXELS} allowed")
        if channels in (1, 3):
            try:
                return _DECODE_JPEG(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB.value)
            except RuntimeError:
                pass  # Pillow decides; it raises for truncated files too
    return _decode_with_pillow(data)


def rgb_tensor(image: Image.Image) -> torch.Tensor:
    """A Pillow image as uint8 (3, H, W), converted to RGB as in torchvision's loader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # palettes with transparency
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _decode_with_pillow(data: bytes) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # EXIF blocks that cannot be parsed, sizes between Pillow's two limits
        try:
            with Image.open(io.BytesIO(data)) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(f"{image.width} x {image.height} pixels, more than the {MAX_PIXELS} allowed")
                return rgb_tensor(image)
        except Image.UnidentifiedImageError:
            raise DataError("not an image of a known format" if data else "an empty file") from None
        except Image.DecompressionBombError:
            raise DataError(f"more than the {MAX_PIXELS} pixels allowed") from None
        except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
            # Pillow's decoders and format plug-ins raise all of these for damaged files.
            raise DataError(f"damaged or truncated ({str(error) or type(error).__name__})") from None


def _jpeg_header(data: bytes) -> tuple[int, int, int] | None:
    """Height, width and channels of a JPEG that torchvision can decode; None for other formats. About 2 us.

    ITU T.81, annex B: segments are 0xFF, marker, length (2 bytes, included), payload. A thumbnail is within an APP
    segment, which is skipped.
    """
    if data[:2] != b"\xff\xd8":
        return None
    position, end = 2, len(data) - 9
    while position < end:
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:  # fill byte
            position += 1
        elif marker in _START_OF_FRAME:
            height, width, channels = struct.unpack_from(">HHB", data, position + 5)
            return height, width, channels
        elif marker in _WITHOUT_LENGTH:
            position += 2
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return None
