"""How an evaluation differs from those of the run that made the checkpoint."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imagenet_cls.config.schema import Config, DataConfig

# Keys that decide which images are evaluated and how they are prepared; not those of speed and batches.
_KEYS = {
    "data": ("name", "root", "train", "val", "val_fraction", "kwargs"),
    "eval": ("crop_px", "crop_pct", "resize_px", "interpolation", "flip_tta"),
}


def evaluation_differences(
    config: Config, stored: Config, preprocessing: Mapping[str, Sequence[float]], checkpoint: Path
) -> list[str]:
    """One line for each key that makes this evaluation differ from the run's own, with a remedy and a warning.

    config: the user's, which is evaluated. stored: of the checkpoint in the folder `checkpoint`. preprocessing: its
    `mean` and `std`, which are used, not the config's, as is its model.
    """
    pairs = [
        (f"{section}.{name}", getattr(getattr(config, section), name), getattr(getattr(stored, section), name))
        for section, names in _KEYS.items()
        for name in names
        # The training part matters only if the held-out images are taken from it.
        if (section, name) != ("data", "train") or config.data.val is None
    ]
    lines = [
        f"{key}: {_format(here)}, and {_format(there)} in the run that made the checkpoint"
        for key, here, there in pairs
        if here != there
    ]
    run_config = checkpoint.parent.parent / "config.yaml"
    if lines and run_config.is_file():
        lines.append(f"{run_config} as CONFIG evaluates as the run did")
    if _may_hold_training_images(config.data, stored.data):
        lines.append("warning: images that the run trained on may be among those evaluated: this is no test of it")
    used: dict[str, tuple[Any, Any]] = {"model.name": (config.model.name, stored.model.name)}
    used |= {f"data.{name}": (getattr(config.data, name), list(preprocessing[name])) for name in ("mean", "std")}
    unused = [
        f"{key}: {here} is not used, but {there}, with which the checkpoint was trained"
        for key, (here, there) in used.items()
        if here is not None and here != there
    ]
    return [*lines, *unused]


def _format(value: Any) -> Any:
    return "null" if value is None else value


def _may_hold_training_images(data: DataConfig, trained: DataConfig) -> bool:
    """Whether the part evaluated is the one trained on, or more of it than that run held out.

    What is held out by a smaller fraction is part of what a larger one holds out (`data.index.held_out`).
    """

    def place(data: DataConfig, part: str) -> tuple[str, str]:
        return data.name, os.path.realpath(Path(data.root).expanduser() / part)

    part = data.val if data.val is not None else data.train
    same_part = (data.name, part) == (trained.name, trained.train)
    evaluated = 1.0 if data.val is not None else data.val_fraction or 0.0
    held_out = 0.0 if trained.val is not None else trained.val_fraction or 0.0
    return (same_part or place(data, part) == place(trained, trained.train)) and evaluated > held_out
