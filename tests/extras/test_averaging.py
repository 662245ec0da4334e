"""tools/average_checkpoints.py: the mean of checkpoints, which evaluates and predicts like any
other.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    altered,
    arguments,
    call,
    fails,
    newest,
    succeeds,
    write_files,
)
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from imagenet_cls.checkpoint.folders import step_of
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.engine.stored_weights import Weights
from imagenet_cls.errors import CheckpointError
from imagenet_cls.extras.weights.average_checkpoints import average_command, choose, mean_of_weights


@pytest.fixture(scope="module")
def run(train_on_digits: Callable[..., Path]) -> Path:
    """Five epochs, each saved and evaluated, with BatchNorm and an average."""
    options = {"ema__decay": 0.8, "train__epochs": 5, "checkpoint__keep_last": "null"}
    return train_on_digits("noisy", **options)


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def mean_of(paths: list[Path], name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    """The formula, written out; counters of the last."""
    states = [load_file(path / name) for path in paths]
    return {
        key: torch.stack([state[key].double() for state in states]).mean(0).float()
        if states[0][key].is_floating_point()
        else states[-1][key]
        for key in states[0]
    }


def test_mean_of_weights_half_precision_is_summed_in_double() -> None:
    """A thousand times 1 + 1/128, whose sum bfloat16 can't represent."""
    state = {"weight": torch.full((3,), 1 + 1 / 128, dtype=torch.bfloat16)}
    mean, _ = mean_of_weights((Path("x"), Weights({"raw": state}, "raw", "x")) for _ in range(1000))
    assert mean["weight"].tolist() == [1 + 1 / 128] * 3


def test_average_of_the_last_checkpoints_evaluates_predicts_and_starts_runs(
    run: Path, digits: Path, tmp_path: Path
) -> None:
    """`state.json` lists the sources. A run starts from it, but does not resume from it."""
    succeeds(average_command, run, "--last", 3, "--weights", "ema", "--out", tmp_path / "swa")
    (folder,) = (tmp_path / "swa").iterdir()
    sources = checkpoints(run)[-3:]
    assert_close(
        load_file(folder / "model.safetensors"), mean_of(sources, "ema.safetensors"), rtol=0, atol=0
    )
    state = json.loads((folder / "state.json").read_text())
    averaged = [(Path(entry["checkpoint"]), entry["weights"]) for entry in state["averaged"]]
    assert averaged == [(path, "ema") for path in sources]
    words = arguments(digits, tmp_path, "noisy")[:-2]
    allow = ("--allow-import", "helpers:noisy")
    # the latter two with the config in its state.json
    for line in ((*words, tmp_path / "swa"), (tmp_path / "swa", *allow), (folder, *allow)):
        out = succeeds(evaluate_command, *line)
        assert "\nraw: top-1" in out and "\nema" not in out
        assert "step 55, an average of 3 checkpoints" in out
    image = next((digits / "train" / "7").glob("*.jpg"))
    assert call(predict_command, folder, image, *allow)[0] == 0
    start = {"model__checkpoint": tmp_path / "swa", "train__max_steps": 1}
    succeeds(train_command, *arguments(digits, tmp_path / "new", "noisy", **start))
    resume = arguments(digits, tmp_path / "run", "noisy", ema__decay=0.8, train__epochs=5)
    err = fails(4, train_command, *resume, "--resume-from", tmp_path / "swa")
    assert "model.checkpoint" in err


def test_choose_by_each_rule(run: Path, tmp_path: Path) -> None:
    results = [70.0, 72.0, 71.9, 73.0, 72.5]
    for path, value in zip(checkpoints(run), results, strict=True):

        def set_results(state: dict[str, Any], value: float = value) -> None:
            state["progress"]["latest"] = {"raw": {"top1_pct": value}}

        altered(path, tmp_path / "checkpoints" / path.name, set_results)

    for rule, steps in {"last": [44, 55], "best": [22, 44, 55]}.items():
        chosen = choose(tmp_path, rule, len(steps), "raw")
        assert [step_of(path) for path in chosen] == steps
    with pytest.raises(CheckpointError):
        choose(tmp_path, "best", 6, "raw")


def test_average_of_other_models_or_of_unusable_checkpoints_is_an_error(
    run: Path, tmp_path: Path
) -> None:
    """Each writes nothing. Runs with different dropout may be averaged."""
    first, second = checkpoints(run)[:2]

    def changed(copy: str, **values: Any) -> Path:
        return altered(second, tmp_path / copy, lambda s: s["config"]["model"].update(values))

    plain = changed("plain", name="helpers:plain")
    wide = changed("wide", kwargs={"width": 8})
    classes = altered(second, tmp_path / "classes", lambda state: state["classes"].reverse())
    ema = tmp_path / "without/ema.safetensors"
    altered(second, ema.parent, lambda state: ema.unlink())
    small = tmp_path / "small.safetensors"
    save_file({"weight": torch.ones(2)}, small)
    damaged = shutil.copytree(second, tmp_path / "damaged")
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    write_files(tmp_path, {"taken/mine": "mine"})
    out, file, taken = tmp_path / "out", tmp_path / "out.safetensors", tmp_path / "taken"
    for code, text, *words in (
        (4, "model.name", first, plain),
        (4, "model.kwargs", first, wide),
        (4, "classes", first, classes),
        (4, "small.safetensors", small, first, "--out", file),
        (4, "damaged", first, damaged),
        (4, "ema", first, ema.parent, "--weights", "ema"),
        (2, "", first),
        (2, "--last", first, second, "--last", 2),
        (4, "nowhere", first, tmp_path / "nowhere"),
        (2, "taken", first, second, "--out", taken),
    ):
        assert text in fails(code, average_command, "--out", out, *words)
        assert not out.exists() and not file.exists()
    assert [path.name for path in taken.iterdir()] == ["mine"]
    dropout = changed("dropout", kwargs={"dropout": 0.5})
    succeeds(average_command, first, dropout, "--out", out)


def test_average_of_weights_files_of_any_origin(run: Path, tmp_path: Path) -> None:
    """Files of other libraries and checkpoints, into one file."""
    first, second = checkpoints(run)[:2]
    state = load_file(first / "model.safetensors")
    average = {key: value + 1 for key, value in state.items()}  # `--weights raw` does not want it
    trained = {"state_dict": {f"module.{key}": value for key, value in state.items()}}
    torch.save(trained | {"state_dict_ema": average}, tmp_path / "a.pth")
    save_file(load_file(second / "model.safetensors"), tmp_path / "b.safetensors")
    out = tmp_path / "new" / "soup.safetensors"
    files = [tmp_path / "a.pth", tmp_path / "b.safetensors", newest(run)]
    succeeds(average_command, *files, "--out", out)
    assert_close(load_file(out), mean_of([first, second, newest(run)]), rtol=0, atol=0)
    torch.save(trained, tmp_path / "raw.pth")
    (tmp_path / "b.safetensors").rename(tmp_path / "b")  # it does not say that it is an average
    for name, code in (("raw.pth", 4), ("b", 4), ("a.pth", 0)):
        words = [tmp_path / "a.pth", tmp_path / name, "--weights", "ema"]
        assert call(average_command, *words, "--out", tmp_path / "ema.safetensors")[0] == code
    # a file and a checkpoint make no checkpoint
    fails(2, average_command, tmp_path / "a.pth", first, "--out", tmp_path / "folder")
