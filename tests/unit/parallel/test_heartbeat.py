"""The heartbeat: lost ranks are named, slow and stopped ones are not."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import pytest
from helpers import wait_for

from imagenet_cls.errors import ResourceError
from imagenet_cls.guards.heartbeat import Heartbeat, Member, name_machines

HOST = socket.gethostname()
TIMEOUT_SEC = 1.6  # a datagram each 0.2 s

Heartbeats = Callable[..., list[Heartbeat]]


def on_ranks(*ranks: int) -> str:
    return f"host {HOST} (127.0.0.1; rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"


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
        wait_for(lambda: all(len(heartbeat._silence()) == count - 1 for heartbeat in found), "all heartbeats")
        return found

    yield make
    for heartbeat in made:
        heartbeat.close()


def vanish(heartbeat: Heartbeat) -> None:
    """As after a power cut: without a last datagram."""
    heartbeat._closed.set()


def test_lost_ranks_are_named_by_all_others_and_reported_once(heartbeats: Heartbeats) -> None:
    a, b, *gone = heartbeats(4)
    for heartbeat in gone:
        vanish(heartbeat)
    reasons = [heartbeat.wait_for_lost_rank(patience_sec=5) for heartbeat in (a, b)]
    for reason in reasons:
        assert str(reason).startswith(f"lost contact with {on_ranks(2, 3)}: no heartbeat for 1 s\n")
        assert "--resume" in str(reason) and len(str(reason).splitlines()) <= 3
    assert [reason.reported_by_main for reason in reasons if reason] == [False, True]


def test_no_rank_is_named_while_all_send_and_after_a_following_exit(heartbeats: Heartbeats) -> None:
    aborts: list[ResourceError] = []
    a, b, _ = heartbeats(3, aborts)
    assert a.wait_for_lost_rank(patience_sec=TIMEOUT_SEC * 1.5) is None and not aborts
    a.close(failed=True)
    time.sleep(0.3)
    assert b.lost_rank_error() is None


def test_first_rank_to_fail_is_named_and_not_those_that_fail_after_it(heartbeats: Heartbeats) -> None:
    a, b, c, d = heartbeats(4)
    c.close(failed=True)
    time.sleep(0.6)
    assert b.wait_for_lost_rank(patience_sec=0.1) is not None
    b.close(failed=True)  # it has lost a rank itself
    vanish(d)  # its launcher has killed it
    time.sleep(0.8)
    reason = a.lost_rank_error()
    assert str(reason).startswith(f"{on_ranks(2)} failed ") and "logs/rank2.log" in str(reason)


def test_rank_that_leaves_is_not_lost(heartbeats: Heartbeats) -> None:
    aborts: list[ResourceError] = []
    a, b = heartbeats(2, aborts)
    b.close()
    time.sleep(TIMEOUT_SEC * 1.5)
    assert a.lost_rank_error() is None and not aborts


def test_silent_rank_aborts_the_others_once_unless_they_are_leaving(heartbeats: Heartbeats) -> None:
    aborts: list[ResourceError] = []
    _, leaving, gone = heartbeats(3, aborts)
    leaving.stop_aborting()
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
    stranger.start([deaf.me, stranger.me], aborts.append)  # of another run: its members are not the same
    try:
        time.sleep(0.4)
        vanish(stranger)
        time.sleep(1.0)
        assert deaf.lost_rank_error() is None and not aborts
    finally:
        deaf.close()


def test_heartbeat_with_many_ranks_sends_to_some_in_each_round() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind(("127.0.0.1", 0))
        ear.setblocking(False)
        port = ear.getsockname()[1]

        def count() -> int:
            heard = 0
            while True:
                try:
                    heard += bool(ear.recv(64))
                except BlockingIOError:
                    return heard

        heartbeat = Heartbeat(0, "127.0.0.1", 16.0)  # rounds of 1 s; each rank in every second one
        heartbeat.start([heartbeat.me, *(Member(rank, "b", "127.0.0.1", port, 0) for rank in range(1, 211))], print)
        time.sleep(0.5)
        first = count()
        time.sleep(1.0)
        second = count()
        heartbeat.close()
    assert (first, second) == (210, 105)


def test_name_machines_groups_ranks_by_machine() -> None:
    members = [Member(rank, f"gpu{rank // 10}", f"10.0.0.{rank // 10}", 1, 1) for rank in range(8, 52)]
    assert name_machines(members[:1]) == "host gpu0 (10.0.0.0; rank 8)"
    assert name_machines(members) == (
        "host gpu0 (10.0.0.0; ranks 8, 9), host gpu1 (10.0.0.1; ranks 10, 11, 12, 13, 14, 15, 16, 17, ...), "
        "host gpu2 (10.0.0.2; ranks 20, 21, 22, 23, 24, 25, 26, 27, ...) and 3 more machines"
    )
    assert name_machines([Member(1, "gpu1", "gpu1", 1, 1)]) == "host gpu1 (rank 1)"


# ------------------------------------------------------------------------------------ in their own processes


def received(pipe: Connection) -> Any:
    assert pipe.poll(60), "no answer from the other process"
    return pipe.recv()


def heartbeat_in_a_process(pipe: Connection, rank: int) -> None:
    """Answers `error` with its error, and `aborted` with whether it aborted."""
    aborts: list[ResourceError] = []
    heartbeat = Heartbeat(rank, "127.0.0.1", TIMEOUT_SEC)
    pipe.send(heartbeat.me)
    heartbeat.start(received(pipe), aborts.append)
    while (question := received(pipe)) != "end":
        pipe.send(str(heartbeat.lost_rank_error()) if question == "error" else bool(aborts))


@pytest.fixture
def processes() -> Iterator[list[tuple[SpawnProcess, Connection]]]:
    context = multiprocessing.get_context("spawn")
    made = []
    try:
        for rank in range(3):
            ours, theirs = context.Pipe()
            process = context.Process(target=heartbeat_in_a_process, args=(theirs, rank), daemon=True)
            process.start()
            made.append((process, ours))
        members = [received(pipe) for _, pipe in made]
        for _, pipe in made:
            pipe.send(members)
        time.sleep(0.4)
        yield made
    finally:
        for process, _ in made:
            process.kill()


def ask(process: tuple[SpawnProcess, Connection], question: str) -> str | bool:
    process[1].send(question)
    return received(process[1])


def test_stopped_process_that_continues_is_not_lost_and_does_not_blame_others(
    processes: list[tuple[SpawnProcess, Connection]],
) -> None:
    zero, one, two = processes
    pid = one[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(TIMEOUT_SEC * 0.8)
    assert on_ranks(1) in str(ask(zero, "error")), "silent"
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)
    assert ask(zero, "error") == "None" and not ask(zero, "aborted"), "only slow"

    for process in (zero, one):  # both suspended
        os.kill(process[0].pid or 0, signal.SIGSTOP)
    time.sleep(TIMEOUT_SEC * 2)
    assert ask(two, "aborted"), "longer than any collective"
    for process in (zero, one):
        os.kill(process[0].pid or 0, signal.SIGCONT)
    time.sleep(0.5)
    assert not ask(zero, "aborted") and not ask(one, "aborted")

    two[0].kill()
    time.sleep(1.0)
    assert on_ranks(2) in str(ask(zero, "error"))
