"""A SLURM cluster of two nodes on this machine, with its own folder, ports and configuration.

Needs Debian's `slurm-wlm`, and no privileges beyond those of `slurmd`. Authentication is off, so
any process on this machine can use it while a test runs.
"""

import getpass
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers import free_port, wait_for

SEARCHED = f"{os.environ['PATH']}:/usr/sbin"
# A requeued job waits for `cred_expire` (default: two minutes), then for the scheduler.
# The node names are addresses, so that the first one of a step leads to rank 0. `train.py` derives
# its port from the job's id: clusters that run at once must not number their jobs alike.
CONFIG = """
ClusterName=tests
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
SchedulerParameters=sched_interval=1,bf_interval=1
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} Gres=gpu:1 State=UNKNOWN
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment that `srun` and `sbatch` need; ends the cluster and all its processes
    at exit.
    """
    with socket.socket() as a, socket.socket() as b, socket.socket() as c:
        for probe in (a, b, c):
            probe.bind(("", 0))
        ports = [probe.getsockname()[1] for probe in (a, b, c)]
    host, user = socket.gethostname().split(".")[0], getpass.getuser()
    (folder / "state").mkdir(parents=True)
    (folder / "gpu").touch()  # SLURM only counts files
    text = CONFIG.format(
        first_job=int(free_port()) - 20_000,
        host=host,
        user=user,
        folder=folder,
        ports=ports,
        cpus=os.cpu_count(),
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(f"NodeName=127.0.0.[1-2] Name=gpu File={folder}/gpu\n")
    env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCHED}

    def two_nodes_are_idle() -> bool:
        words = ["sinfo", "--noheader", "--format=%D %t"]
        return (
            "2 idle"
            in subprocess.run(
                words, env=os.environ | env, capture_output=True, text=True, timeout=240
            ).stdout
        )

    daemons = []
    try:
        for words in (
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "127.0.0.1"],
            ["slurmd", "-D", "-N", "127.0.0.2"],
        ):
            daemons.append(
                subprocess.Popen(
                    words,
                    env=os.environ | env,
                    start_new_session=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        wait_for(two_nodes_are_idle, f"the cluster, see {folder}/*.log", 120)
        yield env
    finally:
        subprocess.run(["scancel", "--user", user], env=os.environ | env, timeout=240)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
