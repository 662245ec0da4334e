"""The start-up table."""

from helpers import DEMO, REPOSITORY

from imagenet_cls.config.load import load_config
from imagenet_cls.engine.summary import recipe_rows

PLAIN = ["ema.decay=null", "loss.label_smoothing=0"]


def test_recipe_rows_plain_recipe_empty() -> None:
    assert recipe_rows(load_config(DEMO, PLAIN).config) == []


def test_recipe_rows_list_additions() -> None:
    overrides = ["mix.mixup_alpha=0.2", "mix.cutmix_alpha=1", "loss.label_smoothing=0.1", "augment.policy=rand-m9"]
    overrides += ["ema.half_life_images=20000000", "ema.every_steps=32", "ema.decay=null"]
    overrides += ["distill.kind=hard", "distill.teacher.name=resnet50", "distill.teacher.pretrained=true"]
    assert dict(recipe_rows(load_config(DEMO, overrides).config)) == {
        "policy": "rand-m9",
        "mixing": "mixup 0.2, cutmix 1.0",
        "loss": "cross_entropy, label smoothing 0.1",
        "teacher": "resnet50, hard",
        "EMA": "half-life 20,000,000 images, every 32 steps",
    }


def test_recipe_rows_fine_tuning() -> None:
    rows = dict(recipe_rows(load_config(REPOSITORY / "configs" / "finetune" / "own_dataset.yaml").config))
    assert rows["layer decay"] == "0.8" and rows["EMA"].startswith("decay 0.99")
