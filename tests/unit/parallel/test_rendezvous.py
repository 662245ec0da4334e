"""The rendezvous of ranks, and the errors when it fails."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from socket import create_server

import pytest
import torch
import torch.distributed as dist
from helpers import free_port, run

from imagenet_cls.commands.distributed import lost_rank_error
from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.parallel import process_group
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import (
    Rendezvous,
    check_rendezvous_file,
    find_rendezvous,
    init_process_groups,
    nccl_error,
    open_store,
    wait_for_all_ranks,
    wait_until_reachable,
)

FIRST, SECOND = RankInfo(0, 0, 2, 2), RankInfo(1, 1, 2, 2)
ENV = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


def test_find_rendezvous_by_init_method() -> None:
    assert find_rendezvous(ENV, "env://", SECOND) == Rendezvous("host0", 29500)
    assert find_rendezvous(ENV, "tcp://[fd00::1]:34567", SECOND) == Rendezvous("fd00::1", 34567)
    assert find_rendezvous(ENV, "file:///shared/a file", SECOND) == Rendezvous(
        file=Path("/shared/a file")
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_ADDR", ""),
        *(("MASTER_PORT", port) for port in ("", "0", "65536", "http", "29500 ")),
    ],
)
def test_find_rendezvous_with_an_invalid_variable_names_it(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        find_rendezvous({**ENV, name: value}, "env://", SECOND)


def test_wait_until_reachable_waits_for_a_late_server() -> None:
    address, servers = Rendezvous("127.0.0.1", int(free_port())), []
    threading.Timer(
        0.3, lambda: servers.append(create_server((address.host, address.port)))
    ).start()
    wait_until_reachable(address, 240.0, is_server=False)
    servers[0].close()


@pytest.mark.parametrize(
    ("rank_info", "host", "reason"),
    [
        (SECOND, "127.0.0.1", "Connection refused"),
        (FIRST, "nowhere.invalid", "resolution|not known"),
        (SECOND, "no..host", "label"),
    ],
)
def test_init_process_groups_with_an_unreachable_machine_gives_the_reason(
    rank_info: RankInfo, host: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's store writes two dozen lines from C++."""
    with pytest.raises(ResourceError, match=reason):
        init_process_groups(
            rank_info, torch.device("cpu"), "auto", "gloo", f"tcp://{host}:{free_port()}", 0.5
        )
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("by_file", "present", "missing"),
    [
        (False, (0, 2), "missing: ranks 1, 3 of 4"),
        (True, (0, 2), "missing: ranks 1, 3 of 4"),
        (True, (1, 2, 3), "missing: rank 0 of 4"),
    ],
)
def test_wait_for_all_ranks_with_missing_ranks_names_them_on_every_rank(
    tmp_path: Path, by_file: bool, present: tuple[int, ...], missing: str
) -> None:
    """The others are threads with their own stores."""
    address = Rendezvous("127.0.0.1", int(free_port()))
    place = Rendezvous(file=tmp_path / "store") if by_file else address
    all_have_a_store = threading.Barrier(len(present))

    def arrive(rank: int) -> str:
        rank_info = RankInfo(rank, rank, 4, 4)
        store = open_store(place, rank_info, 240.0)
        all_have_a_store.wait()
        with pytest.raises(TimeoutError) as error:
            wait_for_all_ranks(store, rank_info, 1.0)
        return str(error.value)

    with ThreadPoolExecutor() as threads:
        assert set(threads.map(arrive, present)) == {missing}


@pytest.mark.nightly
def test_init_process_groups_with_a_silent_server_aborts_after_the_timeout() -> None:
    """torch's store would wait forever."""
    with closing(create_server(("127.0.0.1", 0))) as silent:
        code = (
            "import torch; from imagenet_cls.parallel import process_group as group\n"
            "from imagenet_cls.parallel.environment import RankInfo\n"
            "group._RENDEZVOUS_EXTRA_SEC = 0.0\n"
            "group.init_process_groups(RankInfo(1, 1, 2, 2), torch.device('cpu'), 'auto', 'gloo', "
            f"'tcp://127.0.0.1:{silent.getsockname()[1]}', 0.5)"
        )
        rank = run([sys.executable, "-c", code], timeout_sec=240)
    assert rank.returncode == 5, rank.stderr


def test_check_rendezvous_file_of_an_earlier_run_raises(tmp_path: Path) -> None:
    file = tmp_path / "file"
    check_rendezvous_file(file, 0.0)
    file.touch()
    check_rendezvous_file(file, 0.0)  # made by mktemp
    file.write_bytes(b"addresses")
    check_rendezvous_file(file, 60.0)  # of this run
    for max_age_sec in (0.0, 60.0):
        with pytest.raises(ResourceError):
            check_rendezvous_file(file, max_age_sec)
        os.utime(file, (time.time() - 61, time.time() - 61))
    for wrong in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(UsageError):
            check_rendezvous_file(wrong, 0.0)


LEGACY = """NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled system error (run with \
NCCL_DEBUG=INFO for details), NCCL version 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device \
error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-x (size 33030528), error: No space left \
on device (28)"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LEGACY, "No space left on device"),
        (
            "NCCL init: invalid usage (NCCL_DEBUG=WARN) \nNCCL Last Error: Duplicate GPU detected",
            "Duplicate GPU",
        ),
        (
            "NCCL init: unhandled cuda error (run with NCCL_DEBUG=INFO) \nNCCL Last Error: ",
            "unhandled cuda error",
        ),
        (
            "NCCL error: remote process exited or there was a network error\nLast error:\n"
            "Connection "
            "closed",
            None,
        ),
        *(
            (f"NCCL error: unhandled system error\nLast error:\nCall failed: {reason}", None)
            for reason in (
                "Connection reset by peer",
                "Connection refused",
                "Connection timed out",
                "Broken pipe",
                "No route to host",
            )
        ),
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer", None),
    ],
)
def test_failure_of_nccl_itself_is_reported_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, text: str, reason: str | None
) -> None:
    monkeypatch.setattr("imagenet_cls.commands.distributed._LOST_RANK_WAIT_SEC", 0.0)
    found = nccl_error(dist.DistBackendError(text), 3)
    assert (found is None) == (reason is None)
    lost = lost_rank_error(dist.DistBackendError(text), RankInfo(3, 3, 4, 4))
    assert lost.exit_code == 5 and ("lost contact" in str(lost)) == (reason is None)
    assert reason is None or reason in str(found) == str(lost)


def test_failure_of_nccl_at_the_start_is_no_failed_rendezvous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise dist.DistBackendError(LEGACY)

    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr(process_group, "wait_for_all_ranks", lambda *_: None)
    with pytest.raises(ResourceError, match="nccl failed: Error while creating"):
        init_process_groups(
            FIRST, torch.device("cpu"), "auto", "gloo", f"file://{tmp_path}/store", 5.0
        )
