"""The teacher of a distillation: a trained network that is looked at and never changed.

Owns the `distill.teacher` section: its check, its weights, its pixels. Any model that `model` can name can teach.
Refuses one with other classes than the model that learns, one that can't take its images, and weights that fit but for
the head. Its outputs become a loss in `optim.distillation`. Called by `engine.model`, `distillation_problems` by
`engine.check`.

Only rank 0 reads weights, from disk or network; the others are handed them.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import timm
import torch
import torchvision
from torch import Tensor, nn

from imagenet_cls.config.schema import DistillConfig, ModelConfig, TeacherConfig
from imagenet_cls.errors import CheckpointError, ConfigError, Problem, ResourceError
from imagenet_cls.lookup import is_factory_name
from imagenet_cls.models.build import TORCHVISION, build_model, first_line, head_names, model_mean_std
from imagenet_cls.models.check import model_problems
from imagenet_cls.models.weights import load_weights, naming_the_key
from imagenet_cls.parallel.collectives import broadcast_tensors
from imagenet_cls.parallel.process_group import Group, run_on_main
from imagenet_cls.seeding import hash_key, seed_generators

# Mean and standard deviation of each channel, of pixel values scaled to 0..1.
MeanStd = tuple[Sequence[float], Sequence[float]]
# The weights in a file or checkpoint folder, and what they were normalised with where it says so.
WeightsReader = Callable[[Path], tuple[Mapping[str, Tensor], MeanStd | None]]


class Teacher(nn.Module):
    """Callable: images as the learning model takes them, float (B, 3, H, W) -> logits (B, classes), without gradients.

    Frozen, in evaluation mode. Images that were normalised with one mean and std are normalised with the other:
    (x * std + mean - own mean) / own std, which holds for mixed and erased images, too. Nothing is drawn.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, mean_std: MeanStd, own_mean_std: MeanStd):
        super().__init__()
        self.network = network
        (mean, std), (own_mean, own_std) = (
            [torch.tensor(list(numbers), dtype=torch.float64, device="cpu").view(1, 3, 1, 1) for numbers in pair]
            for pair in (mean_std, own_mean_std)
        )
        self.register_buffer("scale", (std / own_std).float())
        self.register_buffer("shift", ((mean - own_mean) / own_std).float())
        self.eval()
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(torch.addcmul(self.shift, images, self.scale))
        return logits


def build_teacher(
    teacher: TeacherConfig,
    num_classes: int,
    group: Group,
    read: WeightsReader,
    mean_std: MeanStd,
    sizes_px: Collection[int],
    seed: int,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Teacher:
    """The teacher, on `group.device`. A collective: every rank calls it.

    num_classes: outputs of the model that learns. read: called on rank 0 only, for `teacher.checkpoint`. mean_std: what
    the images are normalised with for the model that learns. sizes_px: sides of the images to come; each is tried with
    one black image. seed: keys the initial weights of a factory's model that is given no others.

    Raises ConfigError for other classes or unfit sizes, and what `build_model`, `load_weights` and `read` raise, in
    words of `distill.teacher`: the same error on every rank.
    """
    built: list[Teacher] = []

    def with_weights() -> None:
        seed_generators(hash_key("teacher", seed))
        network, own_mean_std = _trained(teacher, num_classes, read)
        built.append(Teacher(network, mean_std, own_mean_std))
        _refuse_unfit(built[0], teacher, num_classes, sizes_px)

    run_on_main(group, with_weights)
    if not built:
        network = build_model(ModelConfig(name=teacher.name or "", kwargs=teacher.kwargs), num_classes)
        built.append(Teacher(network, mean_std, mean_std))  # its pixels come with rank 0's weights
    ours = built[0]
    ours.load_state_dict(broadcast_tensors(ours.state_dict() if group.is_main else None, group))
    return ours.to(group.device, memory_format=memory_format)  # type: ignore[call-overload]


def enable_distillation_token(model: nn.Module) -> bool:
    """Let a model with a distillation token give two logits while it trains. Says whether it has one.

    Models of timm's that have one say so by `set_distilled_training`; in evaluation they give the mean of both, always.
    """
    enable = getattr(model, "set_distilled_training", None)
    if enable is not None:
        enable(True)
    return enable is not None


def distillation_problems(distill: DistillConfig) -> list[Problem]:
    """Everything wrong with the teacher that shows without data: name, tag, published weights, kwargs."""
    teacher = distill.teacher
    if distill.kind == "none" or teacher.name is None:
        return []
    model = ModelConfig(teacher.name, teacher.pretrained, None, teacher.checkpoint, kwargs=teacher.kwargs)
    return [Problem(_of_teacher(problem.key), _of_teacher(problem.message)) for problem in model_problems(model)]


def _trained(teacher: TeacherConfig, num_classes: int, read: WeightsReader) -> tuple[nn.Module, MeanStd]:
    """The network with its weights, on the CPU, and the pixels that they expect."""
    if teacher.pretrained:
        _refuse_other_classes(teacher, _published_classes(teacher), num_classes)
    assert teacher.name is not None, "the rules across keys come first"
    with _words_of_teacher():
        model = ModelConfig(name=teacher.name, pretrained=teacher.pretrained, kwargs=teacher.kwargs)
        network = build_model(model, num_classes)
        own_mean_std: MeanStd | None = None
        if teacher.checkpoint is not None:
            with naming_the_key("model.checkpoint"):
                state, own_mean_std = read(Path(teacher.checkpoint))
                heads = [state[name].shape[0] for name in head_names(network, num_classes) if name in state]
                _refuse_other_classes(teacher, heads[0] if heads else None, num_classes)
                load_weights(network, state, num_classes, head_may_differ=False)
    return network, own_mean_std or model_mean_std(network)


def _published_classes(teacher: TeacherConfig) -> int | None:
    """Classes of the library's published weights, where it says so; nothing is downloaded."""
    name = teacher.name or ""
    if name.startswith(TORCHVISION):
        published = torchvision.models.get_model_weights(name.removeprefix(TORCHVISION))
        categories = published[teacher.kwargs.get("weights", "DEFAULT")].meta.get("categories")
        return len(categories) if categories else None
    if is_factory_name(name):
        return None
    cfg = timm.models.get_pretrained_cfg(name)
    return cfg.num_classes if cfg is not None else None


def _refuse_other_classes(teacher: TeacherConfig, given: int | None, num_classes: int) -> None:
    if given is not None and given != num_classes:
        text = f"{teacher.name} was trained for {given} classes, but the model that learns has {num_classes}"
        raise ConfigError([f"distill.teacher: {text}; take a teacher of the same classes"])


def _refuse_unfit(teacher: Teacher, config: TeacherConfig, num_classes: int, sizes_px: Collection[int]) -> None:
    for size_px in sorted(set(sizes_px)):
        try:
            outputs = teacher(torch.zeros(1, 3, size_px, size_px))
        except (AssertionError, RuntimeError, ValueError) as error:
            text = f"{config.name} can't take {size_px} px: {first_line(error)}"
            raise ConfigError([f"distill.teacher.name: {text}"]) from error
        shape = tuple(getattr(outputs, "shape", ())) or type(outputs).__name__
        if shape != (1, num_classes):
            text = f"{config.name} gives {shape} for one image, not {(1, num_classes)}"
            raise ConfigError([f"distill.teacher: {text}; take a teacher of the same classes"])


@contextmanager
def _words_of_teacher() -> Iterator[None]:
    """Errors about a `model` are told with the keys of this one."""
    try:
        yield
    except (CheckpointError, ResourceError) as error:
        raise type(error)(_of_teacher(str(error))) from error


def _of_teacher(text: str) -> str:
    return re.sub(r"\bmodel\.(?=(name|pretrained|checkpoint|kwargs)\b)", "distill.teacher.", text)
