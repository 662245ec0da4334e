"""Read every image of a data set, write down the bad ones: python tools/verify_data.py ROOT (or CONFIG). See --help."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands.arguments import positive
from imagenet_cls.commands.program import main


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="verify_data.py",
        usage="verify_data.py ROOT | CONFIG [key=value ...] [--out FILE] [--threads N]",
        description="Read and decode every image, and write down the bad ones with the reason. Ctrl-C, and the same "
        "command goes on. Exit code 0 where all are good, 3 where some are bad.",
    )
    made.add_argument("data", metavar="ROOT | CONFIG", help="a folder, with all in it; or a config, whose images it is")
    made.add_argument("overrides", nargs="*", metavar="key=value", help="with CONFIG, such as data.root=/my/images")
    made.add_argument("--out", type=Path, metavar="FILE", help="default: ROOT/verified_images.json")
    made.add_argument("--threads", type=positive, metavar="N", help="images at a time (default: one for each core)")
    made.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return made


def verify_command(argv: Sequence[str]) -> None:
    arguments = parser().parse_intermixed_args(argv)
    from imagenet_cls.commands.verify_data import verify_data  # torch takes seconds, and --help should not

    verify_data(arguments.data, arguments.overrides, arguments.out, arguments.threads)


if __name__ == "__main__":
    sys.exit(main(verify_command))
