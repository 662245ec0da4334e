"""Named points of a run at which a rank sends itself a signal, so that a kill can be repeated exactly.

Given are the point, and at which of its passings. Patched are `os`, torch's global hooks and a few methods, in the
process of the rank. Imported by `forked_ranks.py`, in a process that has torch.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import imagenet_cls.engine.run as engine_run
from imagenet_cls.data.loader import _TrainSamples
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.report.jsonl import MetricsFile

Passed = Callable[[], None]


def arm(point: str, passing: int, number: int) -> None:
    """Send this process the signal when it passes `point` for the `passing`-th time since the training loop began."""
    begun, times = False, 0

    def passed() -> None:
        nonlocal times
        times += begun
        if begun and times == passing:
            os.kill(os.getpid(), number)

    POINTS[point](passed)
    train = engine_run.train

    def train_and_count(run: Any) -> None:
        nonlocal begun
        begun = True
        train(run)

    engine_run.train = train_and_count


# ---------------------------------------------------------------------------------------------- in a step


def while_fetching(passed: Passed) -> None:
    """Half of a micro-batch is loaded."""
    make = _TrainSamples.batch

    def batch(self: _TrainSamples, keys: list[Any]) -> Any:
        make(self, keys[: len(keys) // 2])
        passed()
        return make(self, keys)

    _TrainSamples.batch = batch  # type: ignore[method-assign]


def while_waiting_for_a_worker(passed: Passed) -> None:
    before(_MultiProcessingDataLoaderIter, "_next_data", passed)


def in_forward(passed: Passed) -> None:
    """At the dropout layer: BatchNorm's statistics are updated, and dropout has drawn."""
    at_dropout(lambda module, output: passed() if module.training else None)


def in_backward(passed: Passed) -> None:
    """The head has its gradient, the other layers have none."""

    def hook(module: nn.Module, output: torch.Tensor) -> None:
        if module.training and output.requires_grad:
            output.register_hook(lambda _: passed())

    at_dropout(hook)


def before_optimizer_step(passed: Passed) -> None:
    register_optimizer_step_pre_hook(lambda *_: passed())


def after_optimizer_step(passed: Passed) -> None:
    """Before the EMA update and the records of the step."""
    register_optimizer_step_post_hook(lambda *_: passed())


# ------------------------------------------------------------------------------------- between the steps


def in_evaluation(passed: Passed) -> None:
    at_dropout(lambda module, output: None if module.training else passed())


def between_epochs(passed: Passed) -> None:
    """Before an epoch's first batch."""
    before(EpochSampler, "set_epoch", passed)


def after_the_last_step(passed: Passed) -> None:
    """Everything is saved; the final message is not printed."""
    before(engine_run, "final_message", passed)


def half_a_record(passed: Passed) -> None:
    """Half of a line of metrics.jsonl is written."""
    flush = MetricsFile.flush

    def flush_half(self: MetricsFile) -> None:
        flush(self)
        self._file.write(b'{"kind": "tra')
        passed()
        self._file.truncate(self._file.tell() - len('{"kind": "tra'))

    MetricsFile.flush = flush_half  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------ in a checkpoint


def checkpoint_opened(passed: Passed) -> None:
    """The temporary folder exists, and is empty."""
    after(os, "mkdir", passed, lambda path, *_: is_temporary(path))


def checkpoint_half_written(passed: Passed) -> None:
    """Files are missing, and one is truncated."""

    def at_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not str(arguments[0]).endswith("/state.json") or "w" not in str(arguments[1]):
            return
        folder = Path(str(arguments[0])).parent
        if is_temporary(folder):
            weights = folder / "model.safetensors"
            content = weights.read_bytes()
            weights.write_bytes(content[: len(content) // 2])
            passed()
            weights.write_bytes(content)

    sys.addaudithook(at_event)


def checkpoint_before_fsync(passed: Passed) -> None:
    """All files are written, none is synced."""
    before(os, "fsync", passed, lambda descriptor: ".tmp-step" in str(path_of(descriptor)))


def checkpoint_after_fsync(passed: Passed) -> None:
    """It is complete, in its temporary folder."""
    before(os, "rename", passed, lambda source, target, **_: is_temporary(source))


def checkpoint_after_rename(passed: Passed) -> None:
    """It has its name; the parent folder is not synced."""
    after(os, "rename", passed, lambda source, target, **_: is_temporary(source))


def before_old_ones_are_removed(passed: Passed) -> None:
    before(os, "rename", passed, lambda source, target, **_: ".tmp-gone" in str(target))


def old_one_half_removed(passed: Passed) -> None:
    """The model is removed, the rest is not."""
    remove = shutil.rmtree

    def rmtree(path: Any, *rest: Any, **more: Any) -> None:
        if ".tmp-gone" in str(path):
            (Path(path) / "model.safetensors").unlink()
            passed()
        remove(path, *rest, **more)

    shutil.rmtree = rmtree  # type: ignore[assignment]


POINTS: dict[str, Callable[[Passed], None]] = {
    function.__name__: function
    for function in (
        while_fetching, while_waiting_for_a_worker, in_forward, in_backward, before_optimizer_step,
        after_optimizer_step, in_evaluation, between_epochs, after_the_last_step, half_a_record, checkpoint_opened,
        checkpoint_half_written, checkpoint_before_fsync, checkpoint_after_fsync, checkpoint_after_rename,
        before_old_ones_are_removed, old_one_half_removed,
    )
}  # fmt: skip


# ---------------------------------------------------------------------------------------------- patching


def always(*_: Any, **__: Any) -> bool:
    return True


def is_temporary(path: Any) -> bool:
    """Whether this is the folder that a checkpoint is written in, beside its place."""
    return Path(path).name.startswith(".tmp-step")


def path_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def before(owner: Any, name: str, passed: Passed, where: Callable[..., bool] = always) -> None:
    """Pass before each call of `owner.name` whose arguments `where` accepts."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if where(*args, **kwargs):
            passed()
        return function(*args, **kwargs)

    setattr(owner, name, call)


def after(owner: Any, name: str, passed: Passed, where: Callable[..., bool] = always) -> None:
    """Pass after each call of `owner.name` whose arguments `where` accepts."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if where(*args, **kwargs):
            passed()
        return result

    setattr(owner, name, call)


def at_dropout(action: Callable[[nn.Module, torch.Tensor], None]) -> None:
    """Call `action` with each dropout layer that has run, and with what it gave."""

    def hook(module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if isinstance(module, nn.Dropout):
            action(module, output)

    register_module_forward_hook(hook)
