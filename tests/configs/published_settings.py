"""The settings of every recipe as published by its source, copied by hand: one row for each published recipe.

A row has the differences from `USUAL` and from its family. Left out: the location of images, and keys that change speed
or logging but not what is computed.
"""

from typing import Any

from imagenet_cls.config.load import values_by_key
from imagenet_cls.config.schema import Config
from imagenet_cls.models.ema import ema_decay

Settings = dict[str, Any]

# Column of the table -> key of the config. A key that is set and has no column shows under its own name.
# lr_for: where the source states a rule by which the rate follows the batch.
# fmt: off
COLUMNS = {
    "model": "model.name", "drop": "model.kwargs.drop_rate", "drop_path": "model.kwargs.drop_path_rate",
    "zero_init_last": "model.kwargs.zero_init_last",
    "repeats": "data.repeats", "repeats_multiple": "data.repeats_multiple", "mean": "data.mean", "std": "data.std",
    "px": "augment.size_px", "policy": "augment.policy", "resampling": "augment.interpolation",
    "area": "augment.scale", "erasing": "augment.erasing.prob", "erasing_mode": "augment.erasing.mode",
    "erasing_count": "augment.erasing.max_count", "erasing_area": "augment.erasing.scale",
    "erasing_ratio": "augment.erasing.ratio", "splits": "augment.splits",
    "growth_epochs": "augment.progressive.epochs", "growth_px": "augment.progressive.sizes_px",
    "growth_multiple_px": "augment.progressive.multiple_px", "brightness": "augment.color_jitter.brightness",
    "contrast": "augment.color_jitter.contrast", "saturation": "augment.color_jitter.saturation",
    "hue": "augment.color_jitter.hue",
    "mixup": "mix.mixup_alpha", "cutmix": "mix.cutmix_alpha", "mix_prob": "mix.prob",
    "switch_prob": "mix.switch_prob",
    "loss": "loss.name", "smoothing": "loss.label_smoothing", "threshold": "loss.kwargs.target_threshold",
    "sum_classes": "loss.kwargs.sum_classes",
    "distill": "distill.kind", "distill_alpha": "distill.alpha", "teacher": "distill.teacher.name",
    "teacher_pretrained": "distill.teacher.pretrained",
    "optimizer": "optimizer.name", "lr": "optimizer.lr", "lr_for": "optimizer.lr_base_batch",
    "decay": "optimizer.weight_decay", "momentum": "optimizer.kwargs.momentum",
    "nesterov": "optimizer.kwargs.nesterov", "alpha": "optimizer.kwargs.alpha", "eps": "optimizer.kwargs.eps",
    "schedule": "schedule.name", "warmup": "schedule.warmup_epochs", "warmup_factor": "schedule.warmup_start_factor",
    "warmup_lr": "schedule.warmup_start_lr", "warmup_prefix": "schedule.warmup_prefix",
    "by_epoch": "schedule.by_epoch", "min_lr": "schedule.kwargs.min_lr", "every": "schedule.kwargs.every_epochs",
    "gamma": "schedule.kwargs.gamma", "factors": "schedule.kwargs.factors", "knots": "schedule.kwargs.epochs",
    "epochs": "train.epochs", "batch": "train.global_batch_size", "at_once": "train.micro_batch_size",
    "clip": "train.clip_norm", "sam": "train.sam_rho", "sam_every": "train.sam_every_steps",
    "ema_every": "ema.every_steps",
    "eval_px": "eval.crop_px", "eval_resize": "eval.resize_px", "eval_pct": "eval.crop_pct",
    "eval_resampling": "eval.interpolation", "flip_tta": "eval.flip_tta",
    "sync_bn": "parallel.sync_bn",
}
# fmt: on
SHORT = {key: column for column, key in COLUMNS.items()}

# Keys that don't decide what is computed, by their beginnings.
NOT_HELD = (
    *(
        f"data.{key}"
        for key in ("name", "root", "train", "val", "num_workers", "prefetch", "decode", "timeout", "exclude")
    ),
    *(
        f"train.{key}"
        for key in (
            "precision",
            "compile",
            "channels_last",
            "grad_checkp",
            "deterministic",
            "max_nonf",
            "early_stop",
            "profile",
        )
    ),
    *(
        f"parallel.{key}"
        for key in ("mode", "backend", "device_ids", "output_device", "init", "timeout", "check", "uneven")
    ),
    *("eval.batch_size", "eval.every_epochs", "eval.metrics", "checkpoint.", "log.", "expect.", "seed", "device"),
)
SPARED = ("norm", "bias", "token", "scale")  # kinds of parameters that may have a weight decay of their own


def settings(config: Config) -> Settings:
    """What a config sets, by columns. spared: kinds of parameters without decay; ema: what stays at each update."""
    held = {key: value for key, value in values_by_key(config).items() if not key.startswith(NOT_HELD)}
    found = {SHORT.get(key, key): value for key, value in held.items() if value not in (None, [], {})}
    zero = [kind for kind in SPARED if found.get(f"optimizer.{kind}_weight_decay") == 0]
    average = ema_decay(config.ema, config.train.global_batch_size)
    for key in [f"optimizer.{kind}_weight_decay" for kind in zero] + ["ema.half_life_images", "ema.decay"]:
        found.pop(key, None)
    if average is not None:
        found["ema"] = average
    return found | {"spared": " ".join(zero)}


# ------------------------------------------------------------------------------------------------------- the figures

# fmt: off
OFF: Settings = {
    **dict.fromkeys(["model.pretrained", "model.head_only", "model.freeze_bn", "model.split_bn", "sync_bn"], False),
    **dict.fromkeys(["augment.vflip_prob", "augment.grayscale_prob", "schedule.cooldown_epochs"], 0.0),
    "augment.color_jitter.prob": 1.0, "brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0,
    "augment.crop": "random_resized", "augment.pad_px": 4, "augment.pad_mode": "constant",  # the padding has no effect
    "data.channels": 3, "data.exif": "ignore", "data.fraction": 1.0,
    "data.balance": 0.0, "loss.effective_beta": 0.999,  # the latter is unused
    "eval.classes": "all",
    "eval.mode": "crop", "mix.mode": "batch", "optimizer.lr_scaling": "linear", "ema.warmup": False, "flip_tta": False,
    "distill": "none", "distill_alpha": 0.5, "distill.temperature": 1.0, "teacher_pretrained": False,
}
USUAL = OFF | {
    "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "repeats": 1, "splits": 1,
    "px": 224, "area": [0.08, 1.0], "augment.ratio": [3 / 4, 4 / 3], "augment.hflip_prob": 0.5,
    "resampling": "bilinear", "eval_resampling": "bilinear", "growth_multiple_px": 32,
    "eval_px": 224, "eval_resize": 256, "eval_pct": 0.875,
    "erasing": 0.0, "erasing_mode": "const", "erasing_count": 1,
    "erasing_area": [0.02, 1 / 3], "erasing_ratio": [0.3, 10 / 3],
    "mixup": 0.0, "cutmix": 0.0, "mix_prob": 1.0, "switch_prob": 0.5,
    "loss": "cross_entropy", "smoothing": 0.0, "sam_every": 1, "ema_every": 1,
    "optimizer": "sgd", "momentum": 0.9, "spared": "",
    "schedule": "cosine", "warmup": 0, "warmup_factor": 0.01, "warmup_prefix": True, "by_epoch": False,
}
BICUBIC: Settings = {"resampling": "bicubic", "eval_resampling": "bicubic"}
MIX: Settings = {"mixup": 0.8, "cutmix": 1.0}
ADAMW: Settings = {"optimizer": "adamw", "momentum": None}
TIMM: Settings = {"resampling": "random", "eval_resampling": "bicubic", "warmup_prefix": False, "by_epoch": True}
SAMPLER: Settings = {"repeats_multiple": 256}  # of DeiT's and torchvision's repeated augmentation
AUTO_AUGMENT: Settings = {"policy": "torchvision:auto_augment", "augment.policy_kwargs.policy": "imagenet"}


def torchvision_average(batch: int, epochs: int) -> Settings:
    """`--model-ema-decay 0.99998 --model-ema-steps 32`, as its script adjusts it."""
    return {"ema": 1 - (1 - 0.99998) * batch * 32 / epochs, "ema_every": 32}


# Families: what several rows share.
RSB = BICUBIC | SAMPLER | {
    "optimizer": "lamb", "momentum": None, "lr": 5e-3, "decay": 0.02, "spared": "norm bias", "batch": 2048,
    "warmup": 5, "warmup_lr": 1e-4, "warmup_prefix": False, "by_epoch": True, "min_lr": 1e-6,
    "loss": "bce", "threshold": 0.2, "policy": "rand-m7-mstd0.5-inc1", "mixup": 0.1, "cutmix": 1.0, "repeats": 3,
    "drop_path": 0.05, "eval_resize": None, "eval_pct": 0.95,
}
TV_V1: Settings = {
    "lr": 0.1, "decay": 1e-4, "epochs": 90, "batch": 256, "schedule": "step", "every": 30, "gamma": 0.1,
    "zero_init_last": False,
}
TV_ERASING: Settings = {"erasing_area": [0.02, 0.33], "erasing_ratio": [0.3, 3.3]}
TV_V2 = TV_ERASING | torchvision_average(1024, 600) | {
    "lr": 0.5, "decay": 2e-5, "spared": "norm", "epochs": 600, "batch": 1024, "at_once": 128,
    "warmup": 5, "by_epoch": True, "policy": "torchvision:trivial_augment_wide", "erasing": 0.1,
    "smoothing": 0.1, "mixup": 0.2, "cutmix": 1.0,
}
TV_V2_RESNET = TV_V2 | {"zero_init_last": False, "eval_resize": 232}
TV_REPEATED = SAMPLER | {"repeats": 4}
TV_MOBILENET_V3 = TV_ERASING | AUTO_AUGMENT | {
    "optimizer": "rmsprop", "alpha": 0.9, "eps": 0.0316, "lr": 0.064, "decay": 1e-5, "epochs": 600, "batch": 1024,
    "schedule": "step", "every": 2, "gamma": 0.973, "at_once": 128, "erasing": 0.2,
    "augment.policy_kwargs.interpolation": "nearest",
}
TIMM_RMSPROP = TIMM | {
    "optimizer": "rmsproptf", "alpha": 0.9, "eps": 1e-3, "decay": 1e-5, "spared": "norm bias", "smoothing": 0.1,
    "schedule": "step", "every": 2.4, "warmup": 3, "warmup_lr": 1e-6, "policy": "rand-m9-mstd0.5",
    "erasing": 0.2, "erasing_mode": "pixel", "drop": 0.2, "drop_path": 0.2, "ema": 0.9999,
}
TIMM_SGD = TIMM | {
    "nesterov": True, "decay": 1e-4, "spared": "norm bias", "smoothing": 0.1, "erasing_mode": "pixel",
    "warmup_lr": 1e-4, "min_lr": 1e-5,
}
# NVIDIA's warm-up of n epochs is (epoch + 1) / n: n - 1 of ours, that begin at 1 / n.
NVIDIA_RESNET: Settings = {
    "model": "resnet50", "zero_init_last": False, "lr": 0.256, "lr_for": 256, "momentum": 0.875, "decay": 1 / 32768,
    "spared": "norm", "by_epoch": True, "warmup": 7, "warmup_factor": 1 / 8, "batch": 2048, "at_once": 256,
    "smoothing": 0.1,
}
NVIDIA_EFFICIENTNET = BICUBIC | AUTO_AUGMENT | {
    "optimizer": "rmsprop", "alpha": 0.9, "eps": 0.01, "lr_for": 4096, "epochs": 400, "batch": 4096, "spared": "norm",
    "by_epoch": True, "warmup": 15, "warmup_factor": 1 / 16, "smoothing": 0.1, "mixup": 0.2,
    "model.kwargs.bn_eps": 1e-3, "model.kwargs.bn_momentum": 0.01,
}
FFCV: Settings = {
    "spared": "norm", "smoothing": 0.1, "zero_init_last": False, "schedule": "piecewise", "factors": [1e-4, 1.0, 0.0],
    "px": 192, "growth_px": [160, 192], "eval_px": 256, "eval_resize": None, "eval_pct": 224 / 256, "flip_tta": True,
}
FFCV_18 = FFCV | {"model": "resnetblur18", "lr": 0.5, "decay": 5e-5, "batch": 1024}
FFCV_50 = FFCV | {"model": "resnetblur50", "lr": 1.7, "decay": 1e-4, "batch": 4096, "at_once": 512}
FFCV_GROWTH = {16: [11, 13], 24: [17, 20], 32: [23, 27], 40: [29, 34], 56: [41, 48], 88: [65, 76]}  # by epochs
MOSAIC: Settings = {
    "model": "resnetblur50", "zero_init_last": False, "optimizer": "timm:sgdw", "lr": 2.048, "momentum": 0.875,
    "decay": 5e-4 / 2.048, "batch": 2048, "at_once": 256, "warmup": 8, "warmup_factor": 0.0,
    "loss": "bce", "sum_classes": True, "px": 176, "growth_multiple_px": 4, "eval_resize": 232,
    "ema": 0.5 ** (20 / 100), "ema_every": 20,  # a half-life of 100 batches, every 20
}
DEIT = ADAMW | BICUBIC | MIX | SAMPLER | {
    "lr": 5e-4, "lr_for": 512, "decay": 0.05, "spared": "norm bias token scale", "epochs": 300, "batch": 1024,
    "warmup": 5, "warmup_lr": 1e-6, "warmup_prefix": False, "by_epoch": True, "min_lr": 1e-5,
    "policy": "rand-m9-mstd0.5-inc1", "erasing": 0.25, "erasing_mode": "pixel", "smoothing": 0.1,
    "repeats": 3, "drop_path": 0.1, "ema": 0.99996,
}
REGNET: Settings = {"decay": 5e-5, "epochs": 100, "warmup": 5, "warmup_factor": 0.1, "by_epoch": True}
REGNET_TV = REGNET | {"zero_init_last": False}
PYCLS = REGNET | {"nesterov": True, "warmup_prefix": False}
CIFAR: Settings = {
    "mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616], "augment.crop": "pad_crop", "px": 32,
    "eval_px": 32, "eval_resize": 32, "lr": 0.1, "decay": 5e-4, "batch": 128, "schedule": "multistep", "by_epoch": True,
}
WRN = CIFAR | {
    "mean": [0.4914, 0.4824, 0.4467], "std": [0.2471, 0.2435, 0.2616], "model": "wrn28_10_cifar",
    "augment.pad_mode": "reflect", "nesterov": True, "epochs": 200,
    "schedule.kwargs.milestones_epochs": [60, 120, 160], "gamma": 0.2,
}


def row(number: int | None, stem: str, *families: Settings, **own: Any) -> tuple[int | None, str, Settings]:
    """Number of the published recipe, config, and all of its settings."""
    values = USUAL
    for family in (*families, own):
        values = values | family
    return number, stem, {column: value for column, value in values.items() if value is not None}


ROWS = [
    row(1, "resnet50_rsb_a1", RSB, model="resnet50.a1_in1k", epochs=600, decay=0.01, smoothing=0.1, mixup=0.2),
    row(2, "resnet50_rsb_a2", RSB, model="resnet50.a2_in1k", epochs=300),
    row(3, "resnet50_rsb_a3", RSB, model="resnet50.a3_in1k", epochs=100, lr=8e-3, px=160, policy="rand-m6-mstd0.5-inc1",
        repeats=1, repeats_multiple=None, drop_path=None),
    *(row(4, f"resnet{n}", TV_V1, model=f"resnet{n}.tv_in1k") for n in (18, 50)),
    *(row(4, f"resnet{n}_tv_v1", TV_V1, model=f"resnet{n}.tv_in1k") for n in (34, 101, 152)),
    row(5, "resnet50_tv_v2", TV_V2_RESNET, TV_REPEATED, model="resnet50.tv2_in1k", px=176),
    *(row(6, f"resnet{n}_tv_v2", TV_V2_RESNET, model=f"resnet{n}.tv2_in1k") for n in (101, 152)),
    row(6, "resnext50_32x4d_tv_v2", TV_V2_RESNET, model="resnext50_32x4d.tv2_in1k"),
    row(6, "wide_resnet50_2_tv_v2", TV_V2_RESNET, model="wide_resnet50_2.tv2_in1k", px=176),
    row(7, "resnext50_32x4d_tv_v1", TV_V1, model="resnext50_32x4d.tv_in1k", epochs=100),
    row(8, "mobilenet_v2_tv_v1", TV_V1, model="torchvision:mobilenet_v2", lr=0.045, decay=4e-5, epochs=300, at_once=32,
        every=1, gamma=0.98, zero_init_last=None),
    row(9, "mobilenet_v3_large_tv_v1", TV_MOBILENET_V3, model="torchvision:mobilenet_v3_large"),
    row(9, "mobilenet_v3_small_tv_v1", TV_MOBILENET_V3, model="torchvision:mobilenet_v3_small"),
    row(10, "mobilenetv3_large_100_timm_ra", TIMM_RMSPROP, model="mobilenetv3_large_100.ra_in1k", epochs=600,
        batch=1024, at_once=512, lr=0.064, gamma=0.973),
    row(11, "efficientnet_b0_timm_ra", TIMM_RMSPROP, model="efficientnet_b0.ra_in1k", epochs=450, batch=768,
        at_once=384, lr=0.048, gamma=0.97),
    row(12, "efficientnet_b2_timm_ra", TIMM_RMSPROP, model="efficientnet_b2.ra_in1k", epochs=450, batch=256,
        at_once=128, lr=0.016, gamma=0.97, drop=0.3, px=260, eval_px=260, eval_resize=None, eval_pct=0.89),
    row(13, "resnext50_32x4d_timm_ra", TIMM_SGD, model="resnext50_32x4d.ra_in1k", epochs=240, batch=1536, at_once=192,
        lr=0.6, warmup=5, policy="rand-m7-mstd0.5-inc1", erasing=0.4, erasing_count=3),
    row(14, "resnet50_timm_jsd", TIMM_SGD, {"model.split_bn": True}, model="resnet50.ram_in1k", epochs=200, batch=128,
        at_once=64, lr=0.05, warmup=3, splits=3, loss="jsd", policy="rand-m9-mstd0.5-inc1", erasing=0.6),
    row(15, "resnet50_nvidia_90e", NVIDIA_RESNET, epochs=90),
    row(16, "resnet50_nvidia_250e", NVIDIA_RESNET, epochs=250, mixup=0.2),
    row(17, "efficientnet_b0_nvidia", NVIDIA_EFFICIENTNET, model="efficientnet_b0", lr=0.08, decay=1e-5, drop=0.2,
        at_once=256),
    row(17, "efficientnet_b4_nvidia", NVIDIA_EFFICIENTNET, model="efficientnet_b4", lr=0.16, decay=5e-6, drop=0.4,
        drop_path=0.2, at_once=128, px=380, eval_px=380, eval_resize=412),
    *(row(18, f"resnet18_ffcv_{n}e", FFCV_18, epochs=n, growth_epochs=grows, knots=[0, 2, n])
      for n, grows in FFCV_GROWTH.items()),
    *(row(19, f"resnet50_ffcv_{n}e", FFCV_50, epochs=n, growth_epochs=grows, knots=[0, 2, n])
      for n, grows in FFCV_GROWTH.items()),
    # Sides grow from 176 px x 0.5 (hot: x 0.6, in fours) between two shares of the run: the delay and 1 - finetune.
    row(21, "resnet50_mosaic_mild", MOSAIC, epochs=36, smoothing=0.08,
        growth_px=[88, 176], growth_epochs=[0.4 * 36, 0.8 * 36]),
    row(22, "resnet50_mosaic_medium", MOSAIC, epochs=135, smoothing=0.1, mixup=0.2, sam=0.5, sam_every=10,
        growth_px=[88, 176], growth_epochs=[0.4 * 135, 0.8 * 135]),
    row(23, "resnet50_mosaic_hot", MOSAIC, epochs=270, smoothing=0.13, mixup=0.25, sam=0.5, sam_every=5, drop_path=0.1,
        policy="rand-m9-n1-p1.0-mstd101-inc1", growth_px=[104, 176], growth_epochs=[0.2 * 270, 0.8 * 270]),
    row(24, "deit_small_paper", DEIT, model="deit_small_patch16_224.fb_in1k", at_once=256),
    row(24, "deit_base_paper", DEIT, model="deit_base_patch16_224.fb_in1k", at_once=64),
    row(24, "deit_small_distilled_paper", DEIT, model="deit_small_distilled_patch16_224.fb_in1k", at_once=256,
        distill="hard", distill_alpha=0.5, teacher="regnety_160.deit_in1k", teacher_pretrained=True),
    row(25, "deit_small_mmpretrain", DEIT, model="deit_small_patch16_224", at_once=256, clip=5.0, warmup=20,
        warmup_prefix=True, by_epoch=False, repeats=1, repeats_multiple=None, drop_path=None, ema=None),
    row(26, "deit3_small_paper", DEIT, {"model.kwargs.init_values": 1e-4}, model="deit3_small_patch16_224.fb_in1k",
        epochs=800, batch=2048, at_once=256, optimizer="lamb", lr=4e-3, lr_for=None, drop_path=0.05, policy="3a",
        brightness=0.3, contrast=0.3, saturation=0.3, erasing=0.0, erasing_mode="const", loss="bce", threshold=0.0,
        smoothing=0.0, eval_resize=224),
    row(27, "vit_b_16_tv", ADAMW, SAMPLER, torchvision_average(4096, 300), model="torchvision:vit_b_16", epochs=300,
        batch=4096, at_once=64, lr=3e-3, decay=0.3, clip=1.0, warmup=30, warmup_factor=0.033, by_epoch=True,
        policy="torchvision:rand_augment", mixup=0.2, cutmix=1.0, smoothing=0.11, repeats=3),
    row(28, "vit_small_big_vision_90e", ADAMW, {"model.kwargs.class_token": False, "model.kwargs.global_pool": "avg"},
        {"model.kwargs.fc_norm": False, "model.kwargs.weight_init": "jax"}, model="vit_small_patch16_224", epochs=90,
        batch=1024, lr=1e-3, decay=1e-4 / 1e-3, spared="norm bias token", clip=1.0, warmup=7.9936, warmup_factor=0.0,
        policy="rand-m10-n2-p1.0", mixup=0.2, area=[0.05, 1.0], mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5]),
    row(29, "convnext_tiny_paper", ADAMW, BICUBIC, MIX, {"model.kwargs.ls_init_value": 1e-6},
        model="convnext_tiny.fb_in1k", epochs=300, batch=4096, at_once=128, lr=4e-3, decay=0.05,
        spared="norm bias scale", warmup=20, warmup_factor=0.0, min_lr=1e-6, smoothing=0.1, drop_path=0.1,
        policy="rand-m9-mstd0.5-inc1", erasing=0.25, erasing_mode="pixel", ema=0.9999),
    row(30, "convnext_tiny_tv", TV_V2, TV_REPEATED, ADAMW, model="torchvision:convnext_tiny", lr=1e-3, decay=0.05,
        at_once=64, px=176, eval_resize=236),
    row(31, "swin_t_tv", TV_V2, TV_REPEATED, ADAMW, BICUBIC, MIX, torchvision_average(1024, 300),
        model="torchvision:swin_t", epochs=300, lr=1e-3, decay=0.05, spared="norm bias token", clip=5.0, warmup=20,
        min_lr=1e-5, erasing=0.25, eval_resize=232),
    row(32, "efficientnet_v2_s_tv", TV_V2, TV_REPEATED, model="torchvision:efficientnet_v2_s", at_once=32,
        px=300, eval_px=384, eval_resize=384),
    row(32, "efficientnet_v2_m_tv", TV_V2, TV_REPEATED, model="torchvision:efficientnet_v2_m", at_once=32,
        px=384, eval_px=480, eval_resize=480),
    row(33, "regnet_y_400mf_tv_v1", REGNET_TV, model="regnety_004", lr=0.4, batch=1024, at_once=128),
    row(33, "regnet_y_3_2gf_tv_v1", REGNET_TV, model="regnety_032", lr=0.4, batch=512, at_once=64),
    row(33, "regnet_y_16gf_tv_v1", REGNET_TV, model="regnety_160", lr=0.2, batch=256, at_once=32),
    row(34, "regnet_y_400mf_tv_v2", TV_V2_RESNET, model="regnety_004.tv2_in1k"),
    row(34, "regnet_y_3_2gf_tv_v2", TV_V2_RESNET, model="regnety_032.tv2_in1k"),
    row(34, "regnet_y_16gf_tv_v2", TV_V2_RESNET, model="regnety_160.tv2_in1k"),
    row(35, "regnet_y_3_2gf_pycls", PYCLS, model="regnety_032.pycls_in1k", lr=0.4, batch=512, at_once=64),
    row(36, "resnet50_pycls", PYCLS, model="resnet50", lr=0.2, batch=256, at_once=32),
    row(36, "resnext50_32x4d_pycls", PYCLS, model="resnext50_32x4d", lr=0.2, batch=256, at_once=32),
    row(36, "efficientnet_b0_pycls", PYCLS, model="efficientnet_b0", lr=0.4, batch=256, at_once=32, decay=1e-5),
    row(38, "maxvit_t_tv", ADAMW, BICUBIC, torchvision_average(4096, 400), model="torchvision:maxvit_t", epochs=400,
        batch=4096, at_once=128, lr=3e-3, decay=0.05, spared="token", warmup=32, by_epoch=True, min_lr=1e-5,
        policy="torchvision:trivial_augment_wide", mixup=0.8, smoothing=0.1, clip=1.0, sync_bn=True, eval_resize=224),
    # Of recipes that have no number: DenseNet's paper, MindCV's configs.
    row(None, "densenet121_paper", TV_V1, BICUBIC, model="densenet121", nesterov=True, brightness=0.4, contrast=0.4,
        saturation=0.4, zero_init_last=None),
    row(None, "ghostnet_100_mindcv", model="ghostnet_100", epochs=600, batch=1024, at_once=128, lr=0.4, decay=2e-5,
        spared="norm bias", warmup=20, warmup_factor=0.0, min_lr=1e-7, smoothing=0.1, drop=0.2,
        policy="rand-m9-mstd0.5", erasing=0.25),
    row(None, "resnet18_cifar10", CIFAR, {"schedule.kwargs.milestones_epochs": [150, 250]}, model="resnet18_cifar",
        zero_init_last=False, std=[0.2023, 0.1994, 0.2010], epochs=350, gamma=0.1),
    row(None, "wrn28_10_cifar10", WRN),
    row(None, "wrn28_10_cifar100", WRN),
]
