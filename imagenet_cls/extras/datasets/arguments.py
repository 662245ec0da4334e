"""What the commands share that read all images of a dataset: options, a config, a bar."""

import argparse
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tqdm import tqdm

from imagenet_cls.commands import cli
from imagenet_cls.commands.own_data import OWN_DATASET, is_config
from imagenet_cls.config.load import load_config
from imagenet_cls.config.reader import dump_inline
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import UsageError
from imagenet_cls.parallel.cpus import cpu_threads

T = TypeVar("T")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add what the commands that read all images of a dataset share: overrides and --threads."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="with a config, such as data.root=/my/images",
    )
    parser.add_argument(
        "--threads",
        type=cli.positive,
        default=cpu_threads(),
        metavar="N",
        help="default: one for each CPU that it may use",
    )


def load_config_if_given(source: str, overrides: Sequence[str]) -> Config | None:
    """The config of a file or of `hf:NAME`; None for another path, which takes no overrides."""
    if source.startswith("hf:"):
        overrides = [f"data.name={dump_inline(source)}", *overrides]
        return load_config(OWN_DATASET, overrides).config
    if is_config(source):
        return load_config(source, overrides).config
    if overrides:
        raise UsageError(
            f"{overrides[0]!r} overrides a key of a config, but {source} is not a config.",
            "Leave out the override, or name a .yaml file (for class folders without validation "
            "images: configs/finetune/own_dataset.yaml data.root=FOLDER).",
        )
    return None


def track(items: Sequence[T], description: str) -> Iterable[T]:
    """Iterate, with a progress bar on stderr if that is a terminal."""
    iterator: Iterable[T] = tqdm(items, description, leave=False, disable=None)
    return iterator
