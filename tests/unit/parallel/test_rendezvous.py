"""The rendezvous of ranks, and the errors when it fails."""

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
ENV = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("init_method", "expected"),
    [
        ("env://", Rendezvous("host0", 29500)),
        ("tcp://10.9.1.2:34567", Rendezvous("10.9.1.2", 34567)),
        ("tcp://[fd00::1]:34567", Rendezvous("fd00::1", 34567)),
        ("file:///shared/a file", Rendezvous(file=Path("/shared/a file"))),
    ],
)
def test_find_rendezvous_by_init_method(init_method: str, expected: Rendezvous) -> None:
    assert find_rendezvous(ENV, init_method, SECOND) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("MASTER_ADDR", ""), *(("MASTER_PORT", port) for port in ("", "0", "65536", "-1", "http", "29500 "))],
)
def test_find_rendezvous_with_an_invalid_variable_names_it(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        find_rendezvous({**ENV, name: value}, "env://", SECOND)


def test_wait_until_reachable_waits_for_a_late_server() -> None:
    address, servers = Rendezvous("127.0.0.1", int(free_port())), []
    threading.Timer(0.3, lambda: servers.append(create_server((address.host, address.port)))).start()
    wait_until_reachable(address, 20.0, is_server=False)
    servers[0].close()


def test_wait_until_reachable_for_the_server_itself_returns() -> None:
    wait_until_reachable(Rendezvous("127.0.0.1", int(free_port())), 20.0, is_server=True)
    wait_until_reachable(Rendezvous(file=Path("file")), 20.0, is_server=False)


@pytest.mark.parametrize(
    ("rank_info", "host", "reason"),
    [
        (SECOND, "127.0.0.1", "Connection refused"),
        (FIRST, "nowhere.invalid", "resolution|not known"),
        (SECOND, "no..host", "label"),
    ],
)
def test_init_group_with_an_unreachable_machine_gives_the_reason(
    rank_info: RankInfo, host: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's store writes two dozen lines from C++."""
    with pytest.raises(ResourceError, match=reason) as raised:
        init_group(rank_info, torch.device("cpu"), "auto", "gloo", f"tcp://{host}:{free_port()}", 0.5)
    assert len(str(raised.value).splitlines()) == 3 and capfd.readouterr().err == ""


def test_rendezvous_error_after_a_stores_timeout_hides_its_keys() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(dist.DistStoreError) as raised:
        store.wait(["never set"], timedelta(seconds=0.1))
    assert "never set" not in str(rendezvous_error(raised.value, Rendezvous("host0", 29500), SECOND, 0.1))


@pytest.mark.parametrize("by_file", [False, True])
def test_wait_for_all_ranks_with_missing_ranks_names_them_on_every_rank(tmp_path: Path, by_file: bool) -> None:
    """Ranks 1 and 3 of four are missing; the others are threads with their own stores."""
    place = Rendezvous(file=tmp_path / "store") if by_file else Rendezvous("127.0.0.1", int(free_port()))
    errors: dict[int, str] = {}

    def arrive(rank: int, timeout_sec: float) -> None:
        rank_info = RankInfo(rank, rank, 4, 4)
        with pytest.raises(TimeoutError) as error:
            wait_for_all_ranks(open_store(place, rank_info, 20.0), rank_info, timeout_sec)
        errors[rank] = str(error.value)

    ranks = [threading.Thread(target=arrive, args=(0, 1.0)), threading.Thread(target=arrive, args=(2, 20.0))]
    for rank in ranks:
        rank.start()
        time.sleep(0.2)
    for rank in ranks:
        rank.join(30)
    assert errors == dict.fromkeys((0, 2), "missing: ranks 1, 3 of 4")


def test_wait_for_all_ranks_without_rank_0_names_it(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="missing: rank 0 of 2"):
        wait_for_all_ranks(open_store(Rendezvous(file=tmp_path / "store"), SECOND, 20.0), SECOND, 0.1)


def test_wait_for_all_ranks_with_a_late_rank_returns(tmp_path: Path) -> None:
    place = Rendezvous(file=tmp_path / "store")

    def arrive(rank_info: RankInfo) -> None:
        wait_for_all_ranks(open_store(place, rank_info, 20.0), rank_info, 20.0)

    late = threading.Timer(0.3, arrive, (SECOND,))
    late.start()
    arrive(FIRST)
    late.join(20)


@pytest.mark.nightly
def test_init_group_with_a_silent_server_aborts_after_the_timeout() -> None:
    """torch's store would wait forever."""
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


def test_check_rendezvous_file_of_an_earlier_run_raises(tmp_path: Path) -> None:
    file = tmp_path / "file"
    check_rendezvous_file(file, 0.0)
    file.touch()
    check_rendezvous_file(file, 0.0)  # made by mktemp
    file.write_bytes(b"addresses")
    check_rendezvous_file(file, 60.0)  # of this run
    check_rendezvous_file(file, None)
    for max_age_sec in (0.0, 60.0):
        with pytest.raises(ResourceError):
            check_rendezvous_file(file, max_age_sec)
        os.utime(file, (time.time() - 61, time.time() - 61))
    for wrong in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(UsageError):
            check_rendezvous_file(wrong, None)
