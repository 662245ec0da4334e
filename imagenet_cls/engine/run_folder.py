"""The run folder: its paths, its lock, and the protection of an existing run. Only rank 0 uses it.

work_dirs/<config name>/ config.yaml env.json metrics.jsonl logs/ tensorboard/ checkpoints/ plots/ .lock .job
"""

import fcntl
import json
import os
import platform
import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from imagenet_cls.checkpoint.format import finish_interrupted_writes, list_checkpoints, step_of
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.files import write_file
from imagenet_cls.parallel.collectives import gather_to_main
from imagenet_cls.parallel.process_group import Group, run_on_main

# A folder that has one of these holds a run, and they are all that --overwrite removes. Not the logs: they are appended
# to, and exist before a run has begun. Checkpoints come first: a run without them can't be resumed.
_WRITTEN = ("checkpoints", "config.yaml", "env.json", "metrics.jsonl", "tensorboard", "plots")

# Folders get this prefix before they are removed; `open` removes those that a killed process left.
_REMOVED_PREFIX = ".tmp-gone-"

# Environment variables that are recorded: none of them ever holds a secret.
_SAFE_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG", "NCCL_IB_DISABLE", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NODELIST", "PYTHONHASHSEED",
)  # fmt: skip


@dataclass(frozen=True)
class RunOptions:
    """resume: from a checkpoint in `work_dir`. resume_from: from a checkpoint elsewhere. overwrite: remove the old run.

    allow_change: dotted keys of the config that may differ from the checkpoint's. dry_run: write nothing. jobs: names
    of the launcher process and of the SLURM job, which may restart this command; restarted_by: those that did.
    """

    work_dir: Path
    resume: bool = False
    resume_from: Path | None = None
    overwrite: bool = False
    allow_change: Sequence[str] = ()
    dry_run: bool = False
    jobs: Sequence[str] = ()
    restarted_by: Sequence[str] = ()


def starts_from(config: Config, options: RunOptions) -> dict[str, str | Path | None]:
    """The weights that a run starts from, by the key or option that names them."""
    return {
        "model.checkpoint": config.model.checkpoint,
        "distill.teacher.checkpoint": config.distill.teacher.checkpoint,
        "--resume-from": options.resume_from,
    }


class RunFolder:
    """The paths of one run folder, and its lock."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    def check_free(self, resume: bool, overwrite: bool) -> None:
        """Raise UsageError where the folder can't be used, or holds a run and neither flag is given. Writes nothing."""
        if resume and overwrite:
            raise UsageError("--resume continues a run, --overwrite removes it.\nGive one of them.")
        try:
            if self.path.exists() and not self.path.is_dir():
                raise UsageError(f"{self.path} is a file, not a folder.\nGive another folder with --work-dir.")
            if os.path.lexists(self.checkpoints) and not self.checkpoints.is_dir():
                raise UsageError(
                    f"{self.checkpoints} is not a folder, or a dangling link (is its disk mounted?).\n"
                    "Restore it, or move it away."
                )
            holds_run = any((self.path / name).exists() for name in _WRITTEN)
        except OSError as error:
            raise UsageError(
                f"{self.path} can't be the run folder: {error.strerror}\nGive another one with --work-dir."
            ) from error
        if holds_run and not resume and not overwrite:
            done = list_checkpoints(self.checkpoints)
            got = f"saved up to step {step_of(done[0])}" if done else "no checkpoint yet"
            raise UsageError(
                f"{self.path} already holds a run ({got}).\n"
                "--resume continues it, --overwrite removes it and starts again, --work-dir DIR uses another folder."
            )

    def check_removable(self, sources: Mapping[str, str | Path | None]) -> None:
        """Raise UsageError where `clear` would remove weights that the new run needs.

        sources: their paths, by the key or option that names them.
        """
        removed = [self.path.resolve(), *((self.path / name).resolve() for name in _WRITTEN)]
        for key, source in sources.items():
            path = None if source is None else Path(source).resolve()
            if path == removed[0] or (path and any(path.is_relative_to(folder) for folder in removed[1:])):
                raise UsageError(
                    f"{key}: {source} is in {self.path}, which --overwrite would remove.\n"
                    "Use another folder with --work-dir, or copy the weights elsewhere first."
                )

    def open(self, resume: bool, overwrite: bool) -> None:
        """Create the folder and lock it until `close` or the end of the process. Removes no run: that is `clear`.

        Raises UsageError where `check_free` does or another process has the lock, ResourceError where it can't be
        written.
        """
        self.check_free(resume, overwrite)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            for left in self.path.glob(f"{_REMOVED_PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
            if self.checkpoints.is_dir():
                finish_interrupted_writes(self.checkpoints)
        except OSError as error:
            raise self._resource_error("write to", error) from error

    def clear(self) -> None:
        """Remove the run in the folder, and nothing that a run has not written. Raises ResourceError."""
        try:
            for name in _WRITTEN:
                path = self.path / name
                # A link to a folder stays; what is in that folder is removed, the newest checkpoint first.
                linked = path.is_symlink() and path.is_dir()
                for entry in sorted(path.iterdir(), reverse=True) if linked else [path]:
                    _remove(entry)
        except OSError as error:
            raise self._resource_error("remove the run in", error) from error

    def write_metadata(self, jobs: Collection[str], config_yaml: str, versions: Mapping[str, str]) -> None:
        """Write `.job` (see `was_started_by`), `config.yaml` and `env.json`. Raises ResourceError.

        `env.json` has the versions, the machine and some environment variables.
        """
        env = {
            "versions": dict(versions) | {"python": platform.python_version()},
            "host": socket.gethostname(),
            "machine": platform.machine(),
            "system": platform.platform(),
            "variables": {name: os.environ[name] for name in _SAFE_NAMES if name in os.environ},
        }
        try:
            write_file(self.path / ".job", "".join(f"{job}\n" for job in jobs))
            write_file(self.path / "config.yaml", config_yaml)
            write_file(self.path / "env.json", json.dumps(env, indent=1) + "\n")
        except OSError as error:
            raise self._resource_error("write to", error) from error

    def was_started_by(self, jobs: Collection[str]) -> bool:
        """Whether the run in the folder belongs to one of these jobs: then this is a restart of the same command."""
        try:
            return not set(jobs).isdisjoint((self.path / ".job").read_text().splitlines())
        except (OSError, UnicodeDecodeError):
            return False

    def check_present(self) -> None:
        """Raise ResourceError where the path is no longer the folder that `open` locked: removed, moved or unmounted.

        The folder must not be created again at that path.
        """
        assert self._lock is not None, "call open first"
        try:
            same = os.path.samestat(os.fstat(self._lock.fileno()), (self.path / ".lock").stat())
        except OSError:
            same = False
        if not same:
            raise ResourceError(
                f"could not write {self.checkpoints}: the run folder is gone (removed, moved or not mounted)\n"
                "Restore it, then resume with --resume."
            )

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        """Take an advisory lock (fcntl), which the kernel releases when the process ends. The file names its holder."""
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

    def _resource_error(self, verb: str, error: OSError) -> ResourceError:
        return ResourceError(
            f"can't {verb} {self.path}: {error.strerror or error}\nFree space, or give another folder with --work-dir."
        )


def _remove(path: Path) -> None:
    """Rename a folder before removing it, so that a killed process leaves nothing that looks like a run."""
    if path.is_dir() and not path.is_symlink():
        renamed = path.with_name(f"{_REMOVED_PREFIX}{path.name}")
        shutil.rmtree(renamed, ignore_errors=True)
        path.rename(renamed)
        shutil.rmtree(renamed)
    else:
        path.unlink(missing_ok=True)


def open_run_folder(folder: RunFolder, config: Config, options: RunOptions, group: Group) -> tuple[RunOptions, bool]:
    """Lock the folder, on rank 0. Returns each rank's options, and whether the run resumes from a checkpoint.

    A command that torchrun or SLURM restarted resumes the run that it started before, as with --resume. After a restart
    any machine may have rank 0, so it considers the restarts of all ranks. Raises as `RunFolder`.
    """
    restarted_by = gather_to_main(list(options.restarted_by), group)

    def open_on_main() -> tuple[bool, bool]:
        """Whether the command was restarted, and whether the folder has a checkpoint."""
        restarted = folder.was_started_by(restarted_by)
        overwrite = options.overwrite and not restarted
        if overwrite:
            folder.check_removable(starts_from(config, options))
        folder.open(options.resume or restarted, overwrite)
        return restarted, bool(list_checkpoints(folder.checkpoints))

    restarted, has_checkpoints = run_on_main(group, open_on_main)
    if restarted:  # keeps this rank's work_dir: ranks on other machines may write their logs elsewhere
        options = replace(options, resume=True, overwrite=False)
    return options, options.resume_from is not None or (options.resume and has_checkpoints)
