"""`train.compile`: which values are read, and how model and loss are compiled."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from imagenet_cls.config.load import config_from_dict, load_config
from imagenet_cls.config.schema import DistillConfig, LossConfig
from imagenet_cls.engine.build import check_compiler, compile_module
from imagenet_cls.engine.model_with_loss import ModelWithLoss
from imagenet_cls.errors import UsageError
from imagenet_cls.models.teacher import Teacher
from imagenet_cls.optim.losses import build_loss, build_training_loss

STATIC, AUTOMATIC = {"dynamic": False}, {"dynamic": None}


@pytest.mark.parametrize(
    ("words", "value", "expected"),
    [
        (["train.compile=false"], False, []),
        (["train.compile=true"], True, [{"mode": "default", **STATIC}]),
        (["train.compile=max-autotune"], "max-autotune", [{"mode": "max-autotune", **STATIC}]),
        (
            [
                "train.compile=default",
                "augment.progressive.epochs=[0,1]",
                "augment.progressive.sizes_px=[32,64]",
                "augment.size_px=64",
            ],
            "default",
            [{"mode": "default", **AUTOMATIC}],
        ),
    ],
)
def test_model_is_compiled_in_the_mode_of_the_config(
    words: list[str],
    value: bool | str,
    expected: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, calls = load_config(None, words).config, []
    assert config.train.compile == value and config_from_dict(asdict(config)) == config
    monkeypatch.setattr(nn.Linear, "compile", lambda _, **keywords: calls.append(keywords))
    compile_module(nn.Linear(2, 2), config.train, config.augment)
    assert calls == expected


SOFT = torch.rand(6, 5).softmax(1)
LABELS = torch.randint(0, 5, (6,))


@pytest.mark.parametrize(
    ("loss", "targets", "more", "kind"),
    [
        (LossConfig(label_smoothing=0.1), SOFT, {}, "none"),
        (LossConfig("bce", 0.1, [1.0, 2.0, 3.0, 4.0, 5.0]), LABELS, {}, "none"),
        (LossConfig("focal", class_weights=[1.0, 2.0, 3.0, 4.0, 5.0]), LABELS, {}, "none"),
        (LossConfig("jsd"), LABELS[:2], {"splits": 3}, "none"),
        (LossConfig("asymmetric"), SOFT.gt(0.2).float(), {"images": 6}, "none"),
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
    eager, compiled = ModelWithLoss(model, criterion), ModelWithLoss(model, criterion)
    model.compile(backend="aot_eager", dynamic=False)  # as for evaluations
    compiled.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    images = torch.rand(6, 3, 2, 2)
    for divisor in (1.0, 2.0):
        results = []
        for module in (eager, compiled):
            result, loss_and_top1 = module(images, targets, divisor)
            results.append([loss_and_top1, *torch.autograd.grad(result, list(model.parameters()))])
        torch.testing.assert_close(*results)


def test_compiling_for_a_gpu_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    compiled, eager = (
        load_config(None, [f"train.compile={value}"]).config.train for value in ("true", "false")
    )
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name == "clang" else None)
    check_compiler(compiled, gpu)
    monkeypatch.setattr("shutil.which", lambda _: None)
    # for CPUs inductor finds the compiler itself
    for train, device in ((eager, gpu), (compiled, cpu)):
        check_compiler(train, device)
    with pytest.raises(UsageError, match="needs a C compiler"):
        check_compiler(compiled, gpu)
    monkeypatch.setenv("CC", "/opt/bin/cc")
    check_compiler(compiled, gpu)
