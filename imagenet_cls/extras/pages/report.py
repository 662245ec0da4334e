"""`tools/report.py`: write a page about one run or several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imagenet_cls.checkpoint.folders import list_checkpoints, step_of
from imagenet_cls.commands import cli
from imagenet_cls.commands.trained_run import TrainedRun
from imagenet_cls.config.compare import differing_values
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import UsageError, UserError
from imagenet_cls.files import check_replaced, explain_write_errors, write_output
from imagenet_cls.lookup import check_packages
from imagenet_cls.text import first_line


def report_command(argv: Sequence[str]) -> None:
    """Write the page. Of several paths, those that are no run folders are left out.

    Raises UsageError if a path is missing or none is a run folder, CheckpointError for an invalid
    file of a run.
    """
    parser = cli.build_parser(
        "report", "Write a page about one run or several, finished or not.", "RUN [RUN ...]"
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=cli.path,
        metavar="RUN",
        help="a run folder, such as work_dirs/resnet50",
    )
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE.html",
        help="the page; an earlier page is replaced; default: report.html, in the folder of "
        "one run, or in the current folder for several runs",
    )
    arguments = cli.parse(parser, argv)
    paths = list(dict.fromkeys(arguments.runs))
    runs = []
    for path in paths:
        try:
            TrainedRun(path)
            runs.append(path)
        except UsageError as error:
            # work_dirs/* may have other files. A path without permission or that is missing is an
            # error.
            if len(paths) == 1 or error.__cause__ or not path.exists():
                raise
            print(f"left out {error.problem}")
    if not runs:
        raise UsageError("None of the paths is a run folder.", "Give a folder like work_dirs/demo.")
    folder = runs[0] if len(runs) == 1 else Path()
    out = arguments.out or folder / "report.html"
    if out.suffix.lower() != ".html" or out.is_dir():
        raise UsageError(f"--out {out}: the page is an HTML file.", "Name it *.html.")
    if arguments.out or len(runs) > 1:  # else the run folder's own page, perhaps an old one
        check_replaced(out)
    write_page(runs, out)


def write_page(
    runs: Sequence[Path],
    out: Path,
    settings: tuple[Sequence[tuple[str, str]], Sequence[Sequence[Any]]] | None = None,
) -> None:
    """Write the page of run folders. settings: columns and rows of a table above the runs, see
    `table` in templates/macros.html. Raises a UserError.
    """
    from imagenet_cls.extras.pages.runs_page import read_run, run_names, runs_page

    check_packages("report", "jinja2", "plotly")
    configs: dict[Path, Config] = {}
    texts: dict[Path, str] = {}
    notes = []
    for run in runs:
        file = run / "config.yaml"
        try:
            configs[run] = load_config(file).config
            texts[run] = file.read_text("utf-8")
        except UserError as error:
            notes.append(
                f"{run}: its config can't be read and is not compared: {first_line(error)}"
            )
    differences = {}
    for key, values in differing_values(list(configs.values())).items():
        by_run = dict(zip(configs, values, strict=True))
        differences[key] = [by_run.get(run) for run in runs]
    batches = [configs[run].train.global_batch_size if run in configs else None for run in runs]
    records = []
    for run, name in zip(runs, run_names(runs), strict=True):
        checkpoints = {step_of(path): path for path in list_checkpoints(run / "checkpoints")}
        records.append(read_run(run, name, checkpoints))
    config_texts = [texts.get(run) for run in runs]
    page = runs_page(records, batches, config_texts, differences, notes, out.parent, settings)
    with explain_write_errors(out, "Name another file with --out."):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_output(out, page)
    print(f"wrote {out}")
