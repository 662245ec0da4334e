"""A run folder, for Python and for the commands that read it. Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagenet_cls.checkpoint.folders import read_state
from imagenet_cls.checkpoint.progress import best_weights
from imagenet_cls.entry_points import load_extra
from imagenet_cls.errors import CheckpointError, UsageError
from imagenet_cls.lookup import did_you_mean
from imagenet_cls.report.jsonl import Record, read_metrics

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from imagenet_cls.inference.predictor import Predictor


class TrainedRun:
    """A run, finished or not.

    folder: the run folder, such as `work_dirs/photos`. Raises UsageError if it holds no run.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).absolute()  # the working directory may change
        _check_run_folder(self.folder)

    @property
    def metrics(self) -> list[Record]:
        """The records of `metrics.jsonl`, see docs/api.md."""
        return read_metrics(self.folder)

    @property
    def best(self) -> dict[str, Any]:
        """The evaluation whose weights `predictor()` loads: a record of `metrics`.

        Raises CheckpointError if the run has none yet.
        """
        best = read_state(self.folder)["progress"]["best"]
        if not best:
            raise CheckpointError(f"{self.folder}: no evaluation yet.", "Train for an epoch.")
        weights = best_weights(best)
        for record in self.metrics:
            is_eval = record["kind"] == "eval" and record["weights"] == weights
            if is_eval and record["step"] == best[weights]["step"]:
                return record
        raise CheckpointError(
            f"{self.folder}: metrics.jsonl lacks the best evaluation.", "Restore the file."
        )

    def dataframe(self) -> "pandas.DataFrame":
        """`metrics` as a table of pandas, which has to be installed."""
        try:
            import pandas
        except ImportError as error:
            raise UsageError(
                "A dataframe needs pandas.", "Install it: pip install pandas"
            ) from error
        return pandas.DataFrame(self.metrics)

    def plot(self) -> "Figure":
        """The curves of the run's page over the epochs. A notebook shows the returned figure."""
        figure: Figure = load_extra("TrainedRun.plot")(self.folder)
        return figure

    def report(self) -> Path:
        """Write the page of `tools/report.py` into the run folder. Returns its path."""
        load_extra("TrainedRun.report")([str(self.folder)])
        return self.folder / "report.html"

    def predictor(self, **options: Any) -> "Predictor":
        """A `Predictor` with the best weights of the run. options: those of `Predictor`."""
        from imagenet_cls.inference.predictor import Predictor  # imports torch

        return Predictor(self.folder, **options)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.folder)!r})"


def _check_run_folder(folder: Path) -> None:
    """Raise UsageError if a folder holds no run, or can't be read."""
    try:
        is_run = (folder / "metrics.jsonl").is_file()
    except PermissionError as error:
        raise UsageError(f"{folder}: {error.strerror}.", "Give this user access to it.") from error
    if not folder.exists():
        near = did_you_mean(str(folder), [str(path) for path in folder.parent.glob("*")])
        raise UsageError(
            f"{folder}: there is no such folder{near or '.'}", "Give a folder like work_dirs/demo."
        )
    if not is_run:
        raise UsageError(
            f"{folder}: not a run folder (it has no metrics.jsonl).",
            "Give a folder like work_dirs/demo.",
        )
