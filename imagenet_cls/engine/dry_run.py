"""`train.py --dry-run`: everything up to the first update."""

from torch import Tensor

from imagenet_cls.checkpoint.format import Progress
from imagenet_cls.config.load import Loaded
from imagenet_cls.engine.build import TrainingParts, build
from imagenet_cls.engine.step import autocast
from imagenet_cls.engine.summary import startup_table
from imagenet_cls.models.adapt import set_training
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.report.reporter import Reporter


def dry_run(loaded: Loaded, group: Group) -> None:
    """Build everything, print the start-up table, and try one batch. Writes nothing and changes no weight."""
    parts = build(loaded.config, group)
    try:
        with Reporter(None, 0, False, group.is_main, parts.plan.total_steps, parts.plan.epochs) as reporter:
            reporter.table(startup_table(parts, None, Progress()))
            for message in [*(f"warning: {line}" for line in loaded.warnings), *parts.messages, try_one_batch(parts)]:
                reporter.message(message)
    finally:
        parts.train_loader.close()


def try_one_batch(parts: TrainingParts) -> str:
    """Forward and backward with one micro-batch. Returns a message with the shapes and the loss."""
    batch = next(iter(parts.train_loader.epoch(0, 0)))
    set_training(parts.model, parts.config.model)
    images, targets = parts.prepare(batch, 0, 0, 0)
    with autocast(parts.group.device, parts.evaluation.autocast_dtype):
        logits = parts.wrapped(images)
        loss = parts.criterion(logits, targets, images)
    loss.backward()
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else [tuple(each.shape) for each in logits]
    return (
        f"dry run: one batch of {tuple(batch.images.shape)} gave logits {shape} and loss {loss.item():.4f}; "
        "no run folder was written"
    )
