"""A check of the paths in the config's `data` section before torch is imported."""

from pathlib import Path

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.archives import find_archives
from imagenet_cls.data.index import list_classes
from imagenet_cls.data.lists import LIST_REMEDY, read_bad_images
from imagenet_cls.files import read_text


def check_paths(config: DataConfig) -> None:
    """Raise DataError for missing folders and lists."""
    root = Path(config.root).expanduser()
    parts = [config.train] if config.val is None else [config.train, config.val]
    for part in parts:
        if config.name == "folder" and find_archives(root, part) is None:
            list_classes(root / part)
        elif config.name == "list":
            read_text(root / part, LIST_REMEDY, 1)
    if config.exclude is not None:
        read_bad_images(Path(config.exclude).expanduser())
