"""The results of evaluations in `Progress`."""

import math

from imagenet_cls.checkpoint.progress import Progress, best_weights
from imagenet_cls.config.metrics import BY_NAME


def test_best_results_have_one_metric_after_a_change_of_metric() -> None:
    """A loss and a top-1 are not compared, also if the EMA weights have no finite loss."""
    progress = Progress(step=10)
    for kind in ("raw", "ema"):
        assert progress.record(kind, {"top1_pct": 1.0, "loss": 2.0}, BY_NAME["top1"])
    progress.step = 20
    assert progress.record("raw", {"top1_pct": 3.0, "loss": 0.1}, BY_NAME["loss"])
    assert not progress.record("ema", {"top1_pct": 0.0, "loss": math.nan}, BY_NAME["loss"])
    assert progress.best == {"raw": {"loss": 0.1, "step": 20}}
    assert best_weights(progress.best) == "raw"
