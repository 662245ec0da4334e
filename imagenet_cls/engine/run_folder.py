"""The run folder: its paths, its lock, and the protection of an existing run. Only rank 0 uses it.

Does not import torch before a run opens it.
"""

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from imagenet_cls.checkpoint.folders import finish_interrupted_writes, list_checkpoints, step_of
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.files import REMOVED, explain_write_errors, remove, take_lock, write_file

if TYPE_CHECKING:
    from imagenet_cls.parallel.process_group import Group

# A folder that has one of these holds a run, and they are all that --overwrite removes, in this order. Not the logs:
# they are appended to, and exist before a run has begun.
_WRITTEN = (
    "checkpoints", "config.yaml", "env.json", "metrics.jsonl", "tensorboard", "wandb", "mlflow", "writers", "plots",
    "profile",
)  # fmt: skip

_REMEDY = "Free space, or give another folder with --work-dir."

# Environment variables that are recorded: none of them ever holds a secret.
_SAFE_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG", "NCCL_IB_DISABLE", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NODELIST", "PYTHONHASHSEED",
)  # fmt: skip


@dataclass(frozen=True)
class RunOptions:
    """The options of `tools/train.py`.

    new_folder: write into a new folder in `work_dir`, named by the time. launchers: names of the torchrun process and
    of the SLURM job, which may restart this command; restarted_by: those that did.
    """

    work_dir: Path
    resume: bool = False
    resume_from: Path | None = None
    overwrite: bool = False
    new_folder: bool = False
    allow_change: Sequence[str] = ()
    dry_run: bool = False
    launchers: Sequence[str] = ()
    restarted_by: Sequence[str] = ()


class RunFolder:
    """The paths of one run folder, and its lock."""

    def __init__(self, path: Path):
        self.path, self.checkpoints = path, path / "checkpoints"
        self._lock: IO[str] | None = None
        self._created: list[Path] = []  # by `open`, the innermost first

    def check_usable(self, config: Config, options: RunOptions) -> None:
        """Raise UsageError where the folder can't be used with these options. Writes nothing."""
        if options.resume and options.overwrite:
            raise UsageError("--resume continues a run, --overwrite removes it.\nGive one of them.")
        try:
            if self.path.exists() and not self.path.is_dir():
                raise UsageError(
                    f"{self.path} is a file, not a folder.\nGive another folder with --work-dir."
                )
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
        if holds_run and not options.resume and not options.overwrite:
            done = list_checkpoints(self.checkpoints)
            got = f"saved up to step {step_of(done[0])}" if done else "no checkpoint yet"
            raise UsageError(
                f"{self.path} already holds a run ({got}).\n"
                "--resume continues it, --overwrite removes it and starts again, --work-dir DIR uses another folder."
            )
        sources = {
            "model.checkpoint": config.model.checkpoint,
            "distill.teacher.checkpoint": config.distill.teacher.checkpoint,
            "--resume-from": options.resume_from,
        }
        removed = [(self.path / name).resolve() for name in _WRITTEN]
        for key, source in sources.items() if options.overwrite else ():
            path = None if source is None else Path(source).resolve()
            if path and (
                path == self.path.resolve()
                or any(path.is_relative_to(folder) for folder in removed)
            ):
                raise UsageError(
                    f"{key}: {source} is in {self.path}, which --overwrite would remove.\n"
                    "Use another folder with --work-dir, or copy the weights elsewhere first."
                )

    def open(self, config: Config, options: RunOptions) -> None:
        """Create the folder and lock it until `close` or the end of the process; a dry run checks whether it could.

        Raises UsageError if `check_usable` does or another process has the lock, or ResourceError.
        """
        self.check_usable(config, options)
        with explain_write_errors(self.path, _REMEDY):
            paths = (self.path / ".lock", self.path, *self.path.parents)
            self._created = [path for path in paths if not path.exists()]
            if options.dry_run:
                existing = next(path for path in paths[1:] if path.exists())
                tempfile.TemporaryFile(dir=existing).close()
                return
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(
                self.path, "Wait for that run, or use another folder with --work-dir."
            )
            for left in self.path.glob(f"{REMOVED}*"):  # by a killed process
                shutil.rmtree(left, ignore_errors=True)
            if self.checkpoints.is_dir():
                finish_interrupted_writes(self.checkpoints)

    def clear(self) -> None:
        """Remove the run in the folder, and nothing else. Raises ResourceError."""
        with explain_write_errors(self.path, _REMEDY):
            for path in (self.path / name for name in _WRITTEN):
                # A link to a folder stays; what is in that folder is removed, the newest checkpoint first.
                linked = path.is_symlink() and path.is_dir()
                for entry in sorted(path.iterdir(), reverse=True) if linked else [path]:
                    remove(entry)

    def write_metadata(
        self, launchers: Collection[str], config_yaml: str, versions: Mapping[str, str]
    ) -> None:
        """Write `.job` (for `was_started_by`), `config.yaml` and `env.json`. Raises ResourceError."""
        env = {
            "code": code_version(),
            "versions": dict(versions) | {"python": platform.python_version()},
            "host": socket.gethostname(),
            "machine": platform.machine(),
            "system": platform.platform(),
            "variables": {name: os.environ[name] for name in _SAFE_NAMES if name in os.environ},
        }
        with explain_write_errors(self.path, _REMEDY):
            write_file(self.path / ".job", "".join(f"{launcher}\n" for launcher in launchers))
            write_file(self.path / "config.yaml", config_yaml)
            write_file(self.path / "env.json", json.dumps(env, indent=1) + "\n")

    def was_started_by(self, launchers: Collection[str]) -> bool:
        """Whether one of these launchers started the run in the folder, so that this command is a restart."""
        try:
            return not set(launchers).isdisjoint((self.path / ".job").read_text().splitlines())
        except (OSError, UnicodeDecodeError):
            return False

    def check_present(self) -> None:
        """Raise ResourceError where the folder was removed, moved or unmounted: it must not be created again."""
        if not (self.path / ".lock").exists():
            raise ResourceError(
                f"could not write {self.checkpoints}: the run folder is gone (removed, moved or not mounted)\n"
                "Restore it, then resume with --resume."
            )

    def discard(self) -> None:
        """Remove what `open` has created, up to the first folder that is not empty, and `close`."""
        with contextlib.suppress(OSError):
            for path in self._created:
                path.unlink() if path.name == ".lock" else path.rmdir()
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def code_version() -> dict[str, Any] | None:
    """The commit of the package's checkout, and whether the package differs from it; None without one or git."""
    folder = Path(__file__).parents[1]
    # Variables such as GIT_DIR, which git sets for hooks, name another repository. `status` must not write an index.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_OPTIONAL_LOCKS"] = "0"

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "capture_output": True,
            "check": True,
            "timeout": 10,
        }
        return subprocess.run(command, env=env, **options).stdout.decode(errors="replace").strip()

    try:
        git(
            "ls-files", "--error-unmatch", "__init__.py"
        )  # fails for an installed package in another repository
        return {
            "commit": git("rev-parse", "HEAD"),
            "uncommitted_changes": bool(git("status", "--porcelain", ".")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def open_run_folder(
    config: Config, options: RunOptions, group: "Group"
) -> tuple[RunFolder, RunOptions, bool]:
    """Lock the folder, on rank 0. Returns it, each rank's options, and whether the run resumes from a checkpoint.

    A command that torchrun or SLURM restarted, on any machine, resumes the run that it started before.
    """
    from imagenet_cls.parallel.collectives import gather_to_main, run_on_main

    restarted_by = gather_to_main(list(options.restarted_by), group)

    def name_on_main() -> str:
        earlier = [
            path.name
            for path in options.work_dir.glob("*/")
            if RunFolder(path).was_started_by(restarted_by)
        ]
        return max(earlier, default=time.strftime("%Y%m%d_%H%M%S"))

    if options.new_folder:
        options = replace(options, work_dir=options.work_dir / run_on_main(group, name_on_main))
    resumed = replace(options, resume=True, overwrite=False)
    folder = RunFolder(options.work_dir)

    def open_on_main() -> tuple[bool, bool]:
        restarted = folder.was_started_by(restarted_by)
        folder.open(config, resumed if restarted else options)
        return restarted, bool(list_checkpoints(folder.checkpoints))

    restarted, has_checkpoints = run_on_main(group, open_on_main)
    options = resumed if restarted else options
    return folder, options, options.resume_from is not None or (options.resume and has_checkpoints)
