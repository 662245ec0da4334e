"""`report.py`: one page about runs that are finished, interrupted or new; wrong folders."""

import json
import os
import re
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import unquote_to_bytes

import helpers
import pytest
from helpers import (
    REPOSITORY,
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
from imagenet_cls.extras.pages import report
from imagenet_cls.extras.pages.report import report_command
from imagenet_cls.extras.pages.runs_page import read_run, run_statistics
from imagenet_cls.files import take_lock

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


def write_records(folder: Path, *written: dict[str, Any]) -> Path:
    """A run folder with these metrics alone."""
    lines = [json.dumps(record) + "\n" for record in written]
    write_files(folder, {"metrics.jsonl": "".join(lines)})
    return folder


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


def test_state_of_a_run(run: Path, copy: Path, tmp_path: Path) -> None:
    """Running while another process has the lock; stopped early."""

    def stop_early(state: dict[str, Any]) -> None:
        state["progress"]["stopped_early"] = True
        state["plan"]["total_steps"] = 44

    edit_state(newest(copy), stop_early)
    page = tmp_path / "page.html"
    tool = REPOSITORY / "tools" / "report.py"
    saving = Path(shutil.copytree(run, tmp_path / "saving"))
    shutil.rmtree(newest(saving))
    with take_lock(saving, ""):
        done = helpers.run([sys.executable, tool, saving, copy, "--out", page])
    assert done.returncode == 0
    found = cells(page.read_text())
    assert "running: step 22 of 22" in found and "stopped early: step 22 of 44" in found


def test_epochs_and_ranks_of_a_run_that_resumed_with_another_batch(
    copy: Path, tmp_path: Path
) -> None:
    """22 steps, at the end of the third epoch. The batch of the first intervals is unknown. SLURM
    and MPI do not set WORLD_SIZE, which env.json would have.
    """

    def resume(state: dict[str, Any]) -> None:
        state["plan"]["offset"] = 11
        state["world_size"] = 8

    edit_state(newest(copy), resume)
    page = page_of(tmp_path / "page.html", copy)
    assert "3 of 3" in page and "2 of 2" not in page


def test_every_figure_of_the_page_is_from_the_files_of_the_run(run: Path, tmp_path: Path) -> None:
    train, results = records(run, "train"), records(run, "eval")
    intervals = [record for record in train if "images_per_sec" in record]
    assert [record["step"] for record in intervals] == [5, 10, 11, 15, 20, 22]
    speeds = [record["images_per_sec"] for record in intervals]
    steps = [5, 5, 1, 4, 5, 2]
    seconds = sum(count * 128 / speed for count, speed in zip(steps, speeds, strict=True))
    seconds += sum(record["seconds"] for record in results)
    best = max(results, key=lambda record: record["top1_pct"])
    page = page_of(tmp_path / "page.html", run)
    found = cells(page)
    expected = {
        "state": "done, 22 steps",
        "best validation top-1": BY_NAME["top1"].format(best["top1_pct"], 2, best["images"]),
        "last validation top-1, %": f"{results[-1]['top1_pct']:.2f}",
        "last training loss": f"{train[-1]['loss']:.4f}",
        "time": str(timedelta(seconds=round(seconds))),
        "images per second": f"{median(speeds):,.0f}",
        "waiting for data, %": f"{fmean(record['data_wait_pct'] for record in intervals):.1f}",
        "last validation mean_target": f"{results[-1]['mean_target']:.4f}",
    }
    first = found.index("state")
    assert dict(zip(found[first:][::2], found[first:][1::2], strict=False)) | expected == dict(
        zip(found[first:][::2], found[first:][1::2], strict=False)
    )
    assert f">step-{best['step']:07d}</a>, best" in page
    versions = json.loads((run / "env.json").read_text())["versions"]
    assert all(f"<span>{name} {value}</span>" in page for name, value in versions.items())
    assert found[found.index("optimizer.lr") + 1] == "0.03"


def test_hours_of_a_run_that_continues_another_are_of_its_own_steps(
    run: Path, tmp_path: Path
) -> None:
    lines = [TRAIN | {"step": step} for step in range(5001, 5021)]
    lines[-1]["images_per_sec"] = 64.0
    write_records(tmp_path, *lines, EVAL | {"step": 5020})
    shutil.copy(run / "config.yaml", tmp_path)
    hours = run_statistics(read_run(tmp_path, "run"))["hours"]
    assert 3600 * hours == pytest.approx(20 * 128 / 64 + 1)


def test_last_result_is_of_the_weights_with_the_best_one(tmp_path: Path) -> None:
    values = [(10, "raw", 60.0), (10, "ema", 20.0), (20, "raw", 50.0), (20, "ema", 55.0)]
    keys = ("step", "weights", "top1_pct")
    lines = [EVAL | dict(zip(keys, value, strict=True)) for value in values]
    run = write_records(tmp_path / "run", *lines)
    found = run_statistics(read_run(run, "run"))
    assert [found["best"], found["best_record"]["weights"], found["last"]] == [60.0, "raw", 50.0]
    other = write_records(tmp_path / "other", EVAL | {"top1_pct": 61.5})
    page = page_of(tmp_path / "page.html", run, other)
    assert "<strong>60.75</strong>" in page  # the median of two runs is their mean


def test_page_of_a_run_with_its_classes_and_first_images(copy: Path, tmp_path: Path) -> None:
    """A class without images is left out. The rate of the optimizer is the one for the batch."""
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
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("lr_base_batch: null", "lr_base_batch: 64"))
    page = page_of(tmp_path / "page.html", copy)
    assert "Accuracy by class, epoch 2" in page and "First images of the training" in page
    texts = re.findall("<text[^>]*>(.*?)</text>", page)
    assert {"a$b$ (4)", "&lt;b&gt; (8)"} <= {*texts} and "none (0)" not in texts
    assert "0.06 (0.03 for a batch of 64)" in cells(page)
    (copy / "classes.json").write_text("[3]")
    assert "classes.json" in fails(4, report_command, copy)


def test_curves_are_grouped_by_a_key(run: Path, copy: Path, tmp_path: Path) -> None:
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("lr: 0.03", "lr: 0.07", 1))
    out = tmp_path / "page.html"
    succeeds(report_command, run, copy, "--out", out, "--group-by", "optimizer.lr")
    assert all(f"optimizer.lr={value}" in out.read_text() for value in (0.03, 0.07))
    fails(2, report_command, run, copy, "--out", out, "--group-by", "seed")


def test_watched_page_reloads_until_the_run_ends(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[str] = []
    monkeypatch.setattr(report, "is_locked", lambda run: not pages)
    monkeypatch.setattr(time, "sleep", lambda _: pages.append((copy / "report.html").read_text()))
    succeeds(report_command, copy, "--watch")
    pages.append((copy / "report.html").read_text())
    assert ['http-equiv="refresh"' in page for page in pages] == [True, False]


def test_new_run_has_a_page(run: Path, tmp_path: Path) -> None:
    """Records without an evaluation, with a loss that is not finite; no config, checkpoint or
    versions.
    """
    empty = write_records(tmp_path / "empty")
    new = write_records(tmp_path / "new", TRAIN | {"loss": "NaN"})
    page = page_of(tmp_path / "page.html", run, empty, new)
    assert "interrupted: step 1, no checkpoint" in page and page.count("is not compared") == 2


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", {"kind": "train", "step": 1}),
        ("metrics.jsonl", {"kind": "eval", "step": 1, "weights": "raw", "seconds": 1.0}),
        ("env.json", {"code": 3}),
        ("checkpoints/step-0000022/state.json", {"plan": 3}),
    ],
)
def test_invalid_content_is_an_error_that_names_the_file(
    run: Path, copy: Path, tmp_path: Path, file: str, content: dict[str, object]
) -> None:
    (copy / file).write_text(json.dumps(content) + "\n")
    err = fails(4, report_command, run, copy, "--out", tmp_path / "page.html")
    assert f"{copy}/{file}:" in err and not (tmp_path / "page.html").exists()


def test_page_is_in_the_run_folder_or_for_several_runs_in_the_current_folder(
    run: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert succeeds(report_command, "copy") == "wrote copy/report.html\n"
    assert succeeds(report_command, "copy", run) == "wrote report.html\n"


def test_other_files_and_folders_among_several_paths_are_left_out(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "average").mkdir()
    others = [tmp_path / "average", run / "config.yaml"]
    out = succeeds(report_command, *others, run, "--out", tmp_path / "page.html")
    assert all(f"left out {path}: " in out for path in others)
    assert (tmp_path / "page.html").read_text().count("<h2>Results</h2>") == 1


def test_wrong_folders_and_names_are_usage_errors(run: Path, tmp_path: Path) -> None:
    config, missing = run / "config.yaml", tmp_path / "missing"
    for words in ([tmp_path], [tmp_path, config], [run, missing], [run, "--out", missing]):
        fails(2, report_command, *words)
