"""The learning rate for the batch that is trained with.

Owns `optimizer.lr_base_batch` and `optimizer.lr_scaling`. Scales the highest rate alone: rates that a schedule names
itself (`min_lr`, `warmup_start_lr`) stay as written, as in DeiT's script, from which the linear rule's form is taken.
Called by `engine.build` and by the drawing of a schedule.
"""

import math

from imagenet_cls.config.schema import OptimizerConfig


def scaled_lr(optimizer: OptimizerConfig, global_batch_size: int) -> tuple[float, str | None]:
    """The learning rate for a global batch of so many images, and a line that says so where it is not `optimizer.lr`.

    linear: lr * batch / base (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1). sqrt: lr times the root
    of that (Krizhevsky 2014, "One weird trick"). Without a base batch the rate is used as it is written.
    """
    base = optimizer.lr_base_batch
    if base is None or base == global_batch_size:
        return optimizer.lr, None
    ratio = global_batch_size / base
    factor, manner = {"linear": (ratio, "linearly"), "sqrt": (math.sqrt(ratio), "by the root")}[optimizer.lr_scaling]
    lr = optimizer.lr * factor
    return lr, (
        f"lr {optimizer.lr:g} for {base} images, scaled {manner} x {factor:.4g} to {lr:.4g} for {global_batch_size}"
    )
