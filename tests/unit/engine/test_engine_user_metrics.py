"""User-defined metrics: which objects and values are accepted, and the errors."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import arguments, fails, single_rank, succeeds, train_here

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.config.schema import Config, EvalConfig, ExpectConfig, LossConfig
from imagenet_cls.engine.evaluate import compute_results
from imagenet_cls.engine.user_metrics import values_by_field
from imagenet_cls.errors import ConfigError
from imagenet_cls.guards.agreement import user_modules
from imagenet_cls.lookup import import_from_cwd
from imagenet_cls.tasks.single_label import SingleLabel

ALONE = single_rank()
MODULE = """
import torch
from torch import nn

class Good(nn.Module):
    value = 0.5
    def __init__(self, num_classes, **values):
        super().__init__()
        self.classes = num_classes
        self.__dict__.update(values)
    def update(self, logits, targets):
        self.shapes = [*logits.shape, *targets.shape]
    def compute(self):
        return self.value
    def reset(self):
        pass

class Incomplete(Good):
    compute = reset = None

class Plain:
    def __init__(self, num_classes): pass
    compute = reset = lambda self, *_: None

def of_classes(classes): return Good(classes)
"""

PARTS = """
import torch

def own_sgd(groups, lr, weight_decay):
    return torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay)

def constant(base_lr, total_steps, steps_per_epoch):
    return lambda step: base_lr

def loss():
    return torch.nn.functional.cross_entropy

def policy():
    return lambda image: image
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_metric.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_metric"
    sys.modules.pop("own_metric", None)


def test_numbers_of_any_kind_are_values() -> None:
    results = {
        "a:f1": torch.tensor(1),
        "b.c:D.recall": np.float32(0.5),
        "d:e": {"x": 2, "y": torch.tensor(0.25)},
    }
    assert values_by_field(results, ALONE) == {"f1": 1.0, "recall": 0.5, "x": 2.0, "y": 0.25}
    assert all(type(value) is float for value in values_by_field(results, ALONE).values())


@pytest.mark.parametrize(
    "name",
    [
        "own_metric:Incomplete",
        "own_metric:Plain",
        "f1",
        "no_such:f1",
        "own_metric:of_classes",  # whose argument has another name
    ],
)
def test_unusable_metric_ends_training_at_the_start(
    own_module: str, digits: Path, tmp_path: Path, name: str
) -> None:
    words = arguments(digits, tmp_path / "run", eval__metrics=f"[{name}]")
    assert "eval.metrics: " in fails(2, train_command, *words, "--dry-run")


def test_run_folder_whose_config_names_a_metric_needs_permission(
    own_module: str, digits: Path, tmp_path: Path
) -> None:
    """Its code is not imported: a run folder may come from someone else."""
    words = arguments(digits, tmp_path / "run", train__max_steps=1)
    train_here([*words, "eval.metrics=[own_metric:Good]"])
    sys.modules.pop("own_metric")
    command = (evaluate_command, tmp_path / "run", "--allow-import", "helpers:plain")
    assert "--allow-import own_metric:Good" in fails(4, *command)
    assert "own_metric" not in sys.modules
    assert "Good 0.50000" in succeeds(*command, "--allow-import", "own_metric:Good")
    train_here([*words, "--overwrite"])
    # the command line permits it
    assert "Good 0.50000" in succeeds(*command, "eval.metrics=[own_metric:Good]")


def test_code_of_metrics_is_compared_between_ranks(own_module: str, tmp_path: Path) -> None:
    config = Config(eval=EvalConfig(metrics=["own_metric:Good"]))
    assert user_modules(config)["own_metric"] == tmp_path / "own_metric.py"
    config = Config(expect=ExpectConfig(note="own_metric:Good"), loss=LossConfig("own_metric:x"))
    assert user_modules(config).keys() == {"own_metric"}
    assert user_modules(config, training=False) == {}
    sys.modules.pop("own_metric")
    assert user_modules(replace(config, loss=LossConfig())) == {}
    assert "own_metric" not in sys.modules


def test_evaluation_needs_only_the_code_of_model_data_and_metrics(
    own_module: str, digits: Path
) -> None:
    """The images are in a folder whose name looks like the name of a factory."""
    Path("x:y").symlink_to(digits)
    Path("own_parts.py").write_text(PARTS)
    names = {"optimizer": "own_sgd", "schedule": "constant", "loss": "loss"}
    parts = {f"{section}__name": f"own_parts:{name}" for section, name in names.items()}
    parts["augment__policy"] = "own_parts:policy"
    train_here(arguments("x:y", "run", **parts, train__max_steps=1))
    Path("own_parts.py").unlink()
    sys.modules.pop("own_parts")
    for run in (["run"], ["run/config.yaml", "run"]):
        assert "raw: " in succeeds(evaluate_command, *run, "--allow-import", "helpers:plain")


def test_names_and_values_that_can_not_be_reported() -> None:
    taken = {"top1_pct": 1.0}
    for result in ({"a\nb": 1.0}, {"large": 10**400}, "high", torch.zeros(2), taken):
        with pytest.raises(ConfigError, match=r"eval\.metrics"):
            values_by_field({"a:b": result}, ALONE)
    with pytest.raises(ConfigError, match=r"eval\.metrics: 'a:c'"):
        values_by_field({"a:b": 1.0, "a:c": {"b": 1.0}}, ALONE)


def test_metric_that_changes_its_arguments_changes_no_result(own_module: str) -> None:
    class Erasing(import_from_cwd(own_module).Good):  # type: ignore[misc]
        def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
            logits.zero_(), targets.zero_()

    batch = torch.eye(3), torch.arange(3), torch.arange(3)
    outputs = [({"raw": batch[0], "ema": batch[0]}, *batch[1:])]
    metrics = {name: {"Erasing": Erasing(3)} for name in ("raw", "ema")}
    results = compute_results(outputs, ["raw", "ema"], ALONE, 3, SingleLabel(), metrics)
    assert [result["top1_pct"] for result in results.values()] == [100, 100]
