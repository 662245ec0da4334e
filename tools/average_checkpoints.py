"""Average the weights of checkpoints: python tools/average_checkpoints.py RUN_FOLDER --last 5 --out DIR. See --help."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands.arguments import positive
from imagenet_cls.commands.program import main
from imagenet_cls.errors import UsageError


def parser() -> argparse.ArgumentParser:
    from imagenet_cls.commands.average_checkpoints import RULES

    made = argparse.ArgumentParser(
        prog="average_checkpoints.py",
        description="Average the weights of checkpoints into one that test.py and predict.py take.",
    )
    made.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="checkpoints, or one run folder")
    made.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a new folder; or x.safetensors, for weights alone"
    )
    choice = made.add_mutually_exclusive_group()
    for rule, meaning in RULES.items():
        choice.add_argument(f"--{rule}", type=positive, metavar="N", help=meaning)
    made.add_argument("--weights", choices=("raw", "ema"), default="raw", help="which weights (default: raw)")
    made.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return made


def average_command(argv: Sequence[str]) -> None:
    from imagenet_cls.commands.average_checkpoints import RULES, average_checkpoints, choose

    arguments = parser().parse_args(argv)
    paths: list[Path] = arguments.paths
    for rule in RULES:
        count = getattr(arguments, rule)
        if count is not None:
            if len(paths) > 1:
                raise UsageError(f"--{rule} chooses from one run folder, and {len(paths)} paths are given.\nName one.")
            paths = choose(paths[0], rule, count, arguments.weights)
    print(average_checkpoints(paths, arguments.out, arguments.weights))


if __name__ == "__main__":
    sys.exit(main(average_command))
