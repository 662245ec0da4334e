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


def save_with_bias(state: dict[str, torch.Tensor], value: float, path: Path) -> None:
    """Write weights with this bias of class 3."""
    bias = state["5.bias"].clone()
    bias[3] = value
    torch.save(state | {"5.bias": bias}, path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_outputs_that_are_not_finite_are_an_error_with_their_number(
    run_folder: Path, tmp_path: Path, call: Callable, value: float
) -> None:
    raw = load_file(newest(run_folder) / "model.safetensors")
    words = [run_folder / "config.yaml", tmp_path / "weights.pth", "--out", tmp_path / "rows.csv"]
    save_with_bias(raw, value, tmp_path / "weights.pth")
    code, out, err = call(evaluate_command, *words)
    assert (code, out) == (4, "") and "359 (raw) of 359" in err and "--weights" not in err
    assert not (tmp_path / "rows.csv").exists()
    both = {"state_dict": torch.load(tmp_path / "weights.pth"), "state_dict_ema": raw}
    torch.save(both, tmp_path / "weights.pth")
    assert call(evaluate_command, *words[:2], "--weights", "raw")[0] == 4
    assert call(evaluate_command, *words[:2])[0] == 0
    save_with_bias(raw, -torch.inf, tmp_path / "weights.pth")  # a class that is never predicted
    assert call(evaluate_command, *words[:2])[0] == 0


def test_report_without_a_path_is_a_usage_error(
    run_folder: Path, tmp_path: Path, call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(evaluate_command, run_folder, *ALLOW, "--report", "")
    assert code == 2 and "--report" in err and not list(tmp_path.iterdir())
