"""`report.py`: one page about runs that are finished, interrupted or new; wrong folders."""

import json
import os
import re
import shutil
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from helpers import (
    arguments,
    edit_state,
    fails,
    newest,
    records,
    succeeds,
    train_here,
    write_files,
)
from PIL import Image

from imagenet_cls.config.metrics import BY_NAME
from imagenet_cls.config.schema import Config
from imagenet_cls.extras.pages import runs_page
from imagenet_cls.extras.pages.curves import curves_of
from imagenet_cls.extras.pages.report import report_command
from imagenet_cls.extras.pages.runs_page import read_run, run_statistics

SHARED = {"step": 1, "epoch": 0, "loss": 1.0, "top1_pct": 50.0}
TRAIN = {"kind": "train", "lr": 0.1, "data_wait_pct": 0.0} | SHARED
EVAL = {"kind": "eval", "weights": "raw", "seconds": 1.0} | SHARED


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a <b>first"
    options = {"log__every_steps": 5, "eval__metrics": "[helpers:mean_target]"}
    train_here(arguments(digits, folder, **options))
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def page_of(out: Path, *runs: Path) -> str:
    succeeds(report_command, *runs, "--out", out)
    return out.read_text()


def cells(page: str) -> list[str]:
    return re.findall(r"<td[^>]*>(.*?)</td>", page)


def test_page_of_a_finished_and_an_interrupted_run(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / os.fsdecode(b"other\xff")))
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("lr: 0.03", "lr: 0.07", 1))
    code = {"commit": "0123456789abcdef", "uncommitted_changes": True}
    (other / "env.json").write_text(json.dumps({"code": code}))
    content = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text("".join(content.splitlines(True)[:9])[:-20])
    page = page_of(tmp_path / "new" / "page.html", run, other)
    assert re.findall("<h3>(.*?)</h3>", page) == ["Loss", "validation top-1, %", "Learning rate"]
    assert f"{tmp_path}/other" not in page  # a name is the path below the common folder
    assert "<b>first" not in page and "a &lt;b&gt;first" in page and "other\\udcff" in page
    assert ">optimizer.<wbr>lr</button>" in page
    assert {"done", "interrupted: step 8 of 22", "0.03", "0.07"} <= {*cells(page)}
    assert "commit 0123456789ab, with changes" in page
    links = re.findall(r'<a href="([^"]+)">', page)
    checkpoints = [tmp_path / "new" / os.fsdecode(unquote_to_bytes(link)) for link in links]
    assert links and all((path / "manifest.json").is_file() for path in checkpoints)


def test_state_of_a_run(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped early; running while another process has the lock."""

    def stop_early(state: dict[str, Any]) -> None:
        state["progress"]["stopped_early"] = True
        state["plan"]["total_steps"] = 44

    edit_state(newest(copy), stop_early)
    assert read_run(copy, "run").state == "stopped early: step 22 of 44"
    shutil.rmtree(newest(copy))
    monkeypatch.setattr(runs_page, "is_locked", lambda folder: True)
    assert read_run(copy, "run").state == "running: step 22 of 22"


def test_every_figure_of_the_page_is_from_the_files_of_the_run(run: Path, tmp_path: Path) -> None:
    train, results = records(run, "train"), records(run, "eval")
    intervals = [record for record in train if "images_per_sec" in record]
    speeds = [record["images_per_sec"] for record in intervals]
    ends = [record["step"] for record in intervals]
    assert ends == [5, 10, 11, 15, 20, 22]
    seconds = sum(np.diff([0, *ends]) * 128 / speeds)
    seconds += sum(record["seconds"] for record in results)
    best = max(results, key=lambda record: record["top1_pct"])
    page = page_of(tmp_path / "page.html", run)
    found = cells(page)
    expected = {
        "state": "done: step 22 of 22",
        "best validation top-1": BY_NAME["top1"].format(best["top1_pct"], 2, best["images"]),
        "last validation top-1, %": f"{results[-1]['top1_pct']:.2f}",
        "last training loss": f"{train[-1]['loss']:.4f}",
        "time": str(timedelta(seconds=round(seconds))),
        "images per second": f"{median(speeds):,.0f}",
        "waiting for data, %": f"{fmean(record['data_wait_pct'] for record in intervals):.1f}",
        "last validation mean_target": f"{results[-1]['mean_target']:.4f}",
        "optimizer.lr": "0.03",
    }
    assert expected == {name: found[found.index(name) + 1] for name in expected}
    assert f">step-{best['step']:07d}</a>, best" in page
    versions = json.loads((run / "env.json").read_text())["versions"]
    assert all(f"<span>{name} {value}</span>" in page for name, value in versions.items())


def test_time_of_a_run_that_continues_another_is_of_its_own_steps() -> None:
    lines = [TRAIN | {"step": step} for step in range(5001, 5021)]
    lines[-1]["images_per_sec"] = 64.0
    curves = curves_of([*lines, EVAL | {"step": 5020}])
    seconds = 3600 * run_statistics(curves, Config())["hours"]
    assert seconds == pytest.approx(20 * Config().train.global_batch_size / 64 + 1)


def test_last_result_is_of_the_weights_with_the_best_one() -> None:
    values = [(10, "raw", 60.0), (10, "ema", 20.0), (20, "raw", 50.0), (20, "ema", 55.0)]
    keys = ("step", "weights", "top1_pct")
    lines = [EVAL | dict(zip(keys, value, strict=True)) for value in values]
    found = run_statistics(curves_of(lines), None)
    assert [found["best"], found["best_record"]["weights"], found["last"]] == [60.0, "raw", 50.0]


def test_page_of_a_run_with_its_classes_and_first_images(copy: Path, tmp_path: Path) -> None:
    """A class without images is left out."""
    (copy / "classes.json").write_text(
        json.dumps(
            {
                "classes": ["a$b$", "<b>", "none"],
                "epoch": 1,
                "raw": {"class_pct": [25.0, 75.0, None], "class_images": [4, 8, 0]},
            }
        )
    )
    (copy / "plots").mkdir()
    Image.new("RGB", (20, 10)).save(copy / "plots" / "first_batch.jpg")
    page = page_of(tmp_path / "page.html", copy)
    assert "Accuracy by class, epoch 2" in page and "First images of the training" in page
    texts = re.findall("<text[^>]*>(.*?)</text>", page)
    assert {"a$b$ (4)", "&lt;b&gt; (8)"} <= {*texts} and "none (0)" not in texts
    (copy / "classes.json").write_text("[3]")
    assert "classes.json" in fails(4, report_command, copy)


def test_new_run_has_a_page(run: Path, tmp_path: Path) -> None:
    """Records without an evaluation, with a loss that is not finite; no config, checkpoint or
    versions.
    """
    new = json.dumps(TRAIN | {"loss": "NaN"}) + "\n"
    write_files(tmp_path, {"empty/metrics.jsonl": "", "new/metrics.jsonl": new})
    page = page_of(tmp_path / "page.html", run, tmp_path / "empty", tmp_path / "new")
    assert "interrupted: step 1, no checkpoint" in page and page.count("is not compared") == 2


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", {"kind": "train", "step": 1}),
        ("env.json", {"code": 3}),
        ("checkpoints/step-0000022/state.json", {"plan": 3, "progress": 3}),
    ],
)
def test_invalid_content_is_an_error_that_names_the_run(
    run: Path, copy: Path, tmp_path: Path, file: str, content: dict[str, object]
) -> None:
    (copy / file).write_text(json.dumps(content) + "\n")
    err = fails(4, report_command, run, copy, "--out", tmp_path / "page.html")
    assert str(copy) in err and not (tmp_path / "page.html").exists()


def test_page_is_in_the_run_folder_or_for_several_runs_in_the_current_folder(
    run: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other files and folders among several paths are left out."""
    monkeypatch.chdir(tmp_path)
    assert succeeds(report_command, "copy") == "wrote copy/report.html\n"
    others = [tmp_path, run / "config.yaml"]
    *left_out, wrote = succeeds(report_command, *others, "copy", run).splitlines()
    assert wrote == "wrote report.html" and len(left_out) == 2
    assert "<title>2 runs</title>" in Path("report.html").read_text()


def test_wrong_folders_and_names_are_usage_errors(run: Path, tmp_path: Path) -> None:
    config, missing = run / "config.yaml", tmp_path / "missing"
    for words in ([tmp_path], [tmp_path, config], [run, missing], [run, "--out", missing]):
        fails(2, report_command, *words)
