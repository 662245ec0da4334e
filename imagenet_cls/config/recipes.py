"""`docs/recipes.md`, written from the configs: `python -m imagenet_cls.config.recipes > docs/recipes.md`.

Owns the page's form and its introduction, and which configs are recipes: those whose `expect` names a source. Every
number on the page is read from a config, so that the two can't drift apart; a test fails when the page is older. Not
used in a run.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from imagenet_cls.config.load import DEMO, load_config
from imagenet_cls.config.schema import Config

CONFIGS = DEMO.parent
# Folder of configs -> title, in the order of the page. A new folder needs a line here.
FAMILIES = {
    "resnet": "ResNet",
    "resnext": "ResNeXt",
    "mobilenet": "MobileNet",
    "efficientnet": "EfficientNet",
    "regnet": "RegNet",
    "densenet": "DenseNet",
    "ghostnet": "GhostNet",
    "convnext": "ConvNeXt",
    "deit": "DeiT",
    "vit": "ViT",
    "swin": "Swin",
    "maxvit": "MaxViT",
}

INTRODUCTION = """\
# Recipes

<!-- Written by `python -m imagenet_cls.config.recipes`. Change the configs or recipes.py, not this file. -->

Each config below has the settings of a published recipe, and opens with its paper, its source and its command:

    bash scripts/dist_train.sh configs/resnet/resnet50_tv_v2.yaml 8
    python tools/plot_schedule.py configs/resnet/resnet50_tv_v2.yaml

**Claimed** is what the source says: top-1 on ImageNet-1k's validation set, in per cent, one centre crop (FFCV's with
its mirror image). **Ours** is a run of this project. **Not run** says that there was none: then a config is a
translation, and its claim is the source's alone. The batch is that of an optimizer step; where the source tells how
many images each of its GPUs had, `train.micro_batch_size` has that number in most configs, so that BatchNorm never sees
more of them at once than it did there. A GPU that takes several such micro-batches in turn sees the very groups that as
many GPUs would: a step's samples are dealt to them one by one, which spreads an image's repeats as the samplers of
DeiT and torchvision spread them over GPUs.

What stands behind a translation is that each ingredient does what the recipe's authors' did, compared with independent
implementations:

| ingredient | compared with | by |
|---|---|---|
| learning rate of every step | timm's and torch's schedulers, FFCV's formula | `tests/parity/test_parity_schedule.py` |
| who is decayed | timm's and torchvision's parameter groups | `tests/parity/test_parity_groups.py` |
| losses | timm's, torch's and torchvision's, the formulas | `tests/parity/test_parity_losses.py` |
| mixup and cutmix | timm's, for the same draws | `tests/parity/test_parity_mixing.py` |
| policies, erasing, repeats | timm's pipeline, its samplers' order | `tests/parity/test_parity_augment.py` |
| averages of weights | timm's and torchvision's | `tests/parity/test_parity_ema.py` |
| other resolutions | timm's loading, torchvision's, the formulas | `tests/parity/test_parity_resolution.py` |
| whole optimizer steps | plain torch | `tests/parity/test_parity_step.py` |
| these configs | claims, sides and parameters as published | `tests/configs/test_configs_published.py` |
| their rates | schedulers and formulas of the sources' scripts | `tests/configs/test_configs_rates.py` |
| their other settings | a table of every recipe, copied by hand | `tests/configs/published_settings.py` |

Two published recipes have no config. MosaicML's baseline of ResNet-50 (90 epochs): no figure is claimed for it,
so that nothing could be compared. timm's RegNetY-3.2GF with RandAugment (`regnety_032.ra_in1k`, 81.95 %): its settings
are in a gist, not in timm's repository.
"""

NOTES_INTRODUCTION = """\
## What deviates, what is left out, and what is uncertain

`deviates`: settings of the source that no key expresses, and what happens instead. `left out`: what the source's script
does besides, and the keys that add it. `uncertain`: what the source does not say for sure, or what is written from
memory of it. The others are believed to have every setting of their source.
For all of them: what is random is drawn by keys of our own; an epoch ends with its last whole batch, where
torchvision's script makes a step of what is left; `train.precision` is `auto`, whatever the source computed in; and
torchvision's averages copy the weights while its rate warms up, where here what was there at the start fades.
"""


@dataclass(frozen=True)
class Recipe:
    """A config that names a source. path: relative to `configs/`."""

    path: Path
    config: Config

    @property
    def family(self) -> str:
        """The folder that the config is in; those at the top are ResNets."""
        return self.path.parent.name or "resnet"

    @property
    def row(self) -> str:
        """Its line in the table."""
        config, expect = self.config, self.config.expect
        claimed, ours = _percent(expect.claimed_top1_pct), _percent(expect.ours_top1_pct)
        cells = [
            f"[`{self.path.stem}`](../configs/{self.path.as_posix()})",
            f"`{config.model.name}`",
            str(config.train.epochs),
            f"{config.train.global_batch_size:,}",
            f"{_training_px(config)} → {config.eval.crop_px}",
            claimed or "no single figure",
            ours,
            "" if ours else "not run",
            f"{expect.source}; {expect.hardware}" if expect.hardware else str(expect.source),
        ]
        return f"| {' | '.join(cells)} |"


def recipes() -> list[Recipe]:
    """All recipes, in the order of the page: by family, then by name, numbers in the order of their size."""
    found = []
    for path in CONFIGS.rglob("*.yaml"):
        relative = path.relative_to(CONFIGS)
        if relative.parts[0] != "_base_":
            config = load_config(path).config
            if config.expect.source is not None:
                found.append(Recipe(relative, config))
    order = list(FAMILIES)
    return sorted(found, key=lambda recipe: (order.index(recipe.family), _natural(recipe.path.stem)))


def page() -> str:
    """The whole page, as Markdown."""
    found = recipes()
    lines = []
    for family, title in FAMILIES.items():
        rows = [recipe.row for recipe in found if recipe.family == family]
        header = "| config | model | epochs | batch | px, training → evaluation | claimed | ours | not run | source |"
        lines += [f"## {title}", "", header, f"|{'---|' * 9}", *rows, ""]
    return "\n".join([INTRODUCTION, *lines, NOTES_INTRODUCTION, *_notes(found), ""])


def _notes(found: list[Recipe]) -> list[str]:
    """A point for each note; recipes with the same one share it."""
    names: dict[str, list[str]] = {}
    for recipe in found:
        if recipe.config.expect.note:
            names.setdefault(recipe.config.expect.note, []).append(f"`{recipe.path.stem}`")
    return [f"- {', '.join(owners)}: {note}." for note, owners in names.items()]


def _percent(number: float | None) -> str:
    return "" if number is None else f"{number:g}"


def _training_px(config: Config) -> str:
    sizes = config.augment.progressive.sizes_px
    return "-".join(map(str, sizes)) if sizes else str(config.augment.size_px)


def _natural(name: str) -> list[str | int]:
    """A key that sorts `resnet50_ffcv_16e` behind `resnet18_ffcv_88e`, and `resnet101` behind both."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


if __name__ == "__main__":
    sys.stdout.write(page())
