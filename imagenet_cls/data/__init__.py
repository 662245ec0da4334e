"""Images: from files, libraries or a user's own code to uint8 batches, and from there to what a model takes.

Owns everything between the config's `data`, `augment` and `eval` sections and a batch on the device. Refuses to know
of models, optimizers or reports. The names below are what the rest of the program uses; `prepare` is a tool of its
own.
"""

from imagenet_cls.data.datasets import DataSets, check_data, default_workers, open_datasets
from imagenet_cls.data.decode import decode_rgb
from imagenet_cls.data.device import Preprocess
from imagenet_cls.data.loader import TrainLoader, eval_batches
from imagenet_cls.data.samplers import EpochSampler, shard_for_eval
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.data.synthetic import SyntheticLoader, SyntheticSource, synthetic_eval_batches
from imagenet_cls.data.transforms import eval_transform, train_transform

__all__ = [
    "DataSets",
    "EpochSampler",
    "ImageSource",
    "Preprocess",
    "SyntheticLoader",
    "SyntheticSource",
    "TrainLoader",
    "check_data",
    "decode_rgb",
    "default_workers",
    "eval_batches",
    "eval_transform",
    "open_datasets",
    "shard_for_eval",
    "synthetic_eval_batches",
    "train_transform",
]
