"""The origin of a value (file and line, or argument), and problems formatted with their origin."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagenet_cls.errors import Problem, shorten


@dataclass(frozen=True)
class Origin:
    """Where the value of a key was set.

    layer: `default`, `default of sgd` (a component's), `command line 'optimizer.lr=1'`, or the path of the file
    (`shown_path`). file, line: for a value from a file, else None. Lines count from 1.
    """

    layer: str
    file: Path | None = None
    line: int | None = None

    @property
    def is_default(self) -> bool:
        """Whether the value comes from the schema."""
        return self.file is None and self.layer.startswith("default")

    def __str__(self) -> str:
        return self.layer if self.line is None else f"{self.layer}:{self.line}"


DEFAULT = Origin("default")


def real_path(path: Path) -> Path:
    """The path with links resolved; unlike `Path.resolve`, circular links are no error."""
    return Path(os.path.realpath(path))


def shown_path(path: Path) -> str:
    """A path as messages show it: relative to the working directory if it is below, else as it is."""
    try:
        shown = str(real_path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        shown = str(path)
    return shorten(shown, 300)


def format_line(origin: Origin | None, problem: Problem) -> str:
    """One line: `configs/x.yaml:12: optimizer.lr: 'many' is not a number`. Unknown parts are left out."""
    where = "" if origin is None or origin.is_default else f"{origin}: "
    key = shorten(problem.key, 200)
    return f"{where}{key}: {problem.message}" if key else f"{where}{problem.message}"


def nearest_origin(key: str, origins: Mapping[str, Origin]) -> Origin | None:
    """The origin of `key` if it is not a default, else that of the nearest enclosing section."""
    while key:
        origin = origins.get(key)
        if origin is not None and not origin.is_default:
            return origin
        key = key.rpartition(".")[0]
    return None


def format_problems(problems: Iterable[Problem], origins: Mapping[str, Origin]) -> list[str]:
    """One line for each problem, with file and line or the command-line argument. origins: of `Loaded`."""
    return [format_line(nearest_origin(problem.key, origins), problem) for problem in problems]
