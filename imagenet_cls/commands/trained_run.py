"""A run folder, for Python and for the commands that read it, and evaluations. Imports no torch."""

import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagenet_cls.checkpoint.folders import read_state
from imagenet_cls.checkpoint.progress import best_weights
from imagenet_cls.commands.child import command_arguments, run_command
from imagenet_cls.config.metrics import main_metric
from imagenet_cls.entry_points import load_extra
from imagenet_cls.errors import CheckpointError, UsageError
from imagenet_cls.lookup import check_packages, did_you_mean, suggest_keywords
from imagenet_cls.report.jsonl import Record, describe_result, read_metrics

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from imagenet_cls.inference.predictor import Predictor

_SHOWN_EVALUATIONS = 10


@suggest_keywords
def evaluate(
    weights: str | os.PathLike[str],
    data: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    device: str | int | None = None,
    gpus: int | None = None,
    allow_import: Sequence[str] = (),
    out: str | Path | None = None,
) -> dict[str, dict[str, float]]:
    """Evaluate a `TrainedRun`, a run folder or a checkpoint in a child process.

    data: a separate test set, see docs/your_data.md; None for the validation images of the run.
    device: as in the config. gpus: ranks to start on this machine. allow_import: as for
    `Predictor`. out: also write a row for each image, as .csv or else as lines of JSON.

    Returns the results of the raw weights and of the EMA by name (`raw`, `ema`), such as
    `{"raw": {"top1_pct": 97.2, ...}}`, with data.labels multi `map_pct`; NaN is None. Raises the
    errors of the command as a UserError.
    """
    values = {**(overrides or {})}
    if device is not None:
        values["device"] = device
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        words = command_arguments(
            values, allow_import=allow_import, data=data, gpus=gpus, out=out, results=file
        )
        run_command("test", [os.fspath(weights), *words])
        return json.loads(file.read_text())


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
        for record in read_metrics(self.folder, "eval"):
            if (record["weights"], record["step"]) == (weights, best[weights]["step"]):
                return record
        raise CheckpointError(
            f"{self.folder}: metrics.jsonl lacks the best evaluation.", "Restore the file."
        )

    def dataframe(self, kind: str | None = None) -> "pandas.DataFrame":
        """The `metrics` as a table of pandas, which has to be installed. kind: `train`, `eval` or
        `event`, for these records only.
        """
        check_packages("hf", "pandas")
        import pandas

        return pandas.DataFrame(read_metrics(self.folder, kind))

    def evaluate(
        self, data: str | Path | None = None, *arguments: Any, **options: Any
    ) -> dict[str, dict[str, float]]:
        """`imagenet_cls.evaluate` of this run, with the same arguments."""
        return evaluate(self.folder, data, *arguments, **options)

    def mistakes(
        self, data: str | Path | None = None, *arguments: Any, **options: Any
    ) -> list[dict[str, Any]]:
        """The images that the best weights misclassify, the most confident mistake first: path,
        true and predicted class, and confidence, the probability of the predicted class.

        The arguments are those of `evaluate`. path: of the image file, else what
        `tools/test.py --out` writes. Raises UsageError with data.labels multi.
        """
        config = read_state(self.folder)["config"]["data"]
        if config.get("labels") == "multi":
            raise UsageError(
                f"{self.folder}: an image with several labels is not right or wrong as a whole.",
                "Use evaluate(out='predictions.jsonl'), which writes the labels of each image.",
            )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "predictions.jsonl"
            with redirect_stdout(io.StringIO()):
                self.evaluate(data, *arguments, **options, out=file)
            rows = [json.loads(line) for line in file.open()]
        found = []
        for row in rows:
            predicted, confidence = row["top"][0]
            path = Path(data or config["root"]) / row["image"]
            mistake = {"path": str(path) if path.is_file() else row["image"]}
            mistake |= {"true": row["target"], "predicted": predicted, "confidence": confidence}
            if predicted != row["target"]:
                found.append(mistake)
        return sorted(found, key=itemgetter("confidence"), reverse=True)

    def export(self, out: str | Path | None = None, **options: Any) -> Path:
        """Write the best weights as `tools/export.py` does, and compare the file with PyTorch, in a
        child process. Returns the path of the file.

        out: by default `model.onnx` in the run folder; with the suffix .pt2 a file of
        torch.export, `model.pt2`. options: preprocess, weights, allow_import, as those of the
        command.
        """
        file = Path(out or self.folder / "model.onnx")
        words = command_arguments({}, out=file, **options)
        run_command("export", [str(self.folder), *words])
        return file

    def plot(self) -> "Figure":
        """The curves of the run's page over the epochs. A notebook shows the returned figure."""
        return load_extra("TrainedRun.plot")(self.folder)

    def report(self) -> Path:
        """Write the page of `tools/report.py` into the run folder. Returns its path."""
        load_extra("TrainedRun.report")([str(self.folder)])
        return self.folder / "report.html"

    def predictor(self, **options: Any) -> "Predictor":
        """A `Predictor` with the best weights of the run. options: those of `Predictor`."""
        from imagenet_cls.inference.predictor import Predictor  # imports torch

        return Predictor(self.folder, **options)

    def _repr_html_(self) -> str:
        """The folder, and lines about the best evaluations, for a notebook."""
        text = repr(self)
        records = read_metrics(self.folder, "eval")
        records.sort(key=lambda record: record[main_metric(record).field], reverse=True)
        for record in records[:_SHOWN_EVALUATIONS]:
            result = "  ".join(describe_result(record, 2, 0))
            text += f"\nepoch {record['epoch'] + 1}  {record['weights']}  {result}"
        return f"<pre>{escape(text)}</pre>"

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
    if not is_run:
        parent = [] if folder.exists() else folder.parent.glob("*")
        near = did_you_mean(str(folder), map(str, parent))
        raise UsageError(
            f"{folder}: not a run folder (it has no metrics.jsonl){near or '.'}",
            "Give a folder like work_dirs/demo.",
        )
