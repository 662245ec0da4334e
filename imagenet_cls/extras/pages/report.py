"""`tools/report.py`: write a page about one run or several. Also the page of a run at its end."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands import cli
from imagenet_cls.commands.trained_run import TrainedRun
from imagenet_cls.errors import UsageError
from imagenet_cls.extras.pages.curves import curves_of, run_charts
from imagenet_cls.extras.pages.figures import picture, write_figure
from imagenet_cls.extras.pages.render import check_page, write_html
from imagenet_cls.report.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    if arguments.out or len(runs) > 1:  # else the run folder's own page, perhaps an old one
        check_page(out, "--out")
    write_page(runs, out)
    print(f"wrote {out}")


def write_page(runs: Sequence[Path], out: Path) -> None:
    """Write the page of run folders. Raises a UserError."""
    from imagenet_cls.extras.pages.runs_page import runs_page

    write_html(out, runs_page(runs, out.parent), "--out")


def write_run_page(folder: Path) -> None:
    """Write `report.html` of a run at its end. Raises a UserError."""
    write_page([folder], folder / "report.html")


def plot_run(folder: Path) -> "Figure":
    """The curves of a run. Raises CheckpointError."""
    return picture(run_charts(curves_of(read_metrics(folder))))


def write_plots(folder: Path) -> None:
    """Draw `plots/curves.png` of a run. Raises CheckpointError or OSError."""
    write_figure(folder / "plots" / "curves.png", plot_run(folder))
