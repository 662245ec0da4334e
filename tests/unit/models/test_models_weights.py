"""Any checkpoint into a model; files that are no checkpoints are errors, and no code in them is
run.
"""

import argparse
import copy
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from helpers import read_weights
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.weights import load_weights


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=10)


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def loaded(path: Path, averaged: bool = True) -> Mapping[str, Tensor]:
    """The weights of a file in a model."""
    model = timm.create_model("test_resnet", num_classes=10)
    load_weights(model, read_weights(path, averaged)[0], 10, head_may_differ=False)
    return model.state_dict()


def with_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in state.items()}


def test_read_weights_of_every_library_returns_the_state_dict(
    net: nn.Module, tmp_path: Path
) -> None:
    """What each of the libraries' training scripts passes to torch.save."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    # its state holds a collections.Counter
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60])
    more = {
        "epoch": 3,
        "arch": "resnet18",
        "args": argparse.Namespace(lr=0.1, nested=argparse.Namespace(seed=None)),
        "best_acc1": torch.tensor(70.0),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
    }
    state = net.state_dict()
    partly = {key.replace("layer1.", "layer1._orig_mod."): state[key] for key in state}
    contents = {
        "bare": state,
        "pytorch/examples": {"state_dict": with_prefix("module.", state), **more},
        "torchvision": {"model": state, **more},
        "timm": {"state_dict": state, **more},
        "ddp(compiled)": {"state_dict": with_prefix("module._orig_mod.", state)},
        "compiled(ddp)": {"model": with_prefix("_orig_mod.module.", state)},
        "partly": partly,
        "another key": {"net": state, "cuda_rng": {"0": torch.ByteTensor(8)}},
    }
    path = tmp_path / "weights.pth.tar"
    for kind, content in contents.items():
        torch.save(content, path)
        assert same(loaded(path), state), kind
    torch.save(nn.DataParallel(net).state_dict(), path, _use_new_zipfile_serialization=False)
    assert same(loaded(path), state)
    safetensors.torch.save_file(state, path)
    assert same(loaded(path), state)


@pytest.fixture(scope="module")
def average(net: nn.Module) -> AveragedModel:
    """What torchvision's reference script calls ExponentialMovingAverage, after an update with
    other weights.
    """
    average = AveragedModel(copy.deepcopy(net), avg_fn=get_ema_avg_fn(0.5), use_buffers=True)
    average.update_parameters(net)  # the first one copies
    for parameter in average.module.parameters():
        parameter.data.add_(1)
    return average


@pytest.mark.parametrize("kind", ["timm", "torchvision"])
def test_read_weights_with_average_returns_the_average(
    kind: str, net: nn.Module, average: AveragedModel, tmp_path: Path
) -> None:
    state, trained = average.module.state_dict(), net.state_dict()
    content = {
        "timm": {"state_dict": with_prefix("module.", trained), "state_dict_ema": state},
        "torchvision": {"model": trained, "model_ema": average.state_dict()},
    }[kind]
    path = tmp_path / "weights.pth"
    torch.save({"epoch": 3, **content}, path)
    assert same(loaded(path), state) and same(loaded(path, averaged=False), trained)
    if kind == "timm":
        theirs = timm.create_model("test_resnet", num_classes=10, checkpoint_path=path)
        assert same(theirs.state_dict(), state)


def test_read_weights_with_one_kind_returns_it(net: nn.Module, tmp_path: Path) -> None:
    state, path = net.state_dict(), tmp_path / "weights.pth"
    for content in (
        {"model_ema": state},
        {"state_dict": state, "state_dict_ema": None},
        {"state_dict": state, "state_dict_ema": {"decay": 0.99, "shadow": dict(state)}},
    ):
        torch.save(content, path)
        for averaged in (True, False):
            assert same(read_weights(path, averaged)[0], state)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.pth", None),
        ("empty.pth", b""),
        ("text.pth", b"not a checkpoint\n" * 50),
        ("list.pth", [1, 2, 3]),
        ("no-weights.pth", {"epoch": 3, "lr": 0.1}),
        ("module.pth", {"model": nn.Linear(2, 2)}),
        ("two.pth", {name: {"weight": torch.ones(1)} for name in ("teacher", "student")}),
    ],
)
def test_read_weights_of_no_checkpoint_is_an_error(name: str, content: Any, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    assert_is_no_checkpoint(tmp_path / name)


def test_read_weights_of_a_folder_or_a_truncated_file_is_an_error(
    net: nn.Module, tmp_path: Path
) -> None:
    assert_is_no_checkpoint(tmp_path)
    torch.save(net.state_dict(), tmp_path / "a.pth")
    safetensors.torch.save_file(net.state_dict(), tmp_path / "a.safetensors")
    for path in (tmp_path / "a.pth", tmp_path / "a.safetensors"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        assert_is_no_checkpoint(path)


def assert_is_no_checkpoint(path: Path) -> None:
    with pytest.raises(CheckpointError, match=path.name):
        read_weights(path)


@pytest.mark.parametrize("name", ["test_resnet", "deit_tiny_distilled_patch16_224"])
def test_load_weights_with_another_head_size_keeps_the_initial_head(name: str) -> None:
    kwargs = {"depth": 1} if name.startswith("deit") else {}
    source = timm.create_model(name, num_classes=10, **kwargs)
    target = timm.create_model(name, num_classes=7, **kwargs)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    sentence = load_weights(target, source.state_dict(), 7)
    assert "it had 10 outputs, the model has 7" in sentence
    for key, value in target.state_dict().items():
        expected = before if key.startswith(("fc.", "head")) else source.state_dict()
        assert torch.equal(value, expected[key]), key


def test_load_weights_with_mismatch_raises_and_changes_nothing(net: nn.Module) -> None:
    target = timm.create_model("test_resnet", num_classes=10)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    state = dict(net.state_dict())
    renamed = {key.replace("layer1", "block1"): value for key, value in state.items()}
    fewer = {key: value for key, value in state.items() if not key.startswith(("fc.", "conv1."))}
    for other, text in (
        # Ten weights and statistics are missing, and two counters, which may be.
        (renamed, "10 missing .* 12 unexpected "),
        (state | {"layer1.0.conv1.weight": torch.zeros(64, 1, 3, 3)}, r"1 .* \(layer1.0.conv1"),
        (state | {"fc.weight": torch.zeros(10, 9)}, r"1 .* \(fc.weight"),  # not of other outputs
        (fewer, "11 missing"),
        (state | with_prefix("module.", state), "prefix"),
        (state | {"fc.weight": state["fc.weight"].to(torch.int8)}, "fc.weight"),
    ):
        with pytest.raises(CheckpointError, match=text):
            load_weights(target, other, 10)
    assert same(target.state_dict(), before)


TINY_VIT = {"depth": 1, "embed_dim": 24, "num_heads": 2, "img_size": 64}


def test_load_weights_with_another_patch_size_is_an_error() -> None:
    """timm would also resample patches of 16 px to 32: another model, and an error here."""
    trained = timm.create_model("vit_tiny_patch16_224", num_classes=5, **TINY_VIT)
    coarse = timm.create_model("vit_tiny_patch16_224", num_classes=5, patch_size=32, **TINY_VIT)
    with pytest.raises(CheckpointError, match=r"2 of another shape \(pos_embed"):
        load_weights(coarse, trained.state_dict(), 5)


def test_load_weights_without_counters_loads_everything(net: nn.Module) -> None:
    """As of torch before 0.4.1, which had none."""
    state = {key: value for key, value in net.state_dict().items() if "num_batches" not in key}
    target = timm.create_model("test_resnet", num_classes=10)
    assert load_weights(target, state, 10) == f"loaded {len(state)} tensors"
    assert same({key: target.state_dict()[key] for key in state}, state)


@pytest.mark.parametrize("name", ["densenet121", "vit_b_16"])
def test_names_in_torchvisions_files_are_translated(name: str) -> None:
    model = torchvision.models.get_model(name)
    state = {
        re.sub(r"(norm|conv)([12]\.)", r"\1.\2", key).replace("mlp.0", "mlp.linear_1"): value + 1
        for key, value in model.state_dict().items()
    }
    load_weights(model, state, 1000)
    assert all(map(torch.equal, model.state_dict().values(), state.values()))


@pytest.mark.parametrize(
    "model",
    [
        torchvision.models.mnasnet0_5(num_classes=5),  # has a version
        nn.ModuleDict({"module": nn.Linear(4, 4), "head": nn.Linear(4, 5)}),
    ],
)
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.model."])
def test_names_that_look_like_wrappers_are_kept(model: nn.Module, prefix: str) -> None:
    state = {key: value + 1 for key, value in model.state_dict().items()}
    load_weights(model, with_prefix(prefix, state), 5, head_may_differ=False)
    assert same(model.state_dict(), state)


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)


class Hostile:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_values_beside_the_weights_are_not_read(net: nn.Module, tmp_path: Path) -> None:
    """Numbers of numpy, settings and own classes; no code of the file runs."""
    mark = tmp_path / "mark"
    zeros = np.zeros(3)
    # numpy's own constructors would take bytes for pointers to objects
    hostile_array = Hostile(np.ndarray, (2,), np.dtype(object), b"\x01" * 16)
    values = [
        *(np.float64(71.2), zeros, np.random.get_state(), len, Trainer(), HTTPStatus.OK),
        argparse.Namespace(lr=np.float64(0.1), path=Path("x")),
        *(defaultdict(float, a=1.0), {Path("key"): 1}, OmegaConf.create({"a": [1]})),
        *(Hostile(open, str(mark), "w"), Hostile(eval, f"open({str(mark)!r}, 'w')"), hostile_array),
    ]
    path = tmp_path / "weights.pth"
    for value in values:
        torch.save({"other": value, "state_dict": net.state_dict()}, path)
        assert same(loaded(path), net.state_dict()), value
        assert not mark.exists()
    torch.save({"other": Hostile(os.system, f"touch {mark}"), "model": net.state_dict()}, path)
    assert_is_no_checkpoint(path)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_first_convolution_is_converted_to_the_channels_as_timm_does(name: str) -> None:
    state = timm.create_model(name, num_classes=5).state_dict()
    for channels in (1, 4):
        target = timm.create_model(name, num_classes=5, in_chans=channels)
        sentence = load_weights(target, state, 5, head_may_differ=False)
        first = next(key for key in state if state[key].ndim == 4)
        expected = timm.models.adapt_input_conv(channels, state[first])
        assert torch.equal(target.state_dict()[first], expected) and first in sentence
        with pytest.raises(CheckpointError, match=first):
            load_weights(timm.create_model(name, num_classes=5), target.state_dict(), 5)
