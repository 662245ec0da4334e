"""Any checkpoint into a model; files that are no checkpoints are errors, and no code in them is run."""

import argparse
import collections
import copy
import os
import struct
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.weights import load_weights, read_weights, read_weights_and_origin


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=10)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def checkpoint_of(kind: str, net: nn.Module) -> dict:
    """What each of the libraries' training scripts passes to torch.save."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60])  # its state holds a collections.Counter
    state = net.state_dict()
    wrapped = collections.OrderedDict((f"module.{key}", value) for key, value in state.items())
    args = argparse.Namespace(model="resnet18", lr=0.1, data_path="/data", nested=argparse.Namespace(seed=None))
    return {
        "bare": state,
        "pytorch/examples": {
            "epoch": 3,
            "arch": "resnet18",
            "state_dict": wrapped,
            "best_acc1": torch.tensor(70.0),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        },
        "torchvision": {
            "model": state,
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": scheduler.state_dict(),
            "epoch": 3,
            "args": args,
            "scaler": {"scale": 65536.0},
        },
        "timm": {"epoch": 3, "arch": "resnet18", "state_dict": state, "args": args, "version": 2, "metric": 70.0},
        "compiled": {"_orig_mod." + key: value for key, value in state.items()},
        "ddp(compiled)": {"state_dict": {"module._orig_mod." + key: value for key, value in state.items()}},
        "compiled(ddp)": {"model": {"_orig_mod.module." + key: value for key, value in state.items()}},
        "part compiled": {key.replace("layer1.", "layer1._orig_mod."): value for key, value in state.items()},
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["bare", "pytorch/examples", "torchvision", "timm", "compiled", "ddp(compiled)", "compiled(ddp)", "part compiled"],
)
def test_read_weights_of_every_library(kind: str, net: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth.tar"
    torch.save(checkpoint_of(kind, net), path)
    assert same(read_weights(path), net.state_dict())


def test_read_weights_of_wrappers_and_the_old_file_format(net: nn.Module, tmp_path: Path) -> None:
    torch.save(nn.DataParallel(net).state_dict(), tmp_path / "dp.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.compile(net).state_dict(), tmp_path / "compiled.pt")
    assert same(read_weights(tmp_path / "dp.pt"), net.state_dict())
    assert same(read_weights(tmp_path / "compiled.pt"), net.state_dict())


def averaged_like_torchvision(net: nn.Module) -> nn.Module:
    """What its reference script calls ExponentialMovingAverage, after an update with weights of other values."""
    average = AveragedModel(copy.deepcopy(net), avg_fn=get_ema_avg_fn(0.5), use_buffers=True)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    for _ in range(2):  # the first one copies
        average.update_parameters(other)
        average.module.fc.bias.data.sub_(0.25)
    return average


def test_read_weights_with_average_returns_the_average(net: nn.Module, tmp_path: Path) -> None:
    """In timm's form also as timm reads it."""
    average = averaged_like_torchvision(net)
    state = average.module.state_dict()
    assert not same(state, net.state_dict())
    wrapped = collections.OrderedDict((f"module.{key}", value) for key, value in net.state_dict().items())
    compiled = {f"_orig_mod.{key}": value for key, value in wrapped.items()}
    for name, content in {
        "timm.pth.tar": {"state_dict": wrapped, "state_dict_ema": state},
        "vision.pth": {"model": net.state_dict(), "model_ema": average.state_dict()},
        "compiled.pth": {"model": compiled, "model_ema": state},
    }.items():
        left, taken = content
        path = tmp_path / name
        torch.save({"epoch": 3, **content}, path)
        weights, origin = read_weights_and_origin(path)
        assert same(weights, state) and same(read_weights(path), state), name
        assert origin == f"{path} (its average {taken}, not {left})"
        weights, origin = read_weights_and_origin(path, averaged=False)
        assert same(weights, net.state_dict()), name
        assert origin == f"{path} ({left}, not its average {taken})"
    theirs = timm.create_model("test_resnet", num_classes=10, checkpoint_path=tmp_path / "timm.pth.tar")
    assert same(theirs.state_dict(), state)


def test_read_weights_with_average_alone_or_incomplete(net: nn.Module, tmp_path: Path) -> None:
    state, path = net.state_dict(), tmp_path / "weights.pth"
    torch.save({"model_ema": state, "epoch": 3}, path)
    for averaged in (True, False):
        weights, origin = read_weights_and_origin(path, averaged)
        assert same(weights, state) and origin == f"{path} (its average model_ema)"
    for absent in (None, {}, {"decay": 0.99, "shadow": dict(state)}):
        torch.save({"state_dict": state, "state_dict_ema": absent}, path)
        weights, origin = read_weights_and_origin(path)
        assert same(weights, state) and origin == str(path)
    parameters = {name: parameter + 1 for name, parameter in net.named_parameters()}  # BatchNorm's buffers lack
    torch.save({"model": state, "model_ema": parameters}, path)
    weights, origin = read_weights_and_origin(path)
    assert same(weights, state) and origin == f"{path} (model; its average model_ema has other names and is not used)"


def test_read_weights_of_safetensors(net: nn.Module, tmp_path: Path) -> None:
    safetensors.torch.save_file(net.state_dict(), tmp_path / "model.safetensors")
    assert same(read_weights(tmp_path / "model.safetensors"), net.state_dict())
    with pytest.raises(CheckpointError, match="no such file"):
        read_weights(tmp_path)


class Hostile:
    """Unpickling it runs a command that leaves a file behind."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("place", ["top", "in the options", "in the weights"])
def test_read_weights_never_runs_code(place: str, new_format: bool, net: nn.Module, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    hostile, state = Hostile(canary), dict(net.state_dict())
    content = {
        "top": hostile,
        "in the options": {"state_dict": state, "args": argparse.Namespace(a=argparse.Namespace(b=[{"c": hostile}]))},
        "in the weights": {"state_dict": {**state, "zebra": hostile}},
    }[place]
    torch.save(content, tmp_path / "weights.pth", _use_new_zipfile_serialization=new_format)
    with pytest.raises(CheckpointError, match=r"posix\.system") as caught:
        read_weights(tmp_path / "weights.pth")
    assert not canary.exists()
    assert len(str(caught.value).splitlines()) <= 3
    torch.load(tmp_path / "weights.pth", weights_only=False)
    assert canary.exists()  # it is run where that is allowed


def broken_files(net: nn.Module, tmp_path: Path) -> dict[str, Path]:
    good, tensors = tmp_path / "good.pth", tmp_path / "good.safetensors"
    torch.save(net.state_dict(), good)
    safetensors.torch.save_file(net.state_dict(), tensors)
    whole, lies = good.read_bytes(), tensors.read_bytes()
    header = b'{"a":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4000000]}}'
    contents = {
        "truncated.pth": whole[: len(whole) // 2],
        "empty.pth": b"",
        "text.pth": b"not a checkpoint\n" * 50,
        "page.pth.tar": b"<!DOCTYPE html><html>404</html>",
        "truncated.safetensors": lies[: len(lies) // 2],
        "empty.safetensors": b"",
        "huge.safetensors": struct.pack("<Q", 1 << 60) + b"{}",
        "lying.safetensors": struct.pack("<Q", len(header)) + header + b"\0" * 16,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    torch.save([1, 2, 3], tmp_path / "list.pth")
    torch.save({"epoch": 3, "best_acc1": torch.tensor(1.0), "lr": 0.1}, tmp_path / "no-weights.pth")
    return {name: tmp_path / name for name in [*contents, "list.pth", "no-weights.pth", "missing.pth"]}


def test_read_weights_of_no_checkpoint_raises_checkpoint_error(net: nn.Module, tmp_path: Path) -> None:
    for name, path in broken_files(net, tmp_path).items():
        with pytest.raises(CheckpointError) as caught:
            read_weights(path)
        message = str(caught.value)
        assert caught.value.exit_code == 4
        assert name in message
        assert len(message.splitlines()) <= 3, message
        assert max(map(len, message.splitlines())) < 400, message


def test_load_weights_loads_everything(net: nn.Module) -> None:
    other = timm.create_model("test_resnet", num_classes=10)
    assert load_weights(other, net.state_dict(), 10) == f"loaded {len(net.state_dict())} tensors"
    assert same(other.state_dict(), net.state_dict())


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


def test_load_weights_with_other_mismatch_raises_and_changes_nothing(net: nn.Module) -> None:
    target = timm.create_model("test_resnet", num_classes=10)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    state = dict(net.state_dict())
    renamed = {key.replace("layer1", "block1"): value for key, value in state.items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(target, renamed, 10)
    # Ten weights and statistics, and two counters, which may be missing.
    assert "10 missing (layer1.0.conv1.weight, layer1.0.bn1.weight, layer1.0.bn1.bias, ...)" in str(caught.value)
    assert "12 unexpected (block1.0.conv1.weight, block1.0.bn1.weight, block1.0.bn1.bias, ...)" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"1 of another shape \(layer1.0.conv1.weight"):
        load_weights(target, state | {"layer1.0.conv1.weight": torch.zeros(64, 1, 3, 3)}, 10)
    with pytest.raises(CheckpointError, match=r"1 of another shape \(fc.weight"):  # another width is not another size
        load_weights(target, state | {"fc.weight": torch.zeros(10, 9)}, 10)
    with pytest.raises(CheckpointError, match="2 missing"):
        load_weights(target, {key: value for key, value in state.items() if not key.startswith("fc.")}, 10)
    assert same(target.state_dict(), before)


def test_load_weights_without_batch_counters(net: nn.Module) -> None:
    old = {key: value for key, value in net.state_dict().items() if not key.endswith("num_batches_tracked")}
    target = timm.create_model("test_resnet", num_classes=10)
    assert load_weights(target, old, 10) == f"loaded {len(old)} tensors"
    assert torch.equal(target.bn1.running_var, net.bn1.running_var)


def test_load_weights_translates_names_of_the_authors() -> None:
    """ConvNeXt's published files say `downsample_layers` and `pwconv1`, as its authors' repository does."""
    target = timm.create_model("test_convnext", num_classes=10)
    authors = {}
    for key, value in timm.create_model("test_convnext", num_classes=10).state_dict().items():
        name = key.replace("head.norm.", "norm.").replace("head.fc.", "head.").replace("stem.", "downsample_layers.0.")
        for stage in range(4):
            name = name.replace(f"stages.{stage}.downsample.", f"downsample_layers.{stage}.")
            name = name.replace(f"stages.{stage}.blocks.", f"stages.{stage}.")
        name = name.replace("conv_dw", "dwconv").replace("mlp.fc1", "pwconv1").replace("mlp.fc2", "pwconv2")
        authors[name] = value
    assert "names translated" in load_weights(target, authors, 10)
    assert torch.equal(target.head.fc.weight, authors["head.weight"])


def test_load_weights_from_torchvision_into_timm_resnet() -> None:
    source = torchvision.models.resnet18(num_classes=10)
    load_weights(timm.create_model("resnet18", num_classes=10), source.state_dict(), 10)
