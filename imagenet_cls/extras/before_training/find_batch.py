"""`tools/find_batch.py`: find the largest micro-batch that fits on a device."""

import math
from collections.abc import Sequence

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import join_alone
from imagenet_cls.errors import ResourceError

_USAGE = "CONFIG|DATA [key=value ...] [--gpus N] [--max IMAGES]"
_GIB = 2.0**30
_MOST_IMAGES = 2**20


def find_batch_command(argv: Sequence[str]) -> None:
    """Print speed and memory of micro-batches, and what to put into the config. Raises
    UserError.
    """
    parser = cli.build_parser(
        "find-batch",
        "Find the largest micro-batch that fits on a device, with the training steps of the config "
        "on random images. Prints it, and changes nothing.",
        _USAGE,
        "The data is read only for the number of classes, if model.num_classes is not set.",
    )
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--gpus", "-g", type=cli.positive, default=1, metavar="N", help="of the run (default: 1)"
    )
    parser.add_argument(
        "--max",
        type=cli.positive,
        metavar="IMAGES",
        help="largest size to try; default: no limit on a GPU, and on a CPU the share of a device",
    )
    arguments = cli.parse(parser, argv)
    loaded = cli.load_one_config(arguments, parser)
    config, context = join_alone(loaded)
    from imagenet_cls.extras.before_training.micro_batches import micro_batch_trials

    most = arguments.max or _MOST_IMAGES
    if arguments.max is None and context.device.type == "cpu":
        # The system would kill this process where memory runs out.
        most = math.ceil(config.train.global_batch_size / arguments.gpus)
    reserved = "  reserved GiB" if context.device.type == "cuda" else ""
    print(f"{'images':>9}  {'images/s':>9}  peak GiB{reserved}")
    fitting = []
    for trial in micro_batch_trials(config, context, arguments.gpus, most):
        if trial.problem:
            print(f"{trial.images:9,}  {'-':>9}  {'-':>8}  {trial.problem}", flush=True)
            continue
        fitting.append(trial)
        reserved = f"  {trial.reserved_bytes / _GIB:12.2f}" if trial.reserved_bytes else ""
        print(
            f"{trial.images:9,}  {trial.images_per_sec:9.1f}  "
            f"{trial.peak_bytes / _GIB:8.2f}{reserved}",
            flush=True,
        )
    if not fitting:
        raise ResourceError(
            "Not even one image fits.",
            "Try train.grad_checkpointing=true, train.precision=bf16 or smaller images.",
        )
    fastest = max(fitting, key=lambda trial: trial.images_per_sec)
    largest = max(trial.images for trial in fitting)
    print(
        f"largest that fits: {largest:,}; fastest: {fastest.images:,}, "
        f"{fastest.images_per_sec:.1f} images/s"
    )
    equal = loaded.config.parallel.mode == "dp" and arguments.gpus > 1
    print(describe_plan(config.train.global_batch_size, arguments.gpus, largest, equal))


def describe_plan(global_batch: int, num_devices: int, largest: int, equal: bool) -> str:
    """The line for the config, and the micro-batches that follow from it. equal: see
    `micro_batch_for`.
    """
    from imagenet_cls.engine.plan import micro_batch_for

    size = micro_batch_for(global_batch, num_devices, largest, equal)
    steps = math.ceil(global_batch / (num_devices * size))
    limit = "null" if steps == 1 else str(largest)
    devices = "1 device" if num_devices == 1 else f"{num_devices} devices"
    micro_batches = "1 micro-batch" if steps == 1 else f"{steps} micro-batches"
    return (
        f"train.micro_batch_size={limit}  # train.global_batch_size={global_batch} on "
        f"{devices}: {micro_batches} of {size} images"
    )
