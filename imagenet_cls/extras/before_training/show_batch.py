"""`tools/show_batch.py`: draw the images that the model gets in training, with their labels."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import join_alone
from imagenet_cls.extras.before_training.pictures import (
    add_picture_option,
    images_figure,
    picture_path,
)
from imagenet_cls.extras.pages.figures import png, write_figure
from imagenet_cls.extras.pages.render import to_jpeg, utf8_text
from imagenet_cls.files import explain_write_errors, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from imagenet_cls.data.loader import TrainBatch
    from imagenet_cls.engine.parts import TrainingParts

_USAGE = "CONFIG|DATA [key=value ...] [--epoch E] [--out FILE.png]"


def show_batch_command(argv: Sequence[str]) -> None:
    """Draw the first images of an epoch, after augmentation, erasing and mixing. Raises
    UserError.
    """
    description = (
        "Draw the images that the model gets in training, as a PNG file, without training."
    )
    parser = cli.build_parser("show-batch", description, _USAGE)
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--epoch", type=cli.number(0), default=0, metavar="E", help="counted from 0 (default: 0)"
    )
    add_picture_option(parser, "batch")
    arguments = cli.parse(parser, argv)
    loaded = cli.load_one_config(arguments, parser)
    config = replace(
        loaded.config,
        device="cpu",
        data=replace(loaded.config.data, num_workers=0),
        train=replace(loaded.config.train, compile=False),
    )
    path = picture_path(arguments, loaded, "batch")
    config, context = join_alone(replace(loaded, config=config))
    from imagenet_cls.engine.build import build

    parts = build(config, context, load_initial_weights=False)
    batch = next(parts.train_loader.epoch(arguments.epoch))
    figure, count = batch_figure(parts, batch, arguments.epoch, 32)
    with explain_write_errors(path, "Name another file with --out."):
        write_figure(path, figure)
    print(f"wrote {path}: {count} of the {len(batch.targets)} images of the first micro-batch")


def write_first_batch(folder: Path, parts: "TrainingParts", batch: "TrainBatch") -> None:
    """Write `plots/first_batch.jpg` of a run that starts: 16 images as the model gets them."""
    figure, _ = batch_figure(parts, batch, 0, 16)
    path = folder / "plots" / "first_batch.jpg"
    path.parent.mkdir(exist_ok=True)
    write_file(path, to_jpeg(Image.open(io.BytesIO(png(figure))), 1200))


def batch_figure(
    parts: "TrainingParts", batch: "TrainBatch", epoch: int, most: int
) -> tuple["Figure", int]:
    """A figure of at most `most` images of the first micro-batch of an epoch, after augmentation,
    erasing and mixing, with their labels; and the number of images.
    """
    import torch

    images, targets = parts.preprocess(batch, epoch, epoch * parts.plan.steps_per_epoch, 0)
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in parts.mean_std)
    pixels = (images[:most].cpu() * std + mean).clamp(0, 1).permute(0, 2, 3, 1)
    # The splits of a batch (augment.splits) follow each other.
    classes = [utf8_text(name) for name in parts.data.classes]
    has_several = parts.evaluation.task.is_multilabel
    targets = targets.cpu()
    labels = [
        describe_target(targets[i % len(targets)], classes, has_several) for i in range(len(pixels))
    ]
    return images_figure(pixels.numpy(), labels), len(pixels)


def describe_target(target: "Tensor", classes: Sequence[str], multilabel: bool = False) -> str:
    """The class of a target, int64 (); of a mixed one, float (classes,), the two largest shares; of
    one with several labels, float (classes,), these, with their shares if it is mixed.
    """
    if multilabel:
        return "; ".join(
            name if share == 1 else f"{share:.2f} {name}"
            for share, name in zip(target.tolist(), classes, strict=True)
            if share > 0
        )
    if not target.is_floating_point():
        return classes[int(target)]
    shares, found = target.topk(min(2, len(target)))
    if len(shares) == 1 or shares[1] == 0:
        return classes[int(found[0])]
    pairs = zip(shares.tolist(), found.tolist(), strict=True)
    return "\n".join(f"{share:.2f} {classes[i]}" for share, i in pairs)
