"""Parameter groups, clipping, SAM and learning rate scaling in runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import arguments, assert_resumes, fails, losses, newest, state_digest, train_here

from imagenet_cls.commands.train import train_command


def trained(root: Path, folder: Path, **changes: Any) -> Path:
    train_here(arguments(root, folder, **({"train__max_steps": 3} | changes)))
    return folder


def saved_groups(folder: Path) -> list[dict[str, Any]]:
    return json.loads((newest(folder) / "optimizer.json").read_text())["groups"]


@pytest.fixture(scope="module")
def plain(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(digits, tmp_path_factory.mktemp("plain") / "run")


def test_weight_decays_and_lr_scales_reach_the_optimizer(digits: Path, tmp_path: Path) -> None:
    folder = trained(
        digits,
        tmp_path / "run",
        model="noisy",
        schedule__name="constant",
        optimizer__lr=0.04,
        optimizer__lr_scales='{"10.*": 0.5}',
        optimizer__weight_decay=0.1,
        optimizer__norm_weight_decay=0.2,
        optimizer__bias_weight_decay=0.3,
    )
    found = {}
    for group in saved_groups(folder):
        values = group["values"]
        found[" ".join(group["members"])] = (values["weight_decay"], values["lr"])
    assert found == {
        "1.weight 4.weight": (0.1, 0.04),
        "2.weight 2.bias 5.weight 5.bias": (0.2, 0.04),
        "10.weight": (0.1, 0.02),
        "10.bias": (0.3, 0.02),
    }


def test_sam_reports_the_loss_before_the_perturbation(
    digits: Path, tmp_path: Path, plain: Path
) -> None:
    sharp = losses(trained(digits, tmp_path / "sam", train__sam_rho=0.5))
    without = losses(plain)
    assert sharp[0] == without[0] and abs(sharp[2] - without[2]) > 1e-3
    # Only in step 0, and step 0 alone: the second step is then that of a run with SAM, the third
    # one differs.
    seldom = losses(
        trained(digits, tmp_path / "seldom", train__sam_rho=0.5, train__sam_every_steps=100)
    )
    assert seldom[:2] == sharp[:2] and seldom[2] != sharp[2]


def test_sam_with_tiny_rho_equals_training_without(digits: Path, tmp_path: Path) -> None:
    """With dropout, BatchNorm, mixing and erasing and a rho too small for float32, the second
    gradient is the first.
    """
    random = {"mix__mixup_alpha": 0.8, "augment__erasing__prob": 0.5}
    without = trained(digits, tmp_path / "without", model="noisy", **random)
    within = trained(digits, tmp_path / "within", model="noisy", train__sam_rho=1e-12, **random)
    assert state_digest(within) == state_digest(without)
    assert losses(within) == losses(without)


def test_resume_between_sam_steps_gives_the_same_bits(digits: Path, tmp_path: Path) -> None:
    sam = {"train__sam_rho": 0.1, "train__sam_every_steps": 3, "train__max_steps": 4}
    assert_resumes(digits, tmp_path, 2, "noisy", **sam)


def test_resume_with_other_parameter_groups_names_the_key(digits: Path, plain: Path) -> None:
    """Also if the change is allowed."""
    changed = arguments(digits, plain, optimizer__bias_weight_decay=0.1)
    err = fails(4, train_command, *changed, "--resume", "--allow-change", "optimizer")
    assert "optimizer.bias_weight_decay" in err and f"model.checkpoint={plain}" in err


def test_lr_base_batch_scales_the_rate(digits: Path, tmp_path: Path, plain: Path) -> None:
    """0.015 for 64 images is 0.03 for 128."""
    folder = trained(digits, tmp_path / "run", optimizer__lr=0.015, optimizer__lr_base_batch=64)
    assert losses(folder) == losses(plain)


def test_corrected_weight_decay_has_the_scaled_rate_as_its_highest(
    digits: Path, tmp_path: Path
) -> None:
    """timm decays by lr ** 2 / max_lr. 0.015 for 64 images is 0.03 for 128, also after a resume."""

    def highest(steps: int, base_batch: int, *options: str) -> float:
        changes = {
            "optimizer__name": "timm:sgdc",
            "optimizer__kwargs": "{momentum: 0.9}",
            "optimizer__lr": 0.015,
            "optimizer__lr_base_batch": base_batch,
            "train__max_steps": steps,
        }
        train_here([*arguments(digits, tmp_path, **changes), *options])
        return saved_groups(tmp_path)[0]["values"]["max_lr_snapshot"]

    assert highest(1, 64, "--overwrite") == pytest.approx(0.03)
    change = ("--resume", "--allow-change", "optimizer.lr_base_batch")
    assert highest(2, 32, *change) == pytest.approx(0.06)
