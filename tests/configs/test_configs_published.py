"""Recipes against what their sources publish: sizes of networks, claims, evaluation, who is decayed, averages.

The numbers in `published.py` were copied from the sources, not from the configs; torchvision's metadata and timm's and
torchvision's own code stand for themselves. Learning rates: `test_configs_rates.py`.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from golden import meta_model
from published import PARAMETERS, PATHS, TIMM, TORCHVISION, recipe
from timm.models import get_pretrained_cfg
from timm.optim import param_groups_weight_decay
from torch import nn
from torchvision import models

from imagenet_cls.config.schema import Config
from imagenet_cls.models.ema import ema_decay
from imagenet_cls.optim.groups import parameter_groups


@pytest.mark.parametrize("stem", PARAMETERS)
def test_a_network_has_as_many_parameters_as_published(stem: str) -> None:
    assert sum(p.numel() for p in meta_model(recipe(stem)).parameters()) == PARAMETERS[stem]


def test_a_batch_norm_for_each_split_adds_what_it_should() -> None:
    """Two more layers of two vectors for each of ResNet-50's 53 norms, which have 26,560 channels together."""
    split = sum(p.numel() for p in meta_model(recipe("resnet50_timm_jsd")).parameters())
    assert split == 25_557_032 + 2 * 2 * 26_560


def torchvision_weights() -> Iterator[tuple[str, Any]]:
    """(config, published weights) of each recipe whose source names some."""
    for stem in sorted(PATHS):
        named = re.search(r"(\w+_Weights)\.(IMAGENET1K_V\d)", recipe(stem).expect.source or "")
        if named:
            yield stem, getattr(models, named[1])[named[2]]


@pytest.mark.parametrize(("stem", "weights"), [pytest.param(*pair, id=pair[0]) for pair in torchvision_weights()])
def test_claim_network_and_evaluation_are_those_of_torchvisions_weights(stem: str, weights: Any) -> None:
    config, preprocess = recipe(stem), weights.transforms()
    assert config.expect.claimed_top1_pct == weights.meta["_metrics"]["ImageNet-1K"]["acc@1"]
    assert sum(p.numel() for p in meta_model(config).parameters()) == weights.meta["num_params"]
    assert [config.eval.resize_px] == preprocess.resize_size
    assert [config.eval.crop_px] == preprocess.crop_size
    assert config.eval.interpolation == preprocess.interpolation.value
    assert config.data.mean == preprocess.mean and config.data.std == preprocess.std


def test_all_of_torchvisions_recipes_have_such_weights() -> None:
    assert {stem for stem, _ in torchvision_weights()} == {*TORCHVISION}


@pytest.mark.parametrize("key", ["a1", "a2", "a3"])
def test_evaluation_is_that_of_timms_weights(key: str) -> None:
    config = recipe(f"resnet50_rsb_{key}")
    published = get_pretrained_cfg(config.model.name)
    assert (config.eval.crop_pct, config.eval.interpolation) == (published.crop_pct, published.interpolation)
    assert config.eval.resize_px is None and config.eval.crop_px == 224


def decayed(config: Config) -> set[str]:
    groups = parameter_groups(meta_model(config), config.optimizer)
    return {name for group in groups if group["weight_decay"] > 0 for name in group["names"]}


@pytest.mark.parametrize("stem", [*TIMM, "convnext_tiny_paper"])
def test_timms_scripts_decay_the_same(stem: str) -> None:
    config = recipe(stem)
    model = meta_model(config)
    spare = getattr(model, "no_weight_decay", tuple)()
    decay = next(g for g in param_groups_weight_decay(model, 0.05, no_weight_decay_list=spare) if g["weight_decay"] > 0)
    members = {id(p) for p in decay["params"]}
    assert decayed(config) == {name for name, p in model.named_parameters() if id(p) in members}


NORMS_SPARED = [stem for stem in TORCHVISION if stem.endswith("_tv_v2")] + [
    "efficientnet_v2_s_tv",
    "efficientnet_v2_m_tv",
]
NORMS_SPARED += ["convnext_tiny_tv"]


@pytest.mark.parametrize("stem", NORMS_SPARED)
def test_torchvisions_second_recipe_decays_all_but_norms(stem: str) -> None:
    model = meta_model(recipe(stem))
    norms = [f"{name}." for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d | nn.LayerNorm)]
    spared = {name for name, _ in model.named_parameters() if name.startswith(tuple(norms))}
    assert spared and decayed(recipe(stem)) == {name for name, _ in model.named_parameters()} - spared


def test_some_recipes_decay_everything() -> None:
    for stem in ("resnet50", "mobilenet_v2_tv_v1", "regnet_y_400mf_tv_v1", "vit_b_16_tv", "resnet50_mosaic_mild"):
        assert decayed(recipe(stem)) == {name for name, _ in meta_model(recipe(stem)).named_parameters()}


def test_decays_in_other_terms() -> None:
    """DecoupledSGDW's 5e-4 is a share of the weight at the highest rate, and so is big_vision's 1e-4."""
    for stem, decay in (("resnet50_mosaic_mild", 5e-4), ("vit_small_big_vision_90e", 1e-4)):
        optimizer = recipe(stem).optimizer
        assert optimizer.weight_decay * optimizer.lr == pytest.approx(decay)


AVERAGED = [s for s, (*_, shape) in TORCHVISION.items() if len(shape) == 3 and not s.endswith("_tv_v1")]


@pytest.mark.parametrize("stem", AVERAGED)
def test_averages_of_torchvisions_script(stem: str) -> None:
    """`--model-ema-decay 0.99998 --model-ema-steps 32`, as that script adjusts it."""
    batch, epochs, *_ = TORCHVISION[stem]
    ema = recipe(stem).ema
    assert ema.every_steps == 32
    decay = ema_decay(ema, batch)
    assert decay is not None and 1 - decay == pytest.approx((1 - 0.99998) * batch * 32 / epochs, rel=1e-6)


@pytest.mark.parametrize(
    ("stem", "decay"),
    [
        ("mobilenetv3_large_100_timm_ra", 0.9999),
        ("efficientnet_b0_timm_ra", 0.9999),
        ("efficientnet_b2_timm_ra", 0.9999),
        ("convnext_tiny_paper", 0.9999),
        ("deit_small_paper", 0.99996),
        ("deit_base_paper", 0.99996),
        ("deit3_small_paper", 0.99996),
    ],
)
def test_averages_of_timms_script(stem: str, decay: float) -> None:
    ours = ema_decay(recipe(stem).ema, recipe(stem).train.global_batch_size)
    assert recipe(stem).ema.every_steps == 1
    assert ours is not None and 1 - ours == pytest.approx(1 - decay, rel=1e-6)


def test_no_other_recipe_keeps_an_average() -> None:
    averaging = {stem for stem in PATHS if recipe(stem).ema.half_life_images is not None}
    timm = {"mobilenetv3_large_100_timm_ra", "convnext_tiny_paper", "deit3_small_paper"}
    timm |= {f"efficientnet_{size}_timm_ra" for size in ("b0", "b2")}
    deit = {f"deit_{size}_paper" for size in ("small", "base", "small_distilled")}
    mosaic = {f"resnet50_mosaic_{heat}" for heat in ("mild", "medium", "hot")}
    assert averaging == {*AVERAGED, *timm, *deit, *mosaic}
