"""The initial weights of a run: needed once, and never removed by the run."""

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
import timm
import torch
from helpers import arguments, fails, state_digest, succeeds, train_here
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


class Handler(SimpleHTTPRequestHandler):
    requested: ClassVar[list[str]] = []

    def log_message(self, *_: object) -> None:
        self.requested.append(self.path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of the folder `served`."""
    (tmp_path / "served").mkdir()
    Handler.requested.clear()
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=tmp_path / "served")
    ) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize("name", ["net-DIGEST.pth", "checkpoint.pth", "net-20230115.pth"])
def test_initial_weights_of_a_url_are_downloaded_once(
    server: str,
    name: str,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    served = tmp_path / "served"
    network = timm.create_model("test_resnet", num_classes=10)
    torch.save(network.state_dict(), served / "net.pth")
    digest = hashlib.sha256((served / "net.pth").read_bytes()).hexdigest()
    by_hash = "DIGEST" in name
    name = name.replace("DIGEST", digest[:16])
    (served / "net.pth").rename(served / name)
    words = [*arguments(digits, tmp_path / "run", **{"model.name": "test_resnet"}), "--dry-run"]
    for _ in range(2):
        out = succeeds(train_command, *words, f"model.checkpoint={server}/{name}")
        assert f"/{name} (raw): loaded 92 tensors" in out
    assert Handler.requested == [f"/{name}"]
    other = "other-0123abcd.pth" if by_hash else "other.pth"
    (served / other).write_bytes(b"no weights")
    err = fails(4, train_command, *words, f"model.checkpoint={server}/{other}")
    assert other in err and ("invalid hash" in err) == by_hash
