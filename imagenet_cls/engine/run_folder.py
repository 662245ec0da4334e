"""The run folder: who may write into it, and what lies where.

    work_dirs/<config name>/ config.yaml env.json metrics.jsonl logs/ tensorboard/ checkpoints/ plots/ .lock .job

Owns the refusal to write over a run, and the lock that keeps a second run out. Only rank 0 calls it; other machines
need no shared disk. Called by `cli` (early, before ranks start) and `engine.run`.
"""

import fcntl
import json
import os
import platform
import shutil
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO

from imagenet_cls.checkpoint.format import list_checkpoints, remove_leftovers, step_of
from imagenet_cls.errors import ResourceError, UsageError

# What a run writes besides its logs: what makes a folder a taken one, and what --overwrite removes, and nothing else.
# Logs are appended to: those of a run that could not begin are no run, and those of a removed one tell its story.
# Checkpoints go first: without them nothing that is left can be resumed from.
_WRITTEN = ("checkpoints", "config.yaml", "env.json", "metrics.jsonl", "tensorboard", "plots")

# What is being removed is called this first; `open` ends what a kill interrupted.
_GONE = ".tmp-gone-"

# Names that are safe to write down: no name here ever holds a secret.
_SAFE_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG", "NCCL_IB_DISABLE", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NODELIST", "PYTHONHASHSEED",
)  # fmt: skip


class RunFolder:
    """The paths of one run, and its lock."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    def holds_a_run(self) -> bool:
        return any((self.path / name).exists() for name in _WRITTEN)

    def check_free(self, resume: bool, overwrite: bool) -> None:
        """Raise UsageError where the folder holds a run and neither flag says what to do with it. Changes nothing."""
        if resume and overwrite:
            raise UsageError(
                "--resume and --overwrite contradict each other: one goes on, the other removes.\nGive one."
            )
        try:
            self._refuse_if_taken(resume, overwrite)
        except OSError as error:
            raise UsageError(
                f"{self.path} can't be the run's folder: {error.strerror}\nName another one with --work-dir."
            ) from error

    def _refuse_if_taken(self, resume: bool, overwrite: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file, not a folder.\nName another folder with --work-dir.")
        if os.path.lexists(self.checkpoints) and not self.checkpoints.is_dir():
            raise UsageError(
                f"{self.checkpoints} is no folder, or a link that leads nowhere (a disk that is not mounted?).\n"
                "Bring it back, or move it away."
            )
        if self.holds_a_run() and not resume and not overwrite:
            done = list_checkpoints(self.checkpoints)
            got = f"saved up to step {step_of(done[0])}" if done else "without a checkpoint yet"
            raise UsageError(
                f"{self.path} holds a run already ({got}).\n"
                "--resume goes on with it, --overwrite removes it and starts anew, --work-dir DIR uses another folder."
            )

    def check_removable(self, sources: Mapping[str, str | Path | None]) -> None:
        """Raise UsageError where a run is to start from what `clear` would remove: until its first save there would be
        nothing to go on from, and a teacher is needed to the end. sources: paths by the word that gave them.
        """
        for word, source in sources.items():
            if source is None:
                continue
            path, here = Path(source).resolve(), self.path.resolve()
            if path == here or any(path.is_relative_to((here / name).resolve()) for name in _WRITTEN):
                raise UsageError(
                    f"{word}: {source} lies in {self.path}, which --overwrite would remove.\n"
                    "Use another folder with --work-dir, or copy the weights elsewhere first."
                )

    def open(self, resume: bool, overwrite: bool) -> None:
        """Make the folder this run's own until `close` or the end of the process. `clear` removes a run, this does not.

        Raises UsageError for a folder that is taken or in use, ResourceError where it can't be written.
        """
        self.check_free(resume, overwrite)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            for left in self.path.glob(f"{_GONE}*"):
                shutil.rmtree(left, ignore_errors=True)
            if self.checkpoints.is_dir():
                remove_leftovers(self.checkpoints)
        except OSError as error:
            raise ResourceError(
                f"can't write to {self.path}: {error.strerror or error}\nName another folder with --work-dir."
            ) from error

    def clear(self) -> None:
        """Remove the run that the folder holds, and nothing that a run has not written. Raises ResourceError."""
        assert self._lock is not None, "open comes first"
        try:
            for name in _WRITTEN:
                path = self.path / name
                # Of a link to a folder, such as one on another disk, what lies behind it goes, and the link stays.
                linked = path.is_symlink() and path.is_dir()
                for entry in sorted(path.iterdir(), reverse=True) if linked else [path]:  # the newest checkpoint first
                    _remove_at_once(entry)
        except OSError as error:
            raise ResourceError(
                f"can't remove the run in {self.path}: {error}\nName another folder with --work-dir."
            ) from error

    def begin(self, jobs: Collection[str]) -> None:
        """Note whose run the folder holds from here on: `begun_by` tells a job that starts its command again."""
        try:
            write_whole(self.path / ".job", "".join(f"{job}\n" for job in jobs))
        except OSError as error:
            raise ResourceError(f"can't write to {self.path}: {error}\nName another --work-dir.") from error

    def begun_by(self, jobs: Collection[str]) -> bool:
        """Whether the run in the folder is that of one of these jobs."""
        try:
            return not set(jobs).isdisjoint((self.path / ".job").read_text().splitlines())
        except (OSError, UnicodeDecodeError):
            return False

    def check_present(self) -> None:
        """Raise ResourceError where the path no longer leads to the folder that `open` took.

        A folder that was removed, or whose share is not mounted any more, must not be made anew in its place.
        """
        assert self._lock is not None, "open comes first"
        try:
            same = os.path.samestat(os.fstat(self._lock.fileno()), (self.path / ".lock").stat())
        except OSError:
            same = False
        if not same:
            raise ResourceError(
                f"could not write {self.checkpoints}: the run folder is gone (removed, moved or not mounted)\n"
                "Bring it back, then go on with --resume."
            )

    def _take_lock(self) -> None:
        """The kernel's lock: a dead run's is free by itself. The file's text only says who holds it."""
        lock = (self.path / ".lock").open("a+")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise UsageError(
                f"{self.path} is in use by {holder}.\nWait for that run, or use another folder with --work-dir."
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def describe(self, config_yaml: str, versions: Mapping[str, str]) -> None:
        """Write `config.yaml` (resolved) and `env.json` (versions, machine, variables from a list of safe names)."""
        env = {
            "versions": dict(versions) | {"python": platform.python_version()},
            "host": socket.gethostname(),
            "machine": platform.machine(),
            "system": platform.platform(),
            "variables": {name: os.environ[name] for name in _SAFE_NAMES if name in os.environ},
        }
        try:
            write_whole(self.path / "config.yaml", config_yaml)
            write_whole(self.path / "env.json", json.dumps(env, indent=1) + "\n")
        except OSError as error:
            raise ResourceError(
                f"can't write to {self.path}: {error}\nMake room, or name another --work-dir."
            ) from error


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all. Only who holds the folder's lock may call."""
    temporary = path.with_name(f".tmp-{path.name}")  # one for all runs: what a kill leaves is written over
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _remove_at_once(path: Path) -> None:
    """Remove a file, a link or a folder, renamed first: a kill half way through leaves nothing that looks like one."""
    if path.is_dir() and not path.is_symlink():
        gone = path.with_name(f"{_GONE}{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)
