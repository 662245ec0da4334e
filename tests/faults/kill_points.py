"""Named points of a run at which a rank sends itself a signal, so that a kill can be repeated
exactly.

Imported by `forked_ranks.py`, in a process that has torch.
"""

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.engine import run_training

Passed = Callable[[], None]


def arm(point: str, passing: int, number: int) -> None:
    """Send this process the signal when it passes `point` for the `passing`-th time since the
    training loop began.
    """
    times, train = 0, run_training.train

    def passed() -> None:
        nonlocal times
        times += 1
        if times == passing:
            os.kill(os.getpid(), number)

    def arm_and_train(run: Any) -> None:
        POINTS[point](passed)
        train(run)

    run_training.train = arm_and_train


def at_audit_event(name: str, pattern: str) -> Callable[[Passed], None]:
    """A point before each system call with this audit event (PEP 578) whose first two arguments
    match the pattern.
    """

    def add_hook(passed: Passed) -> None:
        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == name:
                words = (
                    os.fsdecode(word) if isinstance(word, bytes) else str(word)
                    for word in arguments[:2]
                )
                if re.search(pattern, " ".join(words)):
                    passed()

        sys.addaudithook(hook)

    return add_hook


def at_dropout(
    action: Callable[[nn.Module, torch.Tensor, Passed], None],
) -> Callable[[Passed], None]:
    """A point after each forward pass of a dropout layer: `action(layer, output, passed)`
    decides.
    """

    def add_hook(passed: Passed) -> None:
        def hook(module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            if isinstance(module, nn.Dropout):
                action(module, output, passed)

        register_module_forward_hook(hook)

    return add_hook


def in_training(module: nn.Module, _: torch.Tensor, passed: Passed) -> None:
    if module.training:
        passed()


def in_evaluation(module: nn.Module, _: torch.Tensor, passed: Passed) -> None:
    if not module.training:
        passed()


def at_gradient(module: nn.Module, output: torch.Tensor, passed: Passed) -> None:
    if module.training and output.requires_grad:
        output.register_hook(lambda _: passed())


def before_call(owner: Any, name: str) -> Callable[[Passed], None]:
    """A point before each call of `owner.name`."""

    def patch(passed: Passed) -> None:
        function = getattr(owner, name)

        def pass_and_call(*args: Any, **kwargs: Any) -> Any:
            passed()
            return function(*args, **kwargs)

        setattr(owner, name, pass_and_call)

    return patch


POINTS: dict[str, Callable[[Passed], None]] = {
    "reading_an_image": at_audit_event("open", r"/train/.*\.jpg r$"),
    # BatchNorm's statistics are updated, and dropout has drawn
    "in_forward": at_dropout(in_training),
    "in_backward": at_dropout(at_gradient),  # the head has its gradient, the other layers have none
    # before the EMA's
    "after_optimizer_step": lambda passed: register_optimizer_step_post_hook(lambda *_: passed()),
    "in_evaluation": at_dropout(in_evaluation),
    "between_epochs": before_call(EpochSampler, "set_epoch"),
    "after_the_last_step": before_call(run_training, "final_message"),  # everything is saved
    "checkpoint_begun": at_audit_event("os.mkdir", r"/\.tmp-step"),
    "checkpoint_half_written": at_audit_event("open", r"/\.tmp-step[^ ]*/state\.json w$"),
    "checkpoint_before_fsync": at_audit_event("open", r"/\.tmp-step[^ ]*/model\.safetensors None$"),
    "checkpoint_before_rename": at_audit_event("os.rename", r"/\.tmp-step[^ ]* "),
    # its parent folder is not synced
    "checkpoint_after_rename": at_audit_event("open", r"/checkpoints None$"),
    "before_old_one_is_removed": at_audit_event("os.rename", r" [^ ]*/\.tmp-gone"),
    "old_one_half_removed": at_audit_event("os.remove", r"^model\.safetensors "),
}
