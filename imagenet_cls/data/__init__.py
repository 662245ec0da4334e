"""Images: from files, libraries or a user's own code to uint8 batches, and from there to what a model takes."""

from imagenet_cls.data.datasets import DataSets, data_problems, open_datasets
from imagenet_cls.data.decode import decode_rgb
from imagenet_cls.data.device import Preprocess, TrainPreprocess, build_mixing, mixing_problems
from imagenet_cls.data.loader import TrainBatch, TrainLoader, eval_batches
from imagenet_cls.data.policies import policy_problems
from imagenet_cls.data.samplers import EpochSampler, repeats_problems, samples_per_epoch, shard_for_eval
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.data.synthetic import SyntheticLoader, SyntheticSource, synthetic_eval_batches
from imagenet_cls.data.transforms import EvalTransform, TrainTransform, size_px_at, sizes_px
from imagenet_cls.data.workers import check_shared_memory, worker_death

__all__ = [
    "DataSets",
    "EpochSampler",
    "EvalTransform",
    "ImageSource",
    "Preprocess",
    "SyntheticLoader",
    "SyntheticSource",
    "TrainBatch",
    "TrainLoader",
    "TrainPreprocess",
    "TrainTransform",
    "build_mixing",
    "check_shared_memory",
    "data_problems",
    "decode_rgb",
    "eval_batches",
    "mixing_problems",
    "open_datasets",
    "policy_problems",
    "repeats_problems",
    "samples_per_epoch",
    "shard_for_eval",
    "size_px_at",
    "sizes_px",
    "synthetic_eval_batches",
    "worker_death",
]
