"""`tools/predict.py`: classify images."""

import argparse
import re
import sys
from collections.abc import Sequence

from imagenet_cls.commands import cli
from imagenet_cls.commands.test import check_exists, write_predictions
from imagenet_cls.config.schema import DEVICE
from imagenet_cls.errors import DataError, UsageError, first_line, printable


def predict_command(argv: Sequence[str]) -> None:
    """Classify images with a checkpoint folder or an ONNX file."""
    parser = cli.build_parser("predict", "Classify images with a checkpoint folder, or an ONNX file of export.py.")
    cli.add_weights_arguments(parser)
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image files, folders, or quoted patterns")
    parser.add_argument("--top", type=cli.positive, default=5, metavar="K", help="classes to show for each image")
    parser.add_argument(
        "--device", type=device_name, default="auto", help="as the key of a config: auto, cpu, cuda, ..."
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object on each line")
    shape.add_argument("--csv", action="store_true", help="one row for each image")
    parser.add_argument("--logits", action="store_true", help="with --json: the logits of all classes, too")
    arguments = parser.parse_args(argv)
    check_exists(arguments.checkpoint)
    from imagenet_cls.engine.inference import Predictor, find_images

    paths = find_images(arguments.images)
    if arguments.checkpoint.suffix == ".onnx":
        if arguments.weights or arguments.device not in ("auto", "cpu"):
            raise UsageError(
                "an ONNX file holds one set of weights, and is run on the CPU.\nOmit --weights and --device."
            )
        from imagenet_cls.engine.export import OnnxPredictor

        predictor: Predictor = OnnxPredictor(arguments.checkpoint)
    else:
        predictor = Predictor(arguments.checkpoint, arguments.device, arguments.weights, arguments.allow_import)
    for line in predictor.damage:
        print(printable(line), file=sys.stderr)
    bad: list[DataError] = []
    rows = predictor.predict(paths, arguments.top, arguments.logits, bad)
    if arguments.csv or arguments.json:
        write_predictions(sys.stdout, rows, arguments.csv)
    else:
        for row in rows:
            shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in row["top"])
            print(printable(f"{row['image']}: {shares}"))
    if len(bad) > 1:
        listed = "\n".join(map(first_line, bad[:2]))
        raise DataError(f"{listed}\n{len(bad)} of {len(paths)} images can't be read.")
    if bad:
        raise bad[0]


def device_name(text: str) -> str:
    """An argparse type: a value of the config's `device`."""
    pattern, allowed = DEVICE
    if not re.fullmatch(pattern, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return text
