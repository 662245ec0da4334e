"""The learning rate for another batch."""

import pytest

from imagenet_cls.config.schema import OptimizerConfig
from imagenet_cls.optim.scaling import scaled_lr


def test_without_a_base_batch_the_rate_is_as_written() -> None:
    assert scaled_lr(OptimizerConfig(lr=0.1), 1024) == (0.1, None)
    assert scaled_lr(OptimizerConfig(lr=0.1, lr_base_batch=256), 256) == (0.1, None)
    assert scaled_lr(OptimizerConfig(lr=0.1, lr_base_batch=256, lr_scaling="sqrt"), 256) == (0.1, None)


@pytest.mark.parametrize(
    ("lr", "base", "batch", "scaling", "expected", "line"),
    [
        (0.1, 256, 1024, "linear", 0.4, "lr 0.1 for 256 images, scaled linearly x 4 to 0.4 for 1024"),
        (5e-4, 512, 1024, "linear", 1e-3, "lr 0.0005 for 512 images, scaled linearly x 2 to 0.001 for 1024"),
        (0.1, 256, 64, "linear", 0.025, "lr 0.1 for 256 images, scaled linearly x 0.25 to 0.025 for 64"),
        (5e-3, 2048, 512, "sqrt", 2.5e-3, "lr 0.005 for 2048 images, scaled by the root x 0.5 to 0.0025 for 512"),
        (0.1, 3, 1, "linear", 0.1 / 3, "lr 0.1 for 3 images, scaled linearly x 0.3333 to 0.03333 for 1"),
    ],
)
def test_scaling(lr: float, base: int, batch: int, scaling: str, expected: float, line: str) -> None:
    """The second row is DeiT's: 5e-4 * batch / 512."""
    found, told = scaled_lr(OptimizerConfig(lr=lr, lr_base_batch=base, lr_scaling=scaling), batch)  # type: ignore[arg-type]
    assert found == pytest.approx(expected, rel=1e-12)
    assert told == line
