"""The run that the tests of kills share, and the comparison of a killed run with an undisturbed one.

BatchNorm, dropout, EMA, mixup, RandAugment, accumulation 2, warm-up and cosine; 40 steps in 4 epochs, a checkpoint
every 5 steps, of which two stay.
"""

import json
import re
from pathlib import Path
from typing import Any

from helpers import arguments, state_digest

STEPS, STEPS_PER_EPOCH, ACCUMULATION, SAVED_EVERY = 40, 10, 2, 5
MICRO_BATCH = 2  # small, since RandAugment takes most of the time
CLASSES, EVAL_IMAGES = 10, 40

# Measured, so different in each run.
_MEASURED = ("images_per_sec", "data_wait_pct", "memory_mib", "seconds")


def global_batch(ranks: int) -> int:
    return ranks * ACCUMULATION * MICRO_BATCH


def link_images(digits: Path, folder: Path, ranks: int) -> Path:
    """A balanced part of the digits: `STEPS_PER_EPOCH` global batches, and `EVAL_IMAGES` for validation."""
    per_class = {"train": global_batch(ranks) * STEPS_PER_EPOCH // CLASSES, "val": EVAL_IMAGES // CLASSES}
    for source in sorted((digits / "train").iterdir()):
        images = iter(sorted(source.glob("*.jpg")))
        for part, count in per_class.items():
            (folder / part / source.name).mkdir(parents=True)
            for _ in range(count):
                image = next(images)
                (folder / part / source.name / image.name).symlink_to(image)
    return folder


def words_for(images: Path, folder: Path, ranks: int = 1, model: str = "noisy", **changes: Any) -> list[str]:
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
    }
    return arguments(images, folder, model, **(settings | changes))


def records(folder: Path) -> list[dict[str, Any]]:
    """Steps and evaluations of metrics.jsonl, in order, without measurements."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in _MEASURED}
        for line in lines
        if line["kind"] != "event"
    ]


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: (step, value) of each scalar, without measurements."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"), {SCALARS: 0})
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.endswith(_MEASURED)]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints, in order; asserts that nothing else lies beside them."""
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert all(name.startswith("step-") for name in names), names
    return [int(name.removeprefix("step-")) for name in names]


def assert_same_run(folder: Path, undisturbed: Path) -> None:
    """As `assert_same_bits`, and the same checkpoints are left: true unless the kill was in the last few steps."""
    assert_same_bits(folder, undisturbed)
    assert checkpoints(folder) == checkpoints(undisturbed)


def assert_same_bits(folder: Path, undisturbed: Path) -> None:
    """Same bits of all results; every step and evaluation is recorded once, with the same values."""
    assert state_digest(folder) == state_digest(undisturbed)
    lines = records(folder)
    assert [record["step"] for record in lines if record["kind"] == "train"] == list(range(1, STEPS + 1))
    assert lines == records(undisturbed)
    shown = curves(folder)
    assert [step for step, _ in shown["train/loss"]] == list(range(1, STEPS + 1))
    assert shown == curves(undisturbed)


def resumed_at(output: Path) -> int:
    """The step that a run resumed from, by its output; 0 for none. Asserts that no checkpoint was damaged."""
    text = output.read_text()
    assert "using an older checkpoint" not in text, text
    found = re.search(r"resumed from \S*/step-0*(\d+) at step (\d+)", "".join(text.splitlines()))
    assert (found is None) == ("starting from scratch" in text), text
    assert found is None or found[1] == found[2]
    return 0 if found is None else int(found[2])
