"""`train.compile`: which values are read, and how model and loss are compiled."""

from typing import Any

import pytest
import torch
from torch import nn

from imagenet_cls.config.schema import (
    AugmentConfig,
    DistillConfig,
    LossConfig,
    ProgressiveConfig,
    TrainConfig,
)
from imagenet_cls.engine.build import check_compiler, compile_module
from imagenet_cls.engine.model_with_loss import ModelWithLoss
from imagenet_cls.errors import UsageError
from imagenet_cls.models.teacher import Teacher
from imagenet_cls.optim.losses import build_loss, build_training_loss
from imagenet_cls.tasks.single_label import SingleLabel


@pytest.mark.parametrize(
    ("value", "progressive", "expected"),
    [
        (False, None, []),
        (True, None, [{"mode": "default", "dynamic": False}]),
        ("max-autotune", None, [{"mode": "max-autotune", "dynamic": False}]),
        ("default", [0, 1], [{"mode": "default", "dynamic": None}]),
    ],
)
def test_model_is_compiled_in_the_mode_of_the_config(
    value: bool | str,
    progressive: list[int] | None,
    expected: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Linear, "compile", lambda _, **keywords: calls.append(keywords))
    augment = AugmentConfig(progressive=ProgressiveConfig(progressive))
    compile_module(nn.Linear(2, 2), TrainConfig(compile=value), augment)
    assert calls == expected


SOFT = torch.rand(6, 5).softmax(1)
LABELS = torch.randint(0, 5, (6,))
WEIGHTS = [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("loss", "targets", "more", "kind"),
    [
        (LossConfig(label_smoothing=0.1), SOFT, {}, "none"),
        (LossConfig("bce", 0.1, WEIGHTS), LABELS, {}, "none"),
        (LossConfig("focal", class_weights=WEIGHTS), LABELS, {}, "none"),
        (LossConfig("jsd"), LABELS[:2], {"splits": 3}, "none"),
        (
            LossConfig("asymmetric"),
            SOFT.gt(0.2).float(),
            {"labels": "multi", "num_images": 6},
            "none",
        ),
        (LossConfig(), LABELS, {}, "soft"),
        (LossConfig(), LABELS, {}, "hard"),
    ],
)
def test_model_and_loss_compile_as_one_graph(
    loss: LossConfig, targets: torch.Tensor, more: dict[str, int], kind: Any
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    mean_std = ([0.5] * 3, [0.5] * 3)
    teacher = Teacher(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), mean_std, mean_std)
    criterion = build_training_loss(build_loss(loss, 5, **more), DistillConfig(kind), teacher)
    metric = SingleLabel().step_metric
    eager, compiled = (ModelWithLoss(model, criterion, metric) for _ in range(2))
    model.compile(backend="aot_eager", dynamic=False)  # as for evaluations
    compiled.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    images = torch.rand(6, 3, 2, 2)
    for divisor in (1.0, 2.0):
        results = []
        for module in (eager, compiled):
            result, loss_and_metric = module(images, targets, divisor)
            results.append(
                [loss_and_metric, *torch.autograd.grad(result, list(model.parameters()))]
            )
        torch.testing.assert_close(*results)


def test_compiling_for_a_gpu_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    compiled = TrainConfig(compile=True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: name if name == "clang" else None)
    check_compiler(compiled, gpu)
    monkeypatch.setattr("shutil.which", lambda _: None)
    check_compiler(TrainConfig(), gpu)
    check_compiler(compiled, cpu)  # where inductor finds the compiler itself
    with pytest.raises(UsageError):
        check_compiler(compiled, gpu)
    monkeypatch.setenv("CC", "/opt/bin/cc")
    check_compiler(compiled, gpu)
