"""What the command line says about a run beyond its config. Imports no torch: `cli` fills it in before that."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from imagenet_cls.config.schema import Config


@dataclass(frozen=True)
class RunOptions:
    """resume: go on in `work_dir`. resume_from: go on from a checkpoint elsewhere. overwrite: remove the run in it.

    allow_change: dotted keys of the config that may differ from the checkpoint's. dry_run: write nothing. jobs: names
    of the launcher and of SLURM's job that this command belongs to, which may start it again; restarted_by: those of
    them that have done so.
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
    """The weights that a run needs at its start, by the key or option that names them."""
    return {
        "model.checkpoint": config.model.checkpoint,
        "distill.teacher.checkpoint": config.distill.teacher.checkpoint,
        "--resume-from": options.resume_from,
    }
