"""`tools/predict.py`: classify images."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.commands import program
from imagenet_cls.commands.test import write_csv
from imagenet_cls.parallel.environment import RankInfo


def main() -> None:
    """`tools/predict.py`."""
    program.main(predict_command)


def predict_command(argv: Sequence[str]) -> None:
    """Classify images with a checkpoint folder."""
    parser = program.build_parser("predict.py", "Classify images with a checkpoint folder alone.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint folder, or a run folder (its best one)")
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image files, folders, or quoted patterns")
    parser.add_argument("--top", type=program.positive, default=5, metavar="K", help="classes to show for each image")
    parser.add_argument(
        "--weights", choices=("raw", "ema"),
        help="default: of a run folder the better ones, of a checkpoint its EMA if it has one",
    )  # fmt: skip
    program.add_allow_import(parser)
    parser.add_argument("--device", type=device_name, default="auto", help="auto, cpu, cuda or cuda:1")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object on each line")
    shape.add_argument("--csv", action="store_true", help="one row for each image")
    parser.add_argument("--logits", action="store_true", help="with --json: the logits of all classes, too")
    arguments = parser.parse_args(argv)
    from imagenet_cls.engine.inference import Predictor, find_images
    from imagenet_cls.parallel.process_group import choose_device

    paths = find_images(arguments.images)
    device = choose_device(arguments.device, RankInfo())
    predictor = Predictor(Path(arguments.checkpoint), device, arguments.weights, arguments.allow_import)
    for line in predictor.damage:
        print(line, file=sys.stderr)
    rows = predictor.predict(paths, arguments.top, with_logits=arguments.logits)
    if arguments.csv:
        write_csv(sys.stdout, rows)
        return
    for row in rows:
        if arguments.json:
            print(json.dumps(row))
        else:
            print(f"{row['image']}: " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in row["top"]))


def device_name(text: str) -> str:
    """An argparse type: a value of the config's `device`."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, cpu, cuda or cuda:1")
    return text
