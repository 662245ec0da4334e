"""scikit-learn's digits: written once as JPEGs, or several in an image, without files."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data import files
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.errors import DataError, Problem, ResourceError
from imagenet_cls.seeding import generator

DIGIT_PX = 32
NUM_DIGITS = 1797
_COMPOSED_IMAGES = {"train": 2_400, "val": 600}
_COMPOSED_PX = 24  # side of a digit


def open_part(config: DataConfig, part: str, classes: Sequence[str] | None = None) -> ImageSet:
    """The digits, which are written if they are missing. classes: not used."""
    write_digits(Path(config.root).expanduser(), part)
    return files.open_part(config, part)


def problems(config: DataConfig) -> list[Problem]:
    """All problems of the arguments."""
    found = files.problems(config)
    if config.val is not None:
        text = "digits have one part only: use data.val=null data.val_fraction=0.2"
        found.append(Problem("data.val", text))
    return found


def write_digits(root: Path, part: str) -> None:
    """Write the 1,797 digits to `root/part/<digit>/<number>.jpg` unless they are there, enlarged
    from 8 to 32 pixels.

    Several processes may do so at once. Raises DataError for a folder with other contents.
    """
    folder = root / part
    if folder.exists():
        found = sum(1 for _ in folder.glob("[0-9]/*.jpg"))
        if found != NUM_DIGITS:
            raise DataError(
                f"{folder}: holds {found} images of digits, not {NUM_DIGITS}.",
                "Delete the folder, or set data.root elsewhere; the next start writes it again.",
            )
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=root) as temporary:
            _write(Path(temporary, part))
            Path(temporary, part).rename(folder)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process was faster
            raise ResourceError(
                f"{folder}: the digits can't be written: {error.strerror}.",
                "Make room, or set data.root elsewhere.",
            ) from None


def _write(folder: Path) -> None:
    from sklearn.datasets import load_digits  # takes a second to import, and only the demo needs it

    digits = load_digits()
    for digit in range(10):
        (folder / str(digit)).mkdir(parents=True)
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        image = Image.fromarray((pixels * 255 / 16).round().astype("uint8"))
        image = image.resize((DIGIT_PX, DIGIT_PX), Image.Resampling.BICUBIC)
        image.save(folder / str(digit) / f"{number:04d}.jpg", quality=95)


class ComposedDigits:
    """One to three of scikit-learn's digits side by side on 24 x 72 pixels, for `data.labels`
    multi.

    Map-style: (uint8 (3, 24, 72), float32 (10,) with 1 for each digit that is there). part: `train`
    has 2,400 images of the first four fifths of the digits, `val` 600 of the others. root: not
    used.
    """

    def __init__(self, root: str, part: str):
        from sklearn.datasets import load_digits

        digits = load_digits()
        first_of_val = 4 * NUM_DIGITS // 5
        chosen = slice(first_of_val) if part == "train" else slice(first_of_val, None)
        self.pixels = torch.from_numpy(digits.images[chosen])  # float64, 0 to 16
        self.digits = torch.from_numpy(digits.target[chosen])
        self.classes = [str(digit) for digit in range(10)]
        # the digit in each of three places, -1 for none
        self.places = torch.full((_COMPOSED_IMAGES[part], 3), -1)
        random = generator("composed digits", part)
        for row in self.places:
            count = int(torch.randint(1, 4, (), generator=random))
            places = torch.randperm(3, generator=random)[:count]
            row[places] = torch.randint(len(self.digits), (count,), generator=random)
        self.targets = torch.zeros(len(self.places), 10)
        for row, target in zip(self.places, self.targets, strict=True):
            target[self.digits[row[row >= 0]]] = 1.0

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image = torch.zeros(_COMPOSED_PX, 3, _COMPOSED_PX)
        for place, number in enumerate(self.places[i].tolist()):
            if number >= 0:
                enlarged = self.pixels[number].repeat_interleave(3, 0).repeat_interleave(3, 1)
                image[:, place] = enlarged
        rgb = (image * (255 / 16)).round().to(torch.uint8).flatten(1).expand(3, -1, -1)
        return rgb.contiguous(), self.targets[i]
