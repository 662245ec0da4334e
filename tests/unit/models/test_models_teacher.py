"""The teacher: weights, normalization, errors."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from helpers import plain, read_weights, single_rank
from torch import Tensor, nn

from imagenet_cls.config.schema import DistillConfig, TeacherConfig
from imagenet_cls.data.device import Normalize
from imagenet_cls.errors import CheckpointError, ConfigError, ResourceError
from imagenet_cls.models.teacher import (
    MeanStd,
    Teacher,
    build_teacher,
    distillation_problems,
)

CPU = torch.device("cpu")
ALONE = single_rank()
HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def built(
    teacher: TeacherConfig,
    num_classes: int = 5,
    size_px: int = 16,
    own: MeanStd | None = None,
    seed: int = 0,
):
    """own: the normalization that the weights in a file were trained with."""

    def read(path: str) -> tuple[Mapping[str, Tensor], MeanStd | None]:
        return read_weights(Path(path))[0], own

    return build_teacher(teacher, num_classes, ALONE, read, IMAGENET, [size_px], seed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, TeacherConfig]:
    """A network with BatchNorm's statistics far from the initial ones, and the config that names
    its weights.
    """
    network = timm.create_model("resnet10t", num_classes=5)
    for _ in range(3):
        network(torch.randn(4, 3, 32, 32) * 3 + 1)
    file = tmp_path_factory.mktemp("teacher") / "teacher.pth"
    torch.save(network.state_dict(), file)
    return network.eval(), TeacherConfig(name="resnet10t", checkpoint=str(file))


def test_teacher_is_frozen_with_its_weights(trained) -> None:
    network, config = trained
    teacher = built(config, size_px=32)
    images = torch.randn(4, 3, 32, 32)
    logits = teacher(images)
    torch.testing.assert_close(logits, network(images), rtol=1e-6, atol=1e-6)
    assert not logits.requires_grad and not any(p.requires_grad for p in teacher.parameters())
    assert not any(module.training for module in teacher.modules())
    assert torch.equal(teacher(images), logits)  # nothing was drawn, no statistics moved


def test_teacher_gets_images_with_its_own_normalization(trained) -> None:
    """uint8 -> normalized for the student -> what the teacher's own normalization gives."""
    network, config = trained
    teacher = built(config, size_px=32, own=HALF)
    pixels = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    for channels_last in (False, True):
        found = teacher(Normalize(*IMAGENET, CPU, channels_last)(pixels))
        torch.testing.assert_close(
            found, network(Normalize(*HALF, CPU, channels_last)(pixels)), rtol=1e-5, atol=1e-5
        )
    # else this could not fail
    assert (teacher(Normalize(*HALF, CPU, False)(pixels)) - found).abs().max() > 1e-3


def test_teacher_keeps_memory_format_and_autocast(trained) -> None:
    images = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    assert Teacher(nn.Identity(), HALF, IMAGENET)(images).is_contiguous(
        memory_format=torch.channels_last
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert built(trained[1], size_px=32)(images).dtype == torch.bfloat16


def of_nine(num_classes):
    return plain(9)


@pytest.mark.parametrize("name", ["file", "torchvision:resnet18", f"{__name__}:of_nine"])
def test_teacher_with_other_classes_is_an_error(name: str, trained, published: nn.Module) -> None:
    """A file of 5 classes, published weights of 1000, and a factory's model of 9."""
    config = (
        trained[1]
        if name == "file"
        else TeacherConfig(name, pretrained=name.startswith("torchvision:"))
    )
    with pytest.raises(ConfigError, match=r"^distill\.teacher: "):
        built(config, 7)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (TeacherConfig("helpers:plain"), "name"),  # not for this size
        (TeacherConfig("resnet10t", kwargs={"drop_rat": 0.1}), r"kwargs"),
    ],
)
def test_teacher_that_cannot_be_built_is_an_error(config: TeacherConfig, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^distill\.teacher\.{key}: "):
        built(config, size_px=20)


def test_weights_errors_have_the_teachers_keys(
    trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TeacherConfig("resnet14t", checkpoint=trained[1].checkpoint)
    with pytest.raises(CheckpointError, match=r"distill\.teacher\.name"):
        built(config, size_px=32)
    with pytest.raises(CheckpointError, match=r"^distill\.teacher\.checkpoint: "):
        built(TeacherConfig("resnet10t", checkpoint=str(tmp_path / "none.pth")))
    # nothing listens there: torch.hub fails at once
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(ResourceError, match=r"distill\.teacher\.checkpoint=FILE"):
        built(TeacherConfig("torchvision:resnet18", True), 1000)


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The network of torchvision's published weights, which are in the cache folder of its
    downloads.
    """
    network = torchvision.models.resnet18().eval()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(network.state_dict(), tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    return network


def test_teacher_with_published_weights_of_torchvision(published: nn.Module) -> None:
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(
        built(TeacherConfig("torchvision:resnet18", True), 1000, 32)(images), published(images)
    )


def test_factory_without_weights_is_initialized_by_key() -> None:
    teachers = [built(TeacherConfig("helpers:plain")) for _ in range(2)]
    torch.manual_seed(1)
    teachers.append(built(TeacherConfig("helpers:plain")))
    other = built(TeacherConfig("helpers:plain"), seed=1)
    weights = [teacher.network[0].weight for teacher in (*teachers, other)]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])


@pytest.mark.parametrize(
    ("teacher", "kind", "keys"),
    [
        (TeacherConfig("resnet10t", checkpoint="x.pth"), "soft", []),
        (TeacherConfig(None), "soft", []),
        (TeacherConfig("resnet1"), "none", []),
        (TeacherConfig("resnet5O", True), "soft", ["name"]),
        (TeacherConfig("resnet10t", kwargs={"num_classes": 3}), "soft", ["kwargs.num_classes"]),
        (TeacherConfig("helpers:plain", True), "soft", ["pretrained"]),
    ],
)
def test_problems_have_the_teachers_keys(
    teacher: TeacherConfig, kind: str, keys: list[str]
) -> None:
    problems = distillation_problems(DistillConfig(kind, teacher=teacher))
    assert [problem.key for problem in problems] == [f"distill.teacher.{key}" for key in keys]
    assert not any(" model." in problem.message for problem in problems)
