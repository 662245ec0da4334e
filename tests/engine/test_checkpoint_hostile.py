"""Checkpoints from an attacker, through every command that reads one: their code never runs, and
costs no memory.

The canary is a file that appears when that code runs.
"""

import argparse
import json
import os
import pickle
import resource
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_writers import write_tar
from helpers import arguments, edit_state, fails, newest, read_weights, succeeds, train_here
from safetensors.torch import load_file, save_file

from imagenet_cls.checkpoint.format import read_checkpoint, write_manifest
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.errors import CheckpointError

CANARY = "canary"
# A module of the attacker's: importing it creates the canary.
MODULE = f"""
from pathlib import Path
import helpers
Path({CANARY!r}).touch()
def build(num_classes, **kwargs):
    return helpers.plain(num_classes)
"""


@pytest.fixture(autouse=True)
def attacker_in_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """As if the attacker's module was unpacked with the checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "attacker.py").write_text(MODULE)
    yield
    sys.modules.pop("attacker", None)


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `helpers:plain`."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_here(arguments(digits, folder, train__max_steps=1))
    return newest(folder)


@pytest.fixture
def commands(digits: Path, tmp_path: Path) -> Callable[[Path], dict[str, list[Any]]]:
    """A function that returns, for weights, each command that reads them. The user trusts
    `helpers:plain`.
    """

    def commands_for(weights: Path) -> dict[str, list[Any]]:
        words = arguments(digits, tmp_path / "run", train__max_steps=1)
        train = [train_command, *words, "--overwrite"]
        image = next((digits / "train" / "7").glob("*.jpg"))
        return {
            "test": [evaluate_command, *words[:-2], weights],
            "predict": [predict_command, weights, image, "--allow-import", "helpers:plain"],
            "model.checkpoint": [*train, f"model.checkpoint={weights}"],
            "--resume-from": [*train, "--resume-from", weights],
        }

    return commands_for


def changed(
    trained: Path,
    folder: Path,
    imports: list[str] | None = None,
    section: str = "",
    values: dict[str, Any] | None = None,
    **model: Any,
) -> Path:
    """A copy of the checkpoint with other values in its config or in a section of its state;
    digests match.
    """

    def edit(state: dict[str, Any]) -> None:
        state["config"]["model"] |= model
        state["config"]["imports"] = imports or []
        part = state[section] if section else state
        for key, value in (values or {}).items():
            part[key] = part[key] | value if section == "config" else value

    shutil.copytree(trained, folder)
    edit_state(folder, edit)
    return folder


# ---- the config inside

ATTACKS: dict[str, dict[str, Any]] = {
    "os:system": {"name": "os:system", "kwargs": {"command": f"touch {CANARY}"}},
    "attacker:build": {"name": "attacker:build"},
    "attacker": {"imports": ["attacker"]},
    "helpers:subprocess.run": {
        "name": "helpers:subprocess.run",
        "kwargs": {"args": ["touch", CANARY]},
    },
    "hf-hub:someone/model": {"name": "hf-hub:someone/model"},
    "local-dir:.": {"name": "local-dir:."},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_code_named_by_a_checkpoint_is_not_run(
    name: str, trained: Path, tmp_path: Path, commands: Callable
) -> None:
    checkpoint = changed(trained, tmp_path / "changed", **ATTACKS[name])
    for command in ("test", "predict"):
        assert repr(name) in fails(4, *commands(checkpoint)[command])
    assert not Path(CANARY).exists()


def test_commands_that_only_read_weights_run_no_code(
    trained: Path, tmp_path: Path, commands: Callable
) -> None:
    """Initial weights, a teacher and --resume-from: the model is that of the user's config."""
    checkpoint = changed(trained, tmp_path / "changed", ["attacker"], name="attacker:build")
    command = commands(checkpoint)
    teacher = ["distill.kind=soft", "distill.teacher.name=helpers:plain"]
    teacher.append(f"distill.teacher.checkpoint={checkpoint}")
    succeeds(*command["model.checkpoint"], *teacher)
    fails(4, *command["--resume-from"])  # another model.name
    succeeds(*command["--resume-from"], "--allow-change", "model.name")
    assert not Path(CANARY).exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attacker:build", "--allow-import attacker:build"),
        ("attacker:build", "model.name=attacker:build"),
        ("attacker", "--allow-import attacker"),
    ],
)
def test_code_allowed_by_the_user_is_run(
    name: str, words: str, trained: Path, tmp_path: Path, commands: Callable
) -> None:
    """This also shows that the canary works."""
    checkpoint = changed(trained, tmp_path / "changed", **ATTACKS[name])
    succeeds(*commands(checkpoint)["test"], *words.split())
    assert Path(CANARY).exists()


NESTED = json.loads("[" * 300 + "]" * 300)
# Section of `state.json`, other values in it, and the commands that use them.
ODD_VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("preprocessing", {"mean": []}, "test predict model.checkpoint"),
    ("preprocessing", {"std": [0, 0, 0]}, "test predict model.checkpoint"),
    (
        "config",
        {"model": {"name": "test_resnet", "kwargs": {"global_pool": "evil"}}},
        "test predict",
    ),
    ("config", {"model": {"name": "helpers:plain", "kwargs": {"width": -1}}}, "test predict"),
    ("config", {"data": {"kwargs": {"x": NESTED}}}, "test predict"),
    ("", {"classes": 10}, "test predict model.checkpoint"),
    ("config", {"eval": {"crop_px": 20}}, "predict"),
]


@pytest.mark.parametrize(("section", "values", "users"), ODD_VALUES)
def test_odd_values_with_matching_digests_exit_with_4(
    section: str,
    values: dict[str, Any],
    users: str,
    trained: Path,
    tmp_path: Path,
    commands: Callable,
) -> None:
    folder = changed(
        trained, tmp_path / "odd", section=section, values=values, name="helpers:plain"
    )
    for user in users.split():
        assert "odd" in fails(4, *commands(folder)[user]), user


def test_no_weights_that_a_checkpoint_names_are_loaded(
    trained: Path,
    tmp_path: Path,
    commands: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *address, **_: asked.append(address) or [])
    for model, key in (
        ("torchvision:deeplabv3_resnet50", "weights_backbone"),
        ("torchvision:resnet18", "weights"),
        ("resnet18", "checkpoint_path"),
    ):
        folder = changed(trained, tmp_path / key, name=model, kwargs={key: "DEFAULT"})
        err = fails(4, *commands(folder)["predict"])
    assert "model.kwargs.checkpoint_path" in err and asked == []


# ---- pickles and headers


class Hostile:
    """Unpickling it runs a command."""

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.system, (f"touch {CANARY}",)


def write_pickle(name: str, trained: Path, folder: Path) -> Path:
    """.pkl: a plain pickle. .tar: as of torch before 0.1.10. Others: as of torch."""
    state = load_file(trained / "model.safetensors")
    options = argparse.Namespace(optimizer=[{"hook": Hostile()}])
    content = {"state_dict": state, "args": options}
    path, pickled = folder / name, pickle.dumps(content, protocol=2)
    if path.suffix == ".pkl":
        path.write_bytes(pickled)
    elif path.suffix == ".tar":
        members = ("sys_info", "pickle", "storages", "tensors")
        write_tar(path, [(member, pickled) for member in members])
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize("name", ["tar.pth.tar", "plain.pkl", "zip.safetensors"])
def test_hostile_pickle_is_never_run(
    name: str, trained: Path, tmp_path: Path, commands: Callable
) -> None:
    err = fails(4, *commands(write_pickle(name, trained, tmp_path))["test"])
    assert name in err and not Path(CANARY).exists(), err


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_hostile_pickle_through_every_command_exits_with_4(
    kind: str, trained: Path, tmp_path: Path, commands: Callable
) -> None:
    if kind == "file":
        weights = write_pickle("zip.pt", trained, tmp_path)
    else:
        weights = Path(shutil.copytree(trained, tmp_path / "folder"))
        torch.save({"weight": Hostile()}, weights / "model.safetensors")
        write_manifest(weights)
    for command in commands(weights).values():
        assert str(weights) in fails(4, *command)
    assert not Path(CANARY).exists()


def safetensors_header(**tensor: Any) -> bytes:
    text = json.dumps({"a": tensor}).encode()
    return struct.pack("<Q", len(text)) + text


TIB = 2**40
FALSE_SIZES = {
    "header beyond the end": struct.pack("<Q", 1 << 60) + b"{}",
    "tensor beyond the end": safetensors_header(
        dtype="F32", shape=[TIB // 4], data_offsets=[0, TIB]
    ),
    "shape that overflows": safetensors_header(dtype="F32", shape=[TIB] * 9, data_offsets=[0, 4])
    + bytes(4),
    "deep nesting": struct.pack("<Q", 200_000) + b'{"a":' + b"[" * 199_995,
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """At most 100 MB more than this process has by now."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + 100_000_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("content", FALSE_SIZES.values(), ids=FALSE_SIZES.keys())
def test_safetensors_header_with_wrong_sizes_is_an_error_and_costs_no_memory(
    content: bytes, trained: Path, tmp_path: Path, little_memory: None
) -> None:
    """Alone, and in a checkpoint folder with digests that match."""
    (tmp_path / "weights.safetensors").write_bytes(content)
    folder = Path(shutil.copytree(trained, tmp_path / "folder"))
    (folder / "model.safetensors").write_bytes(content)
    write_manifest(folder)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        read_weights(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="folder: invalid content"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"crop_px": 100_000},
        {"crop_px": 1000, "crop_pct": 0.01, "resize_px": None},
        {"crop_px": 0},
    ],
    ids=str,
)
def test_sizes_of_images_out_of_range_exit_with_4(
    values: dict[str, Any],
    trained: Path,
    tmp_path: Path,
    commands: Callable,
    little_memory: None,
) -> None:
    folder = changed(
        trained, tmp_path / "odd", section="config", values={"eval": values}, name="helpers:plain"
    )
    assert "odd" in fails(4, *commands(folder)["predict"])


def test_weights_of_another_model_through_every_command_exit_with_4(
    trained: Path, tmp_path: Path, commands: Callable
) -> None:
    renamed = Path(shutil.copytree(trained, tmp_path / "renamed"))
    state = load_file(trained / "model.safetensors")
    other_names = {name.replace("0.", "first."): value for name, value in state.items()}
    save_file(other_names, renamed / "model.safetensors")
    write_manifest(renamed)
    counts = "2 missing (0.weight, 0.bias); 2 unexpected"
    for name in ("test", "predict", "model.checkpoint", "--resume-from"):
        assert counts in fails(4, *commands(renamed)[name]), name
