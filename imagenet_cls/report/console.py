"""A run's lines on stdout: a progress bar on a terminal, plain lines in a pipe or a file.

An error of the output (`| head`, a closed connection, a full disk) silences the console; the run does not end. The bar
is drawn when a record arrives and not by a thread, so that no lock is held when DataLoader forks its workers, and the
cursor is never hidden, so that even SIGKILL leaves a usable terminal.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TextIO

from imagenet_cls.report.jsonl import Record

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_EVAL_REDRAW_SEC = 0.1
_EVAL_LINE_SEC = 10.0  # between two plain lines about one evaluation


class Console:
    """stream: None for stdout. start_step: updates done before this process began."""

    def __init__(self, stream: TextIO | None = None, start_step: int = 0):
        self._stream = stream if stream is not None else sys.stdout
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._bar: Progress | None = None
        self._train_task: TaskID | None = None
        self._eval_task: TaskID | None = None
        self._eval_drawn_at = 0.0
        # Step and time that the pace is measured from: the start-up table, then the first train record, since the time
        # between them includes the start of the workers.
        self._pace_from = (start_step, time.monotonic())
        self._trained = False

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print one line for each (name, value), the values aligned."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.message(f"{name:<{width}}  {value}")
        self._pace_from = (self._pace_from[0], time.monotonic())

    def message(self, text: str) -> None:
        """Print a message as it is, above the bar if there is one."""
        with self._silenced_by_errors():
            if self._bar is not None:
                self._bar.console.print(text, soft_wrap=True)
            else:  # an ASCII-only stdout gets escapes
                encoding = getattr(self._stream, "encoding", None) or "utf-8"
                print(text.encode(encoding, "backslashreplace").decode(encoding), file=self._stream, flush=True)

    def train(self, record: Record, total_steps: int, total_epochs: int) -> None:
        """Show the last step of a logging interval. record: of kind "train", see `jsonl`."""
        step = record["step"]
        epoch = f"epoch {record['epoch'] + 1}/{total_epochs}"
        numbers = [f"loss {record['loss']:.4f}", f"lr {_format_lr(record['lr'])}"]
        if "images_per_sec" in record:
            numbers += [f"{record['images_per_sec']:.0f} img/s", f"data {record['data_wait_pct']:.0f} %"]
        eta = f"eta {self._eta(step, total_steps)}"
        if not self._is_terminal:
            self.message("  ".join([epoch, f"step {step}/{total_steps}", *numbers, eta]))
            return
        with self._silenced_by_errors():
            bar = self._open_bar()
            if self._train_task is None:
                self._train_task = bar.add_task(epoch, total=total_steps, numbers="")
            text = " ".join([f"{step}/{total_steps}", eta, *numbers])  # fits 80 columns; the rest is cut off
            bar.update(
                self._train_task, description=epoch, completed=step, total=total_steps, numbers=text, refresh=True
            )

    def eval_progress(self, images_done: int, images_total: int) -> None:
        """Show how far an evaluation is. Cheap enough for every batch: the bar is drawn at most ten times a second.

        Without a terminal it is a line every ten seconds, so that a long evaluation does not look like a hang.
        """
        now = time.monotonic()
        if images_done == 0:
            self._eval_drawn_at = now
        since = now - self._eval_drawn_at
        numbers = f"{images_done}/{images_total} images"
        if not self._is_terminal:
            if since >= _EVAL_LINE_SEC:
                self._eval_drawn_at = now
                self.message(f"evaluating  {numbers}")
        elif since >= _EVAL_REDRAW_SEC or images_done in (0, images_total):
            self._eval_drawn_at = now
            with self._silenced_by_errors():
                bar = self._open_bar()
                if self._eval_task is None:
                    self._eval_task = bar.add_task("evaluating", total=images_total, numbers="")
                bar.update(self._eval_task, completed=images_done, total=images_total, numbers=numbers, refresh=True)

    def eval_result(self, record: Record, total_epochs: int) -> None:
        """Print a result. record: of kind "eval"."""
        if self._bar is not None and self._eval_task is not None:
            with self._silenced_by_errors():
                self._bar.remove_task(self._eval_task)
            self._eval_task = None
        parts = [
            f"epoch {record['epoch'] + 1}/{total_epochs}",
            f"{record['weights']} weights: top-1 {record['top1_pct']:.2f} %",
            f"top-5 {record['top5_pct']:.2f} %",
            f"loss {record['loss']:.4f}",
            f"{record['images']} images in {record['seconds']:.1f} s",
        ]
        self.message("  ".join(parts))

    def close(self) -> None:
        """Leave the bar as it is and the cursor below it. May be called again."""
        bar, self._bar = self._bar, None
        self._train_task = self._eval_task = None
        if bar is not None:
            with self._silenced_by_errors():
                bar.stop()

    def _open_bar(self) -> "Progress":
        if self._bar is None:
            from rich.console import Console as RichConsole  # here: not needed where the output is a file
            from rich.progress import BarColumn, Progress, TextColumn

            console = RichConsole(file=self._stream, force_terminal=True, markup=False, emoji=False, highlight=False)
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=max(5, min(40, console.width - 85))),
                TextColumn("{task.fields[numbers]}", markup=False),
                console=console,
                auto_refresh=False,
                redirect_stdout=False,  # a worker that prints would take the bar's lock in a forked process
                redirect_stderr=False,
            )
            self._bar.start()
            self._bar.console.show_cursor(True)
        return self._bar

    def _eta(self, step: int, total_steps: int) -> str:
        """Time to the last step at the pace so far, evaluations and checkpoints included; "-" if unknown."""
        now = time.monotonic()
        steps_done, elapsed_sec = step - self._pace_from[0], now - self._pace_from[1]
        if not self._trained:
            self._pace_from, self._trained = (step, now), True
        if steps_done <= 0:
            return "-"
        return str(timedelta(seconds=round(elapsed_sec / steps_done * max(total_steps - step, 0))))

    @contextlib.contextmanager
    def _silenced_by_errors(self) -> Iterator[None]:
        """Around every output: after one that fails nothing more is printed."""
        try:
            yield
        except OSError:
            nowhere = open(os.devnull, "w")  # noqa: SIM115, PTH123 - open as long as the process
            if self._stream is sys.stdout:  # else Python would fail to flush what is left in it at exit
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            self._stream, self._is_terminal, self._bar = nowhere, False, None


def _format_lr(lr: float) -> str:
    """Four decimals, or scientific where those would hide it."""
    return f"{lr:.4f}" if lr == 0 or 1e-3 <= lr < 1e4 else f"{lr:.2e}"
