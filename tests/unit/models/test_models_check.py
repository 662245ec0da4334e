"""Checks of the `model` section before ranks start."""

import pytest

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.models.check import model_problems

# vit: keywords of a base class; efficientnet, regnet: of an architecture config; swin, deit: of their own.
COMMON = ["resnet50", "vit_small_patch16_224", "efficientnet_b0", "swin_tiny_patch4_window7_224"]
MORE = ["convnext_tiny", "mobilenetv3_large_100", "maxvit_tiny_tf_224", "deit_small_distilled_patch16_224", "resnet18"]
COMMON += [pytest.param(name, marks=pytest.mark.nightly) for name in MORE]


def only(model: ModelConfig) -> tuple[str, str]:
    """Key and message of the one problem that there is."""
    (problem,) = model_problems(model)
    return problem.key, problem.message


@pytest.mark.parametrize("name", ["resnet50.a1_in1k", "torchvision:resnet50", "torchvision:regnet_y_400mf"])
def test_known_name_has_no_problem(name: str) -> None:
    assert model_problems(ModelConfig(name=name)) == []


@pytest.mark.parametrize("name", COMMON)
def test_misspelt_argument_names_the_correct_one(name: str) -> None:
    assert model_problems(ModelConfig(name=name, kwargs={"drop_rate": 0.1, "in_chans": 3})) == []
    key, message = only(ModelConfig(name=name, kwargs={"drop_rat": 0.1, "in_chans": 3}))
    assert key == "model.kwargs.drop_rat"
    assert "did you mean 'drop_rate'" in message


def test_misspelt_argument_of_regnet_config_names_the_correct_one() -> None:
    # timm's RegNet lays further keywords over its architecture's settings, a dataclass of its own.
    assert model_problems(ModelConfig(name="regnety_004", kwargs={"group_size": 16})) == []
    assert "'group_size'" in only(ModelConfig(name="regnety_004", kwargs={"group_siz": 16}))[1]


@pytest.mark.parametrize("name", ["hrnet_w18_small", "caformer_s18"])
def test_argument_rejected_with_another_wording_is_found(name: str) -> None:
    assert only(ModelConfig(name=name, kwargs={"zebra": 1}))[0] == "model.kwargs.zebra"


def test_all_unknown_arguments_are_reported() -> None:
    problems = model_problems(ModelConfig(name="resnet18", kwargs={"drop_rat": 0.1, "zebra": 1, "pretrained": True}))
    assert {p.key for p in problems} == {"model.kwargs.drop_rat", "model.kwargs.zebra", "model.kwargs.pretrained"}


def test_unknown_argument_and_bad_value_are_both_reported() -> None:
    problems = model_problems(ModelConfig(name="resnet18", kwargs={"drop_rat": 0.1, "block": "abc"}))
    assert [p.key for p in problems] == ["model.kwargs.drop_rat", "model.kwargs"]
    assert "'drop_rate'" in problems[0].message


def test_bad_value_reports_the_constructors_error() -> None:
    key, message = only(ModelConfig(name="vit_small_patch16_224", kwargs={"num_heads": 5}))
    assert key == "model.kwargs"
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("resnet5", "resnet50"),
        ("ResNet50", "resnet50"),
        ("torchvision:resnet5", "torchvision:resnet50"),
        ("convnext-tiny", "convnext_tiny"),
    ],
)
def test_unknown_name_suggests_a_known_one(name: str, meant: str) -> None:
    key, message = only(ModelConfig(name=name))
    assert key == "model.name"
    assert f"unknown model {name!r}" in message
    assert repr(meant) in message


@pytest.mark.parametrize(
    "name", ["hf-hub:timm/resnet18.a1_in1k", "timm/resnet18", "torchvision:fasterrcnn_resnet50_fpn"]
)
def test_name_of_no_classifier_is_unknown(name: str) -> None:
    assert only(ModelConfig(name=name))[0] == "model.name"


def test_unknown_tag_suggests_a_known_one() -> None:
    key, message = only(ModelConfig(name="resnet50.a1_in1kk"))
    assert key == "model.name"
    assert "did you mean 'a1_in1k'" in message


def test_pretrained_without_published_weights_is_a_problem() -> None:
    assert only(ModelConfig(name="resnet50d_dsk", pretrained=True))[0] == "model.name"
    assert only(ModelConfig(name="vit_small_patch16_36x1_224", pretrained=True))[0] == "model.pretrained"


def test_torchvision_unknown_argument_is_reported() -> None:
    assert model_problems(ModelConfig(name="torchvision:mobilenet_v3_large", kwargs={"width_mult": 0.5})) == []
    assert "'width_per_group'" in only(ModelConfig(name="torchvision:resnet18", kwargs={"width_per_grup": 64}))[1]
    # torchvision's ConvNeXt takes any keyword and ignores it.
    key, message = only(ModelConfig(name="torchvision:convnext_tiny", kwargs={"layer_scal": 1e-6}))
    assert key == "model.kwargs.layer_scal"
    assert "'layer_scale'" in message


def test_torchvision_weights_names_are_checked() -> None:
    v1 = {"weights": "IMAGENET1K_V1"}
    assert model_problems(ModelConfig(name="torchvision:resnet50", pretrained=True, kwargs=v1)) == []
    assert only(ModelConfig(name="torchvision:resnet50", kwargs=v1))[0] == "model.kwargs.weights"
    message = only(ModelConfig(name="torchvision:resnet50", pretrained=True, kwargs={"weights": "IMAGENET1K_V3"}))[1]
    assert "IMAGENET1K_V2" in message


def test_auxiliary_outputs_are_a_problem() -> None:
    assert "aux_logits=false" in only(ModelConfig(name="torchvision:googlenet", kwargs={"init_weights": False}))[1]
    kwargs = {"aux_logits": False, "init_weights": False}
    assert model_problems(ModelConfig(name="torchvision:googlenet", kwargs=kwargs)) == []


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "models_check_own.py").write_text(
        "from torch import nn\n"
        "def good(num_classes, width=8): return nn.Linear(width, num_classes)\n"
        "def blind(width=8): return nn.Linear(width, 2)\n"
        "def needy(num_classes, width): return nn.Linear(width, num_classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_factory_problems(own_module) -> None:
    assert model_problems(ModelConfig(name="models_check_own:good", kwargs={"width": 4})) == []
    assert "'width'" in only(ModelConfig(name="models_check_own:good", kwargs={"widht": 4}))[1]
    assert "num_classes" in only(ModelConfig(name="models_check_own:blind"))[1]
    assert "'width'" in only(ModelConfig(name="models_check_own:needy"))[1]
    assert "'good'" in only(ModelConfig(name="models_check_own:goood"))[1]
    assert only(ModelConfig(name="models_check_own_not:good"))[0] == "model.name"
    assert only(ModelConfig(name="models_check_own:good", pretrained=True))[0] == "model.pretrained"
    assert only(ModelConfig(name="models_check_own:good", kwargs={"num_classes": 4}))[0] == "model.kwargs.num_classes"
