"""`tools/show_batch.py`: draw the images that the model gets in training, with their labels, without training."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import check_components
from imagenet_cls.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_USAGE = "CONFIG [key=value ...] [--epoch E] [--rank R --ranks N] [--images N] [--out FILE.png]"


def show_batch_command(argv: Sequence[str]) -> None:
    """Draw the first images of an epoch, after augmentation, erasing and mixing. Raises UserError."""
    description = (
        "Draw the images that the model gets in training, as a PNG file, without training."
    )
    parser = cli.build_parser("show-batch", description, _USAGE)
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--epoch", type=cli.not_negative, default=0, metavar="E", help="counted from 0 (default: 0)"
    )
    parser.add_argument(
        "--rank", type=cli.not_negative, default=0, metavar="R", help="whose images (default: 0)"
    )
    parser.add_argument(
        "--ranks", type=cli.positive, default=1, metavar="N", help="of the run (default: 1)"
    )
    parser.add_argument(
        "--images", type=cli.positive, default=32, metavar="N", help="at most (default: 32)"
    )
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE.png",
        help="default: work_dirs/<config name>_batch.png",
    )
    arguments = cli.parse(parser, argv)
    if arguments.rank >= arguments.ranks:
        raise UsageError(
            f"--rank {arguments.rank}: ranks are 0 to {arguments.ranks - 1}.\nGive --ranks, too."
        )
    loaded = cli.load_one_config(arguments, f"show_batch.py {_USAGE}")
    config = replace(
        loaded.config,
        device="cpu",
        parallel=replace(loaded.config.parallel, mode="none"),
        data=replace(loaded.config.data, num_workers=0),
        train=replace(loaded.config.train, compile=False),
    )
    path = arguments.out or Path(f"work_dirs/{loaded.name}_batch.png")
    if path.suffix.lower() != ".png":
        raise UsageError(f"--out {path}: the picture is a PNG file.\nName it *.png.")
    check_components(replace(loaded, config=config), None)
    import torch

    from imagenet_cls.data.samplers import samples_per_epoch
    from imagenet_cls.engine.build import build
    from imagenet_cls.engine.loaders import build_train_loader
    from imagenet_cls.engine.plan import batch_problem, plan_run
    from imagenet_cls.parallel.environment import RankInfo
    from imagenet_cls.parallel.process_group import Group
    from imagenet_cls.report.page import text
    from imagenet_cls.report.plots import plot_images

    if problem := batch_problem(config.train, arguments.ranks, config.parallel.uneven == "allow"):
        size = config.train.global_batch_size
        raise UsageError(
            f"--ranks {arguments.ranks}: {problem.message}.\nA batch of {size} allows up to {size} ranks."
        )
    cpu = torch.device("cpu")
    parts = build(config, Group(RankInfo(), cpu), load_initial_weights=False)
    assert parts.data.train is not None
    samples = samples_per_epoch(len(parts.data.train), config.data.repeats_multiple)
    plan = plan_run(config.train, samples, arguments.ranks)
    rank_info = RankInfo(arguments.rank, arguments.rank, arguments.ranks, arguments.ranks)
    mean, std = (
        torch.tensor(values).view(-1, 1, 1)
        for values in (parts.evaluation.mean, parts.evaluation.std)
    )
    loader = build_train_loader(
        config, parts.data.train, plan, Group(rank_info, cpu), parts.evaluation.mean
    )
    batch = next(iter(loader.epoch(arguments.epoch)))
    preprocess = replace(parts.preprocess, rank=arguments.rank)
    images, targets = preprocess(batch, arguments.epoch, arguments.epoch * plan.steps_per_epoch, 0)
    pixels = (images[: arguments.images] * std + mean).clamp(0, 1).permute(0, 2, 3, 1)
    # Several views of a batch (augment.splits) follow each other.
    classes = [text(name) for name in parts.data.classes]
    labels = [describe_target(targets[i % len(targets)], classes) for i in range(len(pixels))]
    try:
        plot_images(path, pixels.numpy(), labels)
    except OSError as error:
        raise UsageError(
            f"can't write {path}: {error.strerror}\nName another file with --out."
        ) from error
    print(
        f"wrote {path}: {len(pixels)} of the {len(images)} images that rank {arguments.rank} gets at once"
    )


def describe_target(target: "Tensor", classes: Sequence[str]) -> str:
    """The class of a target, int64 (); of a mixed one, float (classes,), the two largest shares."""
    if not target.is_floating_point():
        return classes[int(target)]
    shares, found = target.topk(min(2, len(target)))
    shown = [
        (share, classes[i])
        for share, i in zip(shares.tolist(), found.tolist(), strict=True)
        if share > 0
    ]
    return (
        shown[0][1]
        if len(shown) == 1
        else "\n".join(f"{share:.2f} {name}" for share, name in shown)
    )
