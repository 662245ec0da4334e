"""Do all ranks run the same thing? Each machine has a command line and a data folder of its own, and they may differ.

Ranks that differ would train different recipes into one model, or call different collectives and hang. Called by
`engine.run` (configs, before anything is built) and `engine.build` (images, before the model is).
"""

from typing import Any

from imagenet_cls.config.load import config_to_dict
from imagenet_cls.config.schema import Config
from imagenet_cls.data import DataSets
from imagenet_cls.errors import ConfigError, DataError
from imagenet_cls.parallel.group import Group, told_by_main
from imagenet_cls.parallel.reduce import differing

# What may differ from machine to machine.
_LOCAL = {
    "data.root", "data.manifest", "data.num_workers", "data.prefetch_batches", "data.timeout_sec", "device", "expect",
    "imports", "log.tensorboard",
    "model.checkpoint", "model.pretrained", "distill.teacher.checkpoint", "distill.teacher.pretrained",
    "parallel.init_method", "parallel.timeout_sec",
}  # fmt: skip


def refuse_differing_configs(config: Config, group: Group) -> None:
    """Raise ConfigError on every rank unless all have the same config, but for a machine's own keys. A collective."""
    own = {key: repr(value) for key, value in flatten(config_to_dict(config)).items()}
    own = {key: value for key, value in own.items() if key not in _LOCAL and key.partition(".")[0] not in _LOCAL}
    lines = [
        f"{key}: not the same on {_ranks(ranks)} as on rank 0; start every rank with the same config and changes"
        for key, ranks in differing(own, group).items()
    ]
    if lines:
        raise told_by_main(ConfigError(lines), group)


def refuse_differing_data(data: DataSets, group: Group) -> None:
    """Raise DataError on every rank unless all see the same images. A collective."""
    assert data.train is not None and data.val is not None
    own = {"training images": data.train.digest(), "validation images": data.val.digest()}
    for name, ranks in differing(own, group).items():
        raise told_by_main(
            DataError(
                f"the {name} on {_ranks(ranks)} are not those of rank 0: other files, or other classes.\n"
                "Give every machine the same data set; its place (data.root) may differ."
            ),
            group,
        )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _ranks(ranks: list[int]) -> str:
    listing = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listing}"
