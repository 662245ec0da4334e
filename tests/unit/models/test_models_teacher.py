"""The teacher: weights, normalisation, errors."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from helpers import plain
from timm.task.distillation import DistillationTeacher
from torch import Tensor, nn

from imagenet_cls.config.schema import DistillConfig, TeacherConfig
from imagenet_cls.data.device import Preprocess
from imagenet_cls.errors import CheckpointError, ConfigError, ResourceError
from imagenet_cls.models.teacher import (
    MeanStd,
    Teacher,
    build_teacher,
    distillation_problems,
    enable_distillation_token,
)
from imagenet_cls.models.weights import read_weights
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group

CPU = torch.device("cpu")
ALONE = Group(RankInfo(), CPU)
HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def read(path: Path) -> tuple[Mapping[str, Tensor], MeanStd | None]:
    return read_weights(path), None


def read_half(path: Path) -> tuple[Mapping[str, Tensor], MeanStd | None]:
    return read_weights(path), HALF


def built(teacher: TeacherConfig, num_classes: int = 5, size_px: int = 16, reader=read) -> Teacher:
    return build_teacher(teacher, num_classes, ALONE, reader, IMAGENET, [size_px], 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, TeacherConfig]:
    """A network with BatchNorm's statistics far from the initial ones, and the config that names its weights."""
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


def test_teacher_gets_images_with_its_own_normalisation(trained) -> None:
    """uint8 -> normalised for the student -> what the teacher's own normalisation gives."""
    network, config = trained
    teacher = built(config, size_px=32, reader=read_half)
    pixels = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    for channels_last in (False, True):
        found = teacher(Preprocess(*IMAGENET, CPU, channels_last)(pixels))
        torch.testing.assert_close(found, network(Preprocess(*HALF, CPU, channels_last)(pixels)), rtol=1e-5, atol=1e-5)
    assert (teacher(Preprocess(*HALF, CPU, False)(pixels)) - found).abs().max() > 1e-3  # else this could not fail


@pytest.mark.parametrize(("mean_std", "own"), [(HALF, IMAGENET), (IMAGENET, HALF), (IMAGENET, IMAGENET)])
def test_normalisation_equals_timms(mean_std: MeanStd, own: MeanStd) -> None:
    images = torch.randn(2, 3, 8, 8)
    network = nn.Identity()
    network.pretrained_cfg = {"mean": own[0], "std": own[1]}  # type: ignore[assignment]
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in mean_std)
    expected = DistillationTeacher(network).normalize_input(images, mean, std)
    torch.testing.assert_close(Teacher(network, mean_std, own)(images), expected, rtol=1e-6, atol=1e-6)
    if own == mean_std:
        assert torch.equal(expected, images) and torch.equal(Teacher(network, mean_std, own)(images), images)


def test_memory_format_of_images_is_kept() -> None:
    images = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert Teacher(nn.Identity(), HALF, IMAGENET)(images).is_contiguous(memory_format=torch.channels_last)


def test_teacher_runs_under_the_callers_autocast(trained) -> None:
    teacher = built(trained[1], size_px=32)
    with torch.autocast("cpu", torch.bfloat16):
        assert teacher(torch.randn(2, 3, 32, 32)).dtype == torch.bfloat16


def test_teacher_with_other_classes_is_an_error(trained) -> None:
    """From a file, from timm's and torchvision's published weights (before anything is fetched), from a factory."""
    cases = [
        (trained[1], 32, "resnet10t was trained for 5 classes, but the student has 7"),
        (TeacherConfig("resnet18.a1_in1k", True), 32, "resnet18.a1_in1k was trained for 1000 classes"),
        (TeacherConfig("resnet18", True), 32, "resnet18 was trained for 1000 classes, but"),
        (TeacherConfig("torchvision:resnet18", True), 32, "torchvision:resnet18 was trained for 1000 classes, but"),
        (TeacherConfig(f"{__name__}:of_nine"), 16, r"returns \(1, 9\) for one image, not \(1, 7\)"),
    ]
    for config, size_px, text in cases:
        with pytest.raises(ConfigError, match=rf"distill\.teacher: .*{text}") as caught:
            built(config, 7, size_px)
        assert caught.value.exit_code == 2


def of_nine(num_classes):
    return plain(9)


def test_teacher_that_cannot_take_the_size_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"distill\.teacher\.name: helpers:plain can't take 20 px"):
        built(TeacherConfig("helpers:plain"), size_px=20)


def test_mismatched_weights_are_reported_with_the_teachers_keys(trained, tmp_path: Path) -> None:
    config = TeacherConfig("resnet14t", checkpoint=trained[1].checkpoint)
    with pytest.raises(CheckpointError, match=r"set distill\.teacher\.name and distill\.teacher\.kwargs"):
        built(config, size_px=32)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        built(TeacherConfig("resnet10t", checkpoint=str(tmp_path / "none.pth")))


def test_pretrained_teacher_without_network_is_a_resource_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing listens there: torch.hub fails at once
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    with pytest.raises(ResourceError) as caught:
        built(TeacherConfig("torchvision:resnet18", True), 1000)
    assert "distill.teacher.pretrained=false distill.teacher.checkpoint=FILE" in str(caught.value)


def test_published_weights_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fed from the cache folder of its own download path."""
    source = torchvision.models.resnet18().eval()
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    torch.save(source.state_dict(), tmp_path / "checkpoints" / "resnet18-f37072fd.pth")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(built(TeacherConfig("torchvision:resnet18", True), 1000, 32)(images), source(images))


def test_factory_without_weights_is_initialised_by_key() -> None:
    teachers = [built(TeacherConfig("helpers:plain")) for _ in range(2)]
    torch.manual_seed(1)
    teachers.append(built(TeacherConfig("helpers:plain")))
    other = build_teacher(TeacherConfig("helpers:plain"), 5, ALONE, read, IMAGENET, [16], seed=1)
    weights = [teacher.network[0].weight for teacher in (*teachers, other)]  # type: ignore[index]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])


def test_distillation_tokens() -> None:
    sizes = {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("deit_tiny_distilled_patch16_224", **sizes)
    images = torch.randn(2, 3, 32, 32)
    assert isinstance(model(images), Tensor)
    assert enable_distillation_token(model)
    logits, token_logits = model.train()(images)
    torch.testing.assert_close(model.eval()(images), (logits + token_logits) / 2)
    assert not enable_distillation_token(timm.create_model("resnet10t"))


def problems(name: str | None, kind: str = "soft", **options) -> dict[str, str]:
    found = distillation_problems(DistillConfig(kind, teacher=TeacherConfig(name, **options)))  # type: ignore[arg-type]
    return {problem.key: problem.message for problem in found}


def test_distillation_problems() -> None:
    assert problems("resnet10t", checkpoint="x.pth") == problems(None) == problems("resnet1", "none") == {}
    assert "did you mean 'resnet50" in problems("resnet5O", pretrained=True)["distill.teacher.name"]
    assert list(problems("resnet10t", kwargs={"drop_rat": 0.1})) == ["distill.teacher.kwargs.drop_rat"]
    reserved = problems("resnet10t", kwargs={"num_classes": 3})
    assert "set by the program" in reserved["distill.teacher.kwargs.num_classes"]
    unpublished = problems("helpers:plain", pretrained=True)["distill.teacher.pretrained"]
    assert "use distill.teacher.checkpoint" in unpublished
