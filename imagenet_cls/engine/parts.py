"""The components of a training run, which `engine.build` builds."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from imagenet_cls.config.schema import Config
from imagenet_cls.data.datasets import DataSets
from imagenet_cls.data.device import DevicePrefetch, TrainPreprocess
from imagenet_cls.data.loader import TrainBatch, TrainLoader
from imagenet_cls.engine.evaluate import Evaluation
from imagenet_cls.engine.plan import Plan
from imagenet_cls.engine.precision import autocast
from imagenet_cls.engine.step import Sam, Updater
from imagenet_cls.engine.user_metrics import UserMetrics
from imagenet_cls.models.ema import ModelEma
from imagenet_cls.optim.losses import TrainingLoss
from imagenet_cls.optim.schedule import Schedule
from imagenet_cls.parallel.devices import Devices
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.parallel.wrap import BatchNormStatistics


@dataclass
class ModelParts:
    """The model, and what wraps or copies it."""

    model: nn.Module
    wrapped: nn.Module  # the module to call in training: `ModelWithLoss`, in DDP or by itself
    criterion: TrainingLoss  # outputs of the model, targets, images -> the mean loss, a scalar
    ema: ModelEma
    batch_norm_statistics: BatchNormStatistics
    mean_std: tuple[list[float], list[float]]  # the normalization of the images, per channel
    teacher_digest: str | None  # of the teacher's weights
    messages: list[str]  # lines to print at the start


@dataclass
class Optimization:
    """What changes the weights."""

    optimizer: torch.optim.Optimizer
    schedule: Schedule
    sam: Sam
    scaler: torch.amp.GradScaler
    lr_note: str | None  # about a learning rate that is scaled for the batch


@dataclass
class TrainingParts(ModelParts, Optimization):
    """The components of a training run."""

    config: Config
    context: RankContext
    devices: Devices  # of this rank
    plan: Plan
    data: DataSets
    num_classes: int  # outputs of the model
    prefetch: DevicePrefetch
    preprocess: TrainPreprocess
    autocast_dtype: torch.dtype | None  # None: fp32, no autocast
    updater: Updater
    train_loader: TrainLoader
    evaluation: Evaluation
    metrics: dict[str, UserMetrics]  # by the kind of weights
    forward_backward: "ForwardBackward"  # `engine.train.forward_backward`, or `train.step`

    def autocast(self) -> AbstractContextManager:
        """The context of the forward pass and the loss."""
        return autocast(self.context.device, self.autocast_dtype)


# parts, micro-batches, epoch, step -> the loss and the metric, see `engine.train.forward_backward`
ForwardBackward = Callable[[TrainingParts, Iterator[TrainBatch], int, int], Tensor]
