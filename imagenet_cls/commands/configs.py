"""`imagenet-cls configs`: list the shipped configs."""

from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.commands import cli
from imagenet_cls.config.layers import shipped_configs
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import Config, format_size
from imagenet_cls.text import format_columns


def configs_command(argv: Sequence[str]) -> None:
    """Print a line for each shipped config; the configs of ImageNet come first."""
    parser = cli.build_parser(
        "configs",
        "List the shipped configs, with dataset, the top-1 accuracy that the source claims, image "
        "size in training and evaluation, and source.",
    )
    cli.parse(parser, argv)
    rows = []
    for name, path in sorted(shipped_configs().items(), key=lambda item: item[1]):
        rows.append([name, *describe_config(load_config(path).config)])
    rows.sort(key=lambda row: row[1] != "imagenet")
    print(format_columns([["config", "dataset", "claimed top-1", "size", "source"], *rows]))


def describe_config(config: Config) -> list[str]:
    """Dataset, claimed top-1, image size in training and evaluation, and source; "-" for what is
    unknown.
    """
    dataset = Path(config.data.root).name
    if config.data.name != "folder":
        dataset = config.data.name.removeprefix("torchvision:")
    claimed = config.expect.claimed_top1_pct
    size = format_size(config.augment.size_px)
    evaluated = format_size(config.eval.crop_px)
    if evaluated != size:
        size = f"{size}/{evaluated}"
    accuracy = "-" if claimed is None else f"{claimed:.2f} %"
    return [dataset, accuracy, size, config.expect.source or "-"]
