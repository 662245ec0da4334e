"""A rank outside of a collective ends, too, when another rank is lost."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from forked_ranks import RankServer, join_group

from imagenet_cls.guards.heartbeat import start_heartbeat


def wait_outside_of_collectives(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 is stopped; rank 0 sleeps."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error{rank}.json")
    start_heartbeat(join_group(rank, world_size, folder / "store", timeout_sec=3.0), timeout_sec=3.0)
    time.sleep(0.5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def test_lost_rank_outside_of_a_collective_exits_5_and_is_named(rank_server: RankServer, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        rank_server.call(wait_outside_of_collectives, 2, tmp_path)
    errors = failed.value.args[0].partition("\nassert ")[0]  # what pytest adds
    named = f"lost contact with host {socket.gethostname()} (127.0.0.1; rank 1): no heartbeat for "
    assert errors.count(named) == 1 and len(errors.splitlines()) <= 3, errors
    record = json.loads((tmp_path / "error0.json").read_text())["message"]
    assert record["errorCode"] == 5 and named in record["message"]
    assert not (tmp_path / "error1.json").exists()
