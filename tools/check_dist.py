"""Do the ranks find each other? Under any launcher, or with --gpus N by itself; takes train.py's key=value words."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands.program import main

if TYPE_CHECKING:
    from imagenet_cls.config.load import Loaded
    from imagenet_cls.parallel.environment import RankInfo

# A check need not wait as long as a run may.
LONGEST_WAIT_SEC = 60.0


def parser() -> argparse.ArgumentParser:
    from imagenet_cls.commands.distributed import add_rank_options

    made = argparse.ArgumentParser(
        prog="check_dist.py",
        usage="check_dist.py [key=value ...] [options]",
        description="Meet, compare versions and devices, and reduce once. Exit code 0 when all is well, else 5.",
    )
    made.add_argument("words", nargs="*", metavar="key=value", help="device=cpu, parallel.backend=gloo and the like")
    made.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    add_rank_options(made)
    return made


def load(arguments: argparse.Namespace) -> "Loaded":
    from imagenet_cls.config.load import load_config

    return load_config(None, arguments.words)


def check_here(arguments: argparse.Namespace, loaded: "Loaded", rank_info: "RankInfo", groups: list) -> None:
    """One rank's part. The ranks meet over gloo first, which can say what is wrong; see `check_ranks`."""
    from imagenet_cls.commands.check_dist import check_ranks
    from imagenet_cls.parallel.process_group import choose_device, init_group

    parallel = loaded.config.parallel
    device = choose_device(loaded.config.device, rank_info)
    wait_sec = min(parallel.timeout_sec, LONGEST_WAIT_SEC)
    groups.append(init_group(rank_info, device, "auto", "gloo", parallel.init_method, wait_sec))
    check_ranks(groups[0], parallel.backend)


def check_command(argv: Sequence[str]) -> int:
    from imagenet_cls.commands.distributed import RankCommand, run_command

    # Nothing is trained, so there is nothing more to check before ranks are started.
    return run_command(RankCommand("check_dist.py", parser, load, no_check, check_here, no_check), argv)


def no_check(*_: object) -> None: ...


if __name__ == "__main__":
    sys.exit(main(check_command))
