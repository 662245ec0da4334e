"""A writer for tests, as `log.writers: [tracker:AppendOnly]`."""

import json
from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.config.schema import Config
from imagenet_cls.report.writers import Row, Writer


class AppendOnly(Writer):
    """Steps can't be replaced or extended, and a kill loses the newest ones, as in wandb. Writes
    `rows.jsonl`.
    """

    def __init__(self, folder: Path, config: Config, resume_step: int):
        self.path = folder / "rows.jsonl"
        self.last_step = self.newest = max(read_rows(self.path), default=0)
        self.unwritten: list[Row] = []

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            assert row[0] > self.newest, (row, self.newest)
            self.newest = row[0]
            self.unwritten.append(row)
        if len(self.unwritten) >= 3:
            self.flush_rows()

    def flush_rows(self) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in self.unwritten)
        self.unwritten = []

    def close(self, finished: bool) -> None:
        self.flush_rows()


class NoArguments(Writer):
    """Takes other arguments than writers do."""

    def __init__(self) -> None:
        pass


def read_rows(path: Path) -> dict[int, dict[str, float]]:
    """Scalars by step and tag; asserts that each step is there once."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert [step for step, _ in rows] == sorted({step for step, _ in rows})
    return dict(rows)
