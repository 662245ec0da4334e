"""Our loop and the plain one, step by step: from the same weights and on the same images both make the same weights.

Runs of both may well end several points of top-1 apart: rounding alone turns over a ReLU sooner or later, and after
some dozens of steps small nets have little in common. So each step begins where ours began.

What augmentation draws is ours, since two libraries' draws can't be the same. All that comes behind it is made twice,
with the same seeds: mixing, network, loss, teacher, SAM, clipping, schedule, optimizer, average, and the evaluation.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import evaluations, train_here
from plain_loop import NUM_CLASSES, Plain, top1_pct
from plain_loop import digits as decoded
from quick_runs import QUICK, STARTS_FROM, TEACHER
from safetensors.torch import save_file
from torch import Tensor, nn

from imagenet_cls.config.load import load_config
from imagenet_cls.data.device import TrainPreprocess
from imagenet_cls.engine import run
from imagenet_cls.engine.build import Parts, build
from imagenet_cls.report.log import close_log
from imagenet_cls.seeding import hash_key, seed_generators

# Of each run. All of them are a long test.
FEW_STEPS = 3
# How far numbers may be apart, as a share of themselves and of this. LAMB and Adam divide a gradient by its own size:
# where that is near zero, rounding shows in some step of all, up to a part of an update's length, about the rate.
CLOSE, BESIDE = 1e-4, 0.01
CLOSE_IN_ALL, BESIDE_IN_ALL = 1e-3, 1.0
NAMES = sorted(path.stem for path in QUICK.glob("*.yaml"))
Weights = dict[str, Tensor]


class Trace:
    """A run of ours, and what it was given and made in each step."""

    parts: Parts
    start: Weights

    def __init__(self) -> None:
        self.images: list[list[Tensor]] = []  # by step, of each micro-batch: erased, not mixed
        self.targets: list[list[Tensor]] = []
        self.weights: list[Weights] = []  # behind each step

    def build(self, *words: Any, **more: Any) -> Parts:
        """In place of `engine.run`'s: the same parts, which write down what passes."""
        self.parts = parts = build(*words, **more)
        self.start = {name: value.clone() for name, value in parts.model.state_dict().items()}
        prepare, update = parts.prepare, parts.updater.update
        erased = TrainPreprocess(prepare.preprocess, prepare.erasing, None, prepare.seed, 0)

        def prepare_and_note(batch: Any, epoch: int, step: int, micro: int) -> tuple[Tensor, Tensor]:
            if micro == 0:  # with SAM they come a second time
                self.images[step:], self.targets[step:] = [[]], [[]]
            images, targets = erased(batch, epoch, step, micro)
            self.images[step].append(images.clone())
            self.targets[step].append(targets.clone())
            return prepare(batch, epoch, step, micro)

        def update_and_note(*rates: Any) -> Any:
            done = update(*rates)
            self.weights.append(numbers(parts.model))
            return done

        parts.prepare = prepare_and_note  # type: ignore[assignment]
        parts.updater.update = update_and_note  # type: ignore[method-assign]
        return parts


def numbers(model: nn.Module) -> Weights:
    return {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}


def difference(one: Weights, other: Weights, beside: float) -> float:
    """The largest one of two numbers, as a share of the first of them and `beside`."""
    assert one.keys() == other.keys()
    return max(float(((one[name] - other[name]).abs() / (one[name].abs() + beside)).max()) for name in one)


def seeded(key: int, loss: Callable[[Tensor, Tensor], Tensor], images: Tensor, targets: Tensor) -> Tensor:
    """Dropout and drop-path draw what they drew in our loop."""
    seed_generators(key)
    return loss(images, targets)


@pytest.fixture
def teacher(tmp_path: Path) -> tuple[nn.Module, Path]:
    """The network that some recipes start from, untrained, and its file."""
    model = load_config(QUICK / f"{TEACHER}.yaml").config.model
    torch.manual_seed(5)
    network = timm.create_model(model.name, num_classes=NUM_CLASSES, **model.kwargs).eval().requires_grad_(False)
    save_file(network.state_dict(), tmp_path / "teacher.safetensors")
    return network, tmp_path / "teacher.safetensors"


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    trace = Trace()
    monkeypatch.setattr(run, "build", trace.build)
    yield trace
    close_log()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about channels-last gradients of small nets
@pytest.mark.parametrize("steps", [FEW_STEPS, pytest.param(None, marks=pytest.mark.nightly)], ids=["few", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_weights_behind_each_step(
    name: str, steps: int | None, digits: Path, tmp_path: Path, teacher: tuple[nn.Module, Path], trace: Trace
) -> None:
    words = [str(QUICK / f"{name}.yaml"), f"data.root={digits}", f"train.max_steps={steps or 'null'}"]
    words += [f"{STARTS_FROM[name]}={teacher[1]}"] if name in STARTS_FROM else []
    train_here([*words, "--work-dir", str(tmp_path / "run")])
    found = evaluations(tmp_path / "run")

    train_images, val_images = decoded(digits)
    cfg = trace.parts.config
    plain = Plain(cfg, len(train_images), teacher[0])
    for model in (plain.model, *([] if plain.ema is None else [plain.ema.module])):
        model.load_state_dict(trace.start)
    loss, (close, beside) = plain.loss, (CLOSE, BESIDE) if steps else (CLOSE_IN_ALL, BESIDE_IN_ALL)
    for step, weights in enumerate(trace.weights):
        epoch, start = divmod(step, trace.parts.plan.steps_per_epoch)
        if start == 0:
            plain.start_epoch(epoch)
            plain.top1s = [record["top1_pct"] for record in found if record["step"] <= step]
        plain.loss = partial(seeded, hash_key("batch", cfg.seed, step, 0, 0), loss)  # type: ignore[method-assign]
        seed_generators(hash_key("mix", cfg.seed, step, 0, 0))
        plain.step(torch.cat(trace.images[step]), torch.cat(trace.targets[step]))
        assert difference(weights, numbers(plain.model), beside) < close, step
        plain.model.load_state_dict(weights, strict=False)  # else rounding would grow from step to step

    averages = [ema.module for ema in (trace.parts.ema, plain.ema) if ema is not None and ema.module is not None]
    assert len(averages) in (0, 2) and difference(*map(numbers, averages or [plain.model] * 2), beside) < close
    figures = {record["weights"]: record["top1_pct"] for record in found if record["step"] == found[-1]["step"]}
    for kind, model in zip(("raw", "ema"), [trace.parts.model, *averages[:1]], strict=False):
        # Two images more or less: our pixels are rounded where Pillow's are, too, but not always alike.
        assert figures[kind] == pytest.approx(top1_pct(model, val_images, cfg), abs=0.6)
