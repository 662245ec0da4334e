"""The initial weights of a run: needed once, and never removed by the run."""

import hashlib
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
import timm
import torch
from helpers import arguments, fails, newest, state_digest, succeeds, train_here
from timm.data import IMAGENET_DEFAULT_MEAN

from imagenet_cls.commands.train import train_command
from imagenet_cls.config.schema import Config, DataConfig, ModelConfig
from imagenet_cls.data.classes import class_difference
from imagenet_cls.engine import training_model as engine_model
from imagenet_cls.engine.training_model import build_initial_model
from imagenet_cls.errors import UsageError


def files(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def first(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "first"
    train_here(arguments(digits, folder, train__max_steps=3))
    return folder


@pytest.mark.parametrize("key", ["model.checkpoint", "--resume-from"])
def test_resume_without_the_initial_weights_gives_the_same_bits(
    first: Path, digits: Path, tmp_path: Path, key: str
) -> None:
    start = Path(shutil.copytree(first, tmp_path / "start"))

    def words(folder: str, *more: str, steps: int = 8) -> list[str]:
        named = [key, str(start)] if key.startswith("--") else [f"{key}={start}"]
        return [
            *arguments(
                digits, tmp_path / folder, checkpoint__every_steps=4, train__max_steps=steps
            ),
            *named,
            *more,
        ]

    train_here(words("whole"))
    train_here(words("parts", steps=5))
    shutil.rmtree(start)
    train_here(words("parts", "--resume"))
    assert state_digest(tmp_path / "parts") == state_digest(tmp_path / "whole")


@pytest.mark.parametrize(
    ("key", "inside"),
    [
        ("model.checkpoint", ""),
        ("distill.teacher.checkpoint", "checkpoints"),
        ("--resume-from", "checkpoints/step-0000003/model.safetensors"),
    ],
)
def test_overwrite_of_the_initial_weights_is_an_error(
    first: Path, digits: Path, key: str, inside: str
) -> None:
    before = files(first)
    named = [key, str(first / inside)] if key.startswith("--") else [f"{key}={first / inside}"]
    if key.startswith("distill"):
        named += ["distill.kind=soft", "distill.teacher.name=helpers:plain"]
    with pytest.raises(
        UsageError,
        match=rf"^{key}: .* is in .*--overwrite would "
        rf"remove\.\n.*--work-dir",
    ):
        train_here([*arguments(digits, first), *named, "--overwrite"])
    assert files(first) == before


def test_overwrite_keeps_other_files_of_the_run_folder(
    first: Path, digits: Path, tmp_path: Path
) -> None:
    """A run removes only what runs write."""
    folder = Path(shutil.copytree(first, tmp_path / "run"))
    kept = folder / "mine.safetensors"
    shutil.copy(newest(folder) / "model.safetensors", kept)
    words = arguments(digits, folder, train__max_steps=1, **{"model.checkpoint": kept})
    train_here([*words, "--overwrite"])
    assert kept.exists() and newest(folder).name == "step-0000001"


def test_average_in_a_file_is_used_and_reported(tmp_path: Path) -> None:
    trained = timm.create_model("test_resnet", num_classes=10).state_dict()
    average = {name: value + 1 for name, value in trained.items()}
    path = tmp_path / "last.pth.tar"
    torch.save({"state_dict": trained, "state_dict_ema": average}, path)
    config = ModelConfig(name="test_resnet", num_classes=10, checkpoint=str(path))
    origin = f"{path} (its average state_dict_ema, not state_dict): loaded {len(average)} tensors"

    started, messages = build_initial_model(Config(model=config), 10)
    assert messages == [f"starts from the weights of {origin}"]
    assert all(torch.equal(started.state_dict()[name], value) for name, value in average.items())


def test_mismatch_with_the_initial_weights_is_reported(
    first: Path, digits: Path, tmp_path: Path
) -> None:
    def said(*words: str, root: Path = digits) -> list[str]:
        start = arguments(root, tmp_path / "run", **{"model.checkpoint": first})
        lines = succeeds(train_command, *start, *words, "--dry-run").splitlines()
        return [line for line in lines if "the initial weights" in line]

    assert said() == []
    assert said("data.mean=[0.5,0.5,0.5]") == [
        "the initial weights were trained with data.mean=[0.485, 0.456, 0.406] data.std=[0.229, "
        "0.224, 0.225], "
        "and this run uses data.mean=[0.5, 0.5, 0.5] data.std=[0.229, 0.224, 0.225]"
    ]
    renamed = Path(shutil.copytree(digits, tmp_path / "renamed"))
    (renamed / "train" / "3").rename(renamed / "train" / "three")
    (message,) = said("data.name=folder", "data.val=null", "data.val_fraction=0.2", root=renamed)
    assert message.endswith("class 3 was '3' there and is '4' here")
    difference = class_difference(["caf\u00e9"], ["cafe\u0301"])  # which look alike
    assert difference == r"class 0 was 'caf\xe9' there and is 'cafe\u0301' here"


def test_mismatch_with_published_weights_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm states the mean of its weights; a recipe that was written for another model names its
    own.
    """
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32)
    monkeypatch.setattr(engine_model, "build_model", lambda *_: vit)
    model = ModelConfig(name="vit_tiny_patch16_224", pretrained=True)
    assert len(build_initial_model(Config(model=model), 10)[1]) == 1
    _, message = build_initial_model(
        Config(model=model, data=DataConfig(mean=list(IMAGENET_DEFAULT_MEAN))), 10
    )[1]
    assert (
        "data.mean=[0.5, 0.5, 0.5] data.std=[0.5, 0.5, 0.5], and this run uses data.mean=[0.485"
        in message
    )


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
    state = timm.create_model("test_resnet", num_classes=10).state_dict()
    torch.save(state, tmp_path / "net.pth")
    digest = hashlib.sha256((tmp_path / "net.pth").read_bytes()).hexdigest()
    by_hash = "DIGEST" in name
    name = name.replace("DIGEST", digest[:16])
    (tmp_path / "net.pth").rename(tmp_path / "served" / name)
    config = Config(
        model=ModelConfig(name="test_resnet", num_classes=10, checkpoint=f"{server}/{name}")
    )
    for _ in range(2):
        started, (message,) = build_initial_model(config, 10)
        assert f"loaded {len(state)} tensors" in message
        assert all(torch.equal(started.state_dict()[key], value) for key, value in state.items())
    words = [
        *arguments(digits, tmp_path / "run", **{"model.name": "test_resnet"}),
        f"model.checkpoint={server}/{name}",
    ]
    succeeds(train_command, *words, "--dry-run")
    assert Handler.requested == [f"/{name}"]
    other = "other-0123abcd.pth" if by_hash else "other/checkpoint.pth"
    (tmp_path / "served" / "other").mkdir()
    (tmp_path / "served" / other).write_bytes(b"no weights")
    err = fails(4, train_command, *words[:-1], f"model.checkpoint={server}/{other}", "--dry-run")
    assert Path(other).name in err and ("invalid hash" in err) == by_hash


def test_initial_weights_of_a_url_without_network_are_a_resource_error(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for key in ("model", "distill.teacher"):
        words = [f"{key}.checkpoint=http://127.0.0.1:9/net.pth"]  # nothing listens there
        if key != "model":
            words += ["distill.kind=soft", "distill.teacher.name=helpers:plain"]
        err = fails(5, train_command, *arguments(digits, tmp_path / "run"), *words, "--dry-run")
        assert "http://127.0.0.1:9/net.pth" in err
    assert not [path for path in (tmp_path / "hub").rglob("*") if path.is_file()]
