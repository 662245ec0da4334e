"""The name that a pickle would look up is found in every form, and nothing else is called foreign."""

import argparse
import io
import os
import pickle
import random
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from imagenet_cls.models.pickles import foreign_global
from imagenet_cls.models.weights import read_weights

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


class Hostile:
    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.system, ("true",)


def plain(content: Any, path: Path, protocol: int) -> None:
    path.write_bytes(pickle.dumps(content, protocol))


def zipped(content: Any, path: Path, protocol: int) -> None:
    torch.save(content, path, pickle_protocol=protocol)


def legacy(content: Any, path: Path, protocol: int) -> None:
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)


def tarred(content: Any, path: Path, protocol: int) -> None:
    with tarfile.open(path, "w") as tar:
        for name in ("sys_info", "pickle"):
            data = pickle.dumps(content, protocol)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


FORMS = [plain, zipped, legacy, tarred]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("form", FORMS)
def test_what_would_be_called(form: Callable, protocol: int, tmp_path: Path) -> None:
    form({"state_dict": OrderedDict(weight=[1.0]), "system": Hostile(), "posix": "posix"}, tmp_path / "file", protocol)
    assert foreign_global(tmp_path / "file") == "posix.system"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("form", [zipped, legacy])
def test_weights_call_nothing_foreign(form: Callable, protocol: int, tmp_path: Path) -> None:
    """Of each dtype that a state dict has, and with timm's options beside."""
    tensors = [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)]
    state = {"state_dict": torch.nn.BatchNorm2d(2).state_dict(), "more": tensors, "args": argparse.Namespace(lr=1.0)}
    form(state, tmp_path / "file", protocol)
    assert foreign_global(tmp_path / "file") is None
    if protocol == 2:
        assert len(read_weights(tmp_path / "file")) == 5


def test_a_whole_model_names_its_class(tmp_path: Path) -> None:
    zipped(torch.nn.Linear(1, 1), tmp_path / "file", 2)
    assert foreign_global(tmp_path / "file") == "torch.nn.modules.linear.Linear"


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"\x80\x04\x93.", b"\x80\x04\x8d" + b"\xff" * 8, random.Random(0).randbytes(4096)]
)
def test_what_is_no_pickle(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    assert foreign_global(tmp_path / "file") is None


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """A gigabyte of one string, in a megabyte: no more of it is read than the structure of a checkpoint takes."""
    with (
        zipfile.ZipFile(tmp_path / "file", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a/data.pkl", "w") as out,
    ):
        out.write(b"\x80\x04\x8d" + (2**30).to_bytes(8, "little"))
        for _ in range(64):
            out.write(bytes(2**20))
    assert foreign_global(tmp_path / "file") is None
