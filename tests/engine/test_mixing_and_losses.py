"""Runs with mixing, all losses and a teacher."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import arguments, losses, newest, plain, state_digest, train_here
from safetensors.torch import load_file

from imagenet_cls.commands.program import main
from imagenet_cls.commands.train import train_command
from imagenet_cls.errors import CheckpointError
from imagenet_cls.report.log import close_log

MIX = {"mix__mixup_alpha": 0.2, "mix__cutmix_alpha": 1.0}
TOKEN_MODEL: dict[str, Any] = {
    "model__name": "deit_tiny_distilled_patch16_224",
    "model__kwargs": "{img_size: 16, patch_size: 4, depth: 1, embed_dim: 32, num_heads: 2}",
}


@pytest.fixture(autouse=True)
def log_closed() -> Iterator[None]:
    yield
    close_log()


def distilled(teacher: Path, kind: str, **changes: Any) -> dict[str, Any]:
    return {
        "distill__kind": kind,
        "distill__teacher__name": "helpers:noisy",
        "distill__teacher__checkpoint": teacher,
        **changes,
    }


@pytest.fixture(scope="module")
def teacher(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a model with another normalisation."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    pixels = {"data__mean": "[0.2, 0.3, 0.4]", "data__std": "[0.3, 0.4, 0.5]"}
    train_here(arguments(digits, folder, "noisy", train__max_steps=6, optimizer__lr=0.1, **pixels))
    return folder


def test_teacher_trains_the_distillation_token_only(digits: Path, tmp_path: Path, teacher: Path) -> None:
    """Both heads' biases start at 0, and stay there without a loss."""
    for alpha in (0.0, 0.5, 1.0):
        changes = TOKEN_MODEL | distilled(teacher, "hard", distill__alpha=alpha, train__max_steps=3)
        train_here(arguments(digits, tmp_path / str(alpha), **changes))
        weights = load_file(newest(tmp_path / str(alpha)) / "model.safetensors")
        learnt = [bool(weights[f"{head}.bias"].any()) for head in ("head", "head_dist")]
        assert learnt == [alpha < 1, alpha > 0]


def test_teacher_equal_to_the_student_gives_a_loss_of_zero(digits: Path, tmp_path: Path, teacher: Path) -> None:
    """Both see the same mixed images, in pixels of their own: in evaluation mode their outputs agree, so frozen
    BatchNorm and no dropout leave a divergence of zero."""
    same = {
        "model__checkpoint": teacher,
        "model__kwargs": "{dropout: 0.0}",
        "model__freeze_bn": "true",
        "data__mean": "[0.2, 0.3, 0.4]",
        "data__std": "[0.3, 0.4, 0.5]",
        "train__max_steps": 2,
        **MIX,
    }
    train_here(arguments(digits, tmp_path / "same", "noisy", **same, **distilled(teacher, "soft", distill__alpha=1.0)))
    assert losses(tmp_path / "same") == pytest.approx([0.0, 0.0], abs=1e-6)
    other_pixels = same | {"data__mean": "[0.5, 0.5, 0.5]"}
    words = arguments(
        digits, tmp_path / "other", "noisy", **other_pixels, **distilled(teacher, "soft", distill__alpha=1.0)
    )
    train_here(words)
    assert losses(tmp_path / "other")[0] > 1e-3  # the teacher still sees its own pixels, the model others


def test_first_loss_equals_the_formula(digits: Path, tmp_path: Path) -> None:
    """Smoothing 0.1 and weights of classes, taken apart: with equal outputs every class has the same probability."""
    zero = {"model__name": f"{Path(__file__).stem}:zero_outputs", "train__max_steps": 1}
    for name, expected in (("cross_entropy", 2.302585), ("bce", 0.693147), ("focal", 0.9**2 * 2.302585)):
        train_here(arguments(digits, tmp_path / name, **zero, loss__name=name))
        assert losses(tmp_path / name) == pytest.approx([expected], rel=1e-5)


def zero_outputs(num_classes: int) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, num_classes))
    torch.nn.init.zeros_(model[1].weight)
    torch.nn.init.zeros_(model[1].bias)
    return model


def everything(teacher: Path) -> dict[str, Any]:
    """Mixing until the second epoch, accumulation, smoothing, a teacher, dropout."""
    rest = {"mix__off_epoch": 1, "loss__label_smoothing": 0.1, "train__micro_batch_size": 64}
    return {**MIX, **rest, **distilled(teacher, "soft", distill__temperature=2.0)}


def test_resume_with_mixing_and_teacher_gives_the_same_bits(digits: Path, tmp_path: Path, teacher: Path) -> None:
    """Stopped while mixing; mixing ends with the first epoch."""

    def words(folder: str, **more: Any) -> list[str]:
        return arguments(digits, tmp_path / folder, "noisy", **(everything(teacher) | more))

    train_here(words("whole"))
    train_here(words("parts", train__max_steps=7))
    train_here([*words("parts"), "--resume"])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest(tmp_path / "parts") / name).read_bytes() == (newest(tmp_path / "whole") / name).read_bytes()


def test_resume_with_a_changed_teacher_is_an_error(digits: Path, tmp_path: Path) -> None:
    for name, seed in (("teacher", 0), ("moved", 0), ("other", 1)):
        torch.manual_seed(seed)
        torch.save(plain(10).state_dict(), tmp_path / f"{name}.pth")

    def words(teacher: str, steps: int) -> list[str]:
        changes = distilled(tmp_path / f"{teacher}.pth", "soft", distill__teacher__name="helpers:plain")
        return arguments(digits, tmp_path / "run", train__max_steps=steps, **changes)

    train_here(words("teacher", 2))
    train_here([*words("moved", 3), "--resume"])
    with pytest.raises(CheckpointError, match=r"distill\.teacher"):
        train_command([*words("other", 4), "--resume"])
    train_here([*words("other", 4), "--resume", "--allow-change", "distill.teacher"])


def test_jsd_with_few_images_writes_tensorboard(digits: Path, tmp_path: Path) -> None:
    """Three views of 16 images, of which one for each label is shown."""
    few = {"train__global_batch_size": 16, "train__max_steps": 1, "log__tensorboard": "true"}
    train_here(arguments(digits, tmp_path / "run", "noisy", loss__name="jsd", augment__splits=3, **few))


def test_mixing_off_from_the_start_equals_no_mixing(digits: Path, tmp_path: Path) -> None:
    train_here(arguments(digits, tmp_path / "off", mix__off_epoch=0, **MIX, train__max_steps=2))
    train_here(arguments(digits, tmp_path / "without", train__max_steps=2))
    assert state_digest(tmp_path / "off") == state_digest(tmp_path / "without")


SOFT = {"distill__kind": "soft"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({**MIX, "loss__name": "focal"}, "mix"),
    ({**MIX, "train__micro_batch_size": 1}, "batch_size"),
    ({"mix__cutmix_minmax": "[0.3, 0.31]"}, "mix.cutmix_minmax"),
    ({"loss__name": "cross_entropie"}, "loss.name"),
    ({"loss__name": "bce", "loss__kwargs": "{target_threshold: 2}"}, "loss.kwargs.target_threshold"),
    ({"loss__class_weights": "[1, 2, 3]"}, "loss.class_weights"),
    (SOFT, "distill.teacher.name"),
    ({**SOFT, "distill__teacher__name": "torchvision:resnet18"}, "distill.teacher.checkpoint"),
    (
        {**SOFT, "distill__teacher__name": "resnet81", "distill__teacher__pretrained": "true"},
        "distill.teacher.name",
    ),
    ({**SOFT, "distill__teacher__name": "resnet18", "distill__teacher__pretrained": "true"}, "distill.teacher"),
]


@pytest.mark.parametrize(("changes", "expected"), BAD, ids=[key for _, key in BAD])
def test_bad_value_is_an_error_with_its_key(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], expected: str
) -> None:
    assert main(train_command, arguments(digits, tmp_path / "run", **changes)) == 2
    error = capsys.readouterr().err
    assert expected in error, error
    assert len(error.splitlines()) <= 3 and "Traceback" not in error


def test_teacher_of_other_classes_is_an_error(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(plain(7).state_dict(), tmp_path / "seven.pth")
    changes = distilled(tmp_path / "seven.pth", "hard", distill__teacher__name="helpers:plain")
    assert main(train_command, arguments(digits, tmp_path / "run", **changes)) == 2
    expected = "distill.teacher: helpers:plain was trained for 7 classes, but the student has 10"
    assert expected in capsys.readouterr().err


def test_teacher_of_other_class_names_is_an_error(
    digits: Path, tmp_path: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = tmp_path / "renamed"
    shutil.copytree(digits, renamed)
    (renamed / "train" / "7").rename(renamed / "train" / "seven")
    folder = {"data__name": "folder", "data__val": "null", "data__val_fraction": 0.2}
    words = arguments(renamed, tmp_path / "run", "plain", **folder, **distilled(teacher, "soft"))
    assert main(train_command, words) == 2
    assert "distill.teacher.checkpoint" in capsys.readouterr().err
