"""Which ranks are still there: a heartbeat between all of them, so that a machine that is lost has a name.

Where a cable is cut or a machine vanishes, nobody is told: a collective fails after `parallel.timeout_sec` and names no
one, and a rank that waits for something else (its data, a disk) learns nothing at all. So a thread in each rank sends
every other rank a datagram about once a second, and remembers when it last heard each of them.

It names rather than judges: where a collective has failed, `explain` says whose silence it was. It judges only a rank
that has been silent for longer than any collective may take, for the sake of ranks that are in no collective. A rank
that is slow, however slow, goes on beating; one that is stopped for less than the timeout is waited for, and time in
which this process was itself stopped counts for nothing.

Owns the datagrams (UDP over IPv4: no connection that could block, that a data worker could inherit, or that needs a
file for each rank), who was heard when, and the words. Refuses to end a process, and to judge a rank that it has never
heard: a firewall may stop datagrams. Started by `parallel.group`, asked by `ranks`.
"""

import contextlib
import hashlib
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from imagenet_cls.errors import ResourceError

_BEAT = struct.Struct("!8sIB")  # which run, the sender's rank, what it says
_ALIVE, _FAILED, _LEFT = range(3)

# A rank sends this often, to no more ranks at once; with more of them each gets its beat less often.
_ROUND_SEC = 1.0
_BEATS_A_ROUND = 200
# What is not called silence yet: datagrams get lost.
_MISSED_BEATS = 3
# Beyond the timeout (at most a quarter of it), before a silent rank is judged: collectives go first.
_GRACE_SEC = 3.0
# After so many rounds, a rank that was never heard is written down.
_ROUNDS_UNTIL_NOTED = 30


@dataclass(frozen=True)
class Member:
    """A rank as the others know it. address: of its machine, towards rank 0's. port: of its heartbeat (UDP)."""

    rank: int
    host: str
    address: str
    port: int
    process: int


class Heartbeat:
    """One rank's ear and voice. One for each start of a rank; `close` it before the process ends.

    Times are counted in seconds of listening (`_now`), which do not pass while this process is stopped.
    """

    def __init__(self, rank: int, address: str, timeout_sec: float):
        """address: by which other machines reach this one. timeout_sec: of the collectives."""
        self.timeout_sec = timeout_sec
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self.me = Member(rank, socket.gethostname(), address, self._socket.getsockname()[1], os.getpid())
        self._run = b""
        self._others: dict[int, Member] = {}
        self._addresses: list[tuple[str, int]] = []
        self._heard: dict[int, float] = {}
        self._failed: dict[int, float] = {}
        self._left: set[int] = set()
        self._listened_sec, self._round_began = 0.0, time.monotonic()
        self._round_sec = min(_ROUND_SEC, timeout_sec / 8)
        self._turns = 1
        self._judging = True
        self._asked = False
        self._closed = threading.Event()

    def start(self, members: Sequence[Member], give_up: Callable[[ResourceError], None]) -> None:
        """Begin to beat and to listen. members: all ranks, alike on all. give_up: called, from the heartbeat's thread
        and at most once, with the reason to end this process.
        """
        self._run = hashlib.sha256(repr(members).encode()).digest()[: struct.calcsize("8s")]
        self._others = {member.rank: member for member in members if member.rank != self.me.rank}
        ports = {member.address: 0 for member in members}
        numeric = {address: found for address in ports if (found := _look_up(address))}
        self._addresses = [(numeric[m.address], m.port) for m in self._others.values() if m.address in numeric]
        most = max(1, int(self.timeout_sec / 8 / self._round_sec))
        self._turns = min(math.ceil(len(self._others) / _BEATS_A_ROUND), most)
        threading.Thread(target=self._live, args=(give_up,), name="heartbeat", daemon=True).start()

    def explain(self, patience_sec: float) -> ResourceError | None:
        """Who is gone, now that a collective has failed; None where every rank is heard.

        Takes up to `patience_sec`, in which a rank's death shows and a launcher may end this process, but answers at
        once where a rank has been silent for most of the timeout already. From here on nobody is judged.
        """
        self._asked, self._judging = True, False
        end = time.monotonic() + patience_sec
        while time.monotonic() < end and max(self._silence().values(), default=0.0) < self.timeout_sec / 2:
            time.sleep(0.05)
        return self.loss()

    def loss(self) -> ResourceError | None:
        """What can be told of ranks that are gone: those that went first, since they took the others with them.

        Marked `reported_by_main` where another rank of this machine is there to say the same.
        """
        beat_sec = self._turns * self._round_sec
        silent = {rank: sec for rank, sec in self._silence().items() if sec >= _MISSED_BEATS * beat_sec}
        ended = {rank: self._now() - at for rank, at in dict(self._failed).items()}
        if not silent and not ended:
            return None
        longest = max([*silent.values(), *ended.values()])
        first = {rank for rank, sec in (silent | ended).items() if sec > longest - 2 * beat_sec}
        where = places([self._others[rank] for rank in sorted(first)])
        advice = "Go on with the same command and --resume."
        if first <= set(ended):
            logs = f"logs/rank{min(first)}.log there tells why"
            error = ResourceError(f"{where} ended {longest:.0f} s ago, and this rank with it: {logs}.\n{advice}")
        else:
            error = ResourceError(
                f"lost contact with {where}: nothing heard for {longest:.0f} s\n"
                f"See whether it is up and the network works. {advice}"
            )
        here = (self.me.host, self.me.address)
        peers = {rank for rank, other in self._others.items() if (other.host, other.address) == here}
        error.reported_by_main = any(rank < self.me.rank for rank in peers - silent.keys() - ended.keys())
        return error

    def stop_judging(self) -> None:
        """From here on end nobody: this rank is about to leave, with the others."""
        self._judging = False

    def close(self, failed: bool = False) -> None:
        """Say goodbye and fall silent. failed: for a reason of this rank's own, so that it is the others' cause."""
        self._judging = False
        if not self._closed.is_set():
            self._closed.set()
            self._send(_FAILED if failed and not self._asked else _LEFT, self._addresses)

    def _silence(self) -> dict[int, float]:
        """Seconds since each rank was last heard, without those never heard and those that said goodbye."""
        now, gone = self._now(), self._left | self._failed.keys()
        return {rank: now - at for rank, at in dict(self._heard).items() if rank not in gone}

    def _now(self) -> float:
        # A round that takes longer is no listening: the process was stopped, or its threads were kept waiting.
        return self._listened_sec + min(time.monotonic() - self._round_began, 2 * self._round_sec)

    def _live(self, give_up: Callable[[ResourceError], None]) -> None:
        """The thread: rounds of sending, listening and judging, until `close`."""
        self._send(_ALIVE, self._addresses)
        self._round_began = time.monotonic()
        turn = 0
        while not self._closed.is_set():
            self._listened_sec, self._round_began = self._now(), time.monotonic()
            self._listen(until=self._round_began + self._round_sec)
            turn += 1
            self._send(_ALIVE, self._addresses[turn % self._turns :: self._turns])
            if turn == _ROUNDS_UNTIL_NOTED + self._turns:
                self._note_unheard()
            if self._judging and (reason := self._judge()):
                self._asked, self._judging = True, False
                give_up(reason)

    def _judge(self) -> ResourceError | None:
        absent = [*self._silence().values(), *(self._now() - at for at in self._failed.values())]
        longest_sec = self.timeout_sec + min(_GRACE_SEC, self.timeout_sec / 4)
        return self.loss() if max(absent, default=0.0) > longest_sec else None

    def _send(self, what: int, addresses: list[tuple[str, int]]) -> None:
        beat = _BEAT.pack(self._run, self.me.rank, what)
        for address in addresses:
            if what == _ALIVE and self._closed.is_set():
                return  # no beat after the goodbye
            with contextlib.suppress(OSError):  # no way to that machine: silence is what the other side shall notice
                self._socket.sendto(beat, address)

    def _listen(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                datagram = self._socket.recv(64)
            except TimeoutError:
                return
            except OSError:
                self._closed.wait(min(left, 0.1))
                continue
            self._note(datagram)

    def _note(self, datagram: bytes) -> None:
        if len(datagram) != _BEAT.size:
            return
        run, rank, what = _BEAT.unpack(datagram)
        if run != self._run or rank not in self._others:
            return  # of another run, that used this port before
        if what == _ALIVE:
            self._heard[rank] = self._now()
        elif what == _FAILED:
            self._failed[rank] = self._now()
        else:
            self._left.add(rank)

    def _note_unheard(self) -> None:
        unheard = sorted(self._others.keys() - self._heard.keys() - self._failed.keys() - self._left)
        if unheard:
            logging.getLogger("imagenet_cls").info(
                "no heartbeat from ranks %s: where UDP does not pass, a lost machine cannot be named", unheard
            )


def places(members: Sequence[Member]) -> str:
    """Ranks by machine: `host b (10.9.1.3; ranks 2, 3)`; at most three machines, and of each eight ranks."""
    ranks_on: dict[tuple[str, str], list[int]] = {}
    for member in members:
        ranks_on.setdefault((member.host, member.address), []).append(member.rank)
    parts = []
    for (host, address), ranks in list(ranks_on.items())[:3]:
        listing = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        known_as = "" if address == host else f"{address}; "
        parts.append(f"host {host} ({known_as}rank{'s' if len(ranks) > 1 else ''} {listing})")
    more = len(ranks_on) - len(parts)
    return ", ".join(parts) + (f" and {more} more machines" if more else "")


def _look_up(address: str) -> str | None:
    """The IPv4 address of a host, or None where it has none: its ranks are then not beaten to."""
    try:
        return str(socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return None
