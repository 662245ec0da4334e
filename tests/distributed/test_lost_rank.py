"""A rank that waits for something other than a collective ends, too, when another one is gone."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from forked_ranks import RankServer, join_group


def wait_for_data_for_ever(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 is stopped; rank 0 waits for something that is no collective."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error{rank}.json")
    join_group(rank, world_size, folder / "store", timeout_sec=3.0)
    time.sleep(0.5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def test_a_rank_that_waits_for_its_data_ends_with_code_5_and_a_name(rank_server: RankServer, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        rank_server.call(wait_for_data_for_ever, 2, tmp_path)
    errors = failed.value.args[0].partition("\nassert ")[0]  # what pytest adds
    named = f"lost contact with host {socket.gethostname()} (127.0.0.1; rank 1): nothing heard for "
    assert errors.count(named) == 1 and len(errors.splitlines()) <= 3, errors
    record = json.loads((tmp_path / "error0.json").read_text())["message"]
    assert record["errorCode"] == 5 and named in record["message"]
    assert not (tmp_path / "error1.json").exists()
