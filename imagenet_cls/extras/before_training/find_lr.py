"""`tools/find_lr.py`: train with a growing learning rate, and plot the loss over it."""

from collections.abc import Sequence

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import join_alone
from imagenet_cls.errors import UsageError
from imagenet_cls.extras.before_training.pictures import add_picture_option, picture_path
from imagenet_cls.files import explain_write_errors

_USAGE = "CONFIG|DATA [key=value ...] [--from LR] [--to LR] [--steps N] [--out FILE.png]"


def find_lr_command(argv: Sequence[str]) -> None:
    """Train with a growing learning rate; print and plot the loss and a suggestion. Raises
    UserError.
    """
    parser = cli.build_parser(
        "find-lr",
        "Train from the initial weights while the learning rate grows from step to step (the range "
        "test of Smith 2015, arXiv:1506.01186), and plot the loss over it. Changes no config and "
        "writes no run folder.",
        _USAGE,
    )
    cli.add_config_arguments(parser)
    add = parser.add_argument
    add(
        "--from",
        dest="low",
        type=cli.positive_float,
        default=1e-6,
        metavar="LR",
        help="of the first step (default: 1e-6)",
    )
    add(
        "--to",
        dest="high",
        type=cli.positive_float,
        default=10.0,
        metavar="LR",
        help="of the last step (default: 10)",
    )
    add("--steps", type=cli.number(20), default=100, metavar="N", help="at most (default: 100)")
    add_picture_option(parser, "lr")
    arguments = cli.parse(parser, argv)
    if arguments.low >= arguments.high:
        raise UsageError(
            f"--from {arguments.low:g} is not below --to {arguments.high:g}.",
            "Correct one of them.",
        )
    loaded = cli.load_one_config(arguments, parser)
    path = picture_path(arguments, loaded, "lr")
    config, context = join_alone(loaded)
    from imagenet_cls.extras.before_training.lr_range import lr_range
    from imagenet_cls.extras.before_training.pictures import plot_lr_range

    found = lr_range(config, context, arguments.low, arguments.high, arguments.steps)
    print(f"ended {found.end}")
    lr = found.steepest()
    if lr is None:
        print("no suggestion: the loss did not fall; try a lower --from, or more --steps")
        return
    with explain_write_errors(path, "Name another file with --out."):
        plot_lr_range(path, found.lrs, found.losses, found.smoothed, lr)
    batch = config.train.global_batch_size
    factor = found.lr_factor
    scaled = ""
    if factor != 1:
        scaled = f", which optimizer.lr_base_batch multiplies by {factor:.4g} to {lr:.2g}"
    print(
        f"suggestion: optimizer.lr={lr / factor:.2g}{scaled}: where the smoothed loss falls "
        "fastest with the logarithm of the rate"
    )
    print(
        f"A suggestion is a hint, not a promise: for a global batch of {batch} images and the peak "
        f"of the schedule. Factors of parameter groups were applied.\nwrote {path}"
    )
