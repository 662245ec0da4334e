"""`tools/plot_schedule.py`: plot learning rate, momentum and resolution without training.

Needs no data: without --images, the training images are counted if they exist or the digits are
meant, else ImageNet's number is assumed.
"""

from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import check_components
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.extras.before_training.pictures import (
    add_picture_option,
    picture_path,
    plot_panels,
)
from imagenet_cls.files import explain_write_errors
from imagenet_cls.text import format_columns

IMAGENET_IMAGES = 1_281_167
_USAGE = "CONFIG|DATA [key=value ...] [--out FILE.png] [--images N]"


def plot_schedule_command(argv: Sequence[str]) -> None:
    """Plot and print the schedule. Raises UserError for an invalid config or too few images."""
    description = (
        "Plot learning rate, momentum and training resolution of a run, without training it."
    )
    parser = cli.build_parser("plot-schedule", description, _USAGE)
    cli.add_config_arguments(parser)
    add_picture_option(parser, "schedule")
    parser.add_argument(
        "--images",
        type=cli.positive,
        metavar="N",
        help="in the training set; default: counted, or ImageNet's 1281167 if data.root is missing "
        "or the data may have to be downloaded",
    )
    arguments = cli.parse(parser, argv)
    loaded = cli.load_one_config(arguments, parser)
    path = picture_path(arguments, loaded, "schedule")
    check_components(loaded, None)
    from imagenet_cls.engine.plan import schedule_curves

    images, source = (
        (arguments.images, None) if arguments.images else count_training_images(loaded.config.data)
    )
    plan, note, curves = schedule_curves(loaded.config, images)
    with explain_write_errors(path, "Name another file with --out."):
        plot_panels(
            path,
            loaded.name,
            [step / plan.steps_per_epoch for step in range(plan.total_steps)],
            curves,
        )
    print(
        f"{plan.total_steps:,} steps: {plan.total_steps / plan.steps_per_epoch:g} epochs of "
        f"{plan.steps_per_epoch:,}, {plan.global_batch:,} of {images:,} images in each"
    )
    rows = [["", "start", "lowest", "highest", "end"]]
    for label, values in curves.items():
        rows.append(
            [
                label,
                *(f"{number:.4g}" for number in (values[0], min(values), max(values), values[-1])),
            ]
        )
    print("\n".join(filter(None, [note, format_columns(rows), source])))
    if loaded.config.schedule.name == "plateau":
        print("schedule plateau: drawn as if each evaluation were better than the ones before")
    print(f"wrote {path}")


def count_training_images(data: DataConfig) -> tuple[int, str]:
    """The number of training images, and where it comes from. Writes the digits where they are
    missing, as a training does, but downloads nothing. Raises DataError for wrong data.
    """
    from imagenet_cls.data.datasets import open_datasets

    has_files = data.name in ("folder", "list")
    is_remote = data.name.startswith(("torchvision:", "hf:"))
    is_missing = has_files and not Path(data.root).expanduser().exists()
    if not is_remote and not is_missing:
        train = open_datasets(data, ("train",)).train
        place = data.root if has_files or data.name == "digits" else data.name
        return len(
            train
        ), f"{len(train):,} training images: counted ({place}); use --images N for another number"
    why = f"no {data.root} here" if has_files else f"the images of {data.name} are not counted"
    return (
        IMAGENET_IMAGES,
        f"{IMAGENET_IMAGES:,} training images: assumed, as in ImageNet ({why}); or give --images N",
    )
