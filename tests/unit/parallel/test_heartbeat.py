"""The heartbeat: lost ranks are named, slow and stopped ones are not."""

import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import wait_for

from imagenet_cls.commands import distributed
from imagenet_cls.errors import ResourceError
from imagenet_cls.guards.heartbeat import Heartbeat, Member, name_machines
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import RankContext

HOST = socket.gethostname()
TIMEOUT_SEC = 1.6  # a datagram each 0.2 s
NCCL_FAILURE = "NCCL error: unhandled system error\nLast error: No space left on device"

Heartbeats = Callable[..., list[Heartbeat]]


def on_ranks(*ranks: int) -> str:
    return (
        f"host {HOST} (127.0.0.1; rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
    )


@pytest.fixture
def heartbeats() -> Iterator[Heartbeats]:
    """Makes heartbeats in this process. Errors for which they abort are appended to `aborts`."""
    made: list[Heartbeat] = []

    def make(count: int, aborts: list[ResourceError] | None = None) -> list[Heartbeat]:
        found = [Heartbeat(rank, "127.0.0.1", TIMEOUT_SEC) for rank in range(count)]
        made.extend(found)
        reasons = [] if aborts is None else aborts
        for heartbeat in found:
            heartbeat.start([other.me for other in found], reasons.append)
        wait_for(
            lambda: all(len(heartbeat._silence()) == count - 1 for heartbeat in found),
            "all heartbeats",
        )
        return found

    yield make
    for heartbeat in made:
        heartbeat.close()


def vanish(heartbeat: Heartbeat) -> None:
    """As after a power cut: without a last datagram."""
    heartbeat._closed.set()


def test_lost_ranks_are_named_by_all_others(heartbeats: Heartbeats) -> None:
    a, b, *gone = heartbeats(4)
    for heartbeat in gone:
        vanish(heartbeat)
    reasons = [heartbeat.wait_for_lost_rank(patience_sec=5) for heartbeat in (a, b)]
    for reason in reasons:
        assert str(reason).startswith(f"Lost contact with {on_ranks(2, 3)}: no heartbeat for ")
        assert "--resume" in str(reason) and len(str(reason).splitlines()) <= 3


def test_rank_that_sends_or_leaves_is_not_lost(heartbeats: Heartbeats) -> None:
    aborts: list[ResourceError] = []
    a, b, _ = heartbeats(3, aborts)
    assert a.wait_for_lost_rank(patience_sec=TIMEOUT_SEC * 1.5) is None and not aborts
    a.close()
    time.sleep(TIMEOUT_SEC)
    assert b.lost_rank_error() is None and not aborts


@pytest.mark.parametrize(
    ("text", "is_cause"),
    [
        (NCCL_FAILURE, True),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv", False),
    ],
)
def test_rank_whose_collective_failed_is_named_only_if_nccl_itself_failed(
    heartbeats: Heartbeats, monkeypatch: pytest.MonkeyPatch, text: str, is_cause: bool
) -> None:
    monkeypatch.setattr(distributed, "_LOST_RANK_WAIT_SEC", 0.1)
    a, b = heartbeats(2)
    context = RankContext(RankInfo(0, 0, 2, 2), torch.device("cpu"), heartbeat=a)
    distributed.lost_rank_error(dist.DistBackendError(text), 0, context)
    a.close(failed=True)
    wait_for(lambda: bool(b._failed or b._left), "the last datagram")
    reason = b.lost_rank_error()
    assert (reason is not None) == is_cause
    assert reason is None or on_ranks(0) in str(reason)


def test_first_rank_to_fail_is_named_and_not_those_that_fail_after_it(
    heartbeats: Heartbeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "_LOST_RANK_WAIT_SEC", 0.1)
    a, b, c, d = heartbeats(4)
    c.close(failed=True)
    time.sleep(0.6)
    context = RankContext(RankInfo(1, 1, 4, 4), torch.device("cpu"), heartbeat=b)
    distributed.lost_rank_error(dist.DistBackendError(NCCL_FAILURE), 1, context)
    b.close(failed=True)  # it has lost a rank itself
    vanish(d)  # its launcher has killed it
    time.sleep(0.8)
    reason = a.lost_rank_error()
    assert str(reason).startswith(
        f"Lost contact: {on_ranks(2)} failed "
    ) and "logs/rank2.log" in str(reason)


def test_silent_rank_aborts_the_others_once_unless_they_are_leaving(heartbeats: Heartbeats) -> None:
    aborts: list[ResourceError] = []
    _, leaving, gone = heartbeats(3, aborts)
    leaving.may_abort = False
    vanish(gone)
    wait_for(lambda: bool(aborts), "an abort")
    time.sleep(0.6)
    (reason,) = aborts
    assert on_ranks(2) in str(reason) and reason.exit_code == 5


def test_rank_never_heard_is_not_lost() -> None:
    """Behind a firewall, or with datagrams of an earlier run."""
    aborts: list[ResourceError] = []
    deaf, stranger = Heartbeat(0, "127.0.0.1", 0.4), Heartbeat(1, "127.0.0.1", 0.4)
    nobody = Member(1, "elsewhere", "127.0.0.1", stranger.me.port, 1)
    unknown = Member(2, "nowhere", "no-such-host.invalid", 9, 1)
    deaf.start([deaf.me, nobody, unknown], aborts.append)
    # of another run: its members are not the same
    stranger.start([deaf.me, stranger.me], aborts.append)
    try:
        time.sleep(0.4)
        vanish(stranger)
        time.sleep(1.0)
        assert deaf.lost_rank_error() is None and not aborts
    finally:
        deaf.close()


def test_name_machines_groups_ranks_by_machine() -> None:
    members = [
        Member(rank, f"gpu{rank // 10}", f"10.0.0.{rank // 10}", 1, 1) for rank in range(8, 52)
    ]
    assert name_machines(members[:1]) == "host gpu0 (10.0.0.0; rank 8)"
    assert name_machines(members) == (
        "host gpu0 (10.0.0.0; ranks 8, 9), host gpu1 (10.0.0.1; ranks 10, 11, 12, 13, 14, 15, 16, "
        "17, ...), "
        "host gpu2 (10.0.0.2; ranks 20, 21, 22, 23, 24, 25, 26, 27, ...), ..."
    )


def test_suspended_rank_is_not_lost_and_blames_nobody(
    heartbeats: Heartbeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborts: list[ResourceError] = []
    a, b = heartbeats(2, aborts)
    addresses, b._addresses = b._addresses, []  # nothing is sent
    wait_for(lambda: a.lost_rank_error() is not None, "silence to show")
    b._addresses = addresses
    wait_for(lambda: a.lost_rank_error() is None, "a datagram")
    # The clock of a process that was suspended jumps.
    jumped = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 10 * TIMEOUT_SEC, sleep=time.sleep
    )
    monkeypatch.setattr("imagenet_cls.guards.heartbeat.time", jumped)
    assert a.wait_for_lost_rank(patience_sec=0.5) is None and not aborts
