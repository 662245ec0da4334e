"""Runs with mixing, all losses and a teacher."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import arguments, assert_resumes, fails, losses, newest, plain, train_here
from safetensors.torch import load_file

from imagenet_cls.commands.train import train_command

MIX = {"mix__mixup_alpha": 0.2, "mix__cutmix_alpha": 1.0}
TOKEN_MODEL: dict[str, Any] = {
    "model__name": "deit_tiny_distilled_patch16_224",
    "model__kwargs": "{img_size: 16, patch_size: 4, depth: 1, embed_dim: 32, num_heads: 2}",
}


def distilled(teacher: Path, kind: str, **changes: Any) -> dict[str, Any]:
    return {
        "distill__kind": kind,
        "distill__teacher__name": "helpers:noisy",
        "distill__teacher__checkpoint": teacher,
        **changes,
    }


@pytest.fixture(scope="module")
def teacher(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a model with another normalization."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    pixels = {"data__mean": "[0.2, 0.3, 0.4]", "data__std": "[0.3, 0.4, 0.5]"}
    train_here(arguments(digits, folder, "noisy", train__max_steps=6, optimizer__lr=0.1, **pixels))
    return folder


def test_teacher_trains_the_distillation_token_only(
    digits: Path, tmp_path: Path, teacher: Path
) -> None:
    """Both heads' biases start at 0, and stay there without a loss."""
    for alpha in (0.0, 0.5, 1.0):
        changes = TOKEN_MODEL | distilled(teacher, "hard", distill__alpha=alpha, train__max_steps=3)
        train_here(arguments(digits, tmp_path / str(alpha), **changes))
        weights = load_file(newest(tmp_path / str(alpha)) / "model.safetensors")
        learnt = [bool(weights[f"{head}.bias"].any()) for head in ("head", "head_dist")]
        assert learnt == [alpha < 1, alpha > 0]


def test_teacher_equal_to_the_student_gives_a_loss_of_zero(
    digits: Path, tmp_path: Path, teacher: Path
) -> None:
    """Both see the same mixed images, in pixels of their own. Frozen BatchNorm and no dropout:
    outputs agree.
    """
    same = distilled(
        teacher, "soft", distill__alpha=1.0, model__checkpoint=teacher, model__freeze_bn="true"
    )
    same |= {
        "model__kwargs": "{dropout: 0.0}",
        "data__std": "[0.3, 0.4, 0.5]",
        "train__max_steps": 2,
        **MIX,
    }
    train_here(arguments(digits, tmp_path / "same", "noisy", **same, data__mean="[0.2, 0.3, 0.4]"))
    assert losses(tmp_path / "same") == pytest.approx([0.0, 0.0], abs=1e-6)
    train_here(arguments(digits, tmp_path / "other", "noisy", **same, data__mean="[0.5, 0.5, 0.5]"))
    # the teacher still sees its own pixels, the model others
    assert losses(tmp_path / "other")[0] > 1e-3


def test_resume_with_mixing_and_teacher_gives_the_same_bits(
    digits: Path, tmp_path: Path, teacher: Path
) -> None:
    """Stopped while mixing, which ends with the first epoch. With accumulation, smoothing and
    dropout.
    """
    changes = {
        **MIX,
        "mix__off_epoch": 1,
        "loss__label_smoothing": 0.1,
        "train__micro_batch_size": 64,
    }
    changes |= distilled(teacher, "soft", distill__temperature=2.0)
    assert_resumes(digits, tmp_path, 7, "noisy", **changes, train__max_steps=13)


def test_resume_with_a_changed_teacher_is_an_error(digits: Path, tmp_path: Path) -> None:
    """One that was moved is the same."""

    def words(name: str, steps: int) -> list[str]:
        torch.manual_seed(steps // 4)
        torch.save(plain(10).state_dict(), tmp_path / name)
        changes = distilled(tmp_path / name, "soft", distill__teacher__name="helpers:plain")
        return arguments(digits, tmp_path / "run", train__max_steps=steps, **changes)

    train_here(words("teacher.pth", 2))
    train_here([*words("moved.pth", 3), "--resume"])
    other = [*words("other.pth", 4), "--resume"]
    assert "distill.teacher" in fails(4, train_command, *other)
    train_here([*other, "--allow-change", "distill.teacher"])


def test_teacher_of_other_class_names_is_an_error(
    digits: Path, tmp_path: Path, teacher: Path
) -> None:
    renamed = Path(shutil.copytree(digits, tmp_path / "renamed"))
    (renamed / "train" / "7").rename(renamed / "train" / "seven")
    folder = {"data__name": "folder", "data__val": "null", "data__val_fraction": 0.2}
    words = arguments(renamed, tmp_path / "run", "plain", **folder, **distilled(teacher, "soft"))
    assert "distill.teacher.checkpoint: " in fails(2, train_command, *words)
