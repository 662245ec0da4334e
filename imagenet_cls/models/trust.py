"""Whose code a checkpoint may call.

Owns the line between the config that a user gives, which is trusted, and the one that a checkpoint brings along, which
is not: a folder that came from elsewhere may name `os:system` as its model. Refuses, before anything is imported, every
name that is neither a library's model nor exactly what the user has named: the same factory and imports in a config of
their own, or `--allow-import NAME`. Called by `engine.inference`, the only part that builds what a checkpoint names.
"""

import sys
from collections.abc import Collection, Sequence

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.build import TORCHVISION
from imagenet_cls.models.check import RESERVED

# No user's model lies there, and much that runs commands or fetches code does: not even suggested.
NO_MODELS = sys.stdlib_module_names | {"torch", "torchvision", "timm", "numpy", "imagenet_cls"}


def check_trusted(model: ModelConfig, imports: Sequence[str], trusted: Collection[str], where: str) -> None:
    """Raise CheckpointError for the first thing that building this model would run beyond what is trusted.

    model, imports: as the checkpoint's own config has them. trusted: the names that the user has given, `my_module` for
    an import and `my_module:my_factory` for a model; compared whole, since `my_module:os.system` leads out of a module
    that is trusted. where: the checkpoint, for the message.
    """
    for name in imports:
        _refuse(name, trusted, where)
    # timm takes a name with a colon for a place to fetch a model from; without one it is a key of its registry, as
    # torchvision's are.
    if ":" in model.name.removeprefix(TORCHVISION):
        _refuse(model.name, trusted, where)
    for name in RESERVED:
        if name in model.kwargs:
            raise CheckpointError(
                f"{where}: its config sets model.kwargs.{name}, which no run of ours has set: refused, nothing was "
                "run\nUse another checkpoint."
            )


def _refuse(name: str, trusted: Collection[str], where: str) -> None:
    module = name.partition(":")[0].partition(".")[0]
    if name in trusted and module not in NO_MODELS:
        return
    remedy = (
        "There is no model of that name; the checkpoint was made to run something else."
        if module in NO_MODELS
        else f"If you know that code, and want it run: --allow-import {name}"
    )
    raise CheckpointError(f"{where}: its config names code to run, {name!r}: refused, nothing was run\n{remedy}")
