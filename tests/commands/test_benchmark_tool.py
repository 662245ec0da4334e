"""tools/benchmark.py with a handful of images and one round: what it writes and checks, not how
fast anything is.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY

from imagenet_cls.data.turbojpeg import find_turbojpeg

main = runpy.run_path(str(REPOSITORY / "tools" / "benchmark.py"))["main"]
KEYS = {"command", "date", "commit", "machine", "versions", "tables"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmark")


def benchmark(folder: Path, command: str, *words: str) -> tuple[int, dict]:
    """Exit code and result with eight images."""
    sizes = ["--images", "8", "--batch-size", "4", "--workers", "1", "--tiny"]
    code = main([command, *sizes, "--folder", str(folder / "images"), "--out", str(folder), *words])
    result = json.loads((folder / f"{command}.json").read_text())
    assert result.keys() >= KEYS
    return code, result


def checks(result: dict) -> dict[str, bool]:
    return {row["row"]: row["met"] for row in result["tables"]["Equality"]}


@pytest.mark.nightly
def test_decode_compares_decoders(folder):
    words = ["--only", "*, whole", "ours, *", "--peer", f"nvimgcodec={sys.executable}"]
    code, result = benchmark(folder, "decode", *words)
    rates = {row["row"]: row["value"] for row in result["tables"]["Each implementation"]}
    assert all(rates[f"{name}, whole"] > 0 for name in ("ours", "torchvision", "Pillow"))
    assert (rates["ours, crop"] is None) == (find_turbojpeg() is None)
    assert code == 0 and all(checks(result).values())


@pytest.mark.nightly
def test_loader_compares_with_decoding_only(folder):
    words = ["--only", "ours", "ours, re-encoded", "decode only", "--baseline", str(REPOSITORY)]
    code, result = benchmark(folder, "loader", *words)
    ratios = {row["row"]: row["value"] for rows in result["tables"].values() for row in rows}
    assert ratios["ours / decode only"] > 0 and ratios["ours, re-encoded / ours"] > 0
    assert ratios["ours / FFCV"] is None
    assert "8 of 8 images" in str(result["tables"]["Equality"])
    assert code == 0 and all(checks(result).values())


def test_other_pixels_fail(folder, monkeypatch):
    from benchmarks import equality

    monkeypatch.setattr(
        equality, "decode_rgb", lambda data: torch.zeros(3, 1, 1, dtype=torch.uint8)
    )
    code, result = benchmark(folder, "decode", "--only", "none")
    assert code == 1 and not checks(result)["pixels of torchvision's decoder"]


def test_ratios_are_paired_by_round():
    from benchmarks.compare import Implementation, paired, table

    fast, slow = Implementation("fast", {}), Implementation("slow", {})
    for factor in (1, 4, 2):  # the machine slows down: ratios of 2, 3 and 2.5
        slow.passes.append({"images": 10, "seconds": float(factor), "cpu_seconds": 1.0})
    fast.passes = [
        {"images": 10, "seconds": seconds, "cpu_seconds": 0.5} for seconds in (0.5, 4 / 3, 0.8)
    ]
    row = paired("fast / slow", fast, slow, ">= 2.6")
    expected = {"value": 2.5, "low": 2.0, "high": 3.0, "cpu_ratio": 2.0, "met": False}
    assert row | expected == row
    assert "| fast / slow | 2.5 x | 2 to 3 | 2 |" in table([row])


def test_docs_have_the_results():
    from benchmarks.compare import DOCS, RESULTS, page_with_results, read_results

    page = DOCS.read_text()
    assert page == page_with_results(page, read_results(RESULTS)), (
        "run python tools/benchmark.py docs"
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words", ["step", "arrays", "memory", "gpu --only files vit-*-ema resnet50-256-default"]
)
def test_rows_are_measured(folder, words):
    code, result = benchmark(folder, *words.split())
    (rows,) = result["tables"].values()
    assert code == 0 and [row for row in rows if row["value"] is None] == []
