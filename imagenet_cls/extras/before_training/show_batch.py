"""`tools/show_batch.py`: draw the images that the model gets in training, with their labels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import join_alone
from imagenet_cls.extras.before_training.pictures import (
    add_picture_option,
    picture_path,
    plot_images,
)
from imagenet_cls.extras.pages.render import utf8_text
from imagenet_cls.files import explain_write_errors

if TYPE_CHECKING:
    from torch import Tensor

_USAGE = "CONFIG|DATA [key=value ...] [--epoch E] [--images N] [--out FILE.png]"


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
    parser.add_argument(
        "--images", type=cli.positive, default=32, metavar="N", help="at most (default: 32)"
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
    import torch

    from imagenet_cls.engine.build import build

    parts = build(config, context, load_initial_weights=False)
    batch = next(parts.train_loader.epoch(arguments.epoch))
    first_step = arguments.epoch * parts.plan.steps_per_epoch
    images, targets = parts.preprocess(batch, arguments.epoch, first_step, 0)
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in parts.mean_std)
    pixels = (images[: arguments.images] * std + mean).clamp(0, 1).permute(0, 2, 3, 1)
    # The splits of a batch (augment.splits) follow each other.
    classes = [utf8_text(name) for name in parts.data.classes]
    has_several = parts.evaluation.task.is_multilabel
    labels = [
        describe_target(targets[i % len(targets)], classes, has_several) for i in range(len(pixels))
    ]
    with explain_write_errors(path, "Name another file with --out."):
        plot_images(path, pixels.numpy(), labels)
    print(f"wrote {path}: {len(pixels)} of the {len(images)} images of the first micro-batch")


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
