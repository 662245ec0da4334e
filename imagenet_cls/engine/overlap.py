"""A warning about images that are both trained on and held out."""

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.classes import HOLD_OUT_ADVICE
from imagenet_cls.data.sources import ImageSource, size_fingerprint
from imagenet_cls.engine.build import RunData
from imagenet_cls.lookup import is_user_factory


def same_images_warning(data: DataConfig, opened: RunData) -> str | None:
    """A warning if the training and the validation part seem to be the same images, or have images
    in common.

    It compares the names, classes and sizes of image files. For the datasets of a user's factory,
    it compares the number of images, the classes, and the targets if they are known: reading images
    here may open files that worker processes must not share.
    """
    train, val = opened.train, opened.val
    if train.digest() == val.digest() and size_fingerprint(train) == size_fingerprint(val):
        return (
            f"the validation part has the {len(train)} images of the training part; name another "
            f"data.val, or hold out some: {HOLD_OUT_ADVICE}"
        )
    # a split by the config keeps an image on one side
    if data.val is not None and (common := _images_in_common(train, val)):
        return f"{common} of the {len(val)} validation images are in the training part, too"
    if not is_user_factory(data.name) or data.val is None:
        return None
    if (len(train), train.classes) != (len(val), val.classes):
        return None
    targets, val_targets = train.known_targets(), val.known_targets()
    compared = "number and classes"
    if targets is not None and val_targets is not None:
        compared = "number, classes and targets"
        if (targets != val_targets).any():
            return None
    return (
        f"the parts {data.train!r} and {data.val!r} of {data.name} have the same {compared} "
        f"({len(val)} images); if it ignores its argument part, set data.val=null "
        "data.val_fraction=0.1"
    )


def _images_in_common(first: ImageSource, second: ImageSource) -> int:
    """The number of images of `second` that `first` has, too."""
    if first.collection() != second.collection():
        return 0
    ids = set(first.image_ids())
    return sum(image in ids for image in second.image_ids())
