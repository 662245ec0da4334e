"""Decoding a region of a JPEG with libjpeg-turbo 3's TurboJPEG library, by ctypes.

`tj3SetCroppingRegion` decodes only the rows and the blocks of a region, to the same pixels as the
whole image.
"""

import contextlib
import ctypes
import functools
import os
from importlib import metadata
from typing import Any, NamedTuple

import torch

# Environment variable with the path of the library, which is tried before the system's and the
# wheel `turbojpeg`.
LIBRARY_VARIABLE = "IMAGENET_CLS_TURBOJPEG"
_NAMES = (
    "libturbojpeg.so.0",
    "libturbojpeg.dylib",
    "/opt/homebrew/opt/jpeg-turbo/lib/libturbojpeg.dylib",
)

# Constants of turbojpeg.h.
_INIT_DECOMPRESS = 1
_PIXEL_FORMAT_RGB = 0
_STOP_ON_WARNING = 0
_SUBSAMPLING = 4
_WIDTH = 5
_HEIGHT = 6
_COLORSPACE = 8
_YCBCR = 1
_GRAY = 2
# Width of an MCU (block of coded pixels) by TJSAMP: 4:4:4, 4:2:2, 4:2:0, gray. Others are rare, and
# were not tested.
_MCU_WIDTH = {0: 8, 1: 16, 2: 16, 3: 8}


class Box(NamedTuple):
    """A region of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "w", "h")]


class TurboJpeg:
    """The TurboJPEG library, loaded. path: the path of its file, or a name that the dynamic linker
    finds.
    """

    def __init__(self, path: str):
        """Raises OSError if it can't be loaded, AttributeError if it is older than libjpeg-turbo
        3.
        """
        self.path = path
        library = ctypes.CDLL(path)
        handle = ctypes.c_void_p
        data = ctypes.c_char_p
        size = ctypes.c_size_t
        self._set_region = _declare(library.tj3SetCroppingRegion, handle, _Region)
        self._set = _declare(library.tj3Set, handle, ctypes.c_int, ctypes.c_int)
        self._get = _declare(library.tj3Get, handle, ctypes.c_int)
        self._read_header = _declare(library.tj3DecompressHeader, handle, data, size)
        self._decode = _declare(
            library.tj3Decompress8, handle, data, size, ctypes.c_void_p, ctypes.c_int, ctypes.c_int
        )
        self._open = _declare(library.tj3Init, ctypes.c_int)
        self._open.restype = handle
        self._close = _declare(library.tj3Destroy, handle)
        self._close.restype = None

    def decode(self, data: bytes, height: int, width: int, box: Box) -> torch.Tensor | None:
        """Decode a JPEG into uint8 (3, height, width), channels-last.

        height, width: as its header says. box: only the pixels in it are defined. Returns None for
        files with errors or warnings, and for formats whose pixels were not tested to be the same.
        Each call creates a handle, because a handle keeps tables and errors of earlier files.
        """
        handle = self._open(_INIT_DECOMPRESS)
        if not handle:
            return None
        try:
            if self._set(handle, _STOP_ON_WARNING, 1) or self._read_header(handle, data, len(data)):
                return None
            get = functools.partial(self._get, handle)
            mcu_width = _MCU_WIDTH.get(get(_SUBSAMPLING))
            if mcu_width is None or get(_COLORSPACE) not in (_YCBCR, _GRAY):
                return None
            if (get(_HEIGHT), get(_WIDTH)) != (height, width):
                return None
            # The left edge must be the edge of an MCU. Upsampling of chroma reads the neighboring
            # column, which has two columns of pixels, and repeats it at an edge.
            margin = 2 if mcu_width > 8 else 0
            left = max(box.left - margin, 0) // mcu_width * mcu_width
            right = min(box.left + box.width + margin, width)
            if self._set_region(handle, _Region(left, box.top, right - left, box.height)):
                return None
            pixels = torch.empty(height, width, 3, dtype=torch.uint8)
            pitch = 3 * width  # bytes of a row
            start = pixels.data_ptr() + pitch * box.top + 3 * left
            if self._decode(handle, data, len(data), start, pitch, _PIXEL_FORMAT_RGB):
                return None
            return pixels.permute(2, 0, 1)
        finally:
            self._close(handle)


def _declare(function: Any, *argument_types: type) -> Any:
    """The function of the library, with the types of its arguments declared; it returns an int."""
    function.argtypes = argument_types
    return function


@functools.cache
def find_turbojpeg() -> TurboJpeg | None:
    """The library that `IMAGENET_CLS_TURBOJPEG` names, the system's, or the wheel's; None without
    libjpeg-turbo 3.
    """
    for path in filter(None, [os.environ.get(LIBRARY_VARIABLE), *_NAMES, *_paths_in_wheel()]):
        with contextlib.suppress(OSError, AttributeError):
            return TurboJpeg(path)
    return None


def _paths_in_wheel() -> list[str]:
    try:
        files = metadata.files("turbojpeg") or []
    except metadata.PackageNotFoundError:
        return []
    return [str(file.locate()) for file in files if file.name.startswith("libturbojpeg")]
