"""A profile of some steps, `train.profile`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imagenet_cls.text import first_line

_SHOWN_OPERATORS = 10


class StepProfiler:
    """Profiles steps by `torch.profiler`. steps: first and last, counted from 1; None: disabled."""

    def __init__(self, steps: Sequence[int] | None, folder: Path, device_type: str):
        self._steps = steps
        self._folder = folder
        self._device_type = device_type
        self._profile: Any = None
        self._first = 0

    def update(self, step: int, force_end: bool = False) -> str | None:
        """Start or end the profile if it is due after `step` steps. force_end: end it in any case.

        Returns a message when the profile has ended.
        """
        if self._steps is None:
            return None
        first, last = self._steps
        if self._profile is None and first - 1 <= step < last and not force_end:
            # its messages on stderr are not for users
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU]
            if self._device_type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._first = step + 1
            self._profile.start()
        elif self._profile is not None and (force_end or step >= last):
            ended, self._profile = self._profile, None
            return self._write(ended, step)
        return None

    def _write(self, profile: Any, step: int) -> str | None:
        """Stop the profile, and write its trace and its table of operators. Its errors do not end
        the run, and do not replace the error that does.
        """
        name = f"steps-{self._first:07d}-{step:07d}"
        trace, table = self._folder / f"{name}.json.gz", self._folder / f"{name}.txt"
        order = f"self_{'cuda' if self._device_type == 'cuda' else 'cpu'}_time_total"
        try:
            profile.stop()
            if step < self._first:
                return None
            self._folder.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(trace))
            table.write_text(
                profile.key_averages().table(sort_by=order, row_limit=_SHOWN_OPERATORS) + "\n"
            )
        except (OSError, RuntimeError) as error:
            return f"warning: train.profile: could not write {trace}: {first_line(error)}"
        return f"profile of steps {self._first} to {step}: {trace} (for ui.perfetto.dev), {table}"
