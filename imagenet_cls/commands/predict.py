"""`tools/predict.py`: classify images."""

import argparse
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands import cli
from imagenet_cls.commands.test import write_predictions
from imagenet_cls.config.schema import DEVICE
from imagenet_cls.errors import DataError, UsageError, first_line, printable
from imagenet_cls.files import check_exists, check_output_path, write_output

if TYPE_CHECKING:
    from torch import Tensor


def predict_command(argv: Sequence[str]) -> None:
    """Classify images with a checkpoint folder or an ONNX file."""
    parser = cli.build_parser(
        "predict", "Classify images with a checkpoint folder, or an ONNX file of export.py."
    )
    cli.add_weights_arguments(parser)
    parser.add_argument(
        "images",
        type=cli.not_empty,
        metavar="IMAGE",
        nargs="+",
        help="image files, folders, or quoted patterns",
    )
    parser.add_argument(
        "--top", type=cli.positive, default=5, metavar="K", help="classes to show for each image"
    )
    parser.add_argument(
        "--device", type=device_name, default="auto", help="as in a config: auto, cpu, cuda, ..."
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object on each line")
    shape.add_argument("--csv", action="store_true", help="one row for each image")
    shape.add_argument(
        "--features", type=cli.path, metavar="FILE.npz",
        help="write the input of the classifier, float32 (N, D), and the names of the images, instead of predictions",
    )  # fmt: skip
    parser.add_argument(
        "--logits", action="store_true", help="with --json: the logits of all classes, too"
    )
    arguments = parser.parse_args(argv)
    if arguments.logits and not arguments.json:
        raise UsageError("--logits needs --json.\nAdd it.")
    check_exists(arguments.checkpoint)
    check_output_path(arguments.features, "--features")
    from imagenet_cls.engine.predictor import OnnxPredictor, Predictor, find_images

    paths = find_images(arguments.images)
    if arguments.checkpoint.suffix == ".onnx":
        if arguments.weights or arguments.device not in ("auto", "cpu"):
            raise UsageError(
                "an ONNX file has one set of weights, and is run on the CPU.\nOmit --weights and --device."
            )
        if arguments.features:
            raise UsageError(
                "an ONNX file holds no features, only logits.\nUse --features with a checkpoint."
            )
        predictor: Predictor = OnnxPredictor(arguments.checkpoint)
    else:
        predictor = Predictor(
            arguments.checkpoint, arguments.device, arguments.weights, arguments.allow_import
        )
    for line in predictor.warnings:
        print(printable(line), file=sys.stderr)
    bad: list[DataError] = []
    if arguments.features is not None:
        write_features(
            arguments.features, list(predictor.in_batches(paths, predictor.features, bad))
        )
    elif arguments.csv or arguments.json:
        write_predictions(
            sys.stdout,
            predictor.predict(paths, arguments.top, arguments.logits, bad),
            arguments.csv,
        )
    else:
        for row in predictor.predict(paths, arguments.top, arguments.logits, bad):
            shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in row["top"])
            print(printable(f"{row['image']}: {shares}"))
    if len(bad) > 1:
        listed = "\n".join(map(first_line, bad[:2]))
        raise DataError(f"{listed}\n{len(bad)} of {len(paths)} images can't be read.")
    if bad:
        raise bad[0]


def write_features(path: Path, batches: Sequence[tuple[list, "Tensor"]]) -> None:
    """Write an .npz file of `features`, float32 (N, D), and `images`, their names; nothing without images."""
    if not batches:
        return
    import numpy as np

    images = np.array([name for names, _ in batches for name in names], dtype=str)
    features = np.concatenate([values.numpy() for _, values in batches])
    file = io.BytesIO()
    np.savez(file, features=features, images=images)
    write_output(path, file.getvalue(), "--features")
    print(printable(f"wrote {features.shape[1]} features of {len(images)} images to {path}"))


def device_name(text: str) -> str:
    """An argparse type: a value of the config's `device`."""
    pattern, allowed = DEVICE
    if not re.fullmatch(pattern, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return text
