"""The results of the runs that `compare_parallel` starts, as a table of differences with notes."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from imagenet_cls.checkpoint.select import load_newest_in
from imagenet_cls.commands.compare_parallel import Mode
from imagenet_cls.report.jsonl import read_metrics


@dataclass(frozen=True)
class Outcome:
    """A run's results. losses: of every step. images_per_sec: of all ranks together. memory_mib: rank 0's peak."""

    losses: list[float]
    weights: dict[str, Tensor]
    images_per_sec: float
    memory_mib: float


def read_outcome(run_folder: Path) -> Outcome:
    """A finished run's results. The first logging interval, which includes one-time work, does not count as speed."""
    steps = [record for record in read_metrics(run_folder / "metrics.jsonl") if record["kind"] == "train"]
    intervals = [record for record in steps if "images_per_sec" in record]
    return Outcome(
        losses=[record["loss"] for record in steps],
        weights=load_newest_in(run_folder)[0].model,
        images_per_sec=median(record["images_per_sec"] for record in intervals[1:] or intervals),
        memory_mib=intervals[-1]["memory_mib"],
    )


def loss_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest absolute difference of two runs' losses, step by step; NaN where a loss is."""
    return float((torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)).abs().max())


def weight_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest absolute difference of any weight; BatchNorm's running statistics are not weights."""
    differences = [
        (one[name].double() - other[name].double()).abs().max()
        for name in one
        if not is_statistic(name) and one[name].is_floating_point() and one[name].numel()
    ]
    return float(torch.stack(differences).max())


def is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def table(modes: Sequence[Mode], outcomes: Sequence[Outcome | None]) -> str:
    """Aligned text, a line for each mode. The others are compared with the first."""
    one = outcomes[0]
    assert one is not None
    rows = [["", "at once", "first loss", "losses", "weights", "img/s", "MiB", "good for"]]
    for mode, outcome in zip(modes, outcomes, strict=True):
        if outcome is None:
            rows.append([mode.name, *"------", f"not run: {mode.missing}"])
            continue
        differences = [
            loss_difference(outcome.losses[:1], one.losses[:1]),
            loss_difference(outcome.losses, one.losses),
            weight_difference(outcome.weights, one.weights),
        ]
        texts = ["-"] * 3 if outcome is one else [f"{difference:.1e}" for difference in differences]
        speed, memory = f"{outcome.images_per_sec:.0f}", f"{outcome.memory_mib:.0f}"
        rows.append([mode.name, str(mode.images_at_once), *texts, speed, memory, mode.use])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, use in rows:
        aligned = [text.rjust(width) for text, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned, use]))
    return "\n".join(lines)


def notes(outcomes: Sequence[Outcome | None]) -> str:
    """What the columns are, and why the numbers differ."""
    one = outcomes[0]
    assert one is not None
    paragraphs = [
        "at once: images in one forward pass of one device. The global batch is the same in every row.",
        "first loss, losses, weights: the largest difference from one process, in the first step, in any of the "
        f"{len(one.losses)} steps, and in any weight after the last. Rounding errors grow from step to step: slowly in "
        "a smooth network, up to a hundredfold with ReLU or max pooling; there, look at the first loss. Dropout and "
        "mixing draw for each rank.",
        "img/s: of all ranks together. On a CPU they share its cores, so more ranks are no faster.",
        "MiB: rank 0's peak, of GPU memory or else of the whole process.",
        "BatchNorm normalises the images of one forward pass together, so a row with fewer at once has other losses "
        "from the first step on, and that is correct. SyncBN takes the images of all ranks together, as one process "
        "does, and only rounding is left."
        if any(map(is_statistic, one.weights))
        else "This model has no BatchNorm: the split of a batch makes no difference, and only rounding is left.",
    ]
    return "\n".join(textwrap.fill(text, 110, subsequent_indent="  ") for text in paragraphs)
