"""Images: from files, libraries or a user's own code to uint8 batches, and from there to what a model takes.

Owns everything between the config's `data`, `augment` and `eval` sections and a batch on the device. Refuses to know of
models, optimizers or reports. Called by `engine`; `prepare` is called by its tool.

    layout, lists, index    which images there are             transforms    crops, flips, colour
    decode, sources         one image and its target           samplers      which image comes when, on which rank
    digits, synthetic,      sets that need no folder           loader        batches, from worker processes
    torchvision_sets                                           device        uint8 to normalised floats
    mixing                  mixup and cutmix
    datasets                the config's section, opened       prepare, ilsvrc    ImageNet's archives into folders

The names below are what the rest of the program uses. Each is imported when it is first asked for (PEP 562), so that
the preparing tool, which needs no torch, starts at once and not after several seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imagenet_cls.data.datasets import DataSets, check_data, open_datasets
    from imagenet_cls.data.decode import decode_rgb
    from imagenet_cls.data.device import Preprocess
    from imagenet_cls.data.loader import TrainLoader, eval_batches, worker_death
    from imagenet_cls.data.mixing import Mixing, build_mixing, check_mixing
    from imagenet_cls.data.samplers import EpochSampler, shard_for_eval
    from imagenet_cls.data.sources import ImageSource
    from imagenet_cls.data.synthetic import SyntheticLoader, SyntheticSource, synthetic_eval_batches
    from imagenet_cls.data.transforms import eval_transform, train_transform

__all__ = [
    "DataSets",
    "EpochSampler",
    "ImageSource",
    "Mixing",
    "Preprocess",
    "SyntheticLoader",
    "SyntheticSource",
    "TrainLoader",
    "build_mixing",
    "check_data",
    "check_mixing",
    "decode_rgb",
    "eval_batches",
    "eval_transform",
    "open_datasets",
    "shard_for_eval",
    "synthetic_eval_batches",
    "train_transform",
    "worker_death",
]

_MODULES = {
    "datasets": ("DataSets", "check_data", "open_datasets"),
    "decode": ("decode_rgb",),
    "device": ("Preprocess",),
    "loader": ("TrainLoader", "eval_batches", "worker_death"),
    "mixing": ("Mixing", "build_mixing", "check_mixing"),
    "samplers": ("EpochSampler", "shard_for_eval"),
    "sources": ("ImageSource",),
    "synthetic": ("SyntheticLoader", "SyntheticSource", "synthetic_eval_batches"),
    "transforms": ("eval_transform", "train_transform"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
