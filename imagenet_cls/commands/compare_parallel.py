"""`tools/compare_parallel.py`: run each way, one after the other, and print the table.

Refuses to train by itself: each row is the real command, `tools/train.py`, with a run folder of its own that is gone
afterwards, however this ends. Stands on the level of `cli`, since it starts commands and reads what they leave.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands import program
from imagenet_cls.commands.arguments import positive
from imagenet_cls.commands.compare_ways import as_words, choose_settings, plan_ways
from imagenet_cls.commands.distributed import TOOLS
from imagenet_cls.errors import UsageError, UserError
from imagenet_cls.interrupts import raise_interrupts

if TYPE_CHECKING:
    from imagenet_cls.commands.compare_outcomes import Outcome

# How long a run that is to stop may take to save.
_PATIENCE_SEC = 30.0


class RunFailed(UserError):
    """A row's run ended with an error: its own lines, and its own exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def main() -> None:
    """`tools/compare_parallel.py`."""
    program.main(compare_command)


def compare_command(argv: Sequence[str]) -> int:
    """The tool. Raises UserError: what a config or the machine does not allow, or what a run said that failed."""
    parser = argparse.ArgumentParser(
        prog="compare_parallel.py",
        usage="compare_parallel.py [CONFIG] [key=value ...] [--ranks N]",
        description="Train the same few steps in one process, under DP and under DDP, and show what differs.",
        epilog="Each run ends with an evaluation, so a CONFIG's validation images should be few.",
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help="a config file, and changes to it")
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="processes, or GPUs of DP (default: 2)")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_intermixed_args(argv)
    configs = [word for word in arguments.words if "=" not in word]
    if len(configs) > 1:
        raise UsageError(f"can't tell what {configs[1]!r} is: this takes one config, and changes as key=value.")
    settings = choose_settings([word for word in arguments.words if "=" in word], lesson=not configs)
    ways = plan_ways(configs, settings, arguments.ranks)  # stage 1 of checking, so torch is imported behind it
    from imagenet_cls.commands.compare_outcomes import notes, read_outcome, table

    with tempfile.TemporaryDirectory(prefix="imagenet-cls-", ignore_cleanup_errors=True) as folder, sigterm_raises():
        outcomes: list[Outcome | None] = []
        for number, way in enumerate(ways, start=1):
            print(f"{number} of {len(ways)}: {way.name}{way.missing and ': ' + way.missing}", file=sys.stderr)
            words = [*configs, *as_words({**settings, **way.settings}), *way.options]
            outcomes.append(None if way.missing else read_outcome(run(way.name, words, Path(folder) / str(number))))
    print(table(ways, outcomes), notes(outcomes), sep="\n\n")
    return 0


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM ends this process by SystemExit, and Ctrl-C by KeyboardInterrupt, so that nothing is left behind."""
    raise_interrupts()

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def run(name: str, words: Sequence[str], folder: Path) -> Path:
    """train.py with these words, in a process of its own, to its end; the run folder. Raises RunFailed."""
    folder.mkdir()
    command = [sys.executable, str(TOOLS / "train.py"), *words, "--work-dir", str(folder / "run")]
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C or SIGTERM: the run goes first, and its ranks with it
            process.terminate()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE_SEC)
            finally:
                process.kill()
                process.wait()
            raise
    if code != 0:
        lines = (folder / "stderr").read_text(errors="replace").strip().splitlines() or ["it left no message"]
        told = "\n".join(lines[-1:] if code == 1 else lines)  # of a bug's traceback, what it ends in
        raise RunFailed(f"{name}: {told}", 128 - code if code < 0 else code)
    return folder / "run"
