"""scikit-learn's handwritten digits as class folders of JPEGs: real images without a download."""

import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image

from imagenet_cls.errors import DataError, ResourceError

SIZE_PX = 32
NUM_IMAGES = 1797


def write_digits(root: Path, part: str) -> Path:
    """Write the 1,797 digits to `root/part/<digit>/<number>.jpg` unless they are there. Returns that folder.

    The 8x8 images with 17 grey levels are enlarged to 32x32 (bicubic) and saved as JPEG, quality 95. They are written
    to a temporary folder that is renamed, so the folder is always whole; of several processes that write at once, one
    wins. Raises DataError for a folder with other contents.
    """
    folder = root / part
    if folder.exists():
        found = sum(1 for _ in folder.glob("[0-9]/*.jpg"))
        if found != NUM_IMAGES:
            raise DataError(
                f"{folder}: holds {found} images of digits, not {NUM_IMAGES}\n"
                "delete the folder, and the next start writes it again; or set data.root to another place"
            )
        return folder
    temporary = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
        _write(temporary)
        temporary.chmod(0o755)  # mkdtemp makes folders for their owner only
        temporary.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process was faster
            raise ResourceError(
                f"{folder}: the digits can't be written: {error.strerror}\nmake room, or set data.root elsewhere"
            ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write(folder: Path) -> None:
    from sklearn.datasets import load_digits  # takes a second to import, and only the demo needs it

    digits = load_digits()
    for digit in range(10):
        (folder / str(digit)).mkdir()
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        image = Image.fromarray((pixels * 255 / 16).round().astype("uint8"))
        image = image.resize((SIZE_PX, SIZE_PX), Image.Resampling.BICUBIC)
        image.save(os.path.join(folder, str(digit), f"{number:04d}.jpg"), quality=95)  # noqa: PTH118
