"""Runs with mixing, every loss and a teacher: they learn, repeat to the bit, and go on as if never stopped."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import arguments, evaluations, losses, newest, plain, state_digest, train_here
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
    """The run folder of a model that has learnt something, with pixels of its own."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    pixels = {"data__mean": "[0.2, 0.3, 0.4]", "data__std": "[0.3, 0.4, 0.5]"}
    train_here(arguments(digits, folder, "noisy", train__epochs=3, optimizer__lr=0.1, **pixels))
    return folder


SETTINGS: dict[str, dict[str, Any]] = {
    "mixed": MIX,
    "mixed one by one": {**MIX, "mix__mode": "elem", "mix__prob": 0.5, "loss__label_smoothing": 0.1},
    "resnet strikes back": {
        **MIX,
        "loss__name": "bce",
        "loss__kwargs": "{target_threshold: 0.2, sum_classes: true}",
        "optimizer__lr": 0.05,
    },
    "focal": {"loss__name": "focal", "loss__class_weights": "[1, 2, 1, 2, 1, 2, 1, 2, 1, 2]"},
    "jensen-shannon": {"loss__name": "jsd", "augment__splits": 3, "augment__color_jitter__brightness": 0.4},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_learns(digits: Path, tmp_path: Path, setting: str) -> None:
    train_here(
        arguments(digits, tmp_path / "run", "noisy", train__epochs=3, **({"optimizer__lr": 0.1} | SETTINGS[setting]))
    )
    curve = losses(tmp_path / "run")
    assert sum(curve[-5:]) < 0.9 * sum(curve[:5])
    assert evaluations(tmp_path / "run")[-1]["top1_pct"] > 40


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_learns_from_a_teacher_alone(digits: Path, tmp_path: Path, teacher: Path, kind: str) -> None:
    """With alpha 1 a model sees no label."""
    softened = {"distill__temperature": 2.0} if kind == "soft" else {}
    changes = distilled(teacher, kind, distill__alpha=1.0, train__epochs=3, optimizer__lr=0.1, **softened)
    train_here(arguments(digits, tmp_path / "run", "noisy", **changes))
    assert evaluations(tmp_path / "run")[-1]["top1_pct"] > 40


def test_labels_teach_the_class_token_and_the_teacher_its_own(digits: Path, tmp_path: Path, teacher: Path) -> None:
    """Both heads' biases begin at 0, and stay there where nobody teaches them."""
    for alpha in (0.0, 0.5, 1.0):
        changes = TOKEN_MODEL | distilled(teacher, "hard", distill__alpha=alpha, train__max_steps=3)
        train_here(arguments(digits, tmp_path / str(alpha), **changes))
        weights = load_file(newest(tmp_path / str(alpha)) / "model.safetensors")
        learnt = [bool(weights[f"{head}.bias"].any()) for head in ("head", "head_dist")]
        assert learnt == [alpha < 1, alpha > 0]


def test_a_model_that_is_its_own_teacher_has_nothing_to_learn(digits: Path, tmp_path: Path, teacher: Path) -> None:
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


def test_loss_of_the_first_step_by_hand(digits: Path, tmp_path: Path) -> None:
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


def test_the_same_bits_again_and_in_two_parts(digits: Path, tmp_path: Path, teacher: Path) -> None:
    """Stopped while mixing, and started again; mixing ends with the first epoch."""

    def words(folder: str, **more: Any) -> list[str]:
        return arguments(digits, tmp_path / folder, "noisy", **(everything(teacher) | more))

    train_here(words("whole"))
    train_here(words("again", data__num_workers=1))
    assert state_digest(tmp_path / "again") == state_digest(tmp_path / "whole")
    train_here(words("parts", train__max_steps=7))
    train_here([*words("parts"), "--resume"])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest(tmp_path / "parts") / name).read_bytes() == (newest(tmp_path / "whole") / name).read_bytes()
    train_here(words("longer", mix__off_epoch="null"))
    assert losses(tmp_path / "longer")[:11] == losses(tmp_path / "whole")[:11]
    assert losses(tmp_path / "longer")[11:] != losses(tmp_path / "whole")[11:]


def test_a_teacher_may_be_moved_but_not_changed(digits: Path, tmp_path: Path) -> None:
    for name, seed in (("teacher", 0), ("moved", 0), ("other", 1)):
        torch.manual_seed(seed)
        torch.save(plain(10).state_dict(), tmp_path / f"{name}.pth")

    def words(teacher: str, steps: int) -> list[str]:
        changes = distilled(tmp_path / f"{teacher}.pth", "soft", distill__teacher__name="helpers:plain")
        return arguments(digits, tmp_path / "run", train__max_steps=steps, **changes)

    train_here(words("teacher", 2))
    train_here([*words("moved", 3), "--resume"])
    with pytest.raises(CheckpointError, match=r"weights .* are not those that the checkpoint learned from"):
        train_command([*words("other", 4), "--resume"])
    train_here([*words("other", 4), "--resume", "--allow-change", "distill.teacher"])


def test_views_of_few_images_are_shown_in_tensorboard(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three views of 16 images, of which one for each label is shown."""
    few = {"train__global_batch_size": 16, "train__max_steps": 1, "log__tensorboard": "true"}
    train_here(arguments(digits, tmp_path / "run", "noisy", loss__name="jsd", augment__splits=3, **few))
    assert re.search(r"BatchNorm sees +48 images at a time", capsys.readouterr().out)
    train_here(arguments(digits, tmp_path / "plain", loss__name="jsd", augment__splits=3, **few))
    assert "BatchNorm" not in capsys.readouterr().out  # there is none


def test_never_mixed_is_mixing_that_is_off_from_the_start(digits: Path, tmp_path: Path) -> None:
    train_here(arguments(digits, tmp_path / "off", mix__off_epoch=0, **MIX))
    train_here(arguments(digits, tmp_path / "without"))
    assert state_digest(tmp_path / "off") == state_digest(tmp_path / "without")


BAD: list[tuple[dict[str, Any], str]] = [
    ({**MIX, "loss__name": "focal"}, "mix: makes soft targets, and loss 'focal' takes none"),
    ({**MIX, "train__micro_batch_size": 1}, "micro-batches of 1"),
    ({**MIX, "mix__mode": "pairs"}, "mix.mode"),
    ({"mix__mixup_alpha": -1}, "mix.mixup_alpha"),
    (
        {"mix__cutmix_minmax": "[0.3, 0.31]"},
        "mix.cutmix_minmax: [0.3, 0.31] leaves no side to choose in images of 16 px",
    ),
    ({"loss__name": "cross_entropie"}, "loss.name: unknown loss 'cross_entropie'; did you mean 'cross_entropy'?"),
    ({"loss__label_smoothing": 1.0}, "loss.label_smoothing: 1.0 is out of range"),
    ({"loss__name": "bce", "loss__kwargs": "{target_threshold: 2}"}, "loss.kwargs.target_threshold: 2 is not a number"),
    ({"loss__name": "focal", "loss__kwargs": "{gama: 2}"}, "did you mean 'gamma'?"),
    ({"loss__class_weights": "[1, 2, 3]"}, "loss.class_weights: 3 numbers, but there are 10 classes"),
    ({"distill__kind": "soft"}, "distill.teacher.name: is null"),
    ({"distill__kind": "firm"}, "distill.kind"),
    (
        {"distill__kind": "soft", "distill__teacher__name": "torchvision:resnet18"},
        "distill.teacher.checkpoint: is null: an untrained teacher",
    ),
    (
        {"distill__kind": "soft", "distill__teacher__name": "resnet81", "distill__teacher__pretrained": "true"},
        "distill.teacher.name: unknown model 'resnet81'; did you mean 'resnet18'",
    ),
    (
        {"distill__kind": "soft", "distill__teacher__name": "resnet18", "distill__teacher__pretrained": "true"},
        "distill.teacher: resnet18 was trained for 1000 classes, but the model that learns has 10",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), BAD, ids=[text for _, text in BAD])
def test_bad_values(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], expected: str
) -> None:
    assert main(train_command, arguments(digits, tmp_path / "run", **changes)) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) <= 3 and "Traceback" not in error


def test_a_teacher_of_other_classes(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(plain(7).state_dict(), tmp_path / "seven.pth")
    changes = distilled(tmp_path / "seven.pth", "hard", distill__teacher__name="helpers:plain")
    assert main(train_command, arguments(digits, tmp_path / "run", **changes)) == 2
    expected = "distill.teacher: helpers:plain was trained for 7 classes, but the model that learns has 10"
    assert expected in capsys.readouterr().err


def test_a_teacher_that_learned_other_classes_of_the_same_number(
    digits: Path, tmp_path: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = tmp_path / "renamed"
    shutil.copytree(digits, renamed)
    (renamed / "train" / "7").rename(renamed / "train" / "seven")
    folder = {"data__name": "folder", "data__val": "null", "data__val_fraction": 0.2}
    words = arguments(renamed, tmp_path / "run", "plain", **folder, **distilled(teacher, "soft"))
    assert main(train_command, words) == 2
    assert "its class 7 is '7', that of the data '8'; take a teacher of the same classes" in capsys.readouterr().err
