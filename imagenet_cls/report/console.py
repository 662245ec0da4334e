"""The screen: a progress bar on a terminal, plain lines in a pipe or a file.

Owns the form of every line on stdout. Refuses errors, which go to stderr from one place in `cli`. Nothing here may end
a run: once stdout is gone (`| head`, a closed connection, a full disk behind `> log`), the console falls silent and
training goes on. Called by `reporter`.

The bar is drawn when a record arrives and by no thread, so that no lock is held when DataLoader forks its workers, and
the cursor is never hidden, so that even SIGKILL leaves a sane terminal.
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
    """One run's screen. stream: None for stdout. start_step: updates done before this process began."""

    def __init__(self, stream: TextIO | None = None, start_step: int = 0):
        self._stream = stream if stream is not None else sys.stdout
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._bar: Progress | None = None
        self._train_task: TaskID | None = None
        self._eval_task: TaskID | None = None
        self._eval_drawn_at = 0.0
        # The remaining time is measured from here: the banner at first, which still has the start of the workers in it,
        # then the first record.
        self._clock = (start_step, time.monotonic())
        self._clock_is_settled = False

    def banner(self, rows: Sequence[tuple[str, str]]) -> None:
        """What is about to run: one line for each (name, value), the values aligned."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.say(f"{name:<{width}}  {value}")
        self._clock = (self._clock[0], time.monotonic())

    def say(self, message: str) -> None:
        """Print a message as it stands, above the bar where there is one."""
        if self._bar is not None:
            with self._printing():
                self._bar.console.print(message, soft_wrap=True)
            return
        # An ASCII-only stdout must not end a run over the accent in a class name.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with self._printing():
            print(message.encode(encoding, "backslashreplace").decode(encoding), file=self._stream, flush=True)

    def train(self, record: Record, total_steps: int, total_epochs: int) -> None:
        """Report the last step of a logging interval. record: kind "train", as `jsonl` describes it."""
        step = record["step"]
        where = f"epoch {record['epoch'] + 1}/{total_epochs}"
        numbers = [f"loss {record['loss']:.4f}", f"lr {_format_lr(record['lr'])}"]
        if "images_per_sec" in record:
            numbers += [f"{record['images_per_sec']:.0f} img/s", f"data {record['data_wait_pct']:.0f} %"]
        eta = f"eta {self._eta(step, total_steps)}"
        if not self._is_terminal:
            self.say("  ".join([where, f"step {step}/{total_steps}", *numbers, eta]))
            return
        with self._printing():
            bar = self._open_bar()
            if self._train_task is None:
                self._train_task = bar.add_task(where, total=total_steps, numbers="")
            bar.update(
                self._train_task,
                description=where,
                completed=step,
                total=total_steps,
                numbers=" ".join([f"{step}/{total_steps}", eta, *numbers]),  # fits 80 columns; what doesn't is cut
                refresh=True,
            )

    def evaluating(self, images_done: int, images_total: int) -> None:
        """Report how far an evaluation is. May be called for every batch: it draws ten times a second at most.

        Without a terminal, a line every ten seconds, so that a long evaluation is not mistaken for a hang.
        """
        now = time.monotonic()
        if images_done == 0:
            self._eval_drawn_at = now
        since = now - self._eval_drawn_at
        if not self._is_terminal:
            if since >= _EVAL_LINE_SEC:
                self._eval_drawn_at = now
                self.say(f"evaluating  {images_done}/{images_total} images")
        elif since >= _EVAL_REDRAW_SEC or images_done in (0, images_total):
            self._eval_drawn_at = now
            numbers = f"{images_done}/{images_total} images"
            with self._printing():
                bar = self._open_bar()
                if self._eval_task is None:
                    self._eval_task = bar.add_task("evaluating", total=images_total, numbers="")
                bar.update(self._eval_task, completed=images_done, total=images_total, numbers=numbers, refresh=True)

    def evaluation(self, record: Record, total_epochs: int = 0) -> None:
        """Report a result, on a line that stays. record: kind "eval"; total_epochs: 0 outside training."""
        if self._bar is not None and self._eval_task is not None:
            with self._printing():
                self._bar.remove_task(self._eval_task)
            self._eval_task = None
        parts = [f"epoch {record['epoch'] + 1}/{total_epochs}"] if total_epochs else []
        parts += [
            f"{record['weights']} weights: top-1 {record['top1_pct']:.2f} %",
            f"top-5 {record['top5_pct']:.2f} %",
            f"loss {record['loss']:.4f}",
            f"{record['images']} images in {record['seconds']:.1f} s",
        ]
        self.say("  ".join(parts))

    def close(self) -> None:
        """Leave the bar as it is and the cursor below it. May be called again, and from an exception's cleanup."""
        bar, self._bar = self._bar, None
        self._train_task = self._eval_task = None
        if bar is not None:
            with self._printing():
                bar.stop()

    def _open_bar(self) -> "Progress":
        """The bar, started at first use: a run that fails before has none to clean up."""
        if self._bar is None:
            # Here and not above: a run whose output is a file needs no rich.
            from rich.console import Console as RichConsole
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
        steps_done, elapsed_sec = step - self._clock[0], now - self._clock[1]
        if not self._clock_is_settled:
            self._clock, self._clock_is_settled = (step, now), True
        if steps_done <= 0:
            return "-"
        return str(timedelta(seconds=round(elapsed_sec / steps_done * max(total_steps - step, 0))))

    @contextlib.contextmanager
    def _printing(self) -> Iterator[None]:
        """Around every output: one that fails silences the console for good, instead of ending the run."""
        try:
            yield
        except OSError:
            nowhere = open(os.devnull, "w")  # noqa: SIM115, PTH123 - stays open as long as the process
            if self._stream is sys.stdout:  # or Python would try, and fail, to flush what is left in it at exit
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            self._stream, self._is_terminal, self._bar = nowhere, False, None


def _format_lr(lr: float) -> str:
    """Four decimals, or scientific where those would hide it."""
    return f"{lr:.4f}" if lr == 0 or 1e-3 <= lr < 1e4 else f"{lr:.2e}"
