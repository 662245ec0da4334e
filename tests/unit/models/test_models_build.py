"""Building: three origins, one behaviour; the facts of a finished model."""

import huggingface_hub
import pytest
import timm
import torch
import torchvision
from torch import nn

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import ResourceError, UserError
from imagenet_cls.models.build import _replace_head, build_model, head_names, model_mean_std, origin_of_weights
from imagenet_cls.models.check import model_problems

MODELS = [
    ModelConfig(name="resnet18"),
    ModelConfig(name="vit_tiny_patch16_224", kwargs={"depth": 2}),
    ModelConfig(name="swin_tiny_patch4_window7_224", kwargs={"depths": [1, 1, 1, 1]}),
    ModelConfig(name="torchvision:mobilenet_v3_small"),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_same_seed_same_bits_and_a_check_before_leaves_nothing_behind(model: ModelConfig) -> None:
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


def test_timm_kwargs_reach_the_model() -> None:
    assert build_model(ModelConfig(name="resnet18", kwargs={"drop_rate": 0.25}), 5).drop_rate == 0.25


def test_torchvision_is_torchvisions() -> None:
    built = build_model(ModelConfig(name="torchvision:resnet18"), 5)
    assert isinstance(built, torchvision.models.ResNet)
    assert built.fc.out_features == 5


def test_own_factory(tmp_path, monkeypatch) -> None:
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
def test_no_network_ends_in_what_to_do_by_hand(name: str, tmp_path, monkeypatch) -> None:
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


def test_published_weights_with_another_head_size(tmp_path, monkeypatch) -> None:
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
    ("model", "outputs", "told"),
    [
        (ModelConfig(name="test_resnet"), 5, "starts from scratch"),
        (ModelConfig(name="torchvision:resnet18"), 5, "starts from scratch"),
        (ModelConfig(name="models_build_own:good"), 5,
         "starts from scratch: the weights are those that models_build_own:good makes"),
        (ModelConfig(name="resnet18.fb_swsl_ig1b_ft_in1k", pretrained=True), 1000,
         "starts from published weights (timm resnet18.fb_swsl_ig1b_ft_in1k)"),
        (ModelConfig(name="resnet18", pretrained=True), 5,
         "starts from published weights (timm resnet18.a1_in1k); the head (fc.weight, fc.bias) is initialised anew: "
         "it had 1000 outputs, the model has 5"),
        (ModelConfig(name="torchvision:resnet50", pretrained=True), 1000,
         "starts from published weights (torchvision resnet50, IMAGENET1K_V2)"),
        (ModelConfig(name="torchvision:resnet50", pretrained=True, kwargs={"weights": "IMAGENET1K_V1"}), 5,
         "starts from published weights (torchvision resnet50, IMAGENET1K_V1); the head (fc.weight, fc.bias) is "
         "initialised anew: it had 1000 outputs, the model has 5"),
    ],
)  # fmt: skip
def test_where_weights_come_from_is_told(model: ModelConfig, outputs: int, told: str) -> None:
    without = ModelConfig(name="resnet18" if ":" in model.name else model.name)  # nothing is downloaded here
    with torch.device("meta"):
        assert origin_of_weights(model, build_model(without, outputs), outputs) == told


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_0", "vit_b_16", "mobilenet_v3_small", "densenet121"])
def test_replaced_heads_of_torchvisions_families(name: str) -> None:
    with torch.device("meta"):
        built = torchvision.models.get_model(name)
        _replace_head(built, 7)
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


def test_head_names_of_own_models() -> None:
    assert head_names(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 9)), 7) == ["0.weight", "0.bias"]
    assert head_names(nn.Linear(4, 7), 7) == ["weight", "bias"]
    assert head_names(nn.ReLU(), 7) == []
