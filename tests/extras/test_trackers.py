"""Trackers: an error of the service reaches the run."""

import sys

import pytest
from helpers import wait_for

from imagenet_cls.config.schema import Config
from imagenet_cls.extras.trackers import Mlflow

# As much of MLflow as the writer uses, with a server that is away.
MLFLOW = """
from types import SimpleNamespace

entities = SimpleNamespace(Metric=lambda key, value, timestamp, step: (key, value, step))
run = SimpleNamespace(info=SimpleNamespace(run_id="1"), data=SimpleNamespace(metrics={}))
set_tracking_uri = set_experiment = log_params = end_run = lambda argument: None
start_run = lambda run_id, run_name: run

class MlflowClient:
    def log_batch(self, run_id, metrics):
        raise ConnectionError("the server is away")
"""


def test_failed_upload_to_mlflow_is_an_error_of_the_next_write_or_the_end(tmp_path, monkeypatch):
    (tmp_path / "mlflow.py").write_text(MLFLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("write", "close"):
        (tmp_path / name).mkdir()
    writer = Mlflow(tmp_path / "write", Config(), 0)
    with pytest.raises(ConnectionError):
        wait_for(lambda: bool(writer.write([(1, {"a": 1.0})])), "the error of a write", 60)
    writer = Mlflow(tmp_path / "close", Config(), 0)
    writer.write([(1, {"train/loss": 1.0})])
    with pytest.raises(ConnectionError):
        writer.close(True)
    del sys.modules["mlflow"]
