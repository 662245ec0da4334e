"""Options of a run that are not in its config. Imports no torch, so that a command line is checked quickly."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from imagenet_cls.config.schema import Config


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
