"""`tools/plot_schedule.py`: how learning rate, momentum and training resolution will go, before anything is trained.

Owns the command, and what it prints; the drawing is `report.plots`. Needs no data: images are counted where they lie on
this disk, else their number is told, or assumed, which is said. Refuses a config that `tools/train.py` would refuse.
Stands on the level of `cli`.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands import program
from imagenet_cls.commands.arguments import positive
from imagenet_cls.commands.distributed import check_names
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import Config, DataConfig
from imagenet_cls.errors import UsageError

if TYPE_CHECKING:
    from imagenet_cls.engine.plan import Plan

IMAGENET_IMAGES = 1_281_167
# Of a longer run, evenly spaced steps are looked at.
_MOST_STEPS = 1_000_000


@dataclass(frozen=True)
class Course:
    """What a run will go through, one value for each of `steps`. momentum: None for an optimizer that has none."""

    plan: "Plan"
    scaling: str | None
    steps: Sequence[int]
    lr: Sequence[float]
    momentum: Sequence[float] | None
    size_px: Sequence[int]


def main() -> None:
    """`tools/plot_schedule.py`."""
    program.main(plot_schedule_command)


def plot_schedule_command(argv: Sequence[str]) -> None:
    """The tool. Raises UserError: what a config does not allow, too few images, a file that can't be written."""
    parser = argparse.ArgumentParser(
        prog="plot_schedule.py",
        usage="plot_schedule.py CONFIG [key=value ...] [--out FILE.png] [--images N]",
        description="Draw learning rate, momentum and training resolution over a run, before any training.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG key=value",
        help="a config file, and changes such as optimizer.lr=0.2",
    )
    parser.add_argument("--out", metavar="FILE.png", help="default: work_dirs/<config name>_schedule.png")
    parser.add_argument(
        "--images", type=positive, metavar="N",
        help="in the training set; default: counted in data.root, or where that is not there ImageNet's 1281167",
    )  # fmt: skip
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_intermixed_args(argv)
    configs = [word for word in arguments.words if "=" not in word]
    if len(configs) != 1:
        asked = f"one config, not {len(configs)}: {', '.join(configs)}" if configs else "which config?"
        raise UsageError(f"{asked}\nUsage: plot_schedule.py CONFIG [key=value ...] [--out FILE.png] [--images N]")
    loaded = load_config(configs[0], [word for word in arguments.words if "=" in word])
    path = Path(arguments.out or f"work_dirs/{loaded.name}_schedule.png")
    if path.suffix.lower() != ".png":
        raise UsageError(f"--out {path}: the drawing is a PNG file.\nName it *.png.")
    check_names(loaded, None)
    from imagenet_cls.report.plots import plot_panels

    images, counted = training_images(loaded.config.data, arguments.images)
    course = foresee(loaded.config, images)
    epochs = [step / course.plan.steps_per_epoch for step in course.steps]
    panels = {"learning rate": course.lr, "momentum": course.momentum, "resolution (px)": course.size_px}
    try:
        plot_panels(path, loaded.name, epochs, {label: values for label, values in panels.items() if values})
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}\nName another file with --out.") from error
    for line in summary(course, images):
        print(line)
    if counted is not None:
        print(counted)
    if loaded.config.schedule.name == "plateau":
        print("schedule plateau: drawn as if each evaluation were better than the ones before")
    print(f"wrote {path}")


def training_images(data: DataConfig, told: int | None) -> tuple[int, str | None]:
    """How many images an epoch is made of, and where the number comes from if it was not `told`.

    Files are listed and none is read, written or downloaded. Raises DataError where `data.root` is there and holds
    something else than the config says.
    """
    if told is not None:
        return told, None
    has_files = data.name in ("folder", "list", "digits")
    if data.name == "synthetic" or (has_files and _is_there(data)):
        from imagenet_cls.data import open_datasets

        train = open_datasets(data, ("train",)).train
        assert train is not None, "what is asked for is opened"
        place = data.root if has_files else data.name
        return len(train), f"{len(train):,} training images: counted ({place}); --images takes another number"
    why = f"no {data.root} here" if has_files else f"those of {data.name} are not counted"
    return IMAGENET_IMAGES, f"{IMAGENET_IMAGES:,} training images: assumed, as in ImageNet ({why}); or say --images N"


def _is_there(data: DataConfig) -> bool:
    return (Path(data.root).expanduser() / data.train).exists()


def foresee(config: Config, num_images: int) -> Course:
    """The course of a run on so many training images. Raises DataError where they do not fill one batch."""
    from imagenet_cls.data import samples_per_epoch, size_px_at
    from imagenet_cls.engine.plan import plan_run
    from imagenet_cls.optim.build import own_momentum
    from imagenet_cls.optim.scaling import scaled_lr
    from imagenet_cls.optim.schedule import build_schedule

    plan = plan_run(config.train, samples_per_epoch(num_images, config.data.repeats_multiple), world_size=1)
    lr, scaling = scaled_lr(config.optimizer, config.train.global_batch_size)
    schedule = build_schedule(config.schedule, lr, plan.steps_per_epoch, plan.epochs)
    steps = range(0, plan.total_steps, math.ceil(plan.total_steps / _MOST_STEPS))
    own = own_momentum(config.optimizer)
    momenta = [schedule.momentum(step) for step in steps]
    moved = [own if momentum is None else momentum for momentum in momenta]
    sides_px = [size_px_at(config.augment, epoch) for epoch in range(plan.epochs)]
    return Course(
        plan=plan,
        scaling=scaling,
        steps=steps,
        lr=[schedule(step) for step in steps],
        momentum=None if own is None else [value for value in moved if value is not None],
        size_px=[sides_px[step // plan.steps_per_epoch] for step in steps],
    )


def summary(course: Course, num_images: int) -> list[str]:
    """A short table: where each value starts and ends, and between which values it moves."""
    plan = course.plan
    epochs = plan.total_steps / plan.steps_per_epoch
    lines = [
        f"{plan.total_steps:,} steps: {epochs:g} epochs of {plan.steps_per_epoch:,}, "
        f"{plan.global_batch:,} of {num_images:,} images in each"
    ]
    if course.scaling is not None:
        lines.append(course.scaling)
    columns = ("start", "lowest", "highest", "end")
    lines.append(" " * 16 + "".join(f"{column:>12}" for column in columns))
    for label, values in (
        ("learning rate", course.lr),
        ("momentum", course.momentum),
        ("resolution (px)", course.size_px),
    ):
        if values is None:
            lines.append(f"{label:<16}{'none':>12}")
            continue
        ends = (values[0], min(values), max(values), values[-1])
        lines.append(f"{label:<16}" + "".join(f"{value:>12.4g}" for value in ends))
    return lines
