"""Each quick recipe makes the same weights as a plain loop, step by step, and learns.

Two whole runs cannot be compared: rounding changes a ReLU's sign sooner or later, and after some
dozens of steps small networks differ. So the plain loop takes our weights before each step.

The augmented images are ours, since random draws of two libraries differ. Everything after them is
computed twice with the same seeds: mixing, network, loss, teacher, SAM, clipping, schedule,
optimizer, EMA, and the evaluation.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import Plain, build_teacher, map_pct, top1_pct, val_images
from quick_runs import QUICK, STARTS_FROM, TEACHER, measured, train_recipe
from torch import Tensor, nn

from imagenet_cls.data.device import TrainPreprocess
from imagenet_cls.engine import run_training
from imagenet_cls.engine.build import build
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.seeding import hash_key, seed_generators

# Tolerance and floor: a difference may be `tolerance * (size of the number + floor)`. LAMB and Adam
# divide a gradient by its own size: where that is near zero, rounding changes an update by up to a
# part of the learning rate. This happens in some of the later steps.
FIRST_STEPS, TIGHT, LOOSE = 3, (1e-4, 0.01), (1e-3, 1.0)
# In the default tests; the others are nightly.
FAST = ("resnet_sgd_step", "resnet_rsb_a2")
NAMES = sorted(path.stem for path in QUICK.glob("*.yaml"))
Weights = dict[str, Tensor]


class Trace:
    """Records what one of our runs is given and computes in each step."""

    parts: TrainingParts
    start: Weights

    def __init__(self) -> None:
        self.images: list[list[Tensor]] = []  # by step, one for each micro-batch: erased, not mixed
        self.targets: list[list[Tensor]] = []
        self.weights: list[Weights] = []  # after each step

    def build(self, *args: Any, **kwargs: Any) -> TrainingParts:
        """Replaces `engine.run_training.build`: the same parts, with recording added."""
        self.parts = parts = build(*args, **kwargs)
        self.start = {name: value.clone() for name, value in parts.model.state_dict().items()}
        prepare, update = parts.preprocess, parts.updater.update
        erased = TrainPreprocess(prepare.normalize, prepare.erasing, None, prepare.seed, 0)

        def prepare_and_record(
            batch: Any, epoch: int, step: int, micro: int
        ) -> tuple[Tensor, Tensor]:
            if micro == 0:  # SAM prepares each micro-batch a second time
                self.images[step:], self.targets[step:] = [[]], [[]]
            images, targets = erased(batch, epoch, step, micro)
            self.images[step].append(images.clone())
            self.targets[step].append(targets.clone())
            return prepare(batch, epoch, step, micro)

        def update_and_record(*rates: Any) -> Any:
            result = update(*rates)
            self.weights.append(float_state(parts.model))
            return result

        parts.preprocess = prepare_and_record  # type: ignore[assignment]
        parts.updater.update = update_and_record  # type: ignore[method-assign, assignment]
        return parts


def float_state(model: nn.Module) -> Weights:
    return {
        name: value.clone()
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }


def assert_close(ours: nn.Module | Weights, plain: nn.Module, step: int) -> None:
    tolerance, floor = TIGHT if step < FIRST_STEPS else LOOSE
    if isinstance(ours, nn.Module):
        ours = float_state(ours)
    other = float_state(plain)
    assert ours.keys() == other.keys()
    for name, value in ours.items():
        difference = float(((value - other[name]).abs() / (value.abs() + floor)).max())
        assert difference < tolerance, f"step {step}, {name}: {difference}"


def seeded(
    key: int, loss: Callable[[Tensor, Tensor], Tensor], images: Tensor, targets: Tensor
) -> Tensor:
    """Dropout and drop-path draw what they drew in our loop."""
    seed_generators(key)
    return loss(images, targets)


@pytest.fixture(scope="module")
def teacher(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the recipe that others start from."""
    folder = tmp_path_factory.mktemp("teacher") / TEACHER
    train_recipe(TEACHER, digits, folder, None)
    return folder


# torch's, about channels-last gradients of small networks
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.nightly) for name in NAMES],
)
def test_quick_recipe_equals_plain_loop_and_learns(
    name: str,
    digits: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = request.getfixturevalue("teacher") if name in STARTS_FROM else None
    trace = Trace()
    monkeypatch.setattr(run_training, "build", trace.build)
    results = train_recipe(name, digits, tmp_path / "run", teacher)
    for kind, result in results.items():
        assert result >= measured()[name, kind][0]

    cfg = trace.parts.config
    plain = Plain(cfg, trace.parts.schedule, build_teacher(QUICK / f"{TEACHER}.yaml", teacher))
    for model in (plain.model, *([] if plain.ema is None else [plain.ema.module])):
        model.load_state_dict(trace.start)
    loss = plain.loss
    for step, weights in enumerate(trace.weights):
        epoch, start = divmod(step, trace.parts.plan.steps_per_epoch)
        if start == 0:
            plain.start_epoch(epoch)
        plain.loss = partial(seeded, hash_key("batch", cfg.seed, step, 0, 0), loss)  # type: ignore[method-assign]
        seed_generators(hash_key("mix", cfg.seed, step, 0, 0))
        plain.step(torch.cat(trace.images[step]), torch.cat(trace.targets[step]))
        assert_close(weights, plain.model, step)
        # otherwise rounding grows from step to step
        plain.model.load_state_dict(weights, strict=False)

    models = {"raw": trace.parts.model}
    if plain.ema is not None:
        assert trace.parts.ema.module is not None
        assert_close(trace.parts.ema.module, plain.ema.module, len(trace.weights))
        models["ema"] = trace.parts.ema.module
    assert models.keys() == results.keys()
    for kind, model in models.items():
        if cfg.data.labels == "multi":
            # a pair of images in the other order changes it by less than 0.1
            assert abs(results[kind] - map_pct(model)) < 0.5
            continue
        # Some pixels differ from Pillow's by one level, so a few images may get another class.
        assert abs(results[kind] - top1_pct(model, val_images(digits), cfg)) < 2.0
