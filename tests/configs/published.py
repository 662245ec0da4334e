"""What sources publish about their recipes, copied by hand: torchvision's README, timm's training page, papers."""

import pytest
from golden import CONFIGS, loaded

from imagenet_cls.config.schema import Config

PATHS = {path.stem: path for path in CONFIGS.rglob("*.yaml") if not {"_base_", "quick"} & {*path.parts}}


def recipe(stem: str) -> Config:
    return loaded(PATHS[stem])


# Of the networks, with 1,000 classes.
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet18_ffcv_16e": 11_689_512,
    "resnet34_tv_v1": 21_797_672,
    "resnet50": 25_557_032,
    "resnet50_rsb_a1": 25_557_032,
    "resnet50_ffcv_16e": 25_557_032,
    "resnet50_mosaic_mild": 25_557_032,
    "resnet50_nvidia_90e": 25_557_032,
    "resnet101_tv_v1": 44_549_160,
    "resnet152_tv_v1": 60_192_808,
    "resnext50_32x4d_timm_ra": 25_028_904,
    "mobilenet_v2_tv_v1": 3_504_872,
    "mobilenet_v3_large_tv_v1": 5_483_032,
    "mobilenetv3_large_100_timm_ra": 5_483_032,
    "efficientnet_b0_timm_ra": 5_288_548,
    "efficientnet_b0_nvidia": 5_288_548,
    "efficientnet_b2_timm_ra": 9_109_994,
    "efficientnet_b4_nvidia": 19_341_616,
    "efficientnet_v2_s_tv": 21_458_488,
    "efficientnet_v2_m_tv": 54_139_356,
    "wide_resnet50_2_tv_v2": 68_883_240,
    "regnet_y_400mf_tv_v1": 4_344_144,
    "regnet_y_3_2gf_tv_v1": 19_436_338,
    "regnet_y_16gf_tv_v1": 83_590_140,
    "densenet121_paper": 7_978_856,
    "convnext_tiny_paper": 28_589_128,
    "convnext_tiny_tv": 28_589_128,
    "deit_small_paper": 22_050_664,
    "deit_base_paper": 86_567_656,
    "deit_small_distilled_paper": 22_436_432,
    "vit_b_16_tv": 86_567_656,
    "swin_t_tv": 28_288_354,
    "maxvit_t_tv": 30_919_624,
    # 5.2 M in the paper, table 6; in millions here, since authors' and timm's count differ by their heads' norms.
    "ghostnet_100_mindcv": pytest.approx(5.2e6, rel=0.01),
    # 22.0 M in README_revenge.md: DeiT-S's, without a position for the class token, with two layer scales a block.
    "deit3_small_paper": 22_050_664 - 384 + 12 * 2 * 384,
    # ViT-S/16's 22,050,664 without class token and its position.
    "vit_small_big_vision_90e": 22_050_664 - 2 * 384,
}

# torchvision's README: batch, epochs, rate; then StepLR's (size, gamma), or the cosine's (warm-up, its decay, lowest).
V2 = (1024, 600, 0.5, (5, 0.01, 0.0))
TORCHVISION: dict[str, tuple[int, int, float, tuple[float, ...]]] = {
    **dict.fromkeys(["resnet18", "resnet50"], (256, 90, 0.1, (30, 0.1))),
    **{f"resnet{n}_tv_v1": (256, 90, 0.1, (30, 0.1)) for n in (34, 101, 152)},
    **{f"resnet{n}_tv_v2": V2 for n in (50, 101, 152)},
    "resnext50_32x4d_tv_v1": (256, 100, 0.1, (30, 0.1)),
    "resnext50_32x4d_tv_v2": V2,
    "mobilenet_v2_tv_v1": (256, 300, 0.045, (1, 0.98)),
    **{f"mobilenet_v3_{size}_tv_v1": (1024, 600, 0.064, (2, 0.973)) for size in ("large", "small")},
    "wide_resnet50_2_tv_v2": V2,
    **{f"efficientnet_v2_{size}_tv": V2 for size in ("s", "m")},
    "regnet_y_400mf_tv_v1": (1024, 100, 0.4, (5, 0.1, 0.0)),
    "regnet_y_3_2gf_tv_v1": (512, 100, 0.4, (5, 0.1, 0.0)),
    "regnet_y_16gf_tv_v1": (256, 100, 0.2, (5, 0.1, 0.0)),
    **{f"regnet_y_{size}_tv_v2": V2 for size in ("400mf", "3_2gf", "16gf")},
    "convnext_tiny_tv": (1024, 600, 1e-3, (5, 0.01, 0.0)),
    "vit_b_16_tv": (4096, 300, 3e-3, (30, 0.033, 0.0)),
    "swin_t_tv": (1024, 300, 1e-3, (20, 0.01, 1e-5)),
    "maxvit_t_tv": (4096, 400, 3e-3, (32, 0.01, 1e-5)),
}

# timm's scripts: batch, epochs, rate, (warm-up, its first rate), the lowest rate of a cosine or the gamma of steps.
TIMM: dict[str, tuple[int, int, float, tuple[int, float], dict[str, float]]] = {
    "resnet50_rsb_a1": (2048, 600, 5e-3, (5, 1e-4), {"lr_min": 1e-6}),
    "resnet50_rsb_a2": (2048, 300, 5e-3, (5, 1e-4), {"lr_min": 1e-6}),
    "resnet50_rsb_a3": (2048, 100, 8e-3, (5, 1e-4), {"lr_min": 1e-6}),
    "resnet50_timm_jsd": (128, 200, 0.05, (3, 1e-4), {"lr_min": 1e-5}),
    "resnext50_32x4d_timm_ra": (1536, 240, 0.6, (5, 1e-4), {"lr_min": 1e-5}),
    **{f"deit_{s}_paper": (1024, 300, 1e-3, (5, 1e-6), {"lr_min": 1e-5}) for s in ("small", "base", "small_distilled")},
    "deit3_small_paper": (2048, 800, 4e-3, (5, 1e-6), {"lr_min": 1e-5}),
    "mobilenetv3_large_100_timm_ra": (1024, 600, 0.064, (3, 1e-6), {"decay_rate": 0.973}),
    "efficientnet_b0_timm_ra": (768, 450, 0.048, (3, 1e-6), {"decay_rate": 0.97}),
    "efficientnet_b2_timm_ra": (256, 450, 0.016, (3, 1e-6), {"decay_rate": 0.97}),
}
