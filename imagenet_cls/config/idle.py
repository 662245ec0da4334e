"""Keys that do something only beside others, and what becomes of them where they do nothing.

Owns the table of them. A key that is written where it does nothing is a mistake that no result shows, so it is a
problem, with one exception: where a later layer took away what it needs (`mix.mixup_alpha=0` over a recipe that sets
`mix.prob`), that was meant, and the key falls back to its default. So a loaded config holds no such value, and neither
does its dump. Called by `load` (forgotten), `check` (problems) and `engine.resume` (ineffective_keys).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from imagenet_cls.config import keys
from imagenet_cls.config.schema import Config, MixConfig
from imagenet_cls.errors import Problem, format_value

Heights = Mapping[keys.KeyPath, int]
"""Which layer wrote a value, counted from 1 upwards; keys at a default are not among them."""


@dataclass(frozen=True)
class Need:
    """What `subjects` need to do anything: that `is_met`, which the keys in `switches` decide.

    words: of a problem; `{value}` in them is the subject's, `{switch}` the first switch's. Empty where a rule says it.
    """

    subjects: tuple[str, ...]
    switches: tuple[str, ...]
    is_met: Callable[[Config], bool]
    words: str


def mixes(mix: MixConfig) -> bool:
    """Whether anything is mixed at all."""
    return mix.mixup_alpha > 0 or cuts(mix)


def cuts(mix: MixConfig) -> bool:
    """Whether cutmix is on."""
    return mix.cutmix_alpha > 0 or mix.cutmix_minmax is not None


_JITTER = tuple(f"augment.color_jitter.{name}" for name in ("brightness", "contrast", "saturation", "hue"))
_MIXING = ("mix.mixup_alpha", "mix.cutmix_alpha", "mix.cutmix_minmax")
_NOTHING = "{value} does nothing"

NEEDS = (
    Need(
        ("data.repeats_multiple",),
        ("data.repeats",),
        lambda config: config.data.repeats > 1,
        "cuts epochs of repeated samples, and data.repeats is 1; make it null",
    ),
    Need(
        ("augment.progressive.multiple_px",),
        ("augment.progressive.epochs", "augment.progressive.sizes_px"),
        lambda config: (config.augment.progressive.epochs, config.augment.progressive.sizes_px) != (None, None),
        _NOTHING + " without sizes; give augment.progressive.epochs and sizes_px, or leave it out",
    ),
    Need(
        ("augment.color_jitter.prob",),
        _JITTER,
        lambda config: any(getattr(config.augment.color_jitter, key.rpartition(".")[2]) for key in _JITTER),
        _NOTHING + ", as brightness, contrast, saturation and hue are 0; give one of them, or leave it out",
    ),
    Need(
        tuple(f"augment.erasing.{name}" for name in ("mode", "max_count", "scale", "ratio")),
        ("augment.erasing.prob",),
        lambda config: config.augment.erasing.prob > 0,
        _NOTHING + ", as augment.erasing.prob is 0; give a probability, or leave it out",
    ),
    Need(
        ("mix.prob", "mix.mode"),
        _MIXING,
        lambda config: mixes(config.mix),
        _NOTHING + " without mixing; give mix.mixup_alpha or mix.cutmix_alpha, or leave it out",
    ),
    Need(
        ("mix.switch_prob",),
        _MIXING,
        lambda config: config.mix.mixup_alpha > 0 and cuts(config.mix),
        _NOTHING + " unless both are on; give mix.mixup_alpha and mix.cutmix_alpha, or leave it out",
    ),
    Need(
        ("mix.cutmix_alpha",),
        ("mix.cutmix_minmax",),
        lambda config: config.mix.cutmix_minmax is None,
        _NOTHING + " beside mix.cutmix_minmax {switch}, which is in its place; keep one",
    ),
    Need(
        ("mix.off_epoch",),
        _MIXING,
        lambda config: mixes(config.mix),
        "{value} is where mixing ends, and there is none; give mix.mixup_alpha, or make it null",
    ),
    Need(
        ("mix.off_epoch",),
        ("train.epochs",),
        lambda config: config.mix.off_epoch is None or config.mix.off_epoch <= config.train.epochs,
        _NOTHING + ", as the run ends before: train.epochs is {switch}; make it null to mix to the end",
    ),
    Need(
        tuple(f"distill.teacher.{name}" for name in ("name", "pretrained", "checkpoint")),
        ("distill.kind",),
        lambda config: config.distill.kind != "none",
        "",
    ),
    Need(
        ("distill.alpha",),
        ("distill.kind",),
        lambda config: config.distill.kind != "none",
        _NOTHING + ", as distill.kind is none; say soft or hard, or leave it out",
    ),
    Need(
        ("distill.temperature",),
        ("distill.kind",),
        lambda config: config.distill.kind == "soft",
        _NOTHING + ", as distill.kind is {switch}; it is for soft, so leave it out",
    ),
    Need(
        ("optimizer.lr_scaling",),
        ("optimizer.lr_base_batch",),
        lambda config: config.optimizer.lr_base_batch is not None,
        _NOTHING + " without optimizer.lr_base_batch; give the batch that lr is for, or leave it out",
    ),
    Need(
        ("schedule.warmup_start_factor", "schedule.warmup_start_lr", "schedule.warmup_prefix"),
        ("schedule.warmup_epochs",),
        lambda config: config.schedule.warmup_epochs > 0,
        _NOTHING + " without a warm-up; give schedule.warmup_epochs, or leave it out",
    ),
    Need(
        ("schedule.warmup_start_factor",),
        ("schedule.warmup_start_lr",),
        lambda config: config.schedule.warmup_start_lr is None,
        _NOTHING + " beside schedule.warmup_start_lr {switch}, which is in its place; make that null, or drop this",
    ),
    Need(
        ("train.sam_every_steps",),
        ("train.sam_rho",),
        lambda config: config.train.sam_rho is not None,
        _NOTHING + " without train.sam_rho; give it, or leave this out",
    ),
    Need(
        ("ema.every_steps", "ema.warmup"),
        ("ema.decay", "ema.half_life_images"),
        lambda config: (config.ema.decay, config.ema.half_life_images) != (None, None),
        _NOTHING + " without an average; give ema.decay or ema.half_life_images, or leave it out",
    ),
    Need(
        ("eval.crop_pct",),
        ("eval.resize_px",),
        lambda config: config.eval.resize_px is None,
        _NOTHING + " beside eval.resize_px={switch}; set eval.resize_px=null",
    ),
)


def ineffective_keys(config: Config) -> dict[str, str]:
    """The keys that have no effect in this config, whatever their values, and the keys that decide that."""
    return {
        subject: f"has no effect with this {' and '.join(need.switches)}"
        for need in NEEDS
        if not need.is_met(config)
        for subject in need.subjects
    }


def forgotten(config: Config, heights: Heights) -> list[keys.KeyPath]:
    """The keys that do nothing because of a layer above their own: they are to have their defaults."""
    return [
        path for need, path in _unmet(config) if path in heights and heights[path] < _height_of_switches(need, heights)
    ]


def idle_problems(config: Config, heights: Heights, wrong: Collection[str]) -> Iterator[Problem]:
    """What does nothing and is not at its default.

    eval.crop_pct is told at its default, too, where it is written above a size that was written: it seems to change
    that. wrong: keys that are not to be judged, nor anything by them.
    """
    told = set(wrong)
    for need, path in _unmet(config):
        key, value = ".".join(path), keys.value_of(config, path)
        seems_to_act = key == "eval.crop_pct" and heights.get(path, 0) > _height_of_switches(need, heights) > 0
        if need.words and (value != keys.default_of(path) or seems_to_act) and not {key, *need.switches} & told:
            told.add(key)
            switch = keys.value_of(config, tuple(need.switches[0].split(".")))
            yield Problem(key, need.words.format(value=format_value(value), switch=format_value(switch)))


def _unmet(config: Config) -> Iterator[tuple[Need, keys.KeyPath]]:
    for need in NEEDS:
        if not need.is_met(config):
            for subject in need.subjects:
                yield need, tuple(subject.split("."))


def _height_of_switches(need: Need, heights: Heights) -> int:
    return max(heights.get(tuple(switch.split(".")), 0) for switch in need.switches)
