"""A check of the paths in the config's `data` section before torch is imported."""

from pathlib import Path

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.archives import find_archives
from imagenet_cls.data.classes import chosen_classes, match_classes
from imagenet_cls.data.index import class_folders
from imagenet_cls.data.lists import LIST_REMEDY, read_bad_images
from imagenet_cls.files import read_text


def check_paths(config: DataConfig, *, allow_missing: bool = False) -> None:
    """Raise DataError for missing folders and lists, and for other classes in validation.

    allow_missing: the validation folder need not have all classes.
    """
    root = Path(config.root).expanduser()
    parts = [config.train] if config.val is None else [config.train, config.val]
    if config.name == "folder":
        chosen = chosen_classes(config)
        folders = [part for part in parts if find_archives(root, part) is None]
        found = {part: class_folders(root / part) for part in folders}
        known = chosen or found.get(config.train)
        for part, names in found.items():
            if known is not None:
                match_classes(
                    names,
                    known,
                    root / part,
                    allow_missing=allow_missing and part != config.train,
                    allow_extra=chosen is not None,
                )
    elif config.name == "list":
        for part in parts:
            read_text(root / part, LIST_REMEDY, 1)
    if config.exclude is not None:
        read_bad_images(Path(config.exclude).expanduser())
