"""The notebook in `examples/` runs from its first to its last cell."""

from pathlib import Path

import pytest
from helpers import REPOSITORY, environment

import imagenet_cls


@pytest.mark.nightly
def test_notebook_of_own_images_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel")
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(REPOSITORY / "examples/own_images.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)  # they would be out of date
    place = {"metadata": {"path": tmp_path}}
    client.NotebookClient(notebook, timeout=300, resources=place).execute()  # raises their errors
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    run = imagenet_cls.TrainedRun(tmp_path / "work_dirs" / "photos")
    assert run.best["top1_pct"] > 60  # chance is 33
    (outputs,) = (cell.outputs for cell in cells if cell.source == "run.plot()")
    assert "image/png" in outputs[0].data
    assert (run.folder / "report.html").is_file()
