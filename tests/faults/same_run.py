"""The run that the tests of kills share, and the comparison of a killed run with an undisturbed
one.

BatchNorm, dropout, EMA, mixup, RandAugment, accumulation 2, warm-up and cosine; 40 steps in 4
epochs, a checkpoint every 5 steps, of which two stay.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_ranks import KillPoint, RankServer
from helpers import arguments, state_digest
from tracker import read_rows

STEPS, STEPS_PER_EPOCH, ACCUMULATION, SAVED_EVERY = 40, 10, 2, 5
MICRO_BATCH = 2  # small, since RandAugment takes most of the time
CLASSES, EVAL_IMAGES = 10, 40
# different in each run, or in the last record of an interval only
MEASURED = ("images_per_sec", "data_wait_pct", "memory_mib", "seconds")


def global_batch(ranks: int) -> int:
    return ranks * ACCUMULATION * MICRO_BATCH


def link_images(digits: Path, folder: Path, ranks: int) -> Path:
    """A balanced part of the digits: `STEPS_PER_EPOCH` global batches, and `EVAL_IMAGES` for
    validation.
    """
    per_class = {
        "train": global_batch(ranks) * STEPS_PER_EPOCH // CLASSES,
        "val": EVAL_IMAGES // CLASSES,
    }
    for source in sorted((digits / "train").iterdir()):
        images = iter(sorted(source.glob("*.jpg")))
        for part, count in per_class.items():
            (folder / part / source.name).mkdir(parents=True)
            for _ in range(count):
                image = next(images)
                (folder / part / source.name / image.name).symlink_to(image)
    return folder


def words_for(
    images: Path, folder: Path, ranks: int = 1, model: str = "noisy", **changes: Any
) -> list[str]:
    """Arguments of train.py. A double underscore in a name is a dot."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "data__name": "folder",
        "data__val": "val",
        "data__val_fraction": "null",
        "augment__policy": "torchvision:rand_augment",
        "mix__mixup_alpha": 0.2,
        "schedule__name": "cosine",
        "schedule__warmup_epochs": 1,
        "train__epochs": STEPS // STEPS_PER_EPOCH,
        "train__global_batch_size": global_batch(ranks),
        "train__micro_batch_size": MICRO_BATCH,
        "ema__decay": 0.9,
        "checkpoint__every_steps": SAVED_EVERY,
        "checkpoint__every_epochs": "null",
        "checkpoint__keep_last": 2,
        "log__tensorboard": "true",
        "log__writers": "[tensorboard,tracker:AppendOnly]",
    }
    return arguments(images, folder, model, **(settings | changes))


@dataclass
class Run:
    """A run on forked ranks, to be stopped and resumed. undisturbed: returns the folder of the run
    without a stop.
    """

    server: RankServer
    words: list[str]
    folder: Path
    ranks: int
    undisturbed: Callable[[int], Path]
    output: str = ""  # of the latest start, stdout and stderr of all ranks

    def start(self, *more: str, kills: Sequence[KillPoint] = (), **env: str) -> list[int]:
        """Run the command, with more arguments. Returns the exit code of each rank, negative for a
        signal.
        """
        file = self.folder.with_suffix(".txt")
        file.unlink(missing_ok=True)
        codes = self.server.run([*self.words, *more], file, self.ranks, kills, **env)
        self.output = file.read_text()
        return codes

    def resume(self, options: Sequence[str] = ("--resume",), **env: str) -> int:
        """Resume and train to the end; assert that all is as in the undisturbed run.

        Returns the step that the run resumed from, 0 where it started from scratch.
        """
        assert self.start(*options, **env) == [0] * self.ranks, self.output
        assert "using an older checkpoint" not in self.output, self.output
        assert_same_run(self.folder, self.undisturbed(self.ranks))
        found = re.search(
            r"resumed from \S*/step-0*(\d+) at step \1", "".join(self.output.splitlines())
        )
        assert (found is None) == ("starting from scratch" in self.output), self.output
        return 0 if found is None else int(found[1])


def records(folder: Path) -> list[dict[str, Any]]:
    """Steps and evaluations of metrics.jsonl, in order, without measurements."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in MEASURED}
        for line in lines
        if line["kind"] != "event"
    ]


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars of TensorBoard without measurements: by tag, (step, value) of each."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"), {SCALARS: 0})
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.endswith(MEASURED)]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


def tracked(folder: Path) -> dict[int, dict[str, float]]:
    """The rows of the tests' tracker, without measurements."""
    rows = read_rows(folder / "writers" / "tracker.AppendOnly" / "rows.jsonl")
    return {
        step: {tag: value for tag, value in values.items() if not tag.endswith(MEASURED)}
        for step, values in rows.items()
    }


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints, in order; asserts that nothing but the links is beside them."""
    names = sorted({path.name for path in (folder / "checkpoints").iterdir()} - {"best", "last"})
    assert all(name.startswith("step-") for name in names), names
    return [int(name.removeprefix("step-")) for name in names]


def assert_same_run(folder: Path, undisturbed: Path) -> None:
    """As `assert_same_bits`, and the same checkpoints are left: true unless the kill was in the
    last few steps.
    """
    assert_same_bits(folder, undisturbed)
    assert checkpoints(folder) == checkpoints(undisturbed)


def assert_same_bits(folder: Path, undisturbed: Path) -> None:
    """Same bits of all results; every step and evaluation is recorded once, with the same
    values.
    """
    assert state_digest(folder) == state_digest(undisturbed)
    lines = records(folder)
    assert [record["step"] for record in lines if record["kind"] == "train"] == list(
        range(1, STEPS + 1)
    )
    assert lines == records(undisturbed)
    shown = curves(folder)
    assert [step for step, _ in shown["train/loss"]] == list(range(1, STEPS + 1))
    assert shown == curves(undisturbed)
    assert tracked(folder) == tracked(undisturbed)
    assert {tag: list(dict(points)) for tag, points in shown.items()} == {
        tag: [step for step, values in tracked(folder).items() if tag in values] for tag in shown
    }
