"""`tools/predict.py`: classify images."""

import argparse
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagenet_cls.commands import cli
from imagenet_cls.config.schema import DEVICE
from imagenet_cls.entry_points import load_extra
from imagenet_cls.errors import DataError, UsageError
from imagenet_cls.files import check_output_path, write_output
from imagenet_cls.inference.prediction_files import write_predictions
from imagenet_cls.text import printable

if TYPE_CHECKING:
    from imagenet_cls.inference.predictor import Predictor


def predict_command(argv: Sequence[str]) -> None:
    """Classify images with any weights, or with an ONNX file."""
    parser = cli.build_parser(
        "predict",
        "Classify images with any weights, or with an ONNX file of export.py. IMAGE: files, "
        "folders, or quoted patterns.",
    )
    cli.add_weights_arguments(parser, "IMAGE ...")
    parser.add_argument(
        "--top",
        type=cli.positive,
        metavar="K",
        help="classes to show for each image, at most; default: 5, with data.labels multi all that "
        "reach the threshold",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="P",
        help="with data.labels multi: the minimum probability (0 to 1) of a predicted class; "
        "default: the best one on the validation images if the checkpoint was evaluated, else "
        "eval.threshold",
    )
    parser.add_argument(
        "--device", type=device_name, default="auto", help="as in a config: auto, cpu, cuda, ..."
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object on each line")
    shape.add_argument("--csv", action="store_true", help="one row for each image")
    shape.add_argument(
        "--features",
        type=cli.path,
        metavar="FILE.npz",
        help="write the input of the classifier, float32 (N, D), and the names of the images, "
        "instead of predictions",
    )
    parser.add_argument(
        "--report",
        type=cli.path,
        metavar="PAGE.html",
        help="also write a page of the images by predicted class, the least certain first",
    )
    parser.add_argument(
        "--logits", action="store_true", help="with --json: the logits of all classes, too"
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.logits and not arguments.json:
        raise UsageError("--logits needs --json.", "Add it.")
    if arguments.features and {arguments.top, arguments.threshold, arguments.report} != {None}:
        raise UsageError("--features names no classes.", "Omit --top, --threshold and --report.")
    check_output_path(arguments.features, "--features")
    from imagenet_cls.inference.predictor import OnnxPredictor, Predictor, find_images

    options, images = cli.weights_arguments(arguments)
    if not images:
        raise UsageError("No images given.", "Name files or folders after the weights.")
    paths = find_images(images)
    shown = arguments.report and load_extra("predict.py --report")(arguments.report)
    if options["checkpoint"].endswith(".onnx"):
        others = arguments.weights, arguments.features, arguments.model
        if any(others) or arguments.device not in ("auto", "cpu"):
            raise UsageError(
                "An ONNX file has its model, one set of weights, no features, and runs on the CPU.",
                "Omit --model, --weights, --features and --device.",
            )
        predictor: Predictor = OnnxPredictor(
            cli.checkpoint_path(options["checkpoint"]), arguments.threshold
        )
    else:
        predictor = Predictor(**options, device=arguments.device, threshold=arguments.threshold)
    for line in predictor.warnings:
        print(printable(line), file=sys.stderr)
    used = f"used the {predictor.weights} weights of {predictor.path}"
    if predictor.threshold is not None:
        used += f", threshold {predictor.threshold:g}"
    if arguments.features is not None:
        errors = write_features(predictor, paths, arguments.features)
    else:
        errors = print_predictions(predictor, paths, arguments, shown)
    if shown:
        shown.write(used)
    if errors:
        problems = "\n".join(error.problem for error in errors[:2])
        raise DataError(
            f"{len(errors)} of {len(paths)} images can't be read: {problems}",
            "Leave them out, or give other files.",
        )
    print(printable(used), file=sys.stderr)


def print_predictions(
    predictor: "Predictor", paths: Sequence[Path], arguments: argparse.Namespace, shown: Any
) -> list[DataError]:
    """Print a row for each image that can be read; return the errors of the others.

    shown: a `PredictionsPage` of `extras.pages.predictions` that gets the rows, or None.
    """
    errors: list[DataError] = []

    def rows() -> Iterator[dict[str, Any]]:
        for batch in predictor.read_batches(paths):
            errors.extend(batch.errors)
            predicted = predictor.predict_batch(batch, arguments.top, arguments.logits)
            for row, crop in zip(predicted, batch.crops, strict=True):
                if shown:
                    shown.add(row, crop)
                yield row

    if arguments.csv or arguments.json:
        write_predictions(sys.stdout, rows(), arguments.csv, predictor.task)
        return errors
    from imagenet_cls.data.classes import with_readable_name

    for row in rows():
        ranked = ", ".join(
            f"{with_readable_name(name)} {100 * share:.1f} %" for name, share in row["top"]
        )
        print(printable(f"{row['image']}: {ranked or 'none'}"))
    return errors


def write_features(predictor: "Predictor", paths: Sequence[Path], file: Path) -> list[DataError]:
    """Write an .npz file of `features`, float32 (N, D), and `images`, the names of the N images
    that can be read; no file if there are none. Returns the errors of the others.

    Raises CheckpointError for features that are NaN or infinite.
    """
    import numpy as np

    names: list[str | int] = []
    features = []
    errors: list[DataError] = []
    for batch in predictor.read_batches(paths):
        errors += batch.errors
        if batch.crops:
            names += batch.names
            features.append(predictor.batch_features(batch).numpy())
    if features:
        content = io.BytesIO()
        array = np.concatenate(features)
        np.savez(content, features=array, images=np.array(names, dtype=str))
        write_output(file, content.getvalue(), "--features")
        print(printable(f"wrote {array.shape[1]} features of {len(names)} images to {file}"))
    return errors


def device_name(text: str) -> str:
    """An argparse type: a value of the config's `device`."""
    pattern, allowed = DEVICE
    if not re.fullmatch(pattern, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return text
