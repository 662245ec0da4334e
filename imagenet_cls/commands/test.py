"""`tools/test.py`: evaluate weights on a config's validation images."""

import argparse
import csv
import json
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from imagenet_cls.commands import program
from imagenet_cls.commands.distributed import RankCommand, add_rank_options, check_names, run_command
from imagenet_cls.config.load import Loaded, load_config
from imagenet_cls.errors import UsageError

if TYPE_CHECKING:
    from imagenet_cls.parallel.process_group import Group


def main() -> None:
    """`tools/test.py`."""
    program.main(evaluate_command)


def evaluate_command(argv: Sequence[str]) -> int:
    """Evaluate weights, on one rank or many. Returns the exit code."""
    check = partial(check_names, training=False)
    command = RankCommand("test.py", evaluation_parser, load_for_testing, check_output_path, evaluate_here, check)
    return run_command(command, argv)


def evaluation_parser() -> argparse.ArgumentParser:
    parser = program.build_parser(
        "test.py",
        "Evaluate a checkpoint or run folder, foreign weights, or (model.pretrained=true) published ones.",
        "CONFIG [CHECKPOINT] [key=value ...] [options]",
    )
    program.add_config_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="write a row for each image: as .csv, or else as lines of JSON")
    program.add_allow_import(parser)
    add_rank_options(parser)
    return parser


def load_for_testing(arguments: argparse.Namespace) -> Loaded:
    """Stage 1 of checking. Imports no torch."""
    overrides, paths = program.split_overrides(arguments, ["a config", "a checkpoint"])
    if not paths:
        raise UsageError("no config given.\nUsage: test.py CONFIG [CHECKPOINT] [key=value ...]")
    return load_config(paths[0], overrides)


def check_output_path(arguments: argparse.Namespace, loaded: Loaded) -> None:
    """Raise UsageError, before a long evaluation, if --out can't be written or would replace a file. Leaves no file."""
    if arguments.out is not None:
        path = Path(arguments.out)
        if path.is_file() and path.stat().st_size > 0:
            raise UsageError(f"{path} already exists.\nName another file with --out, or move that one away.")
        is_new = not os.path.lexists(path)
        write_rows(path, [], mode="a")
        if is_new:
            path.unlink(missing_ok=True)


def evaluate_here(arguments: argparse.Namespace, loaded: Loaded, group: "Group") -> None:
    """One rank's part of an evaluation."""
    from imagenet_cls.data import worker_death
    from imagenet_cls.engine.inference import evaluate_weights
    from imagenet_cls.engine.start import check_agreement
    from imagenet_cls.guards.memory import explain_resource_errors, out_of_memory
    from imagenet_cls.parallel.process_group import run_on_main

    check_agreement(loaded, group, training=False)
    _, paths = program.split_overrides(arguments, ["a config", "a checkpoint"])
    checkpoint = Path(paths[1]) if len(paths) > 1 else None
    run_on_main(group, lambda: check_output_path(arguments, loaded))
    with explain_resource_errors(out_of_memory, worker_death):
        keep_predictions = arguments.out is not None
        result = evaluate_weights(loaded.config, checkpoint, group, keep_predictions, arguments.allow_import)
    if not group.is_main:
        return
    print("\n".join(result.messages))
    for kind, metrics in result.metrics.items():
        print(
            f"{kind}: top-1 {metrics['top1_pct']:.3f} %  top-5 {metrics['top5_pct']:.3f} %  "
            f"loss {metrics['loss']:.4f}  over {metrics['images']} images in {metrics['seconds']:.1f} s"
        )
    if arguments.out is not None:
        write_rows(Path(arguments.out), result.predictions)
        print(f"wrote {len(result.predictions)} predictions to {arguments.out}")


def write_rows(path: Path, rows: Iterable[dict], mode: str = "w") -> None:
    """Write predictions: as CSV if the file is called .csv, else one JSON object on each line."""
    try:
        # surrogateescape: an image's name may be any bytes.
        with path.open(mode, newline="", encoding="utf-8", errors="surrogateescape") as file:
            if path.suffix == ".csv":
                write_csv(file, rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}\nName another file with --out.") from error


def write_csv(file: IO[str], rows: Iterable[dict]) -> None:
    """Columns: image, target (if known), then class and probability, likeliest first."""
    writer = csv.writer(file, lineterminator="\n")
    for number, row in enumerate(rows):
        known = {"target": row["target"]} if "target" in row else {}
        if number == 0:
            ranks = [f"{column}_{k + 1}" for k in range(len(row["top"])) for column in ("class", "probability")]
            writer.writerow(["image", *known, *ranks])
        writer.writerow([row["image"], *known.values(), *(value for pair in row["top"] for value in pair)])
