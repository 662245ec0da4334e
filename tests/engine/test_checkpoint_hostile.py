"""Checkpoints from an attacker, through every tool that reads one: their code never runs, and costs no memory.

The canary is a file that appears when that code runs.
"""

import argparse
import io
import json
import os
import pickle
import resource
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEMO, arguments, newest, train_here
from safetensors.torch import load_file, save_file

from imagenet_cls.checkpoint.format import read_checkpoint, write_manifest
from imagenet_cls.commands.average_checkpoints import average_command
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.program import main
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.weights import read_weights
from imagenet_cls.report.log import close_log

CANARY = "canary"
# A module of the attacker's: importing it creates the canary.
MODULE = f"""
from pathlib import Path
import helpers
Path({CANARY!r}).touch()
def build(num_classes, **kwargs):
    return helpers.plain(num_classes)
"""
MIB = 2**20


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder with the attacker's modules, as if unpacked with the checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("attacker", "hubconf"):
        (tmp_path / f"{name}.py").write_text(MODULE)
    yield
    close_log()
    sys.modules.pop("attacker", None)


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_here(arguments(digits, folder, train__max_steps=1))
    close_log()
    return newest(folder)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a tool in this process: exit code and stderr, of at most three lines."""

    def here(command: Callable, *words: Any) -> tuple[int, str]:
        capsys.readouterr()
        code = main(command, [str(word) for word in words])
        err = capsys.readouterr().err
        assert len(err.splitlines()) <= 3, err
        return code, err

    return here


def forged(trained: Path, folder: Path, imports: list[str] | None = None, **model: Any) -> Path:
    """A copy with another config, and digests that match."""
    shutil.copytree(trained, folder)
    state = json.loads((folder / "state.json").read_text())
    state["config"]["model"] |= model
    state["config"]["imports"] = imports or []
    (folder / "state.json").write_text(json.dumps(state))
    return sealed(folder)


def sealed(folder: Path) -> Path:
    write_manifest(folder)
    return folder


def evaluation(digits: Path, *more: Any) -> list[Any]:
    """Arguments of test.py, with a config that names the user's model."""
    sizes = ["augment.size_px=16", "eval.crop_px=16"]
    return [DEMO, "model.name=helpers:plain", f"data.root={digits}", "data.num_workers=0", *sizes, *more]


def an_image(digits: Path) -> Path:
    return next((digits / "train" / "7").glob("*.jpg"))


# ------------------------------------------------------------------------------------ what its config would call

ATTACKS: dict[str, dict[str, Any]] = {
    "os:system": {"name": "os:system", "kwargs": {"command": f"touch {CANARY}"}},
    "torch.hub:load": {"name": "torch.hub:load", "kwargs": {"repo_or_dir": ".", "model": "build", "source": "local"}},
    "attacker:build": {"name": "attacker:build"},
    "attacker": {"imports": ["attacker"]},
    "helpers:subprocess.run": {
        "name": "helpers:subprocess.run",
        "kwargs": {"args": ["touch", CANARY]},
    },  # helpers:plain is trusted
    "hf-hub:someone/model": {"name": "hf-hub:someone/model"},
    "local-dir:.": {"name": "local-dir:."},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_factory_named_by_a_checkpoint_is_not_called(
    name: str, trained: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    changes = {"name": "helpers:plain", **ATTACKS[name]}
    checkpoint = forged(trained, tmp_path / "forged", **changes)
    trusting = ["--allow-import", "helpers:plain"]
    for code, err in (
        call(predict_command, checkpoint, an_image(digits), *trusting),
        call(evaluate_command, *evaluation(digits, checkpoint)),
    ):
        assert code == 4 and repr(name) in err and "nothing was run" in err, err
    assert not Path(CANARY).exists()


@pytest.mark.nightly
def test_tools_that_read_weights_alone_call_nothing(
    trained: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    """Averaging, a start from weights, a teacher, and going on, which refuses another model."""
    one, two = (forged(trained, tmp_path / name, ["attacker"], name="attacker:build") for name in ("one", "two"))
    assert call(average_command, one, two, "--out", tmp_path / "average") == (0, "")
    words = arguments(digits, tmp_path / "run", train__max_steps=1)
    assert call(train_command, *words, f"model.checkpoint={one}") == (0, "")
    teacher = ["distill.kind=soft", "distill.teacher.name=helpers:plain", f"distill.teacher.checkpoint={one}"]
    assert call(train_command, *words, *teacher, "--overwrite") == (0, "")
    code, err = call(train_command, *words, "--overwrite", "--resume-from", one)
    assert code == 4 and "attacker:build" in err and "--allow-change model.name" in err
    # Allowed, it is the config's own model that is built; the checkpoint's is only compared.
    allowed = ["--allow-change", "model.name"]
    assert call(train_command, *words, "--overwrite", "--resume-from", one, *allowed) == (0, "")
    assert not Path(CANARY).exists()
    code, _ = call(predict_command, tmp_path / "average", an_image(digits))
    assert code == 4 and not Path(CANARY).exists()


@pytest.mark.parametrize("way", ["predict", "test", "test, by its config"])
@pytest.mark.nightly
def test_factory_allowed_by_the_user_is_called(
    way: str, trained: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    """Which also shows that the canary works."""
    checkpoint = forged(trained, tmp_path / "forged", name="attacker:build")
    allowed = ["--allow-import", "attacker:build"]
    words = [str(word) for word in evaluation(digits, checkpoint)]
    command, words = {
        "predict": (predict_command, [checkpoint, an_image(digits), *allowed]),
        "test": (evaluate_command, [*words, *allowed]),
        "test, by its config": (evaluate_command, [word.replace("helpers:plain", "attacker:build") for word in words]),
    }[way]
    assert call(command, *words) == (0, "")
    assert Path(CANARY).exists()


def test_model_kwargs_that_load_files_are_an_error(trained: Path, digits: Path, tmp_path: Path, call: Callable) -> None:
    kwargs = {"checkpoint_path": "elsewhere.pth"}
    checkpoint = forged(trained, tmp_path / "forged", name="resnet18", kwargs=kwargs)
    code, err = call(predict_command, checkpoint, an_image(digits))
    assert code == 4 and "model.kwargs.checkpoint_path" in err


# ------------------------------------------------------------------------------------------- pickles and headers


class Hostile:
    """Unpickling it runs a command."""

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.system, (f"touch {CANARY}",)


def old_tar(content: Any, path: Path) -> None:
    """What torch wrote before 0.1.10: a tar of pickles."""
    with tarfile.open(path, "w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            data = pickle.dumps(content, protocol=2)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def hostile_files(state: dict[str, torch.Tensor], folder: Path) -> dict[str, Path]:
    nested = {"state_dict": state, "args": argparse.Namespace(optimizer=[{"hook": Hostile()}])}
    torch.save({"state_dict": state, "extra": Hostile()}, folder / "zip.pt")
    torch.save(nested, folder / "args.pth.tar")
    torch.save({"model": Hostile()}, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    old_tar({"state_dict": state, "extra": Hostile()}, folder / "old.tar")
    (folder / "plain.pkl").write_bytes(pickle.dumps(Hostile(), protocol=2))
    (folder / "newer.pkl").write_bytes(pickle.dumps(Hostile(), protocol=4))
    shutil.copy(folder / "zip.pt", folder / "renamed.safetensors")
    shutil.copy(folder / "legacy.pth", folder / "legacy.safetensors")
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix != ".py"]
    return {path.name: path for path in files}


@pytest.mark.nightly
def test_hostile_pickle_through_every_tool_is_never_run(
    trained: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    state = load_file(trained / "model.safetensors")
    good = trained / "model.safetensors"
    words = arguments(digits, tmp_path / "run", train__max_steps=1)
    files = hostile_files(state, tmp_path)
    assert len(files) == 8
    for name, path in files.items():
        ends = {
            "model.checkpoint": call(train_command, *words, f"model.checkpoint={path}"),
            "test.py": call(evaluate_command, *evaluation(digits, path)),
            "average": call(average_command, good, path, "--out", tmp_path / "average.safetensors"),
            "predict.py": call(predict_command, path, an_image(digits)),
            "--resume-from": call(train_command, *words, "--resume-from", path),
        }
        for way, (code, err) in ends.items():
            assert code == 4 and name in err, (way, err)
        assert not Path(CANARY).exists(), name
    assert not (tmp_path / "average.safetensors").exists()
    torch.load(tmp_path / "zip.pt", weights_only=False)
    assert Path(CANARY).exists()  # the canary works


def test_hostile_pickle_is_never_run(trained: Path, digits: Path, tmp_path: Path, call: Callable) -> None:
    """One file of each kind, through one tool; in a checkpoint folder, too."""
    for name, path in hostile_files(load_file(trained / "model.safetensors"), tmp_path).items():
        code, err = call(evaluate_command, *evaluation(digits, path))
        assert code == 4, (name, err)
    checkpoint = tmp_path / "folder"
    shutil.copytree(trained, checkpoint)
    torch.save({"weight": Hostile()}, checkpoint / "model.safetensors")
    code, err = call(evaluate_command, *evaluation(digits, sealed(checkpoint)))
    assert code == 4 and str(checkpoint) in err
    assert not Path(CANARY).exists()


@pytest.mark.nightly
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "ema.safetensors"])
def test_hostile_pickle_in_a_checkpoint_folder_is_never_run(
    file: str, trained: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    checkpoint = tmp_path / "folder"
    shutil.copytree(trained, checkpoint)
    torch.save({"weight": Hostile()}, checkpoint / file)
    sealed(checkpoint)
    words = arguments(digits, tmp_path / "run", train__max_steps=1)
    for code, err in (
        call(predict_command, checkpoint, an_image(digits), "--allow-import", "helpers:plain"),
        call(evaluate_command, *evaluation(digits, checkpoint)),
        call(average_command, trained, checkpoint, "--out", tmp_path / "average"),
        call(train_command, *words, "--resume-from", checkpoint),
        call(train_command, *words, f"model.checkpoint={checkpoint}"),
    ):
        assert code == 4 and str(checkpoint) in err, err
    assert not Path(CANARY).exists()


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


TIB = 2**40
LIES = {
    "a header without an end": struct.pack("<Q", 1 << 60) + b"{}",
    "a header of a gigabyte": struct.pack("<Q", 1 << 30) + b"{" + b" " * 100,
    "a terabyte beyond the end": header(a={"dtype": "F32", "shape": [TIB // 4], "data_offsets": [0, TIB]}),
    "a terabyte in four bytes": header(a={"dtype": "F32", "shape": [TIB], "data_offsets": [0, 4]}) + bytes(4),
    "more than can be counted": header(a={"dtype": "F32", "shape": [TIB] * 9, "data_offsets": [0, 4]}) + bytes(4),
    "backwards": header(a={"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}) + bytes(4),
    "nested for ever": struct.pack("<Q", 200_000) + b'{"a":' + b"[" * 199_995,
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A hundred megabytes more than this process has by now."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + 100 * MIB, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("lie", LIES)
def test_false_safetensors_header_costs_no_memory(lie: str, trained: Path, tmp_path: Path, little_memory: None) -> None:
    """Alone, and in a checkpoint folder with digests that fit."""
    (tmp_path / "weights.safetensors").write_bytes(LIES[lie])
    folder = tmp_path / "folder"
    shutil.copytree(trained, folder)
    (folder / "model.safetensors").write_bytes(LIES[lie])
    sealed(folder)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        read_weights(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="folder: invalid content"):
        read_checkpoint(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 20 * 1024


# ----------------------------------------------------------------------------------------- weights that don't fit


@pytest.mark.nightly
def test_weights_of_another_model_through_every_tool_are_an_error(
    trained: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    """Through each way in, in the same words: counts, the first three of each kind, what to do."""
    state = load_file(trained / "model.safetensors")
    renamed = {name.replace("0.", "first.", 1) if name.startswith("0.") else name: state[name] for name in state}
    save_file(renamed, tmp_path / "renamed.safetensors")
    save_file({name: value[:3].clone() for name, value in state.items()}, tmp_path / "narrow.safetensors")
    wide = ["model.kwargs.width=8"]
    run = tmp_path / "run"
    words = arguments(digits, run, train__max_steps=2)
    other_kwargs = forged(trained, tmp_path / "forged", kwargs={"width": 8})
    other_names = tmp_path / "other"
    shutil.copytree(trained, other_names)
    save_file(renamed, other_names / "model.safetensors")
    sealed(other_names)
    names = "2 missing (0.weight, 0.bias); 2 unexpected (first.bias, first.weight)"
    shapes = (
        "5 of another shape (0.weight (16, 3, 3, 3) for (8, 3, 3, 3), 0.bias (16,) for (8,), 2.weight (32, 16, 3, 3)"
    )
    for (code, err), expected in (
        (call(train_command, *words, f"model.checkpoint={tmp_path / 'renamed.safetensors'}"), names),
        (call(train_command, *words, *wide, f"model.checkpoint={trained}"), shapes),
        (call(train_command, *words, "--resume-from", other_names), names),
        (call(train_command, *words, *wide, "--resume-from", trained, "--allow-change", "model.kwargs"), shapes),
        (call(evaluate_command, *evaluation(digits, other_names)), names),
        (call(evaluate_command, *evaluation(digits, other_kwargs)), shapes),
        (call(evaluate_command, *evaluation(digits, tmp_path / "renamed.safetensors")), names),
        (call(evaluate_command, *evaluation(digits, *wide, trained / "model.safetensors")), shapes),
        (call(predict_command, other_names, an_image(digits), "--allow-import", "helpers:plain"), names),
    ):
        assert code == 4 and expected in err, err
        assert 2 <= len(err.splitlines()) <= 6  # what to do
    # Another number of classes: a head of another size is a start for training, but none to evaluate with.
    code, err = call(evaluate_command, *evaluation(digits, tmp_path / "narrow.safetensors"))
    assert code == 4 and "6 of another shape (0.weight (3, 3, 3, 3) for (16, 3, 3, 3), " in err
