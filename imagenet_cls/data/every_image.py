"""All images of a dataset, also those that a training leaves out, and what is wrong with one."""

from dataclasses import replace

from imagenet_cls.config.schema import DataConfig, EvalConfig
from imagenet_cls.data.archive_files import ArchiveChangedError
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.decode import decode_rgb
from imagenet_cls.data.image_set import FileImages, ImageSet, reason_of
from imagenet_cls.data.transforms import EvalTransform
from imagenet_cls.entry_points import data_opener
from imagenet_cls.errors import DataError, UsageError
from imagenet_cls.text import first_line


def every_image(data: DataConfig) -> list[ImageSet]:
    """The training and the validation part, with the images that `data.exclude` names. Raises
    DataError, and UsageError for a dataset not made of files.
    """
    opener = data_opener(data.name)
    if opener is None or not opener.has_paths:
        raise UsageError(
            f"data.name {data.name!r} is not made of image files.",
            "Give a folder, or a config with a folder or a list.",
        )
    sets = open_datasets(replace(data, exclude=None), allow_missing=True)
    return [sets.train, sets.val]


def image_problem(images: FileImages, number: int, evaluation: EvalConfig) -> str | None:
    """Read and decode an image: why it can't be used in training or evaluation, or None."""
    try:
        image = decode_rgb(images.read(number))
        EvalTransform(evaluation).resized_size(*image.shape[1:])
    except ArchiveChangedError:
        raise
    except (OSError, DataError) as error:
        return reason_of(error)
    except Exception as error:  # damaged files make decoders raise anything; training would end too
        return f"{type(error).__name__}: {first_line(error)}"
    return None
