"""`report.py`: one page about runs that are finished, interrupted or new; wrong folders."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from helpers import REPOSITORY, arguments, call, edit_state, fails, newest, succeeds, train_here

from imagenet_cls.config.compare import differing_values
from imagenet_cls.config.load import load_config
from imagenet_cls.extras.pages.figures import curve_figures
from imagenet_cls.extras.pages.render import format_duration
from imagenet_cls.extras.pages.report import report_command
from imagenet_cls.extras.pages.runs_page import read_run, run_statistics
from imagenet_cls.files import is_locked
from imagenet_cls.report.jsonl import read_metrics


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a <b>first"
    train_here(
        arguments(
            digits,
            folder,
            log__tensorboard="true",
            log__every_steps=5,
            eval__metrics="[helpers:mean_target]",
        )
    )
    return folder


def cells(page: str) -> list[str]:
    return re.findall(r"<td[^>]*>(.*?)</td>", page)


def configs_of(page: str) -> list[str]:
    return re.findall(r"<pre>\n(.*?)</pre>", page, re.DOTALL)


def figures(page: str) -> list[dict[str, Any]]:
    """The data of the figures of a page."""
    text = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    return json.loads(text[0])


def test_page_of_a_finished_and_an_interrupted_run(
    run: Path, tmp_path: Path, call: Callable
) -> None:
    other = Path(shutil.copytree(run, tmp_path / os.fsdecode(b"other\xff")))
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("lr: 0.03", "lr: 0.07", 1))
    code = {"commit": "0123456789abcdef", "uncommitted_changes": True}
    (other / "env.json").write_text(json.dumps({"code": code, "versions": {"torch": "9.9"}}))
    lines = (other / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (other / "metrics.jsonl").write_bytes(b"".join(lines[:8]) + lines[8][:20])
    out = succeeds(report_command, run, other, "--out", tmp_path / "new" / "page.html")
    assert out == f"wrote {tmp_path}/new/page.html\n"
    page = (tmp_path / "new" / "page.html").read_text()
    titles = [figure["title"] for figure in figures(page)]
    top1 = "Top-1 on validation images, %"
    assert titles == ["Loss", top1, "Learning rate", "Images per second"]
    assert f"{tmp_path}/other" not in page  # a name is the path below the common folder
    assert "<b>first" not in page and "a &lt;b&gt;first" in page
    assert {"done, 22 steps", "interrupted: step 8 of 22"} <= {*cells(page)}
    assert "other\\udcff" in page
    assert {"0123456789ab, with changes", "9.9"} <= {*cells(page)}
    assert ">optimizer.lr</button>" in page and {"0.03", "0.07"} <= {*cells(page)}
    evaluations = [record for record in read_metrics(run) if record["kind"] == "eval"]
    assert f"{max(record['top1_pct'] for record in evaluations):.2f}" in cells(page)
    links = re.findall(r'<a href="([^"]+)">', page)
    assert links
    for link in links:
        checkpoint = tmp_path / "new" / os.fsdecode(unquote_to_bytes(link))
        assert (checkpoint / "manifest.json").is_file()
    best = max(evaluations, key=lambda record: record["top1_pct"])
    assert f">step-{best['step']:07d}</a>, best top-1" in page


def test_curves_show_where_a_run_was_resumed(digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for epochs, resumed in ((1, []), (2, [[0, 11]])):
        train_here(
            [
                *arguments(digits, run, train__epochs=epochs),
                "--resume",
                "--allow-change",
                "train.epochs",
            ]
        )
        succeeds(report_command, run, "--out", tmp_path / "page.html")
        for figure in figures((tmp_path / "page.html").read_text()):
            assert figure["resumed"] == resumed


def test_state_of_a_run(run: Path, tmp_path: Path) -> None:
    """Running while another process has the lock, which the page leaves in place; stopped early."""
    early = Path(shutil.copytree(run, tmp_path / "early"))
    state = early / "checkpoints" / "step-0000022" / "state.json"
    content = json.loads(state.read_text())
    content["progress"]["stopped_early"], content["plan"]["total_steps"] = True, 44
    state.write_text(json.dumps(content))
    holder = (
        "import sys, pathlib\nfrom imagenet_cls.files import take_lock\n"
        "lock = take_lock(pathlib.Path(sys.argv[1]), '')\nprint(flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(run)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "\n"
        for _ in range(2):
            succeeds(report_command, run, early, "--out", tmp_path / "page.html")
            found = cells((tmp_path / "page.html").read_text())
            assert "running: step 22 of 22" in found and "stopped early: step 22 of 44" in found
            assert is_locked(run) and not is_locked(early) and not is_locked(tmp_path)
        other.communicate()
    assert not is_locked(run)


def test_epochs_of_a_run_that_resumed_with_another_batch(run: Path, tmp_path: Path) -> None:
    """22 steps, at the end of the third epoch. The batch of the first intervals is unknown."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    edit_state(newest(folder), lambda state: state["plan"].update(offset=11))
    succeeds(report_command, folder, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "3 of 3" in page and "2 of 2" not in page
    assert run_statistics(read_run(folder, "", {22: newest(folder)}), 128)["hours"] is None


def test_ranks_are_of_the_newest_checkpoint(run: Path, tmp_path: Path) -> None:
    """SLURM and MPI do not set WORLD_SIZE, which env.json would have."""
    folder = tmp_path / "step-0000022"
    shutil.copytree(run / "checkpoints" / folder.name, folder)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"world_size": 8}))
    assert read_run(run, "run", {22: folder}).ranks == 8


def test_every_figure_of_the_page_is_from_the_files_of_the_run(
    run: Path, tmp_path: Path, call: Callable
) -> None:
    statistics = run_statistics(read_run(run, "run", {}), 128)
    train = [record for record in read_metrics(run) if record["kind"] == "train"]
    speeds = {
        record["step"]: record["images_per_sec"] for record in train if "images_per_sec" in record
    }
    seconds = {
        record["step"]: record["seconds"]
        for record in read_metrics(run)
        if record["kind"] == "eval"
    }
    assert list(speeds) == [5, 10, 11, 15, 20, 22] and len(seconds) == 2
    steps = zip([5, 5, 1, 4, 5, 2], speeds.values(), strict=True)
    expected = sum(count * 128 / speed for count, speed in steps) + sum(seconds.values())
    assert statistics["hours"] == pytest.approx(expected / 3600)
    assert [statistics[key] for key in ("step", "ranks", "total_steps")] == [22, None, None]
    succeeds(report_command, run, "--out", tmp_path / "page.html")
    results = [record for record in read_metrics(run) if record["kind"] == "eval"]
    best = max(results, key=lambda record: record["top1_pct"])
    waits = [record["data_wait_pct"] for record in train if "data_wait_pct" in record]
    found = cells((tmp_path / "page.html").read_text())
    first = found.index("done, 22 steps") - 1
    assert found[first : first + 12] == [
        f"{best['top1_pct']:.2f}",
        "done, 22 steps",
        str(best["step"]),
        "raw",
        f"{results[-1]['top1_pct']:.2f}",
        f"{results[-1]['balanced_accuracy_pct']:.2f}",
        f"{train[-1]['loss']:.4f}",
        f"{expected:.3g} s",
        f"{median(speeds.values()):,.0f}",
        f"{fmean(waits):.1f}",
        "1",
        f"{results[-1]['mean_target']:.4f}",
    ]
    versions = json.loads((run / "env.json").read_text())["versions"]
    page = (tmp_path / "page.html").read_text()
    assert all(f"<th>{name}</th>" in page for name in versions)
    first = found.index(versions["imagenet_cls"])
    assert found[first : first + len(versions)] == list(versions.values())


def test_median_of_two_runs_is_their_mean(tmp_path: Path, call: Callable) -> None:
    for top1_pct in (60.0, 61.5):
        folder = tmp_path / str(top1_pct)
        folder.mkdir()
        shared = {"step": 1, "epoch": 0, "loss": 1.0, "top1_pct": top1_pct}
        train = {"kind": "train", "lr": 0.1, "data_wait_pct": 0.0} | shared
        result = {"kind": "eval", "weights": "raw", "seconds": 1.0} | shared
        (folder / "metrics.jsonl").write_text(f"{json.dumps(train)}\n{json.dumps(result)}\n")
    runs = [tmp_path / "60.0", tmp_path / "61.5"]
    assert call(report_command, *runs, "--out", tmp_path / "page.html")[0] == 0
    assert "<strong>60.75</strong>" in (tmp_path / "page.html").read_text()


def test_page_has_the_config_of_each_run(run: Path, tmp_path: Path) -> None:
    config = (run / "config.yaml").read_text()
    succeeds(report_command, run, "--out", tmp_path / "one.html")
    one = (tmp_path / "one.html").read_text()
    assert [html.unescape(text) for text in configs_of(one)] == [config]
    assert ">model.name</button></th>" in one and "helpers:plain" in cells(one)
    assert "test.py RUN --report DIR" in one

    other = Path(shutil.copytree(run, tmp_path / "other"))
    (other / "config.yaml").write_text(config + "# </pre>\n")
    invalid = Path(shutil.copytree(run, tmp_path / "invalid"))
    (invalid / "config.yaml").write_text("unknown: 1\n")
    succeeds(report_command, invalid, run, other, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert [html.unescape(text) for text in configs_of(page)] == [config, config + "# </pre>\n"]
    assert ">model.name</button></th>" not in page


def test_run_that_continues_another_and_has_a_metric_named_like_a_column(
    tmp_path: Path, call: Callable
) -> None:
    shared = {"epoch": 9, "loss": 1.0, "top1_pct": 50.0}
    train = {"kind": "train", "lr": 0.1, "data_wait_pct": 0.0} | shared
    records = [
        train | {"step": step} | ({"images_per_sec": 64.0} if step == 5020 else {})
        for step in range(5001, 5021)
    ]
    records += [
        {"kind": "eval", "step": 5020, "weights": "raw", "seconds": 5.0, "top-1 %": 0.25} | shared
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    assert run_statistics(read_run(tmp_path, "run", {}), 128)["hours"] == pytest.approx(
        (20 * 128 / 64 + 5) / 3600
    )
    assert call(report_command, tmp_path, "--out", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count(">last validation top-1 %</button></th>") == 2 and "0.2500" in cells(page)


def test_columns_name_training_or_validation(run: Path, tmp_path: Path) -> None:
    succeeds(report_command, run, "--out", tmp_path / "page.html")
    titles = re.findall(
        r"<th[^>]*><button[^>]*>(.*?)</button>", (tmp_path / "page.html").read_text()
    )
    results = [title for title in titles if re.match("best|last", title)]
    assert len(results) == 5 and "last validation mean_target" in results
    assert all(re.search("training|validation", title) for title in results)


def test_last_result_is_of_the_weights_with_the_best_one(tmp_path: Path) -> None:
    values = [(10, "raw", 60.0), (10, "ema", 20.0), (20, "raw", 50.0), (20, "ema", 55.0)]
    records = [
        {
            "kind": "eval",
            "step": step,
            "epoch": 0,
            "weights": weights,
            "top1_pct": top1_pct,
            "loss": 1.0,
            "seconds": 1,
        }
        for step, weights, top1_pct in values
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    found = run_statistics(read_run(tmp_path, "run", {}), 128)
    assert [found[key] for key in ("best_top1_pct", "best_weights", "last_top1_pct")] == [
        60.0,
        "raw",
        50.0,
    ]


def test_new_run_and_unreadable_config(run: Path, tmp_path: Path) -> None:
    """Records without an evaluation, with a loss that is not finite; no config, checkpoint or
    versions.
    """
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    (tmp_path / "new").mkdir()
    record = {"kind": "train", "step": 1, "epoch": 0, "loss": "NaN", "top1_pct": 1.0, "lr": 0.1}
    (tmp_path / "new" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "new" / "config.yaml").write_text("unknown: 1\n")
    code, _, err = call(
        report_command, run, tmp_path / "empty", tmp_path / "new", "--out", tmp_path / "page.html"
    )
    page = (tmp_path / "page.html").read_text()
    assert code == 0, err
    assert "interrupted: step 1, no checkpoint" in page and page.count("is not compared") == 2


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("metrics.jsonl", {"kind": "train", "step": 1}, "'loss'"),
        (
            "metrics.jsonl",
            {"kind": "eval", "step": 1, "weights": "raw", "seconds": 1.0},
            "'top1_pct'",
        ),
        ("env.json", {"code": 3}, "'int'"),
        ("env.json", {"versions": [1]}, "'list'"),
        ("env.json", None, "directory"),
        ("checkpoints/step-0000022/state.json", {"plan": 3}, "'int'"),
    ],
)
def test_invalid_content_is_an_error_that_names_the_file(
    run: Path,
    tmp_path: Path,
    file: str,
    content: dict[str, object] | None,
    reason: str,
) -> None:
    """content: None for a folder in the place of the file."""
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    (damaged / file).unlink()
    if content is None:
        (damaged / file).mkdir()
    else:
        (damaged / file).write_text(json.dumps(content) + "\n")
    err = fails(4, report_command, run, damaged, "--out", tmp_path / "page.html")
    assert f"{damaged}/{file}:" in err and reason in err
    assert not (tmp_path / "page.html").exists()


def test_page_is_in_the_run_folder_or_for_several_runs_in_the_current_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "copy")
    assert call(report_command, "copy")[:2] == (0, "wrote copy/report.html\n")
    assert call(report_command, "copy", run)[1] == "wrote report.html\n"


def test_link_js_writes_the_script_once_beside_the_page(
    run: Path, tmp_path: Path, call: Callable
) -> None:
    assert call(report_command, run, "--out", tmp_path / "page.html", "--link-js")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert '<script src="plotly.min.js"></script>' in page and len(page) < 200_000
    assert (tmp_path / "plotly.min.js").stat().st_size > 1_000_000


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_missing_package_is_a_usage_error_that_names_it(
    package: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    err = fails(2, report_command, run, "--out", tmp_path / "page.html")
    assert f"pip install {package}" in err


def test_durations_are_seconds_then_minutes_then_hours() -> None:
    hours = [0.001, 0.03, 0.5, 1.99, 2, 12.34, 2000]
    expected = ["3.6 s", "108 s", "30 min", "119 min", "2.0 h", "12.3 h", "2,000.0 h"]
    assert [format_duration(value) for value in hours] == expected


def test_points_of_a_figure_are_exact_or_say_what_they_are_the_mean_of() -> None:
    few = [{"kind": "train", "step": s, "loss": 2.5 / s, "lr": 1.0 / s} for s in range(1, 11)]
    loss, _, lr, _ = curve_figures([few])
    assert loss["curves"][0]["y"] == [float(f"{2.5 / s:.6g}") for s in range(1, 11)]
    assert loss["curves"][0]["size"] == 1
    many = [{"kind": "train", "step": s, "loss": 2.5 / s, "lr": 1.0 / s} for s in range(1, 3002)]
    loss, _, lr, _ = curve_figures([many, few])
    steps = [*range(4, 3001, 4), 3001]
    assert (loss["curves"][0]["x"], loss["curves"][0]["size"]) == (steps, 4)
    assert (lr["curves"][0]["x"], lr["curves"][0]["size"]) == (steps, 4)
    assert [curve["run"] for curve in lr["curves"]] == [0, 1]


def test_other_files_and_folders_among_several_paths_are_left_out(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "average").mkdir()
    (tmp_path / "picture.png").touch()
    others = [tmp_path / "average", tmp_path / "picture.png"]
    out = succeeds(report_command, others[0], run, others[1], "--out", tmp_path / "page.html")
    assert all(f"left out {path}: " in out for path in others)
    assert (tmp_path / "page.html").read_text().count("<tr data-run") == 1


def test_wrong_folders_and_names_are_usage_errors(run: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for wrong in (tmp_path, run / "config.yaml"):
        err = fails(2, report_command, wrong)
        assert str(wrong) in err
    fails(2, report_command, tmp_path, run / "config.yaml")
    assert str(missing) in fails(2, report_command, run, missing)
    err = fails(2, report_command, run, "--out", run / "config.yaml")
    assert "--out" in err


def test_differing_values_of_three_configs() -> None:
    configs = [
        load_config(None, overrides).config
        for overrides in ([], ["seed=1"], ["model.kwargs.width=2"])
    ]
    assert differing_values(configs) == {
        "seed": ["0", "1", "0"],
        "model.kwargs.width": ["(absent)", "(absent)", "2"],
    }
