"""`tools/plot_schedule.py`: plot learning rate, momentum and training resolution of a run without training.

Needs no data: without --images, the training images are counted if they exist, else ImageNet's number is assumed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands import program
from imagenet_cls.commands.distributed import check_names
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import Config, DataConfig
from imagenet_cls.errors import UsageError

if TYPE_CHECKING:
    from imagenet_cls.engine.plan import Plan

IMAGENET_IMAGES = 1_281_167
_MOST_STEPS = 1_000_000  # most points of a curve; of a longer run only every n-th step is computed
_USAGE = "CONFIG [key=value ...] [--out FILE.png] [--images N]"


@dataclass(frozen=True)
class Curves:
    """Values at each of `steps`. momentum: None for an optimizer without one. scaling: a note on a scaled lr."""

    plan: "Plan"
    scaling: str | None
    steps: Sequence[int]
    lr: Sequence[float]
    momentum: Sequence[float] | None
    size_px: Sequence[int]

    def panels(self) -> dict[str, Sequence[float] | None]:
        return {"learning rate": self.lr, "momentum": self.momentum, "resolution (px)": self.size_px}


def main() -> None:
    """`tools/plot_schedule.py`."""
    program.main(plot_schedule_command)


def plot_schedule_command(argv: Sequence[str]) -> None:
    """Plot and print the schedule. Raises UserError for an invalid config or too few images."""
    description = "Plot learning rate, momentum and training resolution of a run, without training it."
    parser = program.build_parser("plot_schedule.py", description, _USAGE)
    program.add_config_arguments(parser)
    parser.add_argument("--out", metavar="FILE.png", help="default: work_dirs/<config name>_schedule.png")
    parser.add_argument(
        "--images", type=program.positive, metavar="N",
        help="in the training set; default: counted in data.root, or ImageNet's 1281167 if that is missing",
    )  # fmt: skip
    arguments = parser.parse_intermixed_args(argv)
    overrides, configs = program.split_overrides(arguments, ["one config"])
    if not configs:
        raise UsageError(f"no config given.\nUsage: plot_schedule.py {_USAGE}")
    loaded = load_config(configs[0], overrides)
    path = Path(arguments.out or f"work_dirs/{loaded.name}_schedule.png")
    if path.suffix.lower() != ".png":
        raise UsageError(f"--out {path}: the plot is a PNG file.\nName it *.png.")
    check_names(loaded, None)
    from imagenet_cls.report.plots import plot_panels

    images, source = count_training_images(loaded.config.data, arguments.images)
    curves = schedule_curves(loaded.config, images)
    epochs = [step / curves.plan.steps_per_epoch for step in curves.steps]
    try:
        plot_panels(path, loaded.name, epochs, {label: values for label, values in curves.panels().items() if values})
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}\nName another file with --out.") from error
    print(summary(curves, images))
    if source is not None:
        print(source)
    if loaded.config.schedule.name == "plateau":
        print("schedule plateau: drawn as if each evaluation were better than the ones before")
    print(f"wrote {path}")


def count_training_images(data: DataConfig, given: int | None) -> tuple[int, str | None]:
    """The training images and, unless `given`, where their number comes from. Writes and downloads nothing.

    Raises DataError where `data.root` exists and does not hold what the config expects.
    """
    if given is not None:
        return given, None
    has_files = data.name in ("folder", "list", "digits")
    if data.name == "synthetic" or (has_files and (Path(data.root).expanduser() / data.train).exists()):
        from imagenet_cls.data import open_datasets

        train = open_datasets(data, ("train",)).train
        assert train is not None
        place = data.root if has_files else data.name
        return len(train), f"{len(train):,} training images: counted ({place}); --images takes another number"
    why = f"no {data.root} here" if has_files else f"those of {data.name} are not counted"
    return IMAGENET_IMAGES, f"{IMAGENET_IMAGES:,} training images: assumed, as in ImageNet ({why}); or give --images N"


def schedule_curves(config: Config, num_images: int) -> Curves:
    """The curves of a run on `num_images` training images. Raises DataError if they do not fill one batch."""
    from imagenet_cls.data import samples_per_epoch, size_px_at
    from imagenet_cls.engine.plan import plan_run
    from imagenet_cls.optim.build import initial_momentum
    from imagenet_cls.optim.schedule import build_schedule, scaled_lr

    plan = plan_run(config.train, samples_per_epoch(num_images, config.data.repeats_multiple), world_size=1)
    lr, scaling = scaled_lr(config.optimizer, config.train.global_batch_size)
    schedule = build_schedule(config.schedule, lr, plan.steps_per_epoch, plan.epochs)
    steps = range(0, plan.total_steps, math.ceil(plan.total_steps / _MOST_STEPS))
    constant = initial_momentum(config.optimizer)
    scheduled = [schedule.momentum(step) for step in steps]
    momentum = [value for value in (constant if m is None else m for m in scheduled) if value is not None]
    sizes_px = [size_px_at(config.augment, epoch) for epoch in range(plan.epochs)]
    return Curves(
        plan=plan,
        scaling=scaling,
        steps=steps,
        lr=[schedule(step) for step in steps],
        momentum=None if constant is None else momentum,
        size_px=[sizes_px[step // plan.steps_per_epoch] for step in steps],
    )


def summary(curves: Curves, num_images: int) -> str:
    """The steps, then a table: where each value starts and ends, its lowest and its highest."""
    plan = curves.plan
    epochs = plan.total_steps / plan.steps_per_epoch
    lines = [
        f"{plan.total_steps:,} steps: {epochs:g} epochs of {plan.steps_per_epoch:,}, "
        f"{plan.global_batch:,} of {num_images:,} images in each",
        *filter(None, [curves.scaling]),
        " " * 16 + "".join(f"{column:>12}" for column in ("start", "lowest", "highest", "end")),
    ]
    for label, values in curves.panels().items():
        numbers = (values[0], min(values), max(values), values[-1]) if values else ()
        texts = [f"{number:.4g}" for number in numbers] or ["none"]
        lines.append(f"{label:<16}" + "".join(f"{text:>12}" for text in texts))
    return "\n".join(lines)
