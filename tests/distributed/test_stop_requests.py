"""Two ranks check for stop requests every few steps, after the same steps, and stop at the same
one.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from forked_ranks import RankServer, destroy_process_groups, join_ranks

from imagenet_cls.parallel.stop_requests import StopRequested, StopSignalHandler


def stop_between_checks(rank: int, ranks: int, folder: Path) -> None:
    context = join_ranks(rank, ranks, folder / "store")
    stop = StopSignalHandler(context)
    reductions = 0
    reduce = dist.all_reduce

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal reductions
        reductions += 1
        return reduce(*arguments, **keywords)

    assert stop.every_steps == 1
    for step_sec, every_steps in (((2.0, 0.1), 1), ((0.001, 0.002), 40), ((0.01, 0.02), 25)):
        # the slowest rank decides; not longer than what was measured
        stop.set_interval(40, 40 * step_sec[rank])
        assert stop.every_steps == every_steps
    dist.all_reduce = counted
    with pytest.raises(StopRequested):
        for step in range(1, 1000):
            if step == 30 and rank == 1:
                stop.signal = signal.SIGTERM
            stop.check_after_step(force=step == 10)
    # Flags are sent after steps 10 and 35. The second one has the signal and is read after step 60.
    assert (step, reductions) == (60, 2)
    stop.close()
    destroy_process_groups(context)


def test_ranks_stop_at_the_second_check_after_a_signal(
    rank_server: RankServer, tmp_path: Path
) -> None:
    rank_server.call(stop_between_checks, 2, tmp_path)
