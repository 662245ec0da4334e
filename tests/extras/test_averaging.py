"""tools/average_checkpoints.py: the mean of checkpoints, which evaluates and predicts like any
other.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import arguments, call, edit_state, fails, newest, succeeds, train_here
from safetensors.torch import load_file, save_file

from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.errors import CheckpointError
from imagenet_cls.extras.weights.average_checkpoints import average_command, choose, mean_of_weights


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five epochs, each saved and evaluated, with BatchNorm and an average."""
    folder = tmp_path_factory.mktemp("averaging") / "run"
    train_here(
        arguments(
            digits, folder, "noisy", ema__decay=0.8, train__epochs=5, checkpoint__keep_last="null"
        )
    )
    return folder


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


def update_progress(state: dict, values: dict) -> None:
    state["progress"].update(values)


def altered(path: Path, copy: Path, edit: Callable[[dict], object]) -> Path:
    """A copy of a checkpoint with a changed `state.json` and the digests that belong to it."""
    shutil.copytree(path, copy)
    edit_state(copy, edit)
    return copy


def test_mean_of_weights_half_precision_is_summed_in_double() -> None:
    """A thousand times 1 + 1/128, whose sum bfloat16 can't represent."""
    state = {"weight": torch.full((3,), 1 + 1 / 128, dtype=torch.bfloat16)}
    mean, _ = mean_of_weights((Path("x"), state, None) for _ in range(1000))
    assert mean["weight"].tolist() == [1 + 1 / 128] * 3


@pytest.mark.parametrize("kind", ["raw", pytest.param("ema", marks=pytest.mark.nightly)])
def test_average_of_the_last_checkpoints_evaluates_predicts_and_starts_runs(
    run: Path, digits: Path, tmp_path: Path, kind: str
) -> None:
    """`state.json` lists the sources. A run starts from it, but does not resume from it."""
    out = succeeds(average_command, run, "--last", 3, "--weights", kind, "--out", tmp_path / "swa")
    assert "3 checkpoints (step-0000033, step-0000044, step-0000055)" in out
    (folder,) = (tmp_path / "swa").iterdir()
    weights = load_file(folder / "model.safetensors")
    expected = mean_of(
        checkpoints(run)[-3:], {"raw": "model.safetensors", "ema": "ema.safetensors"}[kind]
    )
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in weights)
    assert not torch.equal(
        weights["2.running_mean"], load_file(newest(run) / "model.safetensors")["2.running_mean"]
    )
    state = json.loads((folder / "state.json").read_text())
    assert [(Path(entry["checkpoint"]), entry["weights"]) for entry in state["averaged"]] == [
        (path, kind) for path in checkpoints(run)[-3:]
    ]
    words = arguments(digits, tmp_path, "noisy")[:-2]
    out = succeeds(evaluate_command, *words, tmp_path / "swa")
    assert "over 359 images" in out and "\nraw: top-1" in out and "\nema" not in out
    assert "step 55, an average of 3 checkpoints" in out
    for alone in (tmp_path / "swa", folder):  # with the config in its state.json
        out = succeeds(evaluate_command, alone, "--allow-import", "helpers:noisy")
        assert "step 55, an average of 3 checkpoints" in out
    image = next((digits / "train" / "7").glob("*.jpg"))
    code, out, _ = call(predict_command, folder, image, "--allow-import", "helpers:noisy")
    assert code == 0 and " %" in out
    start = arguments(
        digits, tmp_path / "new", "noisy", model__checkpoint=tmp_path / "swa", train__max_steps=1
    )
    succeeds(train_command, *start)
    resume = arguments(digits, tmp_path / "run", "noisy", ema__decay=0.8, train__epochs=5)
    err = fails(4, train_command, *resume, "--resume-from", tmp_path / "swa")
    assert "model.checkpoint" in err


def test_choose_by_each_rule(run: Path, tmp_path: Path) -> None:
    steps, best_steps = [11, 22, 33, 44, 55], [11, 22, 22, 44, 44]
    results = [70.0, 72.0, 71.9, 73.0, 72.5]
    for path, value, step in zip(checkpoints(run), results, best_steps, strict=True):
        result = {"top1_pct": value}
        raw = {"latest": {"raw": result}, "best": {"raw": {"step": step, **result}}}
        altered(
            path,
            tmp_path / "checkpoints" / path.name,
            partial(update_progress, values=raw),
        )

    def chosen(rule: str, count: int) -> list[int]:
        return [
            steps.index(int(path.name.removeprefix("step-")))
            for path in choose(tmp_path, rule, count, "raw")
        ]

    assert chosen("last", 2) == [3, 4]
    assert chosen("best", 3) == [1, 3, 4]
    assert chosen("improving", 3) == [0, 1, 3]  # 71.9 and 72.5 were no records
    with pytest.raises(CheckpointError, match=r"--improving 4 finds only 3 of 5 checkpoints"):
        choose(tmp_path, "improving", 4, "raw")


def test_improving_without_a_finite_loss_finds_none(run: Path, tmp_path: Path) -> None:
    for path in checkpoints(run)[-2:]:
        edit = partial(update_progress, values={"best": {}})
        altered(path, tmp_path / "checkpoints" / path.name, edit)
    with pytest.raises(CheckpointError, match="finds only 0 of 2"):
        choose(tmp_path, "improving", 2, "raw")


def test_average_of_different_checkpoints_is_an_error(
    run: Path, digits: Path, tmp_path: Path
) -> None:
    """Each writes nothing. Runs with different dropout may be averaged."""
    first, second = checkpoints(run)[:2]
    wide = tmp_path / "wide"
    train_here(arguments(digits, wide, "noisy", train__max_steps=1, model__kwargs__width=8))
    shutil.copy(newest(wide) / "model.safetensors", tmp_path / "8.safetensors")
    reversed_classes = altered(
        second, tmp_path / "classes", lambda state: state["classes"].reverse()
    )
    named = altered(
        second,
        tmp_path / "name",
        lambda state: state["config"]["model"].update(name="helpers:plain"),
    )
    dropout = altered(
        second,
        tmp_path / "drop",
        lambda state: state["config"]["model"].update(kwargs={"dropout": 0.5}),
    )
    damaged = shutil.copytree(second, tmp_path / "damaged")
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("mine")
    out, file = tmp_path / "out", tmp_path / "out.safetensors"
    for words, code, text in [
        ((first, named, "--out", out), 4, "model.name"),
        ((first, named, "--out", file), 4, "model.name"),
        ((first, wide, "--out", out), 4, "model.kwargs"),
        ((tmp_path / "8.safetensors", first, "--out", file), 4, "8.safetensors"),
        ((first, reversed_classes, "--out", out), 4, "classes"),
        ((first, damaged, "--out", out), 4, "damaged"),
        ((wide, first, "--weights", "ema", "--out", out), 4, "EMA"),
        ((first, "--out", out), 2, ""),
        ((first, second, "--last", 2, "--out", out), 2, "--last"),
        ((run, "--last", 9, "--out", out), 4, "--last 9"),
        ((first, tmp_path / "nowhere", "--out", out), 4, "nowhere"),
        ((first, second, "--out", taken), 2, "taken"),
    ]:
        got, _, err = call(average_command, *words)
        assert got == code and text in err, (words, err)
        assert not out.exists() and not file.exists()
    assert [path.name for path in taken.iterdir()] == ["mine"]
    succeeds(average_command, first, dropout, "--out", out)


def test_average_of_weights_files_of_any_origin(run: Path, digits: Path, tmp_path: Path) -> None:
    """Files of other libraries and checkpoints, into one file for test.py."""
    first, second = checkpoints(run)[:2]
    state = load_file(first / "model.safetensors")
    average = {key: value + 1 for key, value in state.items()}  # `--weights raw` does not want it
    trained = {f"module.{key}": value for key, value in state.items()}
    torch.save({"state_dict": trained, "state_dict_ema": average}, tmp_path / "a.pth")
    save_file(load_file(second / "model.safetensors"), tmp_path / "b.safetensors")
    out = tmp_path / "new" / "soup.safetensors"
    succeeds(
        average_command, tmp_path / "a.pth", tmp_path / "b.safetensors", newest(run), "--out", out
    )
    expected = mean_of([first, second, newest(run)])
    soup = load_file(out)
    assert soup.keys() == expected.keys() and all(
        torch.equal(soup[key], expected[key]) for key in soup
    )
    words = arguments(digits, tmp_path, "noisy")[:-2]
    succeeds(evaluate_command, *words, out)
    torch.save({"state_dict": trained}, tmp_path / "raw.pth")
    kinds = [average_command, tmp_path / "a.pth", tmp_path / "raw.pth", "--weights", "ema"]
    assert "raw.pth" in fails(4, *kinds, "--out", tmp_path / "ema.safetensors")
    (tmp_path / "b.safetensors").rename(tmp_path / "b")
    succeeds(*kinds[:2], tmp_path / "b", *kinds[3:], "--out", tmp_path / "ema.safetensors")
    (tmp_path / "raw.pth").rename(tmp_path / "raw.safetensors")
    kinds[2] = tmp_path / "raw.safetensors"
    fails(4, *kinds, "--out", tmp_path / "other.safetensors")
    err = fails(2, average_command, tmp_path / "a.pth", first, "--out", tmp_path / "folder")
    assert "--out average.safetensors" in err
