"""The teacher of a distillation (`distill.teacher`): checks, weights and normalization."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from imagenet_cls.config.schema import (
    DistillConfig,
    ModelConfig,
    Size,
    TeacherConfig,
    format_size,
)
from imagenet_cls.errors import CheckpointError, ConfigError, Problem, ResourceError
from imagenet_cls.models.adapt import output_shape
from imagenet_cls.models.factory import (
    build_model,
    model_mean_std,
    model_problems,
    published_weights,
)
from imagenet_cls.models.head import head_names, permute_outputs
from imagenet_cls.models.weights import load_weights, prefix_errors, set_tensors
from imagenet_cls.parallel.collectives import broadcast_tensors, run_on_main_first
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.seeding import hash_key, seed_generators

# Mean and standard deviation of each channel, of pixel values scaled to 0..1.
MeanStd = tuple[Sequence[float], Sequence[float]]
# Reads a file or checkpoint folder: its weights, and the normalization of their training where
# it is known.
WeightsReader = Callable[[str], tuple[Mapping[str, Tensor], MeanStd | None]]


class Teacher(nn.Module):
    """Images as the student takes them, float (B, 3, H, W) -> logits (B, classes), without
    gradients.

    Frozen, in evaluation mode. Images are converted to the teacher's normalization: (x * std + mean
    - own mean) / own std, which holds for mixed and erased images too.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, mean_std: MeanStd, own_mean_std: MeanStd):
        super().__init__()
        self.network = network
        mean, std = map(_per_channel, mean_std)
        own_mean, own_std = map(_per_channel, own_mean_std)
        self.register_buffer("scale", (std / own_std).float())
        self.register_buffer("shift", ((mean - own_mean) / own_std).float())
        self.eval()
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(torch.addcmul(self.shift, images, self.scale))
        return logits


def _per_channel(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64, device="cpu").view(1, 3, 1, 1)


def build_teacher(
    config: TeacherConfig,
    num_classes: int,
    context: RankContext,
    read: WeightsReader,
    mean_std: MeanStd,
    sizes_px: Collection[Size],
    seed: int,
    memory_format: torch.memory_format = torch.preserve_format,
    order: Sequence[int] = (),
) -> Teacher:
    """The teacher on `context.device`. A collective: rank 0 reads the weights and broadcasts them.

    num_classes, mean_std: the values of the student. read: called for `config.checkpoint`.
    sizes_px: the sizes of the training images; each is tried with an input of zeros. seed: keys the
    initial weights of a factory's model without a checkpoint. order: the output of published
    weights for each class of the data, then all others; empty where it is the same. Raises
    ConfigError for other classes or unsupported sizes, and what `build_model`, `load_weights` and
    `read` raise, on every rank.
    """

    def build() -> Teacher:
        if not context.is_main:
            network = build_model(
                ModelConfig(name=config.name or "", kwargs=config.kwargs), num_classes
            )
            # scale and shift are broadcast with the weights
            return Teacher(network, mean_std, mean_std)
        seed_generators(hash_key("teacher", seed))
        network, own_mean_std = _load_network(config, num_classes, read, order)
        teacher = Teacher(network, mean_std, own_mean_std)
        _check_outputs(teacher, config, num_classes, sizes_px)
        return teacher

    teacher = run_on_main_first(context, build)
    set_tensors(teacher, broadcast_tensors(teacher.state_dict(), context))
    return teacher.to(context.device, memory_format=memory_format)  # type: ignore[call-overload]


def enable_distillation_token(model: nn.Module) -> None:
    """Make a model of timm with a distillation token return two logits in training.

    In evaluation these models return the mean of both.
    """
    enable = getattr(model, "set_distilled_training", None)
    if enable is not None:
        enable(True)


def distillation_problems(config: DistillConfig) -> list[Problem]:
    """All problems of the teacher that can be found without data: name, tag, published weights,
    kwargs.
    """
    teacher = config.teacher
    if config.kind == "none" or teacher.name is None:
        return []
    model_config = ModelConfig(
        teacher.name, teacher.pretrained, None, teacher.checkpoint, kwargs=teacher.kwargs
    )
    return [
        Problem(_teacher_keys(problem.key), _teacher_keys(problem.message))
        for problem in model_problems(model_config)
    ]


def _load_network(
    config: TeacherConfig, num_classes: int, read: WeightsReader, order: Sequence[int]
) -> tuple[nn.Module, MeanStd]:
    """The network with its weights, on the CPU, and the normalization that they expect."""
    assert config.name is not None, "checked by the rules across keys"
    model_config = ModelConfig(name=config.name, pretrained=config.pretrained, kwargs=config.kwargs)
    try:
        network = build_model(model_config, num_classes)
        if config.pretrained:
            _check_classes(config, published_weights(model_config, network)[1], num_classes)
            permute_outputs(network, order)
        if config.checkpoint is None:
            return network, model_mean_std(network)
        with prefix_errors("model.checkpoint"):
            state, mean_std = read(config.checkpoint)
            for name in head_names(network, num_classes):
                if name in state:
                    _check_classes(config, state[name].shape[0], num_classes)
            load_weights(network, state, num_classes, head_may_differ=False)
    except ConfigError as error:
        raise ConfigError(list(map(_teacher_keys, error.lines))) from error
    except (CheckpointError, ResourceError) as error:
        raise type(error)(_teacher_keys(error.problem), _teacher_keys(error.remedy)) from error
    return network, mean_std or model_mean_std(network)


def _check_classes(config: TeacherConfig, classes: int, num_classes: int) -> None:
    if classes != num_classes:
        raise ConfigError(
            [
                f"distill.teacher: {config.name} was trained for {classes} classes, but the "
                f"student has {num_classes}; use a teacher with the same classes"
            ]
        )


def _check_outputs(
    teacher: Teacher, config: TeacherConfig, num_classes: int, sizes_px: Collection[Size]
) -> None:
    for size_px in sizes_px:
        try:
            shape = output_shape(teacher, size_px)
        except ValueError as error:
            size = format_size(size_px)
            raise ConfigError(
                [f"distill.teacher.name: {config.name} can't take {size}: {error}"]
            ) from error
        if shape != (1, num_classes):
            raise ConfigError(
                [
                    f"distill.teacher: {config.name} returns {shape} for one image, not "
                    f"{(1, num_classes)}; use a teacher with the same classes"
                ]
            )


def _teacher_keys(text: str) -> str:
    """`text` with the keys of `model` replaced by keys of `distill.teacher`."""
    return re.sub(r"\bmodel\.(?=(name|pretrained|checkpoint|kwargs)\b)", "distill.teacher.", text)
