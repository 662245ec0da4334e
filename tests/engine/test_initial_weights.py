"""The initial weights of a run: needed once, and never removed by the run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import timm
from helpers import arguments, state_digest, succeeds, train_here
from timm.data import IMAGENET_DEFAULT_MEAN

from imagenet_cls.commands.train import train_command
from imagenet_cls.config.schema import Config, DataConfig, ModelConfig
from imagenet_cls.data.classes import class_difference
from imagenet_cls.engine import training_model as engine_model
from imagenet_cls.engine.training_model import build_initial_model


@pytest.fixture(scope="module")
def first(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "first"
    train_here(arguments(digits, folder, train__max_steps=3))
    return folder


@pytest.mark.parametrize("key", ["model.checkpoint=", "--resume-from="])
def test_resume_without_the_initial_weights_gives_the_same_bits(
    first: Path, digits: Path, tmp_path: Path, key: str
) -> None:
    start = Path(shutil.copytree(first, tmp_path / "start"))

    def train(folder: str, steps: int, *more: str) -> None:
        changes = {"checkpoint__every_steps": 4, "train__max_steps": steps}
        train_here([*arguments(digits, tmp_path / folder, **changes), f"{key}{start}", *more])

    train("whole", 8)
    train("parts", 5)
    shutil.rmtree(start)
    train("parts", 8, "--resume")
    assert state_digest(tmp_path / "parts") == state_digest(tmp_path / "whole")


def test_mismatch_with_the_initial_weights_is_reported(
    first: Path, digits: Path, tmp_path: Path
) -> None:
    def said(*words: str, root: Path = digits) -> list[str]:
        start = arguments(root, tmp_path / "run", **{"model.checkpoint": first})
        lines = succeeds(train_command, *start, *words, "--dry-run").splitlines()
        return [line for line in lines if "initial weights were" in line or "head" in line]

    assert said() == []
    (message,) = said("data.mean=[0.5,0.5,0.5]")
    assert "data.mean=[0.485, 0.456, 0.406]" in message and "data.mean=[0.5, 0.5, 0.5]" in message
    renamed = Path(shutil.copytree(digits, tmp_path / "renamed"))
    (renamed / "train" / "3").rename(renamed / "train" / "three")
    (message,) = said("data.name=folder", "data.val=null", "data.val_fraction=0.2", root=renamed)
    assert message.endswith("class 3 was '3' there and is '4' here")
    assert class_difference(("a", "b", "c"), ("b", "c"))  # with model.num_classes=3


def test_mismatch_with_published_weights_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm states the mean of its weights; a recipe that was written for another model names its
    own.
    """
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32)
    monkeypatch.setattr(engine_model, "build_model", lambda *_: vit)
    config = Config(model=ModelConfig(name="vit_tiny_patch16_224", pretrained=True))
    assert len(build_initial_model(config, 10)[1]) == 1
    other = replace(config, data=DataConfig(mean=list(IMAGENET_DEFAULT_MEAN)))
    _, message = build_initial_model(other, 10)[1]
    assert "data.mean=[0.5, 0.5, 0.5]" in message and "data.mean=[0.485" in message
