"""tools/benchmark.py with a handful of images and one round: what it writes and checks, not how
fast anything is.
"""

import importlib.util
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import wait_for

from imagenet_cls.data.turbojpeg import find_turbojpeg

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"command", "date", "commit", "machine", "versions", "tables"}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_tool", ROOT / "tools" / "benchmark.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmark")


def benchmark(tool: ModuleType, folder: Path, command: str, *words: str) -> tuple[int, dict]:
    """Exit code and result with eight images."""
    sizes = ["--images", "8", "--batch-size", "4", "--workers", "1", "--tiny"]
    code = tool.main(
        [command, *sizes, "--folder", str(folder / "images"), "--out", str(folder), *words]
    )
    result = json.loads((folder / f"{command}.json").read_text())
    assert result.keys() >= KEYS and len(result["machine"]["gpus"]) == torch.cuda.device_count()
    return code, result


def checks(result: dict) -> dict[str, bool]:
    return {row["row"]: row["met"] for row in result["tables"]["Equality"]}


@pytest.mark.nightly
def test_decode_compares_decoders(tool, folder):
    code, result = benchmark(
        tool,
        folder,
        "decode",
        "--only",
        "*, whole",
        "ours, *",
        "--peer",
        f"nvimgcodec={sys.executable}",
    )
    rates = {row["row"]: row["value"] for row in result["tables"]["Each implementation"]}
    assert (
        rates["ours, whole"] > 0 and rates["torchvision, whole"] > 0 and rates["Pillow, whole"] > 0
    )
    assert (rates["ours, crop"] is None) == (find_turbojpeg() is None)
    ratio = result["tables"]["Ratios, one thread"][0]
    assert ratio["row"] == "ours, whole / torchvision, whole" and ratio["value"] > 0
    assert "low" not in ratio, "one round"
    assert code == 0 and all(checks(result).values())


@pytest.mark.nightly
def test_loader_compares_with_decoding_only(tool, folder):
    code, result = benchmark(
        tool,
        folder,
        "loader",
        "--only",
        "ours",
        "ours, re-encoded",
        "decode only",
        "--baseline",
        str(ROOT),
    )
    rows = {row["row"]: row for rows in result["tables"].values() for row in rows}
    assert rows["ours / decode only"]["value"] > 0
    assert rows["ours / decode only"]["goal"] == ">= 1.1"
    assert rows["ours / FFCV"]["value"] is None
    assert rows["ours, re-encoded / ours"]["value"] > 0
    assert "8 of 8 images" in str(result["tables"]["Equality"]) and "crops of" in str(
        checks(result)
    )
    assert code == 0 and all(checks(result).values())


def test_other_pixels_fail(tool, folder, monkeypatch):
    from benchmarks import equality

    monkeypatch.setattr(
        equality, "decode_rgb", lambda data: torch.zeros(3, 1, 1, dtype=torch.uint8)
    )
    code, result = benchmark(tool, folder, "decode", "--only", "none")
    assert code == 1 and not checks(result)["pixels of torchvision's decoder"]


def test_implementation_that_fails_is_not_measured(tool, folder):
    code, result = benchmark(
        tool, folder, "decode", "--only", "nvImageCodec, crop", "--peer", "all=false"
    )
    (row,) = result["tables"]["Each implementation"]
    assert code == 0 and row["value"] is None and row["note"]
    assert result["tables"]["Ratios, one thread"][0]["value"] is None


def test_folder_of_others_is_not_replaced(tmp_path):
    from benchmarks.images import prepare_images

    (tmp_path / "train").mkdir()
    with pytest.raises(AssertionError, match="was not made by this tool"):
        prepare_images(tmp_path, 8)
    assert (tmp_path / "train").exists()


def test_ratios_are_paired_by_round():
    from benchmarks.compare import Implementation, paired, table

    fast, slow = Implementation("fast", {}), Implementation("slow", {})
    for factor in (1, 4, 2):  # the machine slows down: ratios of 2, 3 and 2.5
        slow.passes.append({"images": 10, "seconds": float(factor), "cpu_seconds": 1.0})
    fast.passes = [
        {"images": 10, "seconds": seconds, "cpu_seconds": 0.5} for seconds in (0.5, 4 / 3, 0.8)
    ]
    row = paired("fast / slow", fast, slow, ">= 2.6")
    assert (row["value"], row["low"], row["high"], row["cpu_ratio"], row["met"]) == (
        2.5,
        2.0,
        3.0,
        2.0,
        False,
    )
    assert "| fast / slow | 2.5 x | 2 to 3 | 2 |" in table([row])


def test_pass_does_not_count_what_was_ready_and_stops_the_workers(monkeypatch):
    # mypy does not follow it to packages of other libraries
    implementations = importlib.import_module("benchmarks.implementations")

    def state() -> str:
        return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        monkeypatch.setattr(implementations.multiprocessing, "active_children", lambda: [child])
        numbers = itertools.count()
        batches = ((torch.zeros(4), number) for number in numbers)
        one_pass = implementations.SteadyPasses(batches, count=3, ready=2)
        one_pass.prepare()
        assert next(numbers) == 2
        assert one_pass() == 3 * 4 and next(numbers) == 6
        wait_for(lambda: state() == "T", "a stopped worker")
        one_pass.prepare()
        wait_for(lambda: state() != "T", "a worker that runs")
    finally:
        child.kill()
        child.wait()


def test_cpu_time_of_an_ended_child_does_not_count_in_the_next_pass():
    cpu_seconds = importlib.import_module("benchmarks.implementations").cpu_seconds
    child = multiprocessing.Process(target=sum, args=[range(10**8)])
    child.start()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still a child
    before = cpu_seconds()
    assert cpu_seconds() - before < 0.1


def test_docs_have_the_results():
    from benchmarks.compare import DOCS, RESULTS, page_with_results, read_results

    page = DOCS.read_text()
    assert page == page_with_results(page, read_results(RESULTS)), (
        "run python tools/benchmark.py docs"
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        ["step"],
        ["arrays"],
        ["memory"],
        ["gpu", "--only", "files", "vit-*-ema", "resnet50-256-default"],
    ],
)
def test_rows_are_measured(tool, folder, words):
    code, result = benchmark(tool, folder, *words)
    (rows,) = result["tables"].values()
    assert code == 0 and [row for row in rows if row["value"] is None] == []


def test_gpu_case_that_is_not_finished_keeps_its_rounds(tool, folder, monkeypatch):
    """The table of each case is printed, and the JSON written, when the case ends."""
    from benchmarks import gpu

    def stopped(command: list[str], **options: Any) -> None:
        rows = [gpu.measured(f"{command[3]}: train()", [1.0], "img/s")]
        Path(command[-1]).write_text(json.dumps(rows))
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", stopped)
    monkeypatch.setattr(tool, "new_result", lambda command: {"command": command, "tables": {}})
    monkeypatch.setattr(tool, "page_section", str)
    written = []
    monkeypatch.setattr(
        tool, "write_result", lambda result, out: written.append(len(result["tables"][""]))
    )
    assert tool.main(["gpu", "--only", "resnet50-32*", "--out", str(folder)]) == 0
    assert written == [2, 4]
