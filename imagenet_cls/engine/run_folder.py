"""The run folder: its paths, its lock, and the protection of an existing run.

Only rank 0 uses it, except for the logs of the ranks. Does not import torch.

work_dirs/<config name>/
    config.yaml  env.json  metrics.jsonl  classes.json  report.html  logs/  checkpoints/  plots/
    model.onnx  .lock  .job
    and folders of writers: tensorboard/  wandb/  writers/
"""

import contextlib
import json
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from imagenet_cls.checkpoint.folders import finish_interrupted_writes, list_checkpoints, step_of
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import ResourceError, Stopped, UsageError
from imagenet_cls.files import REMOVED, explain_write_errors, remove, take_lock, write_file
from imagenet_cls.versions import code_version

if TYPE_CHECKING:
    from imagenet_cls.checkpoint.progress import Progress

# A folder that has one of these holds a run, and they are all that --overwrite removes, in this
# order. Not the logs: they are appended to, and exist before a run has begun.
_RUN_CONTENT = (
    "checkpoints",
    "config.yaml",
    "env.json",
    "metrics.jsonl",
    "classes.json",
    "report.html",
    "tensorboard",
    "wandb",
    "mlflow",
    "writers",
    "plots",
    "profile",
    "model.onnx",
)

_REMEDY = "Free space, give this user access, or name another folder with --work-dir."

# Environment variables that are recorded: none of them ever holds a secret.
_SAFE_NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "SLURM_JOB_ID",
    "SLURM_NTASKS",
    "SLURM_NODELIST",
    "PYTHONHASHSEED",
)


@dataclass(frozen=True)
class RunOptions:
    """The options of `tools/train.py`."""

    work_dir: Path
    resume: bool = False  # continue from the newest checkpoint in `work_dir`
    resume_from: Path | None = None  # the checkpoint to continue from
    overwrite: bool = False  # remove the old run
    # Dotted keys of the config that may differ from the checkpoint's.
    allow_change: Sequence[str] = ()
    dry_run: bool = False  # write nothing
    # The names of the torchrun process and of the SLURM job that this command runs in, if any:
    # torchrun may run inside a job, and each of them may restart the command.
    launchers: Sequence[str] = ()
    restarted_by: Sequence[str] = ()  # the launchers that have restarted it


class RunFolder:
    """The paths of one run folder, and its lock.

    As a context manager it unlocks the folder that `open` has locked. What stays in the folder:

    * of a run that has not started (`mark_started`), nothing that `open` created;
    * of a run without --resume that failed before its first step, nothing (`clear`);
    * else everything.
    """

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None  # of rank 0
        self._created: list[Path] = []  # by `open`, the innermost first
        self._progress: Progress | None = None  # of the run, once it has started
        self._first_step = 0
        self._resumed = False

    def holds_run(self) -> bool:
        """Whether a run has written into the folder. Raises OSError."""
        return any((self.path / name).exists() for name in _RUN_CONTENT)

    def check_usable(self, config: Config, options: RunOptions) -> None:
        """Raise UsageError where the folder can't be used with these options. Writes nothing."""
        if options.resume and options.overwrite:
            raise UsageError(
                "--resume continues a run, --overwrite removes it.", "Give one of them."
            )
        try:
            if os.path.lexists(self.path) and not self.path.is_dir():
                raise UsageError(
                    f"{self.path} is a file or a dangling link, not a folder.",
                    "Give another folder with --work-dir.",
                )
            if os.path.lexists(self.checkpoints) and not self.checkpoints.is_dir():
                raise UsageError(
                    f"{self.checkpoints} is not a folder, or a dangling link (is its disk "
                    "mounted?).",
                    "Restore it, or move it away.",
                )
            holds_run = self.holds_run()
            if (self.path / "manifest.json").exists() or list_checkpoints(self.path):
                raise UsageError(
                    f"{self.path} is a checkpoint, or holds the checkpoints of a run.",
                    "Give its run folder, or another folder, with --work-dir.",
                )
        except OSError as error:
            raise UsageError(
                f"{self.path} can't be the run folder: {error.strerror}.",
                "Give another one with --work-dir.",
            ) from error
        if holds_run and not (options.resume or options.overwrite or options.dry_run):
            done = list_checkpoints(self.checkpoints)
            got = f"saved up to step {step_of(done[0])}" if done else "no checkpoint yet"
            raise UsageError(
                f"{self.path} already holds a run ({got}).",
                "--resume continues it with the same settings, --overwrite removes it and starts "
                "again, --work-dir DIR uses another folder.",
            )
        if options.overwrite:
            self._check_overwrites_no_weights(config, options)

    def _check_overwrites_no_weights(self, config: Config, options: RunOptions) -> None:
        """Raise UsageError if --overwrite would remove weights that the new run starts from."""
        sources = {
            "model.checkpoint": config.model.checkpoint,
            "distill.teacher.checkpoint": config.distill.teacher.checkpoint,
            "--resume-from": options.resume_from,
        }
        removed = [(self.path / name).resolve() for name in _RUN_CONTENT]
        for key, source in sources.items():
            if source is None:
                continue
            path = Path(source).resolve()
            is_removed = any(path.is_relative_to(folder) for folder in removed)
            # The run folder itself stands for its best checkpoint.
            if is_removed or path == self.path.resolve():
                raise UsageError(
                    f"{key}: {source} is in {self.path}, which --overwrite would remove.",
                    "Use another folder with --work-dir, or copy the weights elsewhere first.",
                )

    def open(self, config: Config, options: RunOptions) -> None:
        """Create the folder, and lock it until the end of the `with` block or of the process. An
        earlier run stays in it until `clear`. For a dry run, only check that a folder can be
        created.

        Raises UsageError if `check_usable` does or another process has the lock, or ResourceError.
        """
        self.check_usable(config, options)
        with explain_write_errors(self.path, _REMEDY):
            folders = [self.path, *self.path.parents]
            if options.dry_run:
                existing = next(folder for folder in folders if folder.exists())
                # raises OSError if this user can't write there
                tempfile.TemporaryFile(dir=existing).close()
                return
            self._created = [path for path in [self.path / ".lock", *folders] if not path.exists()]
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
            for name in _RUN_CONTENT:
                path = self.path / name
                if path.is_symlink() and path.is_dir():
                    # The link stays. What is in the folder is removed, the newest checkpoint first.
                    for entry in sorted(path.iterdir(), reverse=True):
                        remove(entry)
                else:
                    remove(path)

    def write_metadata(
        self, launchers: Collection[str], config_yaml: str, versions: Mapping[str, str]
    ) -> None:
        """Write `.job` (for `was_started_by`), `config.yaml` and `env.json`. Raises
        ResourceError.
        """
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
        """Whether one of these launchers started the run in the folder, so that this command is a
        restart.
        """
        try:
            return not set(launchers).isdisjoint((self.path / ".job").read_text().splitlines())
        except (OSError, UnicodeDecodeError):
            return False

    def check_present(self) -> None:
        """Raise ResourceError where the folder was removed, moved or unmounted: it must not be
        created again.
        """
        if not (self.path / ".lock").exists():
            raise ResourceError(
                f"Could not write {self.checkpoints}: the run folder is gone (removed, moved or "
                "not mounted).",
                "Restore it, then resume with --resume.",
            )

    def mark_started(self, progress: "Progress", resumed: bool) -> None:
        """Keep what is in the folder at the end of the `with` block, unless a run without --resume
        fails before it has made a step.

        progress: the progress of the run, which the run changes. resumed: whether the command has
        --resume.
        """
        self._progress = progress
        self._first_step = progress.step
        self._resumed = resumed

    @property
    def has_started(self) -> bool:
        return self._progress is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._lock is None:
            return
        if self._progress is None:
            self._remove_created()
        elif self._progress.step == self._first_step and not self._resumed and _is_failure(error):
            with contextlib.suppress(ResourceError):  # `error` is the one to show
                self.clear()  # so that the corrected command needs no --overwrite
        self._lock.close()
        self._lock = None

    def _remove_created(self) -> None:
        """Remove what `open` has created, up to the first folder that is not empty."""
        with contextlib.suppress(OSError):
            for path in self._created:
                if path.name == ".lock":
                    path.unlink()
                else:
                    path.rmdir()


def _is_failure(error: BaseException | None) -> bool:
    return isinstance(error, Exception) and not isinstance(error, Stopped)
