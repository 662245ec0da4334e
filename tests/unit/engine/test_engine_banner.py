"""What the banner tells of a recipe: what was added, and nothing else."""

from helpers import DEMO, REPOSITORY

from imagenet_cls.config.load import load_config
from imagenet_cls.engine.run import recipe_rows

PLAIN = ["ema.decay=null", "loss.label_smoothing=0"]


def test_a_plain_recipe_adds_no_row() -> None:
    assert recipe_rows(load_config(DEMO, PLAIN).config) == []


def test_what_a_recipe_adds_is_told() -> None:
    words = ["mix.mixup_alpha=0.2", "mix.cutmix_alpha=1", "loss.label_smoothing=0.1", "ema.half_life_images=20000000"]
    words += ["ema.every_steps=32", "augment.policy=rand-m9", "distill.kind=hard", "distill.teacher.name=resnet50"]
    words += ["distill.teacher.pretrained=true"]
    assert dict(recipe_rows(load_config(DEMO, PLAIN[:1] + words).config)) == {
        "policy": "rand-m9",
        "mixing": "mixup 0.2, cutmix 1.0",
        "loss": "cross_entropy, label smoothing 0.1",
        "teacher": "resnet50, hard",
        "average (EMA)": "half-life 20,000,000 images, every 32 steps",
    }


def test_fine_tuning() -> None:
    rows = dict(recipe_rows(load_config(REPOSITORY / "configs" / "finetune" / "own_dataset.yaml").config))
    assert rows["layer decay"] == "0.8" and rows["average (EMA)"].startswith("decay 0.99")
