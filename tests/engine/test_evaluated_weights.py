"""Which weights `test.py` evaluates, which classes their outputs are, and outputs that are not finite."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import arguments, evaluations, newest, train_here
from safetensors.torch import load_file

from imagenet_cls.commands.test import evaluate_command

ALLOW = ["--allow-import", "helpers:plain"]


@pytest.fixture(scope="module")
def run_folder(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an EMA whose results differ from those of the raw weights."""
    folder = tmp_path_factory.mktemp("weights") / "run"
    train_here(arguments(digits, folder, ema__decay=0.9, train__epochs=1))
    return folder


@pytest.mark.parametrize(("trained", "average"), [("state_dict", "state_dict_ema"), ("model", "model_ema")])
def test_both_kinds_of_weights_in_a_file_can_be_evaluated(
    run_folder: Path, tmp_path: Path, call: Callable, trained: str, average: str
) -> None:
    top1 = {record["weights"]: f"top-1 {record['top1_pct']:.3f} %" for record in evaluations(run_folder)}
    assert top1["raw"] != top1["ema"]
    states = [load_file(newest(run_folder) / f"{name}.safetensors") for name in ("model", "ema")]
    torch.save(dict(zip((trained, average), states, strict=True)), tmp_path / "both.pth")
    torch.save({trained: states[0]}, tmp_path / "raw.pth")
    torch.save({average: states[1]}, tmp_path / "ema.pth")

    def result(file: str, *options: str) -> tuple[int, str]:
        code, out, _ = call(evaluate_command, run_folder / "config.yaml", tmp_path / file, *options)
        return code, out.splitlines()[-1].partition(" %")[0] + " %" if out else ""

    raw, ema = ((0, f"{kind}: {top1[kind]}") for kind in ("raw", "ema"))
    assert result("both.pth") == result("both.pth", "--weights", "ema") == result("ema.pth") == ema
    assert result("both.pth", "--weights", "raw") == result("raw.pth") == raw
    assert result("raw.pth", "--weights", "ema") == result("ema.pth", "--weights", "raw") == (4, "")


def test_both_kinds_of_weights_in_model_checkpoint_can_be_evaluated(run_folder: Path, call: Callable) -> None:
    words = [run_folder / "config.yaml", f"model.checkpoint={newest(run_folder)}"]
    outs = {kind: call(evaluate_command, *words, "--weights", kind)[1] for kind in ("raw", "ema")}
    for record in evaluations(run_folder):
        assert f"{record['weights']}: top-1 {record['top1_pct']:.3f} %" in outs[record["weights"]]
