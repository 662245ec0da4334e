"""Any checkpoint into a model; files that are no checkpoints are errors, and no code in them is
run.
"""

import argparse
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from helpers import read_weights
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from imagenet_cls.errors import CheckpointError, ResourceError
from imagenet_cls.models.weight_files import download_weights
from imagenet_cls.models.weights import load_weights


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=10)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_read_weights_of_every_library_returns_the_state_dict(
    net: nn.Module, tmp_path: Path
) -> None:
    """What each of the libraries' training scripts passes to torch.save."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    # its state holds a collections.Counter
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60])
    args = argparse.Namespace(
        model="resnet18", lr=0.1, data_path="/data", nested=argparse.Namespace(seed=None)
    )
    more = {
        "epoch": 3,
        "arch": "resnet18",
        "args": args,
        "best_acc1": torch.tensor(70.0),
        "scaler": {"scale": 65536.0},
    }
    more |= {"optimizer": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict()}
    state = net.state_dict()
    contents = {
        "bare": state,
        "pytorch/examples": {"state_dict": with_prefix("module.", state), **more},
        "torchvision": {"model": state, **more},
        "timm": {"state_dict": state, **more},
        "ddp(compiled)": {"state_dict": with_prefix("module._orig_mod.", state)},
        "compiled(ddp)": {"model": with_prefix("_orig_mod.module.", state)},
        "partly": {
            key.replace("layer1.", "layer1._orig_mod."): value for key, value in state.items()
        },
    }
    path = tmp_path / "weights.pth.tar"
    for kind, content in contents.items():
        torch.save(content, path)
        assert same(read_weights(path)[0], state), kind


def with_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in state.items()}


def test_read_weights_of_wrapped_models_removes_prefixes(net: nn.Module, tmp_path: Path) -> None:
    torch.save(
        nn.DataParallel(net).state_dict(), tmp_path / "dp.pt", _use_new_zipfile_serialization=False
    )
    compiled: Any = torch.compile(net)
    torch.save(compiled.state_dict(), tmp_path / "compiled.pt")
    safetensors.torch.save_file(net.state_dict(), tmp_path / "model.safetensors")
    for name in ("dp.pt", "compiled.pt", "model.safetensors"):
        assert same(read_weights(tmp_path / name)[0], net.state_dict()), name


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


@pytest.mark.parametrize("kind", ["timm", "torchvision", "compiled"])
def test_read_weights_with_average_returns_the_average(
    kind: str, net: nn.Module, average: AveragedModel, tmp_path: Path
) -> None:
    state = average.module.state_dict()
    content = {
        "timm": {"state_dict": with_prefix("module.", net.state_dict()), "state_dict_ema": state},
        "torchvision": {"model": net.state_dict(), "model_ema": average.state_dict()},
        "compiled": {
            "model": with_prefix("_orig_mod.module.", net.state_dict()),
            "model_ema": state,
        },
    }[kind]
    path = tmp_path / "weights.pth"
    torch.save({"epoch": 3, **content}, path)
    weights, origin = read_weights(path)
    assert (
        same(weights, state) and "its average" in origin and all(key in origin for key in content)
    )
    assert same(read_weights(path, averaged=False)[0], net.state_dict())
    if kind == "timm":
        theirs = timm.create_model("test_resnet", num_classes=10, checkpoint_path=path)
        assert same(theirs.state_dict(), state)


def test_read_weights_with_one_kind_returns_it(net: nn.Module, tmp_path: Path) -> None:
    state, path = net.state_dict(), tmp_path / "weights.pth"
    torch.save({"model_ema": state, "epoch": 3}, path)
    assert same(read_weights(path)[0], state) and same(read_weights(path, averaged=False)[0], state)
    for absent in (None, {}, {"decay": 0.99, "shadow": dict(state)}):
        torch.save({"state_dict": state, "state_dict_ema": absent}, path)
        weights, origin = read_weights(path)
        assert same(weights, state) and origin == str(path)


def test_failed_download_is_a_resource_error_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(ResourceError, match="downloaded"):
        download_weights("http://127.0.0.1:9/checkpoint.pth")  # nothing listens there
    assert not list((tmp_path / "hub" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.pth", None),
        ("folder", "folder"),
        ("empty.pth", b""),
        ("text.pth", b"not a checkpoint\n" * 50),
        ("empty.safetensors", b""),
        ("truncated.pth", "truncated"),
        ("truncated.safetensors", "truncated"),
        ("list.pth", [1, 2, 3]),
        ("no-weights.pth", {"epoch": 3, "best_acc1": torch.tensor(1.0), "lr": 0.1}),
    ],
)
def test_read_weights_of_no_checkpoint_is_an_error(
    name: str, content: Any, net: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content == "truncated":
        (safetensors.torch.save_file if path.suffix == ".safetensors" else torch.save)(
            net.state_dict(), path
        )
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(CheckpointError) as caught:
        read_weights(path)
    lines = str(caught.value).splitlines()
    assert any(name in line for line in lines) and len(lines) <= 3 and max(map(len, lines)) < 400


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
    for other, text in (
        # Ten weights and statistics are missing, and two counters, which may be.
        (
            {key.replace("layer1", "block1"): value for key, value in state.items()},
            "10 missing .* 12 unexpected ",
        ),
        (
            state | {"layer1.0.conv1.weight": torch.zeros(64, 1, 3, 3)},
            r"1 of another shape "
            r"\(layer1.0.conv1.weight",
        ),
        # not another number of outputs
        (state | {"fc.weight": torch.zeros(10, 9)}, r"1 of another shape \(fc.weight"),
        (
            {key: value for key, value in state.items() if not key.startswith(("fc.", "conv1."))},
            "3 missing",
        ),
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


def test_load_weights_of_another_grid_and_head_resizes_embeddings() -> None:
    """The resized values: tests/parity."""
    trained = timm.create_model("vit_tiny_patch16_224", num_classes=10, **TINY_VIT)
    other = timm.create_model("vit_tiny_patch16_224", num_classes=5, **{**TINY_VIT, "img_size": 96})
    head = other.head.weight.clone()
    sentence = load_weights(other, trained.state_dict(), 5)
    assert "position embeddings resized" in sentence and "10 outputs" in sentence
    assert torch.equal(other.head.weight, head) and torch.equal(other.cls_token, trained.cls_token)


@pytest.mark.parametrize("with_counters", [True, False])
def test_load_weights_loads_everything(net: nn.Module, with_counters: bool) -> None:
    """Counters may be missing: torch before 0.4.1 had none."""
    state = {
        k: v
        for k, v in net.state_dict().items()
        if with_counters or not k.endswith("num_batches_tracked")
    }
    target = timm.create_model("test_resnet", num_classes=10)
    assert load_weights(target, state, 10) == f"loaded {len(state)} tensors"
    assert all(
        torch.equal(value, net.state_dict()[key])
        for key, value in target.state_dict().items()
        if key in state
    )


def test_load_weights_translates_names_of_the_authors() -> None:
    """ConvNeXt's published files say `downsample_layers` and `pwconv1`, as its authors' repository
    does.
    """
    target = timm.create_model("test_convnext", num_classes=10)
    authors = {}
    for key, value in timm.create_model("test_convnext", num_classes=10).state_dict().items():
        name = (
            key.replace("head.norm.", "norm.")
            .replace("head.fc.", "head.")
            .replace("stem.", "downsample_layers.0.")
        )
        for stage in range(4):
            name = name.replace(f"stages.{stage}.downsample.", f"downsample_layers.{stage}.")
            name = name.replace(f"stages.{stage}.blocks.", f"stages.{stage}.")
        name = (
            name.replace("conv_dw", "dwconv")
            .replace("mlp.fc1", "pwconv1")
            .replace("mlp.fc2", "pwconv2")
        )
        authors[name] = value
    assert "names translated" in load_weights(target, authors, 10)
    assert torch.equal(target.head.fc.weight, authors["head.weight"])


def test_load_weights_of_torchvisions_resnet_fits_timms() -> None:
    source = torchvision.models.resnet18(num_classes=10)
    load_weights(timm.create_model("resnet18", num_classes=10), source.state_dict(), 10)
