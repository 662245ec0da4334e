"""Models of timm, torchvision and the user: build, and check before a run."""

from contextlib import nullcontext
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from helpers import write_files
from torch import nn

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import ConfigError, ResourceError, UserError
from imagenet_cls.models.factory import (
    build_model,
    describe_initial_weights,
    model_mean_std,
    model_problems,
    replace_head,
)
from imagenet_cls.models.head import head_names


def own(num_classes, width=8):
    return nn.Linear(width, num_classes)


def own_without_num_classes(width=8):
    return nn.Linear(width, 2)


def own_text(num_classes):
    return "a model"


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "torchvision:resnet18"])
def test_build_with_the_same_seed_gives_the_same_bits(name: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(build_model(ModelConfig(name), 7).state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_build_passes_kwargs() -> None:
    assert build_model(ModelConfig("resnet18", kwargs={"drop_rate": 0.25}), 5).drop_rate == 0.25
    own = build_model(ModelConfig(f"{__name__}:own", kwargs={"width": 3}), 5)
    assert own.weight.shape == (5, 3)
    with pytest.raises(UserError):
        build_model(ModelConfig(f"{__name__}:own_text"), 5)


@pytest.mark.parametrize(
    ("name", "file", "host"),
    [
        ("resnet18.a1_in1k", "timm/resnet18.a1_in1k", huggingface_hub.constants.ENDPOINT),
        ("torchvision:resnet18", "resnet18-f37072fd.pth", "download.pytorch.org"),
    ],
)
def test_pretrained_without_network_is_a_resource_error(
    name: str, file: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nothing listens there: torch.hub fails at once
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    write_files(tmp_path, {"models--timm--resnet34.a1_in1k/snapshots/1/model.safetensors": "-"})
    with pytest.raises(ResourceError) as caught:
        build_model(ModelConfig(name, pretrained=True), 5)
    assert host in str(caught.value) and file in str(caught.value)
    assert "resnet34.a1_in1k" in str(caught.value), "what the cache has"


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("name", ["resnet18.a1_in1k", "hf-hub:someone/vit"])
def test_retries_of_a_download_are_not_reported(
    name: str,
    pretrained: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also of the config of a model on the Hub."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("no such host")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    needs_network = pretrained or name.startswith("hf-hub:")
    with pytest.raises(ResourceError, match="no such host") if needs_network else nullcontext():
        build_model(ModelConfig(name, pretrained=pretrained), 5)
    out, err = capfd.readouterr()
    assert err == "" and (name in out) == pretrained  # named before the download


def test_pretrained_torchvision_with_other_classes_replaces_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fed from the cache folder of torchvision's download path."""
    source = torchvision.models.resnet18()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(source.state_dict(), tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    built = build_model(ModelConfig("torchvision:resnet18", pretrained=True), 5)
    assert built.fc.weight.shape == (5, 512)
    assert torch.equal(built.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
    same = build_model(ModelConfig("torchvision:resnet18", pretrained=True), 1000)
    assert torch.equal(same.fc.weight, source.fc.weight)


def test_pretrained_model_of_one_channel_equals_timms(tmp_path: Path) -> None:
    colors = timm.create_model("test_resnet").state_dict()
    safetensors.torch.save_file(colors, tmp_path / "weights.safetensors")
    overlay = {"pretrained_cfg_overlay": {"file": str(tmp_path / "weights.safetensors")}}
    model = ModelConfig("test_resnet", pretrained=True, kwargs=overlay)
    gray = build_model(model, 1000, channels=1)
    expected = timm.create_model("test_resnet", pretrained=True, in_chans=1, **overlay).state_dict()
    for name, tensor in gray.state_dict().items():
        assert torch.equal(tensor, expected[name])
    torch.testing.assert_close(gray.conv1[0].weight, colors["conv1.0.weight"].sum(1, keepdim=True))
    assert [len(numbers) for numbers in model_mean_std(gray, channels=1)] == [1, 1]
    assert build_model(model, 1000).conv1[0].weight.shape[1] == 3


@pytest.mark.parametrize(
    ("name", "kwargs", "outputs", "source"),
    [
        ("resnet18", {}, 5, "(timm resnet18.a1_in1k); the head (fc.weight, fc.bias) is new"),
        ("torchvision:resnet50", {}, 1000, "(torchvision resnet50, IMAGENET1K_V2)"),
        (
            "torchvision:resnet50",
            {"weights": "IMAGENET1K_V1"},
            5,
            "(torchvision resnet50, IMAGENET1K_V1); the head (fc.weight, fc.bias) is new",
        ),
    ],
)
def test_description_names_the_weights(name: str, kwargs: dict, outputs: int, source: str) -> None:
    with torch.device("meta"):  # nothing is downloaded here
        model = build_model(ModelConfig(name), outputs)
    config = ModelConfig(name, pretrained=True, kwargs=kwargs)
    found = describe_initial_weights(config, model, outputs)
    assert source in found and ("head" in found) == (outputs == 5)
    scratch = describe_initial_weights(ModelConfig(name), model, outputs)
    assert scratch.startswith("starts from scratch")


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_0", "vit_b_16", "maxvit_t"])
def test_replace_head_of_torchvision_models(name: str) -> None:
    with torch.device("meta"):
        built = torchvision.models.get_model(name)
        replace_head(built, 7)
        assert built.eval()(torch.zeros(1, 3, 224, 224)).shape == (1, 7)
        # as on other ranks
        assert {*built.state_dict()} == {
            *build_model(ModelConfig(f"torchvision:{name}"), 7).state_dict()
        }


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("vit_tiny_patch16_224", [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
        ("torchvision:resnet18", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        # also without the weights, as on other ranks and after a resume
        ("torchvision:efficientnet_v2_l", [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
    ],
)
def test_mean_and_std_are_those_of_the_weights(
    name: str, mean: list[float], std: list[float]
) -> None:
    with torch.device("meta"):
        assert model_mean_std(build_model(ModelConfig(name), 10)) == (mean, std)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("convnext_atto", ["head.fc.weight", "head.fc.bias"]),
        (
            "deit_tiny_distilled_patch16_224",
            ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"],
        ),
        ("torchvision:vit_b_16", ["heads.head.weight", "heads.head.bias"]),
        ("torchvision:squeezenet1_0", ["classifier.1.weight", "classifier.1.bias"]),
    ],
)
def test_head_names_of_libraries_are_those_of_the_classifier(name: str, names: list[str]) -> None:
    with torch.device("meta"):
        assert head_names(build_model(ModelConfig(name), 7), 7) == names


def test_head_names_of_user_models_are_those_of_the_last_fit() -> None:
    assert head_names(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 9)), 7) == ["0.weight", "0.bias"]
    assert head_names(nn.Linear(4, 7), 7) == ["weight", "bias"]
    assert head_names(nn.ReLU(), 7) == []


# ---- checks


SWAG = {"weights": "IMAGENET1K_SWAG_E2E_V1"}  # for images of 384 pixels


@pytest.mark.parametrize(
    ("name", "pretrained", "kwargs"),
    [
        ("resnet50.a1_in1k", False, {}),
        ("fbnetc_100", True, {"bn_eps": 0.001}),
        ("regnety_004", False, {"group_size": 16}),
        ("vit_tiny_patch16_224", False, {"pos_embed": "none"}),
        ("torchvision:mobilenet_v3_large", False, {"width_mult": 0.5}),
        ("torchvision:resnet50", True, {"weights": "IMAGENET1K_V1"}),
        ("torchvision:vit_b_16", True, SWAG | {"image_size": 384}),
        ("torchvision:googlenet", False, {"aux_logits": False, "init_weights": False}),
        (f"{__name__}:own", False, {"width": 4}),
    ],
)
def test_valid_section_has_no_problem(name: str, pretrained: bool, kwargs: dict) -> None:
    assert model_problems(ModelConfig(name, pretrained=pretrained, kwargs=kwargs)) == []


def errors_of(model: ModelConfig) -> list[str]:
    """The problems of the check, else the error of the construction."""
    if problems := model_problems(model):
        return [f"{problem.key}: {problem.message}" for problem in problems]
    with pytest.raises(ConfigError) as caught, torch.device("meta"):
        build_model(model, 7)
    return caught.value.lines


@pytest.mark.parametrize(
    ("name", "pretrained", "kwargs", "key"),
    [
        ("timm/resnet18", False, {}, "name"),
        ("torchvision:fasterrcnn_resnet50_fpn", False, {}, "name"),
        ("hrnet_w18_small", False, {"zebra": 1}, "kwargs"),
        ("resnet18", False, {"drop_rat": 0.1, "pretrained": True}, "kwargs.pretrained"),
        ("resnet18", False, {"block": "abc"}, "kwargs"),
        ("vit_small_patch16_224", False, {"num_heads": 5}, "kwargs"),
        ("torchvision:resnet50", False, {"weights": "IMAGENET1K_V1"}, "kwargs.weights"),
        (f"{__name__}:own", False, {"num_classes": 4}, "kwargs.num_classes"),
        (f"{__name__}:own_without_num_classes", False, {}, "name"),
        # published weights that can't be used
        ("resnet50d_dsk", True, {}, "name"),
        ("fbnetc_100", True, {}, "kwargs.bn_eps"),
        ("vit_small_patch16_36x1_224", True, {}, "pretrained"),
        ("torchvision:resnet50", True, {"weights": "V3"}, "kwargs.weights"),
        # without a classifier
        ("torchvision:vgg16", True, {"weights": "IMAGENET1K_FEATURES"}, "kwargs.weights"),
        ("torchvision:vit_b_16", True, {"image_size": 288}, "kwargs.image_size"),
        ("torchvision:vit_b_16", True, SWAG, "kwargs.image_size"),
        (f"{__name__}:own", True, {}, "pretrained"),
    ],
)
def test_bad_section_is_a_problem(name: str, pretrained: bool, kwargs: dict, key: str) -> None:
    (line,) = errors_of(ModelConfig(name, pretrained=pretrained, kwargs=kwargs))
    assert line.startswith(f"model.{key}: ")
