"""`tools/report.py`: write a page about one run or several."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from imagenet_cls.checkpoint.folders import list_checkpoints, step_of
from imagenet_cls.commands import cli
from imagenet_cls.commands.print_config import differing_values
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import UsageError, UserError, first_line
from imagenet_cls.files import explain_write_errors, write_file


def report_command(argv: Sequence[str]) -> None:
    """Write the page. Raises UsageError for a folder without a run, CheckpointError for one with invalid content."""
    parser = cli.build_parser("report", "Write a page about one run or several, finished or not.", "RUN [RUN ...]")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, such as work_dirs/resnet50")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE.html",
        help="the page, which is replaced if it exists; default: report.html",
    )  # fmt: skip
    arguments = cli.parse(parser, argv)
    runs, out = list(dict.fromkeys(arguments.runs)), arguments.out
    if out.suffix.lower() != ".html" or out.is_dir():
        raise UsageError(f"--out {out}: the page is a file of HTML.\nName it *.html.")
    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise UsageError(f"{run}: no run folder (it has no metrics.jsonl).\nGive a folder like work_dirs/demo.")
    from imagenet_cls.report.runs import read_run, runs_page

    configs: list[Config | None] = []
    notes = []
    for run in runs:
        try:
            configs.append(load_config(run / "config.yaml").config)
        except UserError as error:
            configs.append(None)
            notes.append(f"{run}: its config can't be read and is not compared: {first_line(error)}")

    def draw(shown: Mapping[Path, int | None], differences: Mapping[str, Sequence[str | None]]) -> bytes:
        """The page of runs, which are given with their batches."""
        steps = [{step_of(path): path for path in list_checkpoints(run / "checkpoints")} for run in shown]
        records = [read_run(run, checkpoints) for run, checkpoints in zip(shown, steps, strict=True)]
        return runs_page(records, list(shown.values()), differences, notes, out.parent)

    known = [config for config in configs if config is not None]
    sizes = [None if config is None else config.train.global_batch_size for config in configs]
    batches = dict(zip(runs, sizes, strict=True))
    differences = {
        key: [None if config is None else values.pop(0) for config in configs]
        for key, values in differing_values(known).items()
    }
    try:
        page = draw(batches, differences)
    except (UserError, OSError, MemoryError):
        raise
    except Exception:
        from imagenet_cls.checkpoint.format import invalid_content_errors

        for run, batch in batches.items():
            what = "invalid content of metrics.jsonl, env.json or a state.json"
            with invalid_content_errors(run, what, "Restore that file, or leave this run out."):
                draw({run: batch}, {})
        raise
    with explain_write_errors(out, "Name another file with --out."):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, page)
    print(f"wrote {out}")
