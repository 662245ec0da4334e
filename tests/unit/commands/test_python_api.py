"""The Python API without a process: its keyword arguments, what it passes on, and messages."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import imagenet_cls
from imagenet_cls.commands import trained_run
from imagenet_cls.commands.child import command_arguments
from imagenet_cls.commands.python_api import StopRun, evaluation_watcher
from imagenet_cls.errors import UsageError
from imagenet_cls.report.jsonl import MetricsFile
from imagenet_cls.text import CALLER_VARIABLE


def evaluated(step: int, **values: Any) -> dict[str, Any]:
    record = {"kind": "eval", "step": step, "epoch": step - 1, "weights": "raw", "seconds": 0.1}
    return record | {"top1_pct": 10.0 * step, "loss": 1.0, "images": 10} | values


@pytest.fixture
def run(tmp_path: Path) -> imagenet_cls.TrainedRun:
    """A run that has made three evaluations; the second one is the best."""
    MetricsFile(tmp_path / "<run>" / "metrics.jsonl").write(
        [evaluated(1), {"kind": "train", "step": 2}, evaluated(2, top1_pct=90.0), evaluated(3)]
    )
    return imagenet_cls.TrainedRun(tmp_path / "<run>")


@pytest.mark.parametrize(
    ("function", "name", "meant"),
    [
        (imagenet_cls.train, "epoch", "epochs"),
        (imagenet_cls.train, "overwite", "overwrite"),
        (imagenet_cls.evaluate, "dat", "data"),
        (imagenet_cls.Predictor, "allow_imports", "allow_import"),
    ],
)
def test_misspelled_keyword_names_the_right_one(
    function: Callable[..., Any], name: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=f"'{meant}'"):
        function("photos", **{name: 3})
    assert meant in inspect.signature(function).parameters  # a notebook shows it


def test_values_of_python_are_the_options_of_a_command() -> None:
    options = {"resume": True, "overwrite": False, "gpus": 0, "out": None, "data": Path("a b")}
    words = command_arguments({"seed": 1}, **options, allow_change=["a", "b"], allow_import="c:d")
    assert words == [
        *("seed=1", "--resume", "--gpus", "0", "--data", "a b"),
        *("--allow-change", "a", "--allow-change", "b", "--allow-import", "c:d"),
    ]


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        ("--resume continues it, --overwrite removes it", "resume=True overwrite=True"),
        ("trust it: --allow-import a:b --allow-import c:d", "allow_import=['a:b', 'c:d']"),
        ("allow the change: --allow-change train.epochs", "allow_change=['train.epochs']"),
        ("another folder with --work-dir.", "work_dir."),
    ],
)
def test_errors_name_keywords_in_python_and_options_on_the_command_line(
    options: str, keywords: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "Or: imagenet-cls train a.yaml --resume"
    error = UsageError("Wrong.", f"{options}\n{line}")
    monkeypatch.setenv(CALLER_VARIABLE, "command")
    assert options in str(error)
    monkeypatch.delenv(CALLER_VARIABLE)
    assert "--" not in str(error).splitlines()[1] and line in str(error)
    assert all(word in str(error) for word in keywords.split())


def test_watcher_reports_each_new_evaluation_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    MetricsFile(file).write([evaluated(1), evaluated(2)])
    calls: list[dict[str, Any]] = []
    watch = evaluation_watcher(file, calls.append)
    watch()
    assert calls == []
    MetricsFile(file).write([evaluated(3, loss=float("nan")), {"kind": "train", "step": 4}])
    watch()
    MetricsFile(file).write([evaluated(4)])
    watch()
    assert [record["step"] for record in calls] == [3, 4]
    file.unlink()  # as a run with `overwrite` does
    watch()
    MetricsFile(file).write([evaluated(1, seconds=0.2)])
    stop = evaluation_watcher(tmp_path / "metrics.jsonl", lambda record: record["step"] == 2)
    watch()
    assert [record["step"] for record in calls] == [3, 4, 1]
    stop()
    MetricsFile(file).write([evaluated(2), evaluated(3)])
    with pytest.raises(StopRun):
        stop()


def test_table_of_a_run_has_the_best_evaluation_first(run: imagenet_cls.TrainedRun) -> None:
    page = run._repr_html_()
    assert page.index("90.00 %") < page.index("30.00 %") < page.index("10.00 %")
    assert "&lt;run&gt;" in page and "<run>" not in page
    MetricsFile(run.folder / "empty" / "metrics.jsonl").close()
    assert "empty" in imagenet_cls.TrainedRun(run.folder / "empty")._repr_html_()


def test_dataframe_has_one_kind_of_records_and_needs_pandas(
    run: imagenet_cls.TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    assert list(run.dataframe("eval")["step"]) == [1, 2, 3]
    assert len(run.dataframe()) == 4
    monkeypatch.setattr("imagenet_cls.lookup.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pandas"):
        run.dataframe()


def test_export_is_the_command(
    run: imagenet_cls.TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(trained_run, "run_command", lambda *words: calls.append(words))
    assert run.export(preprocess="normalize") == run.folder / "model.onnx"
    assert run.export("model.pt2", allow_import=["a:b"]) == Path("model.pt2")
    onnx = ["--out", str(run.folder / "model.onnx"), "--preprocess", "normalize"]
    torch = ["--out", "model.pt2", "--allow-import", "a:b"]
    assert calls == [("export", [str(run.folder), *words]) for words in (onnx, torch)]


def test_mistakes_need_one_label_for_each_image(
    run: imagenet_cls.TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"config": {"data": {"labels": "multi"}}}
    monkeypatch.setattr(trained_run, "read_state", lambda folder: state)
    with pytest.raises(UsageError):
        run.mistakes()


def test_tqdm_does_not_warn_of_missing_widgets() -> None:
    program = "import imagenet_cls, warnings; warnings.warn('IProgress not found. Please update')"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=240)
