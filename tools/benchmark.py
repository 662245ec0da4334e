"""Measure this project and others in one run: python tools/benchmark.py loader. See --help."""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands import check_environment

if __name__ == "__main__":
    # The benchmarks write no TensorBoard files and draw nothing. A GPU machine may lack both.
    os.environ.setdefault("IMAGENET_CLS_NO_REPORTS", "1")
check_environment()

from benchmarks.compare import (  # noqa: E402
    COMMANDS,
    DOCS,
    RESULTS,
    new_result,
    page_section,
    page_with_results,
    read_results,
    table,
    write_result,
)

WITH_IMAGES = ("decode", "loader")


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "command",
        choices=[*COMMANDS, "all", "docs"],
        help="docs: write docs/benchmarks.md from --out",
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of the JSON files (default: %(default)s)"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="one round of small sizes: shows that all runs, not how fast",
    )
    images = parser.add_argument_group("decode and loader")
    images.add_argument(
        "--folder",
        type=Path,
        default="work_dirs/benchmark",
        help="for images; empty, new or made by this tool (default: %(default)s); gpu writes "
        "tables of kernels into kernels/",
    )
    images.add_argument(
        "--root",
        type=Path,
        help="take the images from class folders in train/ and val/ of this folder",
    )
    images.add_argument("--images", type=int, default=2048, help="of each part (default: 2048)")
    images.add_argument(
        "--workers", type=int, default=2, help="processes or threads of each loader (default: 2)"
    )
    images.add_argument("--batch-size", type=int, default=64, help="default: 64")
    images.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help='rows of "Each implementation", or cases of gpu, to run; `*` matches any text',
    )
    images.add_argument(
        "--baseline", type=Path, metavar="DIR", help="also run the package of this checkout"
    )
    images.add_argument(
        "--peer",
        action="append",
        metavar="NAME=PYTHON",
        default=os.environ.get("BENCHMARK_PEERS", "").split(),
        help="the Python of timm, ffcv, dali, nvimgcodec or all (or the variable BENCHMARK_PEERS, "
        "separated by spaces)",
    )
    return parser


def measure(command: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The result of a command; of gpu after each case."""
    if command == "gpu":
        from benchmarks import gpu

        result, rows = new_result(command), []
        cases = gpu.run(arguments.rounds, arguments.tiny, arguments.only, arguments.folder)
        for of_case in cases:
            print(f"{table(of_case)}\n", flush=True)
            rows += of_case
            yield {**result, "tables": {"": rows}}
        return
    if command not in WITH_IMAGES:
        module = importlib.import_module(f"benchmarks.{command}")
        yield {**new_result(command), "tables": {"": module.run(arguments.rounds, arguments.tiny)}}
        return
    from benchmarks import loader

    pythons = dict(word.split("=", 1) for word in arguments.peer)
    names = ("folder", "root", "images", "rounds", "workers", "batch_size", "baseline", "only")
    values = {name: getattr(arguments, name) for name in names}
    options = loader.Options(pythons=pythons, loss_steps=3 if arguments.tiny else 50, **values)
    yield loader.run_loader(options) if command == "loader" else loader.run_decode(options)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write. Exit code 1 if a property that has to hold does not."""
    arguments = parser().parse_args(words)
    if arguments.command == "docs":
        page = DOCS.read_text()
        DOCS.write_text(page_with_results(page, read_results(arguments.out)))
        return 0
    if arguments.tiny:
        arguments.rounds, arguments.images = 1, min(arguments.images, 64)
    failed = False
    for command in COMMANDS if arguments.command == "all" else (arguments.command,):
        for result in measure(command, arguments):
            path = write_result(result, arguments.out)
        print(page_section(result))
        print(f"written to {path}\n", flush=True)
        rows = [row for rows in result["tables"].values() for row in rows]
        failed |= any(row.get("check") and not row["met"] for row in rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
