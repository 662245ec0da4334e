"""Who is gone, and who is only slow: several hearts in one process, and in processes that are stopped and killed."""

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
TIMEOUT_SEC = 1.6  # a beat each 0.2 s

Hearts = Callable[..., list[Heartbeat]]


def on_ranks(*ranks: int) -> str:
    return f"host {HOST} (127.0.0.1; rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"


@pytest.fixture
def hearts() -> Iterator[Hearts]:
    """Makes ranks that beat, from threads of this process. What they give up for is appended to `given_up`."""
    made: list[Heartbeat] = []

    def make(count: int, given_up: list[ResourceError] | None = None) -> list[Heartbeat]:
        found = [Heartbeat(rank, "127.0.0.1", TIMEOUT_SEC) for rank in range(count)]
        made.extend(found)
        reasons = [] if given_up is None else given_up
        for heart in found:
            heart.start([other.me for other in found], reasons.append)
        wait_for(lambda: all(len(heart._silence()) == count - 1 for heart in found), "all to be heard", 5)
        return found

    yield make
    for heart in made:
        heart.close()


def vanish(heart: Heartbeat) -> None:
    """As a machine does that loses its power: no goodbye."""
    heart._closed.set()


def test_who_vanished_is_named_alike_by_all_others_and_told_once(hearts: Hearts) -> None:
    a, b, *gone = hearts(4)
    for heart in gone:
        vanish(heart)
    reasons = [heart.wait_for_lost_rank(patience_sec=5) for heart in (a, b)]
    for reason in reasons:
        assert str(reason).startswith(f"lost contact with {on_ranks(2, 3)}: no heartbeat for 1 s\n")
        assert "--resume" in str(reason) and len(str(reason).splitlines()) <= 3
    assert [reason.reported_by_main for reason in reasons if reason] == [False, True]


def test_nobody_is_named_while_all_are_heard_nor_who_then_ends_for_want_of_another(hearts: Hearts) -> None:
    given_up: list[ResourceError] = []
    a, b, _ = hearts(3, given_up)
    assert a.wait_for_lost_rank(patience_sec=TIMEOUT_SEC * 1.5) is None and not given_up
    a.close(failed=True)
    time.sleep(0.3)
    assert b.lost_rank_error() is None


def test_the_first_to_fail_is_the_cause_not_those_that_fall_with_it(hearts: Hearts) -> None:
    a, b, c, d = hearts(4)
    c.close(failed=True)
    time.sleep(0.6)
    assert b.wait_for_lost_rank(patience_sec=0.1) is not None
    b.close(failed=True)  # it has lost a peer itself
    vanish(d)  # its launcher has killed it
    time.sleep(0.8)
    reason = a.lost_rank_error()
    assert str(reason).startswith(f"{on_ranks(2)} failed ") and "logs/rank2.log" in str(reason)


def test_who_leaves_in_agreement_is_not_missed(hearts: Hearts) -> None:
    given_up: list[ResourceError] = []
    a, b = hearts(2, given_up)
    b.close()
    time.sleep(TIMEOUT_SEC * 1.5)
    assert a.lost_rank_error() is None and not given_up


def test_a_rank_in_no_collective_gives_up_once_after_the_timeout_unless_it_is_leaving(hearts: Hearts) -> None:
    given_up: list[ResourceError] = []
    _, leaving, gone = hearts(3, given_up)
    leaving.stop_aborting()
    vanish(gone)
    wait_for(lambda: bool(given_up), "giving up")
    time.sleep(0.6)
    (reason,) = given_up
    assert on_ranks(2) in str(reason) and reason.exit_code == 5


def test_a_rank_that_was_never_heard_is_not_judged() -> None:
    """Where a firewall lets no datagram through, and for what a run before has left in the air."""
    given_up: list[ResourceError] = []
    deaf, stranger = Heartbeat(0, "127.0.0.1", 0.4), Heartbeat(1, "127.0.0.1", 0.4)
    nobody = Member(1, "elsewhere", "127.0.0.1", stranger.me.port, 1)
    unknown = Member(2, "nowhere", "no-such-host.invalid", 9, 1)
    deaf.start([deaf.me, nobody, unknown], given_up.append)
    stranger.start([deaf.me, stranger.me], given_up.append)  # of another run: its members are not the same
    try:
        time.sleep(0.4)
        vanish(stranger)
        time.sleep(1.0)
        assert deaf.lost_rank_error() is None and not given_up
    finally:
        deaf.close()


def test_many_ranks_are_not_sent_to_all_at_once() -> None:
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

        heart = Heartbeat(0, "127.0.0.1", 16.0)  # rounds of 1 s, every second of them
        heart.start([heart.me, *(Member(rank, "b", "127.0.0.1", port, 0) for rank in range(1, 211))], print)
        time.sleep(0.5)
        first = count()
        time.sleep(1.0)
        second = count()
        heart.close()
    assert (first, second) == (210, 105)


def test_ranks_are_listed_by_machine() -> None:
    members = [Member(rank, f"gpu{rank // 10}", f"10.0.0.{rank // 10}", 1, 1) for rank in range(8, 52)]
    assert name_machines(members[:1]) == "host gpu0 (10.0.0.0; rank 8)"
    assert name_machines(members) == (
        "host gpu0 (10.0.0.0; ranks 8, 9), host gpu1 (10.0.0.1; ranks 10, 11, 12, 13, 14, 15, 16, 17, ...), "
        "host gpu2 (10.0.0.2; ranks 20, 21, 22, 23, 24, 25, 26, 27, ...) and 3 more machines"
    )
    assert name_machines([Member(1, "gpu1", "gpu1", 1, 1)]) == "host gpu1 (rank 1)"


# ------------------------------------------------------------------------------------ in their own processes


def received(pipe: Connection) -> Any:
    assert pipe.poll(60), "the other process says nothing"
    return pipe.recv()


def beat_in_a_process(pipe: Connection, rank: int) -> None:
    """Answers `loss` with what can be told, and `given up` with whether it wanted to end."""
    given_up: list[ResourceError] = []
    heart = Heartbeat(rank, "127.0.0.1", TIMEOUT_SEC)
    pipe.send(heart.me)
    heart.start(received(pipe), given_up.append)
    while (question := received(pipe)) != "end":
        pipe.send(str(heart.lost_rank_error()) if question == "loss" else bool(given_up))


@pytest.fixture
def processes() -> Iterator[list[tuple[SpawnProcess, Connection]]]:
    context = multiprocessing.get_context("spawn")
    made = []
    try:
        for rank in range(3):
            ours, theirs = context.Pipe()
            process = context.Process(target=beat_in_a_process, args=(theirs, rank), daemon=True)
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


def test_slow_is_not_gone_and_time_that_one_was_stopped_itself_is_no_silence(
    processes: list[tuple[SpawnProcess, Connection]],
) -> None:
    zero, one, two = processes
    pid = one[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(TIMEOUT_SEC * 0.8)
    assert on_ranks(1) in str(ask(zero, "loss")), "silent, and that may be told"
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)
    assert ask(zero, "loss") == "None" and not ask(zero, "given up"), "but it was only slow"

    for process in (zero, one):  # the whole machine is suspended, but for one
        os.kill(process[0].pid or 0, signal.SIGSTOP)
    time.sleep(TIMEOUT_SEC * 2)
    assert ask(two, "given up"), "longer than any collective may take"
    for process in (zero, one):
        os.kill(process[0].pid or 0, signal.SIGCONT)
    time.sleep(0.5)
    assert not ask(zero, "given up") and not ask(one, "given up")

    two[0].kill()
    time.sleep(1.0)
    assert on_ranks(2) in str(ask(zero, "loss"))
