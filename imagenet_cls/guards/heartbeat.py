"""A heartbeat between ranks, which names the machine that was lost.

A thread in each rank sends every other rank a UDP datagram once a second. After a failed
collective, which names no rank, `wait_for_lost_rank` names those that are silent. The thread aborts
this process only if a rank was silent for longer than any collective may take, or if one failed
half a minute ago. A rank from which no datagram ever came is ignored: a firewall may drop them.
"""

import contextlib
import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from imagenet_cls.errors import ResourceError
from imagenet_cls.parallel.collectives import all_gather_objects
from imagenet_cls.parallel.environment import name_ranks
from imagenet_cls.parallel.exit import RESTART_ADVICE, abort_rank
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.text import join_names

_DATAGRAM = struct.Struct("!8sIB")  # id of the run, sender's rank, state
_ALIVE, _FAILED, _LEFT = range(3)

_INTERVAL_SEC = 1.0  # between two datagrams to the same rank
_LOST_DATAGRAMS = 3  # a rank that missed as many is silent
# Collectives time out first: silence must exceed the timeout by this, at most a quarter of it.
_GRACE_SEC = 3.0
# For this rank to end by itself after another one has failed. A rank that is blocked in a
# collective on a GPU can't, and not every launcher ends it.
_AFTER_FAILURE_SEC = 30.0


@dataclass(frozen=True)
class Member:
    """A rank. address: the address of its machine. port: the port of its heartbeat (UDP). process:
    its id, which makes the id of the run unique.
    """

    rank: int
    host: str
    address: str
    port: int
    process: int


def start_heartbeat(context: RankContext, timeout_sec: float) -> "Heartbeat | None":
    """Start this rank's heartbeat; None for a single rank. A collective. timeout_sec: the timeout
    of the collectives.
    """
    if context.cpu_group is None:
        return None
    heartbeat = Heartbeat(context.rank, context.address, timeout_sec)
    heartbeat.start(
        all_gather_objects(heartbeat.me, context), partial(abort_rank, context.rank_info)
    )
    return heartbeat


class Heartbeat:
    """The heartbeat of one rank; `close` it before the process ends."""

    def __init__(self, rank: int, address: str, timeout_sec: float):
        self.timeout_sec = timeout_sec
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self.me = Member(
            rank, socket.gethostname(), address, self._socket.getsockname()[1], os.getpid()
        )
        self._run_id = b""
        self._others: dict[int, Member] = {}
        self._addresses: list[tuple[str, int]] = []
        # When the last datagram of each rank came, by state, in seconds of `_now`.
        self._heard: dict[int, float] = {}
        self._failed: dict[int, float] = {}
        self._left: dict[int, float] = {}
        self._listened_sec = 0.0
        self._round_began = time.monotonic()
        self._interval_sec = min(_INTERVAL_SEC, timeout_sec / 8)
        # to be set to False before this rank leaves the process groups together with the others
        self.may_abort = True
        # whether an error of this rank is the cause of the errors of the others
        self.is_cause = True
        self._closed = threading.Event()

    def start(self, members: Sequence[Member], abort: Callable[[ResourceError], None]) -> None:
        """Start the thread. members: all ranks, the same list on all. abort: called at most once,
        from the thread.
        """
        self._run_id = hashlib.sha256(repr(members).encode()).digest()[:8]
        self._others = {member.rank: member for member in members if member.rank != self.me.rank}
        for member in self._others.values():
            with contextlib.suppress(OSError):  # no IPv4 address: it gets no heartbeat
                self._addresses.append((socket.gethostbyname(member.address), member.port))
        threading.Thread(
            target=self._run_thread, args=(abort,), name="heartbeat", daemon=True
        ).start()

    def wait_for_lost_rank(self, patience_sec: float) -> ResourceError | None:
        """The error that names the lost ranks after a failed collective; None if all still send.

        Waits `patience_sec`, or longer if that is too short for a lost rank to be silent. From here
        on this heartbeat does not abort the process.
        """
        self.may_abort = False
        time.sleep(max(patience_sec, (_LOST_DATAGRAMS + 1) * self._interval_sec))
        return self.lost_rank_error()

    def lost_rank_error(self) -> ResourceError | None:
        """The error that names the ranks that were lost first, on which the others then failed.
        None without any.
        """
        silent = {
            rank: sec
            for rank, sec in self._silence().items()
            if sec >= _LOST_DATAGRAMS * self._interval_sec
        }
        failed = {rank: self._now() - at for rank, at in dict(self._failed).items()}
        lost = silent | failed
        if not lost:
            return None
        longest = max(lost.values())
        first = sorted(rank for rank, sec in lost.items() if sec > longest - 2 * self._interval_sec)
        where = name_machines([self._others[rank] for rank in first])
        if set(first) <= failed.keys():
            problem = (
                f"Lost contact: {where} failed {longest:.0f} s ago, which ended this rank, too. "
                f"See logs/rank{first[0]}.log there."
            )
            advice = RESTART_ADVICE
        else:
            problem = f"Lost contact with {where}: no heartbeat for {longest:.0f} s."
            advice = f"Check that it is up and the network works. {RESTART_ADVICE}"
        return ResourceError(problem, advice)

    def close(self, failed: bool = False) -> None:
        """Tell the others that this rank ends. failed: because of an error, which is the cause of
        theirs if `is_cause`.
        """
        self.may_abort = False
        if not self._closed.is_set():
            self._closed.set()
            self._send(_FAILED if failed and self.is_cause else _LEFT)

    def _silence(self) -> dict[int, float]:
        """Seconds since each rank was last heard, without those never heard and those that have
        ended.
        """
        now = self._now()
        ended = self._left.keys() | self._failed.keys()
        return {rank: now - at for rank, at in dict(self._heard).items() if rank not in ended}

    def _now(self) -> float:
        # Seconds in which this thread listened. A round of more than two intervals counts as two:
        # the process was stopped meanwhile, and the silence of others then means nothing.
        return self._listened_sec + min(
            time.monotonic() - self._round_began, 2 * self._interval_sec
        )

    def _run_thread(self, abort: Callable[[ResourceError], None]) -> None:
        self._send(_ALIVE)
        self._round_began = time.monotonic()
        longest_silence_sec = self.timeout_sec + min(_GRACE_SEC, self.timeout_sec / 4)
        longest_wait_sec = min(_AFTER_FAILURE_SEC, longest_silence_sec)
        while not self._closed.is_set():
            self._listened_sec = self._now()
            self._round_began = time.monotonic()
            self._receive(until=self._round_began + self._interval_sec)
            self._send(_ALIVE)
            now = self._now()
            silence_sec = max(self._silence().values(), default=0.0)
            failed_sec = now - min(self._failed.values(), default=now)
            is_lost = silence_sec > longest_silence_sec or failed_sec > longest_wait_sec
            if self.may_abort and is_lost and (error := self.lost_rank_error()):
                self.is_cause = False
                self.may_abort = False
                abort(error)

    def _send(self, state: int) -> None:
        datagram = _DATAGRAM.pack(self._run_id, self.me.rank, state)
        for address in self._addresses:
            with contextlib.suppress(OSError):  # no route: the other side notices the silence
                self._socket.sendto(datagram, address)

    def _receive(self, until: float) -> None:
        times = {_ALIVE: self._heard, _FAILED: self._failed, _LEFT: self._left}
        while (remaining_sec := until - time.monotonic()) > 0:
            self._socket.settimeout(remaining_sec)
            try:
                datagram = self._socket.recv(64)
            except OSError:  # a timeout, or no network
                self._closed.wait(until - time.monotonic())
                return
            if len(datagram) == _DATAGRAM.size:
                run_id, rank, state = _DATAGRAM.unpack(datagram)
                # Otherwise it is from an earlier run that used this port.
                if run_id == self._run_id and rank in self._others:
                    times[state][rank] = self._now()


def name_machines(members: Sequence[Member]) -> str:
    """Ranks by machine: `host b (10.9.1.3; ranks 2, 3)`; at most three machines, and eight ranks of
    each.
    """
    ranks_on: dict[tuple[str, str], list[int]] = {}
    for member in members:
        ranks_on.setdefault((member.host, member.address), []).append(member.rank)
    machines = [
        f"host {host} ({address}; {name_ranks(ranks)})"
        for (host, address), ranks in ranks_on.items()
    ]
    return join_names(machines)
