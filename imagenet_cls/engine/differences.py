"""What an evaluation does otherwise than the run that made the checkpoint: told, so that no other test passes for it.

Owns which keys make two evaluations comparable, and when images of the training may be among those evaluated. Refuses
nothing: the user's config is what is evaluated. Pure functions of two configs. Called by `engine.inference`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imagenet_cls.config.schema import Config, DataConfig

# What decides which images are evaluated, and how they are prepared; not how fast, or on how many at once.
_DATA = ("name", "root", "train", "val", "val_fraction", "kwargs")
_EVAL = ("crop_px", "crop_pct", "resize_px", "interpolation", "flip_tta")


def differences(
    config: Config, stored: Config, preprocessing: Mapping[str, Sequence[float]], checkpoint: Path
) -> list[str]:
    """One line for each key that makes this evaluation another than the run's own, then what to do; [] where none does.

    config: the user's. stored: of the checkpoint in the folder `checkpoint`. preprocessing: the `mean` and `std` that
    it was trained with, which are used whatever the config says, as its model is.
    """
    lines = [
        f"{key}: {here}, and {there} in the run that made the checkpoint"
        for key, here, there in _changed(config, stored)
    ]
    own: dict[str, tuple[Any, Any]] = {"model.name": (config.model.name, stored.model.name)}
    own |= {f"data.{key}": (getattr(config.data, key), list(preprocessing[key])) for key in ("mean", "std")}
    unused = [
        f"{key}: {here} is not used, but {there}, with which the checkpoint was trained"
        for key, (here, there) in own.items()
        if here is not None and here != there
    ]
    kept = checkpoint.parent.parent / "config.yaml"
    if lines and kept.is_file():
        lines.append(f"{kept} as CONFIG evaluates as the run did")
    if _may_hold_training_images(config.data, stored.data):
        lines.append("warning: images that the run trained on may be among those evaluated: this is no test of it")
    return [*lines, *unused]


def _changed(config: Config, stored: Config) -> list[tuple[str, Any, Any]]:
    """Keys with another value here and there, as (key, here, there)."""
    sections = (("data", config.data, stored.data, _DATA), ("eval", config.eval, stored.eval, _EVAL))
    pairs = [
        (f"{section}.{name}", getattr(here, name), getattr(there, name))
        for section, here, there, names in sections
        for name in names
        # The training part matters where the held-out images are taken from it.
        if (section, name) != ("data", "train") or config.data.val is None
    ]
    return [(key, _shown(here), _shown(there)) for key, here, there in pairs if here != there]


def _shown(value: Any) -> Any:
    return "null" if value is None else value


def _may_hold_training_images(data: DataConfig, trained: DataConfig) -> bool:
    """Whether the part evaluated is the one trained on, or more of it than that run held out.

    What is held out by a smaller fraction is part of what a larger one holds out (`data.index.held_out`).
    """
    part = data.val if data.val is not None else data.train
    same_part = (data.name, part) == (trained.name, trained.train) or _place(data, part) == _place(
        trained, trained.train
    )
    evaluated = 1.0 if data.val is not None else data.val_fraction or 0.0
    held_out = 0.0 if trained.val is not None else trained.val_fraction or 0.0
    return same_part and evaluated > held_out


def _place(data: DataConfig, part: str) -> tuple[str, str]:
    return data.name, os.path.realpath(Path(data.root).expanduser() / part)
