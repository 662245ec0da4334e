"""`train.step`: the built-in step by its name gives the same bits; a broken step is an error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import RankServer
from helpers import arguments, assert_resumes, fails, losses, saved_bytes, succeeds, train_here

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.engine.train import forward_backward

SAME = "imagenet_cls.engine.train:forward_backward"
SMALL: dict[str, Any] = {"train__micro_batch_size": 32, "train__max_steps": 4}


def without_result(parts: Any, batches: Iterator[Any], epoch: int, step: int) -> None:
    forward_backward(parts, batches, epoch, step)


def one_micro_batch(parts: Any, batches: Iterator[Any], epoch: int, step: int) -> torch.Tensor:
    images, targets = parts.preprocess(next(batches), epoch, step, 0)
    loss, loss_and_metric = parts.wrapped(images, targets)
    loss.backward()
    return loss_and_metric


def noisy(parts: Any, batches: Iterator[Any], epoch: int, step: int) -> torch.Tensor:
    images, targets = parts.preprocess(next(batches), epoch, step, 0)
    loss, loss_and_metric = parts.wrapped(images + torch.randn_like(images), targets)
    loss.backward()
    return loss_and_metric


def one_too_many(parts: Any, batches: Iterator[Any], epoch: int, step: int) -> torch.Tensor:
    result = forward_backward(parts, batches, epoch, step)
    next(batches)
    return result


def twice_differentiated(parts: Any, batches: Iterator[Any], epoch: int, step: int) -> torch.Tensor:
    images, targets = parts.preprocess(next(batches), epoch, step, 0)
    images.requires_grad_()
    loss, loss_and_metric = parts.wrapped(images, targets)
    (gradient,) = torch.autograd.grad(loss, images, create_graph=True)
    gradient.square().sum().backward()
    return loss_and_metric


def without_ddp(parts: Any, batches: Iterator[Any], epoch: int, step: int) -> torch.Tensor:
    for _ in range(parts.plan.accumulation):
        images, targets = parts.preprocess(next(batches), epoch, step, 0)
        loss = parts.criterion(parts.model(images), targets, images)
        loss.backward()
    return torch.zeros(2)


def three_arguments(parts: Any, batches: Iterator[Any], step: int) -> None: ...


def test_built_in_step_by_its_name_gives_the_same_bits(digits: Path, tmp_path: Path) -> None:
    own, built_in = tmp_path / "own", tmp_path / "built_in"
    train_here(arguments(digits, built_in, **SMALL))
    train_here(arguments(digits, own, train__step=SAME, **SMALL))
    assert saved_bytes(own) == saved_bytes(built_in) and losses(own) == losses(built_in)


def test_run_with_own_step_resumes_to_the_same_bits(digits: Path, tmp_path: Path) -> None:
    own = "test_user_step:noisy"
    assert_resumes(digits, tmp_path, 3, train__step=own, train__max_steps=6, ema__decay=0.9)


@pytest.mark.parametrize(
    ("function", "key", "words"),
    [
        ("without_result", "train.step", {}),
        ("one_micro_batch", "train.step", {}),
        ("one_too_many", "train.step", {}),
        ("three_arguments", "train.step", {}),
        ("missing", "train.step", {}),
        ("twice_differentiated", "train.compile", {"train__compile": "true"}),
    ],
)
def test_broken_step_is_an_error_of_its_key(
    digits: Path, tmp_path: Path, function: str, key: str, words: dict[str, Any]
) -> None:
    words = SMALL | {"train__step": f"test_user_step:{function}"} | words
    error = fails(2, train_command, *arguments(digits, tmp_path / "run", **words))
    assert f"{key}: test_user_step:{function}" in error or f"{key}: module" in error


def test_step_that_bypasses_ddp_is_an_error(
    digits: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    (tmp_path / "bypass.py").write_text(Path(__file__).read_text())
    words = arguments(
        digits, tmp_path / "run", train__step="bypass:without_ddp", parallel__check_every_steps=1
    )
    output = tmp_path / "output.txt"
    codes = rank_server.run(words, output, 2, PWD=str(tmp_path))
    assert codes == [5, 5], output.read_text()
    assert "train.step" in output.read_text()


def test_evaluation_does_not_need_the_step(digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(arguments(digits, run, train__step=SAME, train__max_steps=1))
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(SAME, "gone:step"))
    succeeds(evaluate_command, config, run)
