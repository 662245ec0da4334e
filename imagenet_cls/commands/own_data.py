"""Train on a dataset that is given in place of a config: `tools/train.py photos`.

The config is `configs/finetune/own_dataset.yaml` with that dataset; with `data.labels=multi` it is
`multilabel.yaml` in the same folder.
"""

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.config.layers import CONFIGS, shipped_configs
from imagenet_cls.config.load import LoadedConfig, load_config
from imagenet_cls.config.reader import dump_inline
from imagenet_cls.data.archives import is_archive, part_folders
from imagenet_cls.data.classes import may_lack_classes
from imagenet_cls.data.index import list_folder
from imagenet_cls.errors import UsageError
from imagenet_cls.text import command_line, count_of, join_names

if TYPE_CHECKING:
    from imagenet_cls.data.datasets import DataSets

OWN_DATASET = CONFIGS / "finetune" / "own_dataset.yaml"
MULTILABEL = CONFIGS / "finetune" / "multilabel.yaml"
# In place of the values of the config, if the training starts from random weights. The decay of the
# learning rate by layers is for layers that are trained already.
FROM_SCRATCH = (
    "optimizer.lr=0.004",
    "optimizer.layer_decay=null",
    "train.epochs=40",
    "augment.scale=[0.6,1.0]",
)
_TRAIN_NAMES = ("train", "training")
_VAL_NAMES = ("val", "valid", "validation", "test")
_LARGEST_BATCH = 64
_SMALLEST_BATCH = 8
_MIN_STEPS_PER_EPOCH = 10
# Images of a class below which a line advises folds.
_ENOUGH_TRAIN = 20
_ENOUGH_VAL = 30


def key_of(override: str) -> str:
    """The key of `key=value`."""
    return override.partition("=")[0].strip()


def is_data(source: str) -> bool:
    """Whether an argument of `train` is a dataset: an existing path that is neither a config nor a
    run folder or checkpoint.
    """
    path = Path(source).expanduser()
    if is_config(source) or not path.exists():
        return False
    return not any((path / name).is_file() for name in ("config.yaml", "optimizer.json"))


def is_config(source: str) -> bool:
    """Whether an argument is a config: a .yaml or .json file, or the name of a shipped one. So
    that a config of another project is not taken for a list of images, .py is a config, too.
    """
    suffixes = (".yaml", ".yml", ".json", ".py")
    return Path(source).suffix in suffixes or source in shipped_configs()


def load_config_or_data(
    source: str,
    overrides: Sequence[str],
    check: Callable[[LoadedConfig], None] = lambda loaded: None,
) -> LoadedConfig:
    """The config of a file, or of a training on the dataset that is given in its place. check: see
    `load_with_data`.
    """
    if is_data(source):
        return load_with_data(source, overrides, check)
    loaded = load_config(source, overrides)
    if Path(source).is_dir():
        note = f"{source} is a config here. For the folder of that name, write ./{source}"
        loaded = replace(loaded, notes=[*loaded.notes, note])
    return loaded


def load_with_data(
    source: str, overrides: Sequence[str], check: Callable[[LoadedConfig], None]
) -> LoadedConfig:
    """The config of a training on a dataset. overrides: `key=value`, also with short keys.

    Lists the images, since the batch size follows from their number. check: called with the config
    before that, and before torch is imported. Raises ConfigError, DataError or UsageError.
    """
    path = Path(source).expanduser()
    config = MULTILABEL if "data.labels=multi" in overrides else OWN_DATASET
    derived = data_overrides(path)
    full = path.resolve()
    name = full.name if full.is_dir() else full.stem
    loaded = replace(load_config(config, overrides, derived), name=name)
    if loaded.config.data.name not in ("folder", "list"):
        raise UsageError(
            f"data.name={loaded.config.data.name} beside {source}: that dataset is not a path.",
            "Give a config in place of the path, such as configs/finetune/own_dataset.yaml.",
        )
    check(loaded)
    from imagenet_cls.data.datasets import open_datasets  # imports torch

    data = open_datasets(loaded.config.data, allow_missing=may_lack_classes(loaded.config))
    derived.append(f"train.global_batch_size={batch_size_for(len(data.train))}")
    model = loaded.config.model
    from_scratch = not model.pretrained and model.checkpoint is None
    if from_scratch:
        derived += FROM_SCRATCH
    loaded = replace(load_config(config, overrides, derived), name=name)
    notes = [
        describe_data(source, loaded, data),
        *few_images_notes(source, overrides, loaded, data),
    ]
    if from_scratch:
        used = [text for text in FROM_SCRATCH if loaded.origins[key_of(text)].startswith("dataset")]
        notes.append(f"training from random weights sets {' '.join(used)}")
    return replace(loaded, notes=[*notes, *loaded.notes], data=data)


def data_overrides(path: Path) -> list[str]:
    """The keys of the section `data` for a folder, an archive or a list of images. All that the
    config sets, since another `data.name` resets the section.
    """
    held_out = "data.val_fraction=0.2"
    if path.is_dir():
        content = list_folder(os.fsencode(path))
        names = [os.fsdecode(name) for name in [*content.folders, *content.others]]
        names = [name for name in names if is_archive(name) or not (path / name).is_file()]
    elif is_archive(path.name):
        names = part_folders(path)
    else:
        files = [_text_override("data.root", path.parent), _text_override("data.train", path.name)]
        return ["data.name=list", *files, held_out, "data.exif=apply"]
    train, val = _find_splits(names)
    # a test part without labels, as of Kaggle, holds images and no class folders
    if val is not None and (is_archive(val) or path.is_file() or _has_folders(path / val)):
        held_out = _text_override("data.val", val)
    files = [_text_override("data.root", path), _text_override("data.train", train or ".")]
    return ["data.name=folder", *files, held_out, "data.exif=apply"]


def _has_folders(path: Path) -> bool:
    if not path.is_dir():
        return True  # a link to a folder that is missing: an error when it is opened
    content = list_folder(os.fsencode(path))
    return bool(content.folders) or not content.images


def _text_override(key: str, text: str | Path) -> str:
    """`key=text`, quoted where YAML would read the text otherwise, such as `photos #1`."""
    return f"{key}={dump_inline(str(text))}"


def _find_splits(names: Sequence[str]) -> tuple[str | None, str | None]:
    """The training and the validation set among folders and archives; None for what is missing."""
    found = {name.lower(): name for name in names}
    for name in names:
        if is_archive(name):
            found.setdefault(Path(name).stem.lower(), name)
    train = next((found[name] for name in _TRAIN_NAMES if name in found), None)
    val = next((found[name] for name in _VAL_NAMES if name in found), None)
    if train is None:
        return None, None  # a class may be called `test`
    return train, val


def batch_size_for(num_images: int) -> int:
    """A power of two from 8 to 64 with at least ten steps in an epoch, if there are enough images;
    never more than the images.
    """
    batch = _LARGEST_BATCH
    while batch > _SMALLEST_BATCH and num_images < _MIN_STEPS_PER_EPOCH * batch:
        batch //= 2
    return max(1, min(batch, num_images))


def describe_data(source: str, loaded: LoadedConfig, data: "DataSets") -> str:
    """One line: the classes of the dataset, the numbers of images, the batch size."""
    config = loaded.config.data
    if config.val is not None:
        held_out = config.val
    elif config.fold is not None:
        held_out = f"fold {config.fold}"
    else:
        held_out = f"{config.val_fraction:.0%} held out"
    classes = count_of(len(data.classes), "class")
    return (
        f"{source}: {classes} ({join_names(data.classes)}), {len(data.train)} images for "
        f"training, {len(data.val)} for evaluation ({held_out}), batch size "
        f"{loaded.config.train.global_batch_size}"
    )


def few_images_notes(
    source: str, overrides: Sequence[str], loaded: LoadedConfig, data: "DataSets"
) -> list[str]:
    """A line if a class has few images, with the command that trains on folds."""
    from imagenet_cls.data.targets import class_sizes

    assert data.train.targets is not None and data.val.targets is not None
    train = class_sizes(data.train.targets, len(data.classes)).min()
    val = class_sizes(data.val.targets, len(data.classes)).min()
    has_enough = train >= _ENOUGH_TRAIN and val >= _ENOUGH_VAL
    if len(data.classes) == 1:
        return []  # an error, which follows
    if has_enough or loaded.config.data.fold is not None or loaded.config.data.labels == "multi":
        return []
    meanings = []
    if train < _ENOUGH_TRAIN:
        meanings.append(f"a class with fewer than {_ENOUGH_TRAIN} is hard to learn")
    if val < _ENOUGH_VAL:
        meanings.append("chance moves the accuracy of a class by several points")
    # --folds holds out each part in turn
    kept = [word for word in overrides if key_of(word) not in ("data.val", "data.val_fraction")]
    words = [source, *kept, "--folds", "5", "--out", f"work_dirs/{loaded.name}_folds"]
    return [
        f"few images: the smallest class has {train} for training and {val} for evaluation: "
        f"{', and '.join(meanings)}. Five runs evaluate every image: {command_line('sweep')} "
        f"{shlex.join(words)}"
    ]
