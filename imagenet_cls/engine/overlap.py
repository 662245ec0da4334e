"""Warnings about images that are both trained on and held out."""

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from imagenet_cls.checkpoint.format import config_from_state, invalid_content_errors
from imagenet_cls.checkpoint.select import state_of_newest
from imagenet_cls.config.reader import dump_inline
from imagenet_cls.config.schema import Config, DataConfig
from imagenet_cls.data.classes import HOLD_OUT_ADVICE
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.sources import ImageSource, size_fingerprint
from imagenet_cls.engine.build import RunData
from imagenet_cls.errors import UserError
from imagenet_cls.files import is_url
from imagenet_cls.lookup import is_user_factory

# Keys of `data` that choose the training images below data.root. The warning about the initial
# weights names those that have changed.
_PART_KEYS = (
    "train",
    "val",
    "val_fraction",
    "fold",
    "stratify",
    "group",
    "classes",
    "fraction",
    "exclude",
)


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


def initial_weights_warning(config: Config, opened: RunData) -> str | None:
    """A warning if the initial weights are of a run that trained on images which are held out now.

    Checkpoints have a digest of the training images, by names and classes. The training part of
    that run is opened again below this run's data.root, and counts if it has this digest. Runs
    before that run are not known.
    """
    checkpoint, data = config.model.checkpoint, config.data
    train, val = opened.train, opened.val
    if checkpoint is None or is_url(checkpoint):
        return None
    with suppress(UserError), invalid_content_errors(checkpoint):
        state = state_of_newest(Path(checkpoint))
        if state is None or state["data_digest"] == train.digest():
            return None  # the same training images: none of them is held out now
        before = config_from_state(state, checkpoint).data
        # Its training images may be all that are held out now.
        common = len(val) if state["data_digest"] == val.digest() else 0
        if not common and _can_open_part(before, data):
            trained_on = open_datasets(replace(before, root=data.root), ("train",)).train
            assert trained_on is not None
            if trained_on.digest() == state["data_digest"]:
                common = _images_in_common(trained_on, val)
        if common:
            split = [
                shlex.quote(f"data.{key}={dump_inline(getattr(before, key))}")
                for key in _PART_KEYS
                if getattr(before, key) != getattr(data, key)
            ]
            return (
                f"model.checkpoint={checkpoint} is of a run that trained on {common} of the "
                f"{len(val)} images that are held out now, by their names and classes; "
                f"the split of that run is {' '.join(split) or 'in its config'}"
            )
    return None


def _can_open_part(before: DataConfig, data: DataConfig) -> bool:
    """Whether another run's part can be opened here; no user's code runs, nothing is downloaded."""
    is_same = before.name == data.name and before.kwargs == data.kwargs
    is_here = before.train == data.train or data.name in ("folder", "list")
    return is_same and is_here and not is_user_factory(data.name)


def _images_in_common(first: ImageSource, second: ImageSource) -> int:
    """The number of images of `second` that `first` has, too."""
    if first.collection() != second.collection():
        return 0
    ids = set(first.image_ids())
    return sum(image in ids for image in second.image_ids())
