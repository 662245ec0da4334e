"""Where a value came from, and the one place where a problem becomes a line of text.

Owns `Origin`, the form of an error line, and how values look in messages. Called by every other module of `config`, and
by `engine.build` for what it finds wrong when names and signatures are compared (stage 2).
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagenet_cls.errors import Problem, shorten


@dataclass(frozen=True)
class Origin:
    """The place that gave a key its value.

    layer: `default`, `default of sgd` (a component's own), `command line 'optimizer.lr=1'`, or the file as it is shown.
    file, line: for a value from a file, else None. Lines count from 1.
    """

    layer: str
    file: Path | None = None
    line: int | None = None

    @property
    def is_default(self) -> bool:
        """Whether nobody wrote this value: it comes from the schema or from a component."""
        return self.file is None and self.layer.startswith("default")

    def __str__(self) -> str:
        return self.layer if self.line is None else f"{self.layer}:{self.line}"


def real_path(path: Path) -> Path:
    """The file that a path leads to, whatever links are on the way, circles of them included."""
    return Path(os.path.realpath(path))


def shown_path(path: Path) -> str:
    """A path as a user knows it: relative to the working directory where it lies below, else as it is."""
    try:
        shown = str(real_path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        shown = str(path)
    return shorten(shown, 300)


def format_line(origin: Origin | None, problem: Problem) -> str:
    """One line: `configs/x.yaml:12: optimizer.lr: 'many' is not a number`. A part that is not known is left out."""
    where = "" if origin is None or origin.is_default else f"{origin}: "
    key = shorten(problem.key, 200)
    return f"{where}{key}: {problem.message}" if key else f"{where}{problem.message}"


def nearest_origin(key: str, origins: Mapping[str, Origin]) -> Origin | None:
    """Where to look for `key`: its own place where somebody wrote it, else that of the nearest section around it."""
    while key:
        origin = origins.get(key)
        if origin is not None and not origin.is_default:
            return origin
        key = key.rpartition(".")[0]
    return None


def format_problems(problems: Iterable[Problem], origins: Mapping[str, Origin]) -> list[str]:
    """One line for each problem, each with the nearest place that a user wrote. `origins` are those of `Loaded`."""
    return [format_line(nearest_origin(problem.key, origins), problem) for problem in problems]
