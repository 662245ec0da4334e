"""The results of evaluations in `Progress`."""

import math

from imagenet_cls.checkpoint.progress import Progress, best_weights


def test_best_results_have_one_metric_after_a_change_of_metric() -> None:
    """A loss and a top-1 are not compared, also if the EMA weights have no finite loss."""
    progress = Progress(step=10)
    for kind in ("raw", "ema"):
        assert progress.record(kind, {"top1_pct": 1.0, "loss": 2.0}, "top1_pct")
    progress.step = 20
    assert progress.record("raw", {"top1_pct": 3.0, "loss": 0.1}, "loss")
    assert not progress.record("ema", {"top1_pct": 0.0, "loss": math.nan}, "loss")
    assert progress.best == {"raw": {"loss": 0.1, "step": 20}}
    assert best_weights(progress.best) == "raw"
