"""`tools/test.py`: evaluate weights on a config's validation images."""

import argparse
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.checkpoint.folders import read_state
from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import add_rank_options, run_on_ranks
from imagenet_cls.commands.own_data import is_config
from imagenet_cls.config.layers import keys_set
from imagenet_cls.config.load import LoadedConfig, load_config, load_stored_config
from imagenet_cls.config.rules import EVALUATED, check_trusted
from imagenet_cls.entry_points import load_extra
from imagenet_cls.errors import UsageError
from imagenet_cls.files import check_output_path
from imagenet_cls.text import command_line

if TYPE_CHECKING:
    from imagenet_cls.parallel.process_group import RankContext


def evaluate_command(argv: Sequence[str]) -> int:
    """Evaluate weights, on one rank or many. Returns the exit code."""
    return run_on_ranks(
        "test",
        evaluate_command,
        evaluation_parser(),
        argv,
        load_for_testing,
        evaluate_on_rank,
        False,
    )


def evaluation_parser() -> argparse.ArgumentParser:
    parser = cli.build_parser(
        "test",
        "Evaluate a checkpoint, a run folder, a file of timm, torchvision or pytorch/examples, or "
        "published weights "
        "(model.pretrained=true). A run folder or checkpoint alone is evaluated with the config "
        "of its run.",
        "CONFIG [CHECKPOINT] [key=value ...] [options], or RUN [key=value ...] [options]",
    )
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--data",
        type=cli.path,
        metavar="PATH",
        help="evaluate all images of a separate test set: class folders (or a folder with them in "
        "val), an archive, shards, or a list of images; see docs/your_data.md",
    )
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE",
        help="write a row for each image: as .csv, or else as lines of JSON",
    )
    parser.add_argument(
        "--report",
        type=cli.path,
        metavar="PAGE.html",
        help="write a page: classes, confusion, calibration, mistakes; with data.labels multi "
        "without confusion and calibration",
    )
    parser.add_argument(
        "--results",
        type=cli.path,
        metavar="FILE",
        help="write the results as JSON: an object for each kind of weights, `raw` and `ema`",
    )
    parser.add_argument(
        "--weights",
        choices=("raw", "ema"),
        help="evaluate only these weights. By default both weights of a run or checkpoint are "
        "evaluated, and --out and --report describe those that predict.py uses; of another file "
        "the average is evaluated if it has one",
    )
    cli.add_allow_import(parser)
    add_rank_options(parser)
    return parser


def load_for_testing(arguments: argparse.Namespace) -> LoadedConfig:
    """Load the config, or that of the run or checkpoint which is given instead. Imports no torch.
    Adds the overrides and the weights to the arguments: the path of a checkpoint, a run folder or a
    file; None for those that the config names. Raises a UserError.
    """
    overrides, paths = cli.split_overrides(arguments, ["a config", "a checkpoint"])
    arguments.overrides = overrides
    if not paths:
        raise UsageError(
            "No config given.",
            f"Usage: {command_line('test')} CONFIG [CHECKPOINT] [key=value ...].",
        )
    source = Path(paths[0])
    is_run = source.is_dir()  # or a checkpoint
    arguments.checkpoint = Path(paths[-1]) if is_run or len(paths) > 1 else None
    if arguments.checkpoint is not None and "model.checkpoint" in keys_set(overrides):
        raise UsageError(
            f"{paths[-1]} and model.checkpoint both name weights to evaluate.",
            f"Give one of them: {command_line('test')} CONFIG model.checkpoint=FILE",
        )
    if arguments.checks_files:
        check_files(arguments)
    if is_run:
        return load_config_of_run(source, overrides, arguments.allow_import)
    if source.exists() and not is_config(paths[0]):
        raise UsageError(
            f"{source}: neither a run folder, a checkpoint folder nor a config.",
            "Give a run folder such as work_dirs/demo; or a config, and then a file of weights.",
        )
    return load_config(source, overrides)


def load_config_of_run(
    folder: Path, overrides: Sequence[str], allow_import: Collection[str]
) -> LoadedConfig:
    """The config of a checkpoint or of a run folder, with overrides. Raises CheckpointError if it
    names code that neither these nor `allow_import` name.
    """
    name = (folder.parent.parent if folder.parent.name == "checkpoints" else folder).resolve().name
    loaded = load_stored_config(read_state(folder)["config"], name, overrides)
    trusted = list(allow_import)
    for override in overrides:  # a value may be a list, such as imports=[my_module]
        trusted += re.split(r"[\s,\[\]'\"]+", override.partition("=")[2])
    check_trusted(loaded.config, EVALUATED, trusted, folder)
    return loaded


def check_files(arguments: argparse.Namespace) -> None:
    """Raise a UserError for options that exclude each other and, on the first machine, for paths
    that can't be used.
    """
    if arguments.out is not None and arguments.out == arguments.results:
        raise UsageError("--out and --results name the same file.", "Give two files.")
    if arguments.node_rank == 0:
        if arguments.checkpoint is not None:
            cli.checkpoint_path(str(arguments.checkpoint))
        check_output_path(arguments.out)
        check_output_path(arguments.results, "--results")
        if arguments.report is not None:
            load_extra("test.py --report")(arguments.report)
        if arguments.data is not None and "data.val" in keys_set(arguments.overrides):
            raise UsageError("--data and data.val name different images.", "Leave out one of them.")


def evaluate_on_rank(
    arguments: argparse.Namespace, loaded: LoadedConfig, context: "RankContext"
) -> None:
    """One rank's part of an evaluation."""
    from imagenet_cls.commands.evaluation import run_evaluation
    from imagenet_cls.engine.component_checks import check_on_all_ranks
    from imagenet_cls.parallel.collectives import run_on_main

    check_on_all_ranks(loaded, context, training=False)
    run_on_main(context, lambda: check_files(arguments))  # not all launchers have done it
    run_evaluation(arguments, loaded.config, context)
