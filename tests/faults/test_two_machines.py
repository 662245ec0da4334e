"""Two machines: network namespaces with their own addresses and host names, joined by a veth pair.

The host names don't resolve, so the rendezvous needs the right interface.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked_ranks import RankServer
from helpers import (
    DIST_TRAIN,
    REPOSITORY,
    arguments,
    environment,
    losses,
    state_digest,
    steps_done,
    wait_for,
)

pytestmark = pytest.mark.nightly

STEPS = 22
TIMEOUT_SEC = 20.0
IP = shutil.which("ip") or "/usr/sbin/ip"


def ip(words: str) -> str:
    """What the program `ip` prints."""
    return subprocess.run([IP, *words.split()], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Machine:
    namespace: str
    host: str
    address: str

    def plug(self, state: str) -> None:
        """The cable's end at this machine: `down` or `up`."""
        ip(f"-n {self.namespace} link set cable {state}")

    def start(self, command: list[str], **env: str) -> subprocess.Popen[str]:
        named = f'echo {self.host} > /proc/sys/kernel/hostname; exec "$@"'
        inside = f"netns exec {self.namespace} unshare --uts sh -c"
        return subprocess.Popen(
            [IP, *inside.split(), named, "sh", *command],
            env=environment(**env),
            cwd=REPOSITORY,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def clear(self) -> None:
        """End every process that runs on this machine."""
        for pid in map(int, ip(f"netns pids {self.namespace}").split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    two = [
        Machine(f"tests-{os.getpid()}-{name}", f"tests-{name}", f"10.9.1.{n}")
        for n, name in ((2, "a"), (3, "b"))
    ]
    try:
        try:
            first, second = (machine.namespace for machine in two)
            for machine in two:
                ip(f"netns add {machine.namespace}")
            ip(f"-n {first} link add cable type veth peer name cable netns {second}")
            for machine in two:
                ip(f"-n {machine.namespace} address add {machine.address}/24 dev cable")
                ip(f"-n {machine.namespace} link set lo up")
                machine.plug("up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(
                f"needs network namespaces (root, iproute2): "
                f"{getattr(error, 'stderr', '') or error}"
            )
        yield two
    finally:
        for machine in two:
            with suppress(OSError, subprocess.CalledProcessError):
                machine.clear()
                ip(f"netns delete {machine.namespace}")


def words_for(digits: Path, folder: Path, **changes: object) -> list[str]:
    return arguments(digits, folder, "noisy", ema__decay=0.9, checkpoint__every_steps=4, **changes)


@contextmanager
def started(
    machines: list[Machine], digits: Path, folders: list[Path], *more: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """`dist_train.sh` on both machines, one rank on each, each with a run folder of its own."""
    processes = []
    try:
        for number, (machine, folder) in enumerate(zip(machines, folders, strict=True)):
            config, *rest = words_for(
                digits, folder, model__kwargs__pause_sec=0.1, parallel__timeout_sec=TIMEOUT_SEC
            )
            env = {
                "NNODES": "2",
                "NODE_RANK": str(number),
                "MASTER_ADDR": machines[0].address,
                "MASTER_PORT": "29500",
            }
            processes.append(machine.start(["bash", DIST_TRAIN, config, "1", *rest, *more], **env))
        yield processes
    finally:
        for machine in machines:
            machine.clear()
        for process in processes:
            process.communicate()


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit code, errors) of each process."""
    errors = [process.communicate(timeout=240)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, errors, strict=True)]


def wait_for_step(folder: Path, step: int, processes: list[subprocess.Popen[str]]) -> None:
    wait_for(
        lambda: (
            steps_done(folder) >= step or any(process.poll() is not None for process in processes)
        ),
        f"step {step}",
    )
    assert all(process.poll() is None for process in processes)


def test_cut_cable_ends_both_machines_and_the_resumed_run_has_the_same_bits(
    rank_server: RankServer, machines: list[Machine], digits: Path, tmp_path: Path
) -> None:
    """A cut shorter than the timeout changes nothing."""
    folders = [tmp_path / "a", tmp_path / "b"]
    undisturbed = tmp_path / "undisturbed"
    rank_server.train(words_for(digits, undisturbed), 2)
    with started(machines, digits, folders) as processes:
        wait_for_step(folders[0], 6, processes)
        machines[0].plug("down")
        try:
            ended = ends(processes)
        finally:
            machines[0].plug("up")
    assert [code for code, _ in ended] == [5, 5], ended
    assert steps_done(folders[0]) < STEPS

    with started(machines, digits, folders, "--resume") as processes:
        wait_for_step(folders[0], 12, processes)
        machines[1].plug("down")
        time.sleep(TIMEOUT_SEC / 4)
        machines[1].plug("up")
        assert ends(processes) == [(0, "")] * 2
    assert re.search(r"resumed from .* at step [48]\b", (folders[0] / "metrics.jsonl").read_text())
    assert len(losses(folders[0])) == STEPS and losses(folders[0]) == losses(undisturbed)
    assert state_digest(folders[0]) == state_digest(undisturbed)
    assert [path.name for path in folders[1].iterdir()] == ["logs"], "only the first machine saves"
