"""Sharpness-aware minimisation against its formula, and all that it must leave as it was."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from imagenet_cls.config.schema import OptimizerConfig, TrainConfig
from imagenet_cls.engine.sam import Sam, build_sam
from imagenet_cls.engine.step import Updater
from imagenet_cls.optim.build import build_optimizer
from imagenet_cls.optim.groups import parameter_groups

RHO, LR = 0.5, 0.1


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4) if norm else nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 5)]
    return nn.Sequential(*layers).double()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    images = torch.randn(8, 3, 6, 6, generator=draws, dtype=torch.float64)
    return images, torch.randint(0, 5, (8,), generator=draws)


def parts(model: nn.Module, rho: float | None = RHO, every_steps: int = 1) -> tuple[Sam, Updater]:
    config = OptimizerConfig(lr=LR, weight_decay=0.01, bias_weight_decay=0.0, kwargs={"momentum": 0.9})
    train = TrainConfig(sam_rho=rho, sam_every_steps=every_steps)
    optimizer = build_optimizer(config, parameter_groups(model, config))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return build_sam(train, model, optimizer), Updater(model, optimizer, train, scaler)


def one_step(model: nn.Module, sam: Sam, step: int, images: Tensor, targets: Tensor, accumulation: int = 1) -> int:
    """Gradients of a step as the loop takes them. Returns how often it went over the micro-batches."""
    micro_batches = zip(images.chunk(accumulation), targets.chunk(accumulation), strict=True)
    passes = 0
    for point in sam.points(step, micro_batches):
        passes += 1
        for some_images, some_targets in point:
            (nn.functional.cross_entropy(model(some_images), some_targets) / accumulation).backward()
    return passes


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_two_steps_are_the_papers_formula(accumulation: int) -> None:
    """Equation 2 and the update of Algorithm 1, with momentum and weight decay, on a dictionary of tensors."""
    model = network()
    sam, updater = parts(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    momenta = {name: torch.zeros_like(p) for name, p in weights.items()}
    for step in range(2):
        images, targets = batch(step)

        def gradients(at: dict[str, Tensor], images: Tensor = images, targets: Tensor = targets) -> dict[str, Tensor]:
            leaves = {name: w.clone().requires_grad_() for name, w in at.items()}
            loss = nn.functional.cross_entropy(functional_call(model, leaves, (images,)), targets)
            return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

        g = gradients(weights)
        length = math.sqrt(sum(float(each.square().sum()) for each in g.values()))
        at_highest = gradients({name: w + RHO * g[name] / length for name, w in weights.items()})
        for name, w in weights.items():
            decay = 0.0 if name.endswith("bias") else 0.01
            momenta[name] = 0.9 * momenta[name] + at_highest[name] + decay * w
            weights[name] = w - LR * momenta[name]

        assert one_step(model, sam, step, images, targets, accumulation) == 2
        norm, _ = updater.update(LR)
        expected_norm = math.sqrt(sum(float(each.square().sum()) for each in at_highest.values()))
        assert norm.item() == pytest.approx(expected_norm, rel=1e-9)
        assert abs(expected_norm - length) > 1e-3  # the point is another one
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), weights[name], rtol=0, atol=1e-12)


def pulled_one_by_one(count: int, pulled: list[int]) -> Iterator[int]:
    for number in range(count):
        pulled.append(number)
        yield number


@pytest.mark.parametrize(("rho", "step"), [(None, 0), (RHO, 1), (RHO, 2), (RHO, 5)])
def test_without_it_or_between_its_steps_micro_batches_are_handed_on_as_they_come(rho: float | None, step: int) -> None:
    sam, _ = parts(network(), rho, every_steps=3)
    pulled: list[int] = []
    points = sam.points(step, pulled_one_by_one(4, pulled))
    first = iter(next(points))
    assert pulled == []
    assert next(first) == 0 and pulled == [0]
    assert list(first) == [1, 2, 3]
    assert list(points) == []


def test_it_is_due_in_every_nth_step_and_takes_what_belongs_to_the_step() -> None:
    model = network()
    sam, updater = parts(model, every_steps=3)
    endless = itertools.cycle([batch(0), batch(1), batch(2)])
    passes = []
    for step in range(7):
        passes.append(0)
        for point in sam.points(step, itertools.islice(endless, 2)):
            passes[-1] += 1
            seen = 0
            for images, targets in point:
                nn.functional.cross_entropy(model(images), targets).backward()
                seen += 1
            assert seen == 2
        updater.update(LR)
    assert passes == [2, 1, 1, 2, 1, 1, 2]


def test_weights_come_back_in_the_same_bits_and_buffers_see_one_pass() -> None:
    """float32, where adding and taking away again is not the same."""
    model, plain = network(norm=True).float(), network(norm=True).float()
    model.to(memory_format=torch.channels_last)
    images, targets = batch()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    strides = [p.stride() for p in model.parameters()]
    sam, _ = parts(model)
    at_points = []
    for point in sam.points(0, iter([(images.float(), targets)])):
        at_points.append({name: p.detach().clone() for name, p in model.named_parameters()})
        assert all(p.grad is None for p in model.parameters())
        for some_images, some_targets in point:
            nn.functional.cross_entropy(model(some_images), some_targets).backward()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(at_points[0][name], before[name]) for name in before)
    moved = torch.cat([(at_points[1][name] - before[name]).flatten() for name in before])
    assert moved.norm().item() == pytest.approx(RHO, rel=1e-5)
    assert [p.stride() for p in model.parameters()] == strides
    plain(images.float())
    for (name, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, msg=name)
    assert model[1].num_batches_tracked == 1
    assert model[1].training and model[1].momentum == 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_skipped(bad: float) -> None:
    model = network()
    sam, updater = parts(model)
    images, targets = batch()
    images[0, 0, 0, 0] = bad
    before = [p.detach().clone() for p in model.parameters()]
    for point in sam.points(0, iter([(images, targets)])):
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        for some_images, some_targets in point:
            nn.functional.cross_entropy(model(some_images), some_targets).backward()
    _, skipped = updater.update(LR)
    assert skipped
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_gradient_of_zero_has_no_direction() -> None:
    model = network()
    sam, updater = parts(model)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in sam.points(0, iter([])):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not updater.update(LR)[1]


def test_frozen_parameters_and_those_that_took_no_part_stay() -> None:
    used = network()
    used[0].bias.requires_grad_(False)
    model = nn.ModuleDict({"used": used, "unused": nn.Linear(2, 2).double()})
    sam, _ = parts(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved: set[str] = set()
    for point in sam.points(0, iter([batch()])):
        moved |= {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        for images, targets in point:
            nn.functional.cross_entropy(used(images), targets).backward()
    assert moved == {"used.0.weight", "used.3.weight", "used.3.bias"}


def test_weights_come_back_where_the_second_pass_fails() -> None:
    model = network()
    sam, _ = parts(model)
    before = [p.detach().clone() for p in model.parameters()]
    points = sam.points(0, iter([batch()]))
    for images, targets in next(points):
        nn.functional.cross_entropy(model(images), targets).backward()
    next(points)
    assert not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    points.close()  # what becomes of an iterator that its loop leaves early
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
