"""Decoders and data loaders of this project and of others: which of them run, their ratios and the
goals.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.compare import (
    ROOT,
    Implementation,
    Row,
    best,
    describe_commit,
    new_result,
    paired,
    run_in_turn,
    table_of_implementations,
)
from benchmarks.images import prepare_images

REENCODED = "ours, re-encoded"
POLICY = "rand-m9-mstd0.5-inc1"


@dataclass
class Options:
    """Of one run of the benchmark. pythons: of the other libraries. only: patterns of the labels to
    run.

    loss_steps: of the runs whose losses are compared.
    """

    folder: Path
    root: Path | None = None
    images: int = 2048
    rounds: int = 5
    workers: int = 2
    batch_size: int = 64
    pythons: dict[str, str] = field(default_factory=dict)
    baseline: Path | None = None
    only: Sequence[str] = ()
    loss_steps: int = 50

    def implementation(
        self, label: str, name: str, library: str = "", checkout: Path = ROOT, **arguments: Any
    ) -> Implementation:
        python = (
            self.pythons.get(library, self.pythons.get("all", sys.executable))
            if library
            else sys.executable
        )
        shared = {
            "folder": str(self.folder),
            "batch_size": self.batch_size,
            "workers": self.workers,
        }
        return Implementation(label, {"name": name, **shared, **arguments}, python, checkout)

    def wants(self, label: str) -> bool:
        return not self.only or any(fnmatch(label, pattern) for pattern in self.only)


class Group:
    """Implementations that run in turn, by their labels."""

    def __init__(self, options: Options, implementations: Sequence[Implementation]):
        self.implementations = [each for each in implementations if options.wants(each.label)]
        run_in_turn(self.implementations, options.rounds)
        self.by_label = {each.label: each for each in self.implementations}

    def ratio(self, row: str, ours: str, *others: str, goal: str = "") -> Row:
        """Of `ours` to the best of the others."""
        found = [self.by_label[label] for label in others if label in self.by_label]
        return paired(row, self.by_label.get(ours), best(found), goal)


def ours_and_timm(
    options: Options, suffix: str, ours: dict[str, Any], timm: dict[str, Any]
) -> list[Implementation]:
    """Implementations whose labels end in `suffix`: ours, and with floats; timm's loader, with its
    prefetcher, and what the prefetcher reads.
    """
    found = [
        options.implementation(f"ours{suffix}", "ours", **ours),
        options.implementation(f"ours, floats{suffix}", "ours", floats=True, **ours),
        options.implementation(f"timm{suffix}", "timm", library="timm", **timm),
        options.implementation(
            f"timm, prefetcher{suffix}", "timm", library="timm", prefetcher=True, **timm
        ),
        options.implementation(f"timm, uint8{suffix}", "timm", library="timm", uint8=True, **timm),
    ]
    if options.baseline is not None:
        found.append(
            options.implementation(f"baseline{suffix}", "ours", checkout=options.baseline, **ours)
        )
    return found


def ratio_rows(group: Group, suffix: str, goal: str) -> Iterator[Row]:
    """Ours to timm's, for batches of the same type, and to the baseline. goal: of uint8 batches."""
    ours, floats = f"ours{suffix}", f"ours, floats{suffix}"
    timms = (f"timm{suffix}", f"timm, prefetcher{suffix}")
    yield group.ratio("ours / timm, uint8", ours, f"timm, uint8{suffix}", goal=goal)
    yield group.ratio("ours, floats / timm's best", floats, *timms)
    if f"baseline{suffix}" in group.by_label:
        yield group.ratio("ours / baseline", ours, f"baseline{suffix}")


def run_loader(options: Options) -> dict[str, Any]:
    """All rows of the loaders."""
    from benchmarks.equality import decode_options, loss_rows, pixel_rows

    images = prepare_images(options.folder, options.images, options.root)
    if options.wants(REENCODED):
        pack_as_ffcv(options.folder)
    result = new_result("loader", images=images)
    workers, new = options.workers, options.implementation
    decode = [
        new(f"ours, decode={value}", "ours", overrides=[f"data.decode={value}"])
        for value in decode_options()
        if value != "auto"
    ]
    train = Group(
        options,
        [
            *ours_and_timm(options, "", {}, {}),
            *decode,
            new(REENCODED, "ours", folder=str(options.folder / "packed")),
            new("ours, 1 worker", "ours", workers=1),
            new("torchvision", "torchvision"),
            new("FFCV", "ffcv", library="ffcv"),
            new("DALI, crop decode", "dali", library="dali"),
            new("DALI, whole decode", "dali", library="dali", crop_decode=False),
            new("decode only", "decode_only"),
        ],
    )
    rows = [
        *ratio_rows(train, "", ">= 2.2"),
        train.ratio("ours, floats / torchvision", "ours, floats", "torchvision"),
        train.ratio("ours / FFCV", "ours", "FFCV", goal=">= 1.1"),
        train.ratio(f"{REENCODED} / FFCV", REENCODED, "FFCV", goal=">= 1.5"),
        train.ratio(f"{REENCODED} / ours", REENCODED, "ours", goal=">= 1.3"),
        train.ratio("ours / DALI, crop decode", "ours", "DALI, crop decode", goal=">= 1.5"),
        train.ratio("ours / DALI, whole decode", "ours", "DALI, whole decode"),
        train.ratio("ours / decode only", "ours", "decode only", goal=">= 1.1"),
        train.ratio(f"ours, {workers} workers / 1 worker", "ours", "ours, 1 worker", goal=">= 1.9"),
        *(train.ratio(f"ours / {each.label}", "ours", each.label) for each in decode),
    ]
    policy_overrides = {"overrides": [f"augment.policy={POLICY}"]}
    policy = Group(
        options, ours_and_timm(options, ", policy", policy_overrides, {"policy": POLICY})
    )
    evaluation = Group(
        options,
        [
            *ours_and_timm(options, ", evaluation", {"evaluate": True}, {"evaluate": True}),
            new("torchvision, evaluation", "torchvision", evaluate=True),
        ],
    )
    rates = f"batch {options.batch_size}, {workers} workers, {images['images']} images"
    groups = (train, policy, evaluation)
    result["tables"] = {
        f"RandomResizedCrop 224 and flip, {rates}": rows,
        f"The same with {POLICY}": list(ratio_rows(policy, ", policy", ">= 1.6")),
        "Evaluation, resize 256 and crop 224": [
            *ratio_rows(evaluation, ", evaluation", ">= 2.0"),
            evaluation.ratio(
                "ours, floats / torchvision", "ours, floats, evaluation", "torchvision, evaluation"
            ),
        ],
        "Each implementation": [
            row for group in groups for row in table_of_implementations(group.implementations)
        ],
        "Equality": [
            *pixel_rows(options.folder, options.batch_size, workers, min(options.images, 512)),
            *loss_rows(options.folder, workers, options.loss_steps),
        ],
    }
    result["versions"] |= versions_of_libraries(
        [each for group in groups for each in group.implementations]
    )
    if options.baseline is not None:
        result["baseline"] = describe_commit(options.baseline)
    return result


def pack_as_ffcv(folder: Path) -> None:
    """Pack the images into shards in `folder`/packed, of JPEGs as FFCV's writer encodes them."""
    command = [sys.executable, str(ROOT / "tools" / "pack.py"), str(folder), str(folder / "packed")]
    options = ["--reencode", "90", "--max-px", "500"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL, env=env)


def run_decode(options: Options) -> dict[str, Any]:
    """All rows of the decoders."""
    from benchmarks.equality import decode_rows

    images = prepare_images(options.folder, options.images, options.root)
    result, new = new_result("decode", images=images), options.implementation
    implementations = [
        new("ours, whole", "decoder", method="ours_whole"),
        new("ours, crop", "decoder", method="ours_region"),
        new("torchvision, whole", "decoder", method="torchvision_whole"),
        new("Pillow, whole", "decoder", method="pillow_whole"),
        new("nvImageCodec, whole", "decoder", library="nvimgcodec", method="nvimgcodec_whole"),
        new("nvImageCodec, crop", "decoder", library="nvimgcodec", method="nvimgcodec_region"),
    ]
    group = Group(options, implementations)
    result["tables"] = {
        "Ratios, one thread": [
            group.ratio("ours, whole / torchvision, whole", "ours, whole", "torchvision, whole"),
            group.ratio("ours, crop / torchvision, whole", "ours, crop", "torchvision, whole"),
            group.ratio("ours, crop / nvImageCodec, crop", "ours, crop", "nvImageCodec, crop"),
            group.ratio("ours, whole / Pillow, whole", "ours, whole", "Pillow, whole"),
        ],
        "Each implementation": table_of_implementations(group.implementations),
        "Equality": list(decode_rows(options.folder, min(options.images, 512))),
    }
    result["versions"] |= versions_of_libraries(group.implementations)
    return result


def versions_of_libraries(implementations: Sequence[Implementation]) -> dict[str, dict[str, str]]:
    """By the implementations of each other Python: what differs from the versions here."""
    ours, found = import_module("benchmarks.implementations").versions(), {}
    for python in dict.fromkeys(
        each.python for each in implementations if each.python != sys.executable and each.versions
    ):
        labels = dict.fromkeys(
            each.label.partition(",")[0] for each in implementations if each.python == python
        )
        packages = next(
            each.versions for each in implementations if each.python == python and each.versions
        )
        found[", ".join(labels)] = {
            name: text for name, text in packages.items() if ours.get(name) != text
        }
    return found
