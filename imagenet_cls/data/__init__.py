"""Images: from files, libraries or a user's own code to uint8 batches, and from there to what a model takes.

Owns everything between the config's `data`, `augment` and `eval` sections and a batch on the device. Refuses to know of
models, optimizers or reports. Called by `engine`; `prepare` is called by its tool.

    layout, lists, index    which images there are             transforms    crops, flips, policies, colour
    decode, sources         one image and its target           resolution    sides by epoch
    digits, synthetic,      sets that need no folder           samplers      which image comes when, on which rank
    torchvision_sets                                           loader        batches, from worker processes
    datasets                the config's section, opened       workers, worker_errors, shared_memory    what ends them
    verify, manifest        bad images: found, left out        device        uint8 to normalised floats
    prepare, ilsvrc         ImageNet's archives into folders   erasing, mixing    random erasing, mixup and cutmix

The names below are what the rest of the program uses. Each is imported when it is first asked for (PEP 562), so that
the preparing tool, which needs no torch, starts at once and not after several seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imagenet_cls.data.datasets import DataSets, data_problems, open_datasets
    from imagenet_cls.data.decode import decode_rgb
    from imagenet_cls.data.device import Preprocess, TrainPreprocess
    from imagenet_cls.data.erasing import erase
    from imagenet_cls.data.loader import TrainBatch, TrainLoader, eval_batches
    from imagenet_cls.data.mixing import Mixing, build_mixing, mixing_problems
    from imagenet_cls.data.policies import policy_problems
    from imagenet_cls.data.resolution import size_px_at, sizes_px
    from imagenet_cls.data.samplers import EpochSampler, repeats_problem, samples_per_epoch, shard_for_eval
    from imagenet_cls.data.shared_memory import check_shared_memory
    from imagenet_cls.data.sources import ImageSource
    from imagenet_cls.data.synthetic import SyntheticLoader, SyntheticSource, synthetic_eval_batches
    from imagenet_cls.data.transforms import eval_transform, train_transform
    from imagenet_cls.data.worker_errors import worker_death

__all__ = [
    "DataSets",
    "EpochSampler",
    "ImageSource",
    "Mixing",
    "Preprocess",
    "SyntheticLoader",
    "SyntheticSource",
    "TrainBatch",
    "TrainLoader",
    "TrainPreprocess",
    "build_mixing",
    "check_shared_memory",
    "data_problems",
    "decode_rgb",
    "erase",
    "eval_batches",
    "eval_transform",
    "mixing_problems",
    "open_datasets",
    "policy_problems",
    "repeats_problem",
    "samples_per_epoch",
    "shard_for_eval",
    "size_px_at",
    "sizes_px",
    "synthetic_eval_batches",
    "train_transform",
    "worker_death",
]

_MODULES = {
    "datasets": ("DataSets", "data_problems", "open_datasets"),
    "decode": ("decode_rgb",),
    "device": ("Preprocess", "TrainPreprocess"),
    "erasing": ("erase",),
    "loader": ("TrainBatch", "TrainLoader", "eval_batches"),
    "mixing": ("Mixing", "build_mixing", "mixing_problems"),
    "policies": ("policy_problems",),
    "resolution": ("size_px_at", "sizes_px"),
    "samplers": ("EpochSampler", "repeats_problem", "samples_per_epoch", "shard_for_eval"),
    "shared_memory": ("check_shared_memory",),
    "sources": ("ImageSource",),
    "synthetic": ("SyntheticLoader", "SyntheticSource", "synthetic_eval_batches"),
    "transforms": ("eval_transform", "train_transform"),
    "worker_errors": ("worker_death",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
