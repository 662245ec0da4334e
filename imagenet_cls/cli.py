"""The command line: one function for each tool, from words and options to a call of the engine.

Owns the parsing and the output of `test.py` and `predict.py`. Refuses to know how anything is computed, and imports
torch only once a config has passed the first stage of checking. Called by the entries in `tools/`.
"""

import argparse
import csv
import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from imagenet_cls.config.keys import is_kwargs, leaves, sections
from imagenet_cls.config.load import Loaded, load_config
from imagenet_cls.engine.options import RunOptions, starts_from
from imagenet_cls.errors import UsageError
from imagenet_cls.lookup import did_you_mean
from imagenet_cls.parallel.place import Place
from imagenet_cls.program import positive
from imagenet_cls.ranks import RankCommand, add_rank_options, check_names, run_command

if TYPE_CHECKING:
    from imagenet_cls.parallel.group import Group


def add_words(parser: argparse.ArgumentParser) -> None:
    """What every command with a config takes: the config, changes to it, and how to see a traceback."""
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help="a config file, and changes to it")
    parser.add_argument(
        "--cfg-options", nargs="+", metavar="key=value", help="changes to the config, as mmdetection has them"
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def add_allow_import(parser: argparse.ArgumentParser) -> None:
    """What a checkpoint's own config may run: see `models.trust`."""
    parser.add_argument(
        "--allow-import", metavar="NAME", action="append", default=[],
        help="let the checkpoint call this my_module:my_factory, or import this module; may be repeated",
    )  # fmt: skip


def split_words(arguments: argparse.Namespace, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are changes to the config (key=value), and the others: at most as many as `names`."""
    words = [*arguments.words, *(arguments.cfg_options or [])]
    changes = [word for word in words if "=" in word]
    others = [word for word in words if "=" not in word]
    if len(others) > len(names):
        raise UsageError(
            f"can't tell what {others[len(names)]!r} is: this takes {' and '.join(names)}, and changes as key=value.\n"
            "Write key=value without spaces around the equals sign."
        )
    return changes, others


# ---------------------------------------------------------------------------------------------- train.py


def train_command(argv: Sequence[str]) -> int:
    """`tools/train.py`."""
    command = RankCommand("train.py", train_parser, load_for_training, refuse_taken_folder, train_here)
    return run_command(command, argv)


def train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage="train.py [CONFIG] [key=value ...] [options]",
        description="Train an image classifier from a config. Without one: the demo, on real handwritten digits.",
    )
    add_words(parser)
    run = parser.add_argument_group("the run folder")
    run.add_argument("--work-dir", metavar="DIR", help="where the run writes (default: work_dirs/<config name>)")
    run.add_argument(
        "--resume", action="store_true", help="go on from the newest whole checkpoint; fresh where there is none"
    )
    run.add_argument(
        "--resume-from", metavar="CKPT",
        help="go on from this checkpoint: its weights, optimizer and step; with --resume where the folder has none",
    )  # fmt: skip
    run.add_argument("--overwrite", action="store_true", help="remove the run that the folder holds and start anew")
    run.add_argument(
        "--allow-change", metavar="KEY", action="append", default=[],
        help="let this key (or section) of the config differ from the checkpoint's; may be repeated",
    )  # fmt: skip
    run.add_argument(
        "--dry-run", action="store_true", help="check, show what would happen, try one batch; write nothing"
    )
    add_rank_options(parser)
    parser.add_argument("--syncbn", action="store_true", help="the same as parallel.sync_bn=true")
    return parser


def load_for_training(arguments: argparse.Namespace) -> Loaded:
    """Stage 1 of checking. Imports no torch."""
    changes, configs = split_words(arguments, ["one config"])
    if arguments.syncbn:
        changes.append("parallel.sync_bn=true")
    for key in arguments.allow_change:
        refuse_unknown_key(key)
    return load_config(configs[0] if configs else None, changes)


def refuse_unknown_key(key: str) -> None:
    """Raise UsageError for what is neither a key of a config, nor a section, nor below one's `kwargs`."""
    known = {".".join(path): hint for path, hint in {**sections(), **leaves()}.items() if path}
    below_kwargs = any(key.startswith(f"{name}.") and is_kwargs(hint) for name, hint in known.items())
    if key not in known and not below_kwargs:
        raise UsageError(f"--allow-change {key}: no such key{did_you_mean(key, known)}\nSee docs/config.md.")


def run_options(arguments: argparse.Namespace, loaded: Loaded) -> RunOptions:
    """What the words and the environment say about the run.

    torchrun starts the same command again after a failure (its run ids are seldom unique, so its process counts), and
    SLURM a job that it requeued; torchrun may run in a job of SLURM's.
    """
    jobs = {}
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        jobs["TORCHELASTIC_RESTART_COUNT"] = f"ranks of {process_name(os.getppid())}"
    if "SLURM_JOB_ID" in os.environ:
        jobs["SLURM_RESTART_COUNT"] = f"SLURM's job {os.environ['SLURM_JOB_ID']}"
    return RunOptions(
        work_dir=Path(arguments.work_dir or Path("work_dirs") / loaded.name),
        resume=arguments.resume,
        resume_from=Path(arguments.resume_from) if arguments.resume_from else None,
        overwrite=arguments.overwrite,
        allow_change=tuple(arguments.allow_change),
        dry_run=arguments.dry_run,
        jobs=tuple(jobs.values()),
        restarted_by=tuple(job for count, job in jobs.items() if os.environ.get(count, "0") != "0"),
    )


def process_name(pid: int) -> str:
    """With the time of its start where the system tells it: in containers the same numbers come again."""
    try:
        since = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        since = "unknown"
    return f"process {pid} on {socket.gethostname()}, started at {since}"


def refuse_taken_folder(arguments: argparse.Namespace, loaded: Loaded) -> None:
    from imagenet_cls.engine.runfolder import RunFolder

    options = run_options(arguments, loaded)
    if not options.dry_run and not options.restarted_by:  # what a restart means, the folder tells
        folder = RunFolder(options.work_dir)
        folder.refuse_if_taken(options.resume, options.overwrite)
        if options.overwrite:
            folder.refuse_to_remove(starts_from(loaded.config, options))


def train_here(arguments: argparse.Namespace, loaded: Loaded, place: Place, groups: "list[Group]") -> None:
    """One rank's part of a training run."""
    from imagenet_cls.engine.run import train_run

    train_run(loaded, run_options(arguments, loaded), place, groups)


# ----------------------------------------------------------------------------------------------- test.py


def test_command(argv: Sequence[str]) -> int:
    """`tools/test.py`."""
    check = partial(check_names, training=False)
    command = RankCommand("test.py", test_parser, load_for_testing, refuse_unwritable_out, test_here, check)
    return run_command(command, argv)


def test_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="test.py",
        usage="test.py CONFIG [CHECKPOINT] [key=value ...] [options]",
        description="Evaluate a checkpoint or run folder, foreign weights, or (model.pretrained=true) published ones.",
    )
    add_words(parser)
    parser.add_argument("--out", metavar="FILE", help="write a row for each image: .csv, or else a JSON object a line")
    add_allow_import(parser)
    add_rank_options(parser)
    return parser


def load_for_testing(arguments: argparse.Namespace) -> Loaded:
    changes, words = split_words(arguments, ["a config", "a checkpoint"])
    if not words:
        raise UsageError("which config?\nUsage: test.py CONFIG [CHECKPOINT] [key=value ...]")
    return load_config(words[0], changes)


def refuse_unwritable_out(arguments: argparse.Namespace, loaded: Loaded) -> None:
    """Raise UsageError where --out could not be written, or would replace a file: before the evaluation, which may take
    an hour, not after. Leaves nothing behind: an evaluation that fails has no rows.
    """
    if arguments.out is not None:
        path = Path(arguments.out)
        if path.is_file() and path.stat().st_size > 0:
            raise UsageError(f"{path} is there already\nName another file with --out, or move that one away.")
        is_new = not os.path.lexists(path)
        write_rows(path, [], mode="a")
        if is_new:
            path.unlink(missing_ok=True)


def test_here(arguments: argparse.Namespace, loaded: Loaded, place: Place, groups: "list[Group]") -> None:
    """One rank's part of an evaluation."""
    from imagenet_cls.engine.inference import evaluate_weights
    from imagenet_cls.engine.resources import naming_what_gave_out
    from imagenet_cls.engine.run import meet
    from imagenet_cls.parallel.group import on_main

    group = meet(loaded, place, groups, training=False)
    words = split_words(arguments, ["a config", "a checkpoint"])[1]
    checkpoint = Path(words[1]) if len(words) > 1 else None
    on_main(group, lambda: refuse_unwritable_out(arguments, loaded))
    with naming_what_gave_out():
        keep_predictions = arguments.out is not None
        origin, results, rows = evaluate_weights(
            loaded.config, checkpoint, group, keep_predictions, arguments.allow_import
        )
    if not group.is_main:
        return
    print(origin)
    for kind, result in results.items():
        print(
            f"{kind}: top-1 {result['top1_pct']:.3f} %  top-5 {result['top5_pct']:.3f} %  loss {result['loss']:.4f}  "
            f"over {result['images']} images in {result['seconds']:.1f} s"
        )
    if arguments.out is not None:
        write_rows(Path(arguments.out), rows)
        print(f"wrote {len(rows)} predictions to {arguments.out}")


# -------------------------------------------------------------------------------------------- predict.py


def predict_command(argv: Sequence[str]) -> None:
    """`tools/predict.py`: name what is on images."""
    parser = argparse.ArgumentParser(
        prog="predict.py", description="Name what is on images, with a checkpoint folder alone."
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint folder, or a run folder (its best one)")
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image files, folders, or quoted patterns")
    parser.add_argument("--top", type=positive, default=5, metavar="K", help="classes to show for each image")
    parser.add_argument(
        "--weights", choices=("raw", "ema"),
        help="default: of a run folder the better ones, of a checkpoint its average where it has one",
    )  # fmt: skip
    add_allow_import(parser)
    parser.add_argument("--device", type=device_name, default="auto", help="auto, cpu, cuda or cuda:1")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object a line")
    shape.add_argument("--csv", action="store_true", help="one row for each image")
    parser.add_argument("--logits", action="store_true", help="with --json: the outputs for all classes, too")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_args(argv)
    from imagenet_cls.engine.inference import Predictor, find_images
    from imagenet_cls.parallel.group import choose_device

    paths = find_images(arguments.images)
    device = choose_device(arguments.device, Place())
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
    """An argparse type: what the config's `device` takes."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, cpu, cuda or cuda:1")
    return text


def write_rows(path: Path, rows: Iterable[dict], mode: str = "w") -> None:
    """Predictions as a file: CSV where it is called .csv, else one JSON object a line."""
    try:
        # surrogateescape: a file name may be any bytes, and comes out as it is.
        with path.open(mode, newline="", encoding="utf-8", errors="surrogateescape") as file:
            if path.suffix == ".csv":
                write_csv(file, rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}\nName another file with --out.") from error


def write_csv(file: IO[str], rows: Iterable[dict]) -> None:
    """Columns: image, target (where known), then class and probability of each rank."""
    writer = csv.writer(file, lineterminator="\n")
    for number, row in enumerate(rows):
        known = {"target": row["target"]} if "target" in row else {}
        if number == 0:
            ranks = [f"{column}_{k + 1}" for k in range(len(row["top"])) for column in ("class", "probability")]
            writer.writerow(["image", *known, *ranks])
        writer.writerow([row["image"], *known.values(), *(value for pair in row["top"] for value in pair)])
