"""Where ranks meet, and few words, with the reason, where they do not."""

import os
import sys
import threading
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from socket import create_server

import pytest
import torch
import torch.distributed as dist
from helpers import free_port, run

from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import init_group
from imagenet_cls.parallel.rendezvous import (
    Rendezvous,
    check_rendezvous_file,
    find_rendezvous,
    open_store,
    rendezvous_error,
    wait_for_all_ranks,
    wait_until_reachable,
)

FIRST, SECOND = RankInfo(0, 0, 2, 2), RankInfo(1, 1, 2, 2)


@pytest.mark.parametrize(
    ("init_method", "expected"),
    [
        ("env://", Rendezvous("host0", 29500)),
        ("tcp://10.9.1.2:34567", Rendezvous("10.9.1.2", 34567)),
        ("tcp://[fd00::1]:34567", Rendezvous("fd00::1", 34567)),
        ("file:///shared/a meeting", Rendezvous(file=Path("/shared/a meeting"))),
    ],
)
def test_where_ranks_meet(init_method: str, expected: Rendezvous) -> None:
    assert find_rendezvous({"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}, init_method, SECOND) == expected


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "29500 "])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(UsageError, match="is not a port"):
        find_rendezvous({"MASTER_ADDR": "host0", "MASTER_PORT": port}, "env://", SECOND)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_is_missing_or_empty(missing: str) -> None:
    variables = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", missing: ""}
    with pytest.raises(UsageError, match=f"{missing} not set"):
        find_rendezvous(variables, "env://", SECOND)


def test_a_rank_waits_for_the_first_one_that_comes_later() -> None:
    meeting = Rendezvous("127.0.0.1", int(free_port()))
    servers = []
    threading.Timer(0.5, lambda: servers.append(create_server((meeting.host, meeting.port)))).start()
    wait_until_reachable(meeting, 20.0, is_server=False)
    assert servers
    servers[0].close()


def test_the_first_rank_waits_for_its_machine_only() -> None:
    wait_until_reachable(Rendezvous("127.0.0.1", int(free_port())), 20.0, is_server=True)
    with closing(create_server(("127.0.0.1", 0))) as taken:  # whose port it is, the store finds out
        wait_until_reachable(Rendezvous("127.0.0.1", taken.getsockname()[1]), 20.0, is_server=True)
    wait_until_reachable(Rendezvous(file=Path("meeting")), 20.0, is_server=False)


@pytest.mark.parametrize(
    ("rank_info", "host", "reason"),
    [
        (SECOND, "127.0.0.1", "Connection refused"),
        (FIRST, "nowhere.invalid", "resolution|not known"),
        (SECOND, "no..host", "label"),
    ],
)
def test_a_machine_that_can_not_be_reached_costs_three_lines(
    rank_info: RankInfo, host: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's own store writes two dozen, which no Python code sees."""
    with pytest.raises(ResourceError, match=reason) as raised:
        init_group(rank_info, torch.device("cpu"), "auto", "gloo", f"tcp://{host}:{free_port()}", 0.5)
    assert f"rank {rank_info.rank} of 2: rendezvous at {host}:" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 3 and capfd.readouterr().err == ""


def test_a_rank_that_does_not_come_is_not_told_in_a_stores_keys() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(dist.DistStoreError) as raised:
        store.wait(["never set"], timedelta(seconds=0.1))
    told = str(rendezvous_error(raised.value, Rendezvous("host0", 29500), SECOND, 0.1)).splitlines()
    assert len(told) == 3 and "another rank is missing" in told[1]


@pytest.mark.parametrize("by_file", [False, True])
def test_all_that_came_learn_who_did_not(tmp_path: Path, by_file: bool) -> None:
    """Four ranks, of which 1 and 3 do not come; each here is a thread with a store of its own."""
    meeting = Rendezvous(file=tmp_path / "store") if by_file else Rendezvous("127.0.0.1", int(free_port()))
    told: dict[int, str] = {}

    def come(rank: int, timeout_sec: float) -> None:
        rank_info = RankInfo(rank, rank, 4, 4)
        with pytest.raises(TimeoutError) as error:
            wait_for_all_ranks(open_store(meeting, rank_info, 20.0), rank_info, timeout_sec)
        told[rank] = str(error.value)

    ranks = [threading.Thread(target=come, args=(0, 1.0)), threading.Thread(target=come, args=(2, 20.0))]
    for rank in ranks:
        rank.start()
        time.sleep(0.2)
    for rank in ranks:
        rank.join(30)
    assert told == dict.fromkeys((0, 2), "missing: ranks 1, 3 of 4")


def test_the_first_rank_itself_may_be_the_one_that_does_not_come(tmp_path: Path) -> None:
    """Where a launching process serves the store, or a file is it."""
    with pytest.raises(TimeoutError, match="missing: rank 0 of 2"):
        wait_for_all_ranks(open_store(Rendezvous(file=tmp_path / "store"), SECOND, 20.0), SECOND, 0.1)


def test_nobody_waits_for_a_rank_that_came_late_but_came(tmp_path: Path) -> None:
    meeting = Rendezvous(file=tmp_path / "store")

    def come(rank_info: RankInfo) -> None:
        wait_for_all_ranks(open_store(meeting, rank_info, 20.0), rank_info, 20.0)

    late = threading.Timer(0.3, come, (SECOND,))
    late.start()
    come(FIRST)
    late.join(60)
    assert not late.is_alive()


def test_a_program_that_says_nothing_is_not_waited_for_forever(tmp_path: Path) -> None:
    """As torch's store would, whatever its timeout."""
    with closing(create_server(("127.0.0.1", 0))) as silent:
        code = (
            "import torch; from imagenet_cls.parallel import process_group as group\n"
            "from imagenet_cls.parallel.environment import RankInfo\n"
            "group._RENDEZVOUS_EXTRA_SEC = 0.0\n"
            "group.init_group(RankInfo(1, 1, 2, 2), torch.device('cpu'), 'auto', 'gloo', "
            f"'tcp://127.0.0.1:{silent.getsockname()[1]}', 0.5)"
        )
        rank = run([sys.executable, "-c", code], timeout_sec=60)
    assert rank.returncode == 5 and len(rank.stderr.splitlines()) == 3, rank.stderr
    assert "the program there does not answer" in rank.stderr


def test_a_file_that_an_earlier_run_left(tmp_path: Path) -> None:
    file = tmp_path / "meeting"
    check_rendezvous_file(file, 0.0)
    file.touch()
    check_rendezvous_file(file, 0.0)  # as mktemp makes it
    file.write_bytes(b"addresses")
    check_rendezvous_file(file, 60.0)  # of this run
    check_rendezvous_file(file, None)
    for oldest_sec in (0.0, 60.0):
        with pytest.raises(ResourceError, match="a run that was killed has left it"):
            check_rendezvous_file(file, oldest_sec)
        os.utime(file, (time.time() - 61, time.time() - 61))


def test_a_file_that_can_not_be_made(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(UsageError, match=r"can't meet in .* folder"):
            check_rendezvous_file(file, None)
