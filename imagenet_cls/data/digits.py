"""scikit-learn's handwritten digits as class folders of JPEGs: real images for the demo and the tests, without a
download.

Owns writing them, once, safely even where several ranks or runs begin at the same moment. Refuses to overwrite
anything that is there. Called by `datasets` for `data.name: digits`.
"""

import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image

from imagenet_cls.errors import DataError, ResourceError

SIZE_PX = 32
NUM_IMAGES = 1797


def write_digits(root: Path, part: str) -> Path:
    """Make sure that the 1,797 digits lie in `root/part/<digit>/<number>.jpg`, and return that folder.

    The 8x8 images with 17 grey levels are enlarged to 32x32 (bicubic) and saved as JPEG, quality 95. They are written
    beside their place and renamed, so the folder is there whole or not at all; of several that write at once, one wins
    and all get the same files. Raises DataError where something else lies in that place.
    """
    folder = root / part
    if folder.exists():
        found = sum(1 for _ in folder.glob("[0-9]/*.jpg"))
        if found != NUM_IMAGES:
            raise DataError(
                f"{folder}: holds {found} images of digits, not {NUM_IMAGES}\n"
                "delete the folder, and the next start writes it anew; or set data.root to another place"
            )
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
    except OSError as error:
        raise ResourceError(
            f"{root}: the digits cannot be written there: {error.strerror}\nset data.root elsewhere"
        ) from None
    try:
        _write(beside)
        beside.chmod(0o755)  # mkdtemp makes folders for their owner only
        beside.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was faster
            raise ResourceError(
                f"{folder}: cannot be written: {error.strerror}\nmake room, or set data.root elsewhere"
            ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _write(folder: Path) -> None:
    from sklearn.datasets import load_digits  # here: the import takes a second, and only the demo needs it

    digits = load_digits()
    for digit in range(10):
        (folder / str(digit)).mkdir()
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        image = Image.fromarray((pixels * 255 / 16).round().astype("uint8"))
        image = image.resize((SIZE_PX, SIZE_PX), Image.Resampling.BICUBIC)
        image.save(os.path.join(folder, str(digit), f"{number:04d}.jpg"), quality=95)  # noqa: PTH118
