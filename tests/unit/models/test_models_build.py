"""Building models of timm, torchvision and the user; facts about a built model; code that a checkpoint names."""

import huggingface_hub
import pytest
import timm
import torch
import torchvision
from torch import nn

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import CheckpointError, ResourceError, UserError
from imagenet_cls.models.build import (
    build_model,
    check_trusted,
    head_names,
    model_mean_std,
    replace_head,
    weights_source,
)
from imagenet_cls.models.check import model_problems

MODELS = [
    ModelConfig(name="resnet18"),
    ModelConfig(name="vit_tiny_patch16_224", kwargs={"depth": 2}),
    ModelConfig(name="swin_tiny_patch4_window7_224", kwargs={"depths": [1, 1, 1, 1]}),
    ModelConfig(name="torchvision:mobilenet_v3_small"),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_build_with_the_same_seed_gives_the_same_bits_also_after_a_check(model: ModelConfig) -> None:
    torch.manual_seed(3)
    first = build_model(model, 7)
    assert model_problems(model) == []  # builds on the meta device: must not leak into the next build
    torch.manual_seed(3)
    second = build_model(model, 7)
    for (key, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert a.device.type == b.device.type == "cpu"
        assert torch.equal(a, b), key
    with torch.no_grad():
        assert second.eval()(torch.zeros(1, 3, 224, 224)).shape == (1, 7)


def test_build_timm_passes_kwargs() -> None:
    assert build_model(ModelConfig(name="resnet18", kwargs={"drop_rate": 0.25}), 5).drop_rate == 0.25


def test_build_torchvision_uses_its_class() -> None:
    built = build_model(ModelConfig(name="torchvision:resnet18"), 5)
    assert isinstance(built, torchvision.models.ResNet)
    assert built.fc.out_features == 5


def test_build_from_factory(tmp_path, monkeypatch) -> None:
    (tmp_path / "models_build_own.py").write_text(
        "from torch import nn\n"
        "def good(num_classes, width=8): return nn.Linear(width, num_classes)\n"
        "def wrong(num_classes): return 'a model'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    built = build_model(ModelConfig(name="models_build_own:good", kwargs={"width": 3}), 5)
    assert built.weight.shape == (5, 3)
    with pytest.raises(UserError, match="returned str"):
        build_model(ModelConfig(name="models_build_own:wrong"), 5)


@pytest.mark.parametrize("name", ["resnet18.a1_in1k", "torchvision:resnet18"])
def test_pretrained_without_network_is_a_resource_error(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing listens there: torch.hub fails at once
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ResourceError) as caught:
        build_model(ModelConfig(name=name, pretrained=True), 5)
    message = str(caught.value)
    assert caught.value.exit_code == 5
    assert len(message.splitlines()) <= 3
    assert "model.checkpoint=FILE" in message
    assert "resnet18.a1_in1k on the hub" in message or "resnet18-f37072fd.pth" in message


def test_pretrained_torchvision_with_other_classes_replaces_the_head(tmp_path, monkeypatch) -> None:
    """torchvision's own download path, fed from its cache folder: weights come through, only the head is new."""
    source = torchvision.models.resnet18()
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    torch.save(source.state_dict(), tmp_path / "checkpoints" / "resnet18-f37072fd.pth")
    built = build_model(ModelConfig(name="torchvision:resnet18", pretrained=True), 5)
    assert built.fc.weight.shape == (5, 512)
    assert torch.equal(built.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
    same = build_model(ModelConfig(name="torchvision:resnet18", pretrained=True), 1000)
    assert torch.equal(same.fc.weight, source.fc.weight)


@pytest.mark.parametrize(
    ("model", "outputs", "expected"),
    [
        (ModelConfig(name="test_resnet"), 5, "starts from scratch"),
        (ModelConfig(name="torchvision:resnet18"), 5, "starts from scratch"),
        (ModelConfig(name="models_build_own:good"), 5,
         "starts from scratch: weights as initialised by models_build_own:good"),
        (ModelConfig(name="resnet18.fb_swsl_ig1b_ft_in1k", pretrained=True), 1000,
         "starts from published weights (timm resnet18.fb_swsl_ig1b_ft_in1k)"),
        (ModelConfig(name="resnet18", pretrained=True), 5,
         "starts from published weights (timm resnet18.a1_in1k); the head (fc.weight, fc.bias) is newly initialised: "
         "it had 1000 outputs, the model has 5"),
        (ModelConfig(name="torchvision:resnet50", pretrained=True), 1000,
         "starts from published weights (torchvision resnet50, IMAGENET1K_V2)"),
        (ModelConfig(name="torchvision:resnet50", pretrained=True, kwargs={"weights": "IMAGENET1K_V1"}), 5,
         "starts from published weights (torchvision resnet50, IMAGENET1K_V1); the head (fc.weight, fc.bias) is "
         "newly initialised: it had 1000 outputs, the model has 5"),
    ],
)  # fmt: skip
def test_weights_source(model: ModelConfig, outputs: int, expected: str) -> None:
    without = ModelConfig(name="resnet18" if ":" in model.name else model.name)  # nothing is downloaded here
    with torch.device("meta"):
        assert weights_source(model, build_model(without, outputs), outputs) == expected


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_0", "vit_b_16"])
def test_replace_head_of_torchvision_models(name: str) -> None:
    with torch.device("meta"):
        built = torchvision.models.get_model(name)
        replace_head(built, 7)
        assert built.eval()(torch.zeros(1, 3, 224, 224)).shape == (1, 7)


def test_mean_and_std() -> None:
    with torch.device("meta"):
        vit = timm.create_model("vit_tiny_patch16_224")
        resnet = torchvision.models.resnet18()
    assert model_mean_std(vit) == ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    assert model_mean_std(resnet) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("resnet18", ["fc.weight", "fc.bias"]),
        ("convnext_atto", ["head.fc.weight", "head.fc.bias"]),
        ("deit_tiny_distilled_patch16_224", ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]),
        ("torchvision:vit_b_16", ["heads.head.weight", "heads.head.bias"]),
        ("torchvision:squeezenet1_0", ["classifier.1.weight", "classifier.1.bias"]),
    ],
)
def test_head_names(name: str, names: list[str]) -> None:
    with torch.device("meta"):
        assert head_names(build_model(ModelConfig(name=name), 7), 7) == names


def test_head_names_of_user_models() -> None:
    assert head_names(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 9)), 7) == ["0.weight", "0.bias"]
    assert head_names(nn.Linear(4, 7), 7) == ["weight", "bias"]
    assert head_names(nn.ReLU(), 7) == []


@pytest.mark.parametrize(
    ("name", "imports", "kwargs", "trusted"),
    [
        ("os:system", [], {}, {"my_models:net"}),
        ("my_models:os.system", [], {}, {"my_models", "my_models:net"}),
        ("hf-hub:someone/model", [], {}, set()),
        ("resnet18", ["my_models"], {}, set()),
        ("resnet18", [], {"checkpoint_path": "x.pth"}, set()),
    ],
)
def test_untrusted_names_of_a_checkpoint_are_errors(name: str, imports: list, kwargs: dict, trusted: set) -> None:
    with pytest.raises(CheckpointError):
        check_trusted(ModelConfig(name=name, kwargs=kwargs), imports, trusted, "step-0000001")


def test_library_models_and_named_factories_are_trusted() -> None:
    for name in ("resnet18", "torchvision:resnet18"):
        check_trusted(ModelConfig(name=name, kwargs={"width": 1}), [], (), "step-0000001")
    check_trusted(ModelConfig(name="my_models:net"), ["my_models"], {"my_models", "my_models:net"}, "step-0000001")
