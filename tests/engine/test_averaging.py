"""tools/average_checkpoints.py: the mean of checkpoints, which evaluates and predicts like any other."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import DEMO, arguments, newest, train_here
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from imagenet_cls.checkpoint.format import write_manifest
from imagenet_cls.commands.average_checkpoints import average_command, choose, mean_of_weights
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.program import main
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.errors import CheckpointError
from imagenet_cls.report.log import close_log


@pytest.fixture(autouse=True)
def log_closed() -> Iterator[None]:
    yield
    close_log()


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five epochs, each saved and evaluated, with BatchNorm and an average."""
    folder = tmp_path_factory.mktemp("averaging") / "run"
    train_here(arguments(digits, folder, "noisy", ema__decay=0.8, train__epochs=5, checkpoint__keep_last="null"))
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def here(command: Callable, *words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(command, [str(word) for word in words])
        return code, *capsys.readouterr()

    return here


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def mean_of(paths: list[Path], name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    """The formula, written out; counters of the last."""
    states = [load_file(path / name) for path in paths]
    return {
        key: torch.stack([state[key].double() for state in states]).mean(0).float()
        if states[0][key].is_floating_point()
        else states[-1][key]
        for key in states[0]
    }


def test_mean_of_weights_equals_torch_averaged_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))
    reference = AveragedModel(model, use_buffers=True)

    def states() -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
        for number in range(7):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
            model(torch.randn(4, 3, 8, 8))
            reference.update_parameters(model)
            yield Path(str(number)), model.state_dict()

    result, expected = mean_of_weights(states()), reference.module.state_dict()
    assert result.keys() == expected.keys() and result["1.num_batches_tracked"] == 7
    for key, value in result.items():
        assert value.dtype == expected[key].dtype
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-6, msg=key)


def test_mean_of_weights_half_precision_is_summed_in_double() -> None:
    """A thousand times 1 + 1/128, whose sum bfloat16 can't represent."""
    state = {"weight": torch.full((3,), 1 + 1 / 128, dtype=torch.bfloat16)}
    mean = mean_of_weights((Path("x"), state) for _ in range(1000))
    assert mean["weight"].tolist() == [1 + 1 / 128] * 3


@pytest.mark.parametrize("kind", ["raw", pytest.param("ema", marks=pytest.mark.nightly)])
def test_average_of_the_last_checkpoints_evaluates_and_predicts(
    run: Path, digits: Path, tmp_path: Path, call: Callable, kind: str
) -> None:
    """`state.json` lists the sources."""
    code, out, err = call(average_command, run, "--last", 3, "--weights", kind, "--out", tmp_path / "swa")
    assert (code, err) == (0, "") and "3 checkpoints (step-0000033, step-0000044, step-0000055)" in out
    assert "running statistics" in out
    folder = only_entry(tmp_path / "swa")
    weights = load_file(folder / "model.safetensors")
    expected = mean_of(checkpoints(run)[-3:], {"raw": "model.safetensors", "ema": "ema.safetensors"}[kind])
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in weights)
    assert not torch.equal(weights["2.running_mean"], load_file(newest(run) / "model.safetensors")["2.running_mean"])
    state = json.loads((folder / "state.json").read_text())
    assert [(Path(entry["checkpoint"]), entry["weights"]) for entry in state["averaged"]] == [
        (path, kind) for path in checkpoints(run)[-3:]
    ]
    words = [DEMO, "model.name=helpers:noisy", f"data.root={digits}", "data.num_workers=0", "eval.crop_px=16"]
    code, out, err = call(evaluate_command, *words, tmp_path / "swa")
    assert (code, err) == (0, "") and "over 359 images" in out and "\nraw: top-1" in out and "\nema" not in out
    assert "step 55, an average of 3 checkpoints" in out
    image = next((digits / "train" / "7").glob("*.jpg"))
    code, out, _ = call(predict_command, folder, image, "--allow-import", "helpers:noisy")
    assert code == 0 and " %" in out


def only_entry(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_average_starts_a_new_run_but_can_not_be_resumed(
    run: Path, digits: Path, tmp_path: Path, call: Callable
) -> None:
    assert call(average_command, *checkpoints(run)[:2], "--out", tmp_path / "swa")[0] == 0
    words = arguments(digits, tmp_path / "run", "noisy", ema__decay=0.8, train__epochs=5)
    code, _, err = call(train_command, *words, "--resume-from", tmp_path / "swa")
    assert code == 4 and "average" in err and "model.checkpoint" in err and len(err.splitlines()) <= 3
    start = arguments(digits, tmp_path / "new", "noisy", model__checkpoint=tmp_path / "swa", train__max_steps=1)
    assert call(train_command, *start)[0] == 0


def set_results(run: Path, top1: list[float]) -> None:
    """Change the records of evaluations in the checkpoints, and their digests."""
    best: dict = {}
    for path, value in zip(checkpoints(run), top1, strict=True):
        state = json.loads((path / "state.json").read_text())
        if value > best.get("top1_pct", -1):
            best = {"top1_pct": value, "step": state["step"]}
        state["progress"]["latest"]["raw"]["top1_pct"] = value
        state["progress"]["best"]["raw"] = best
        (path / "state.json").write_text(json.dumps(state))
        seal(path)


def seal(path: Path) -> None:
    write_manifest(path)


def test_choose_by_each_rule(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    set_results(copy, [70.0, 72.0, 71.9, 73.0, 72.5])
    steps = [11, 22, 33, 44, 55]

    def chosen(rule: str, count: int) -> list[int]:
        return [steps.index(int(path.name.removeprefix("step-"))) for path in choose(copy, rule, count, "raw")]

    assert chosen("last", 2) == [3, 4]
    assert chosen("best", 3) == [1, 3, 4]
    assert chosen("improving", 3) == [0, 1, 3]  # 71.9 and 72.5 were no records
    with pytest.raises(CheckpointError, match=r"--improving 4 finds 3 checkpoints of 5"):
        choose(copy, "improving", 4, "raw")


def test_average_of_runs_with_different_dropout(run: Path, tmp_path: Path, call: Callable) -> None:
    first, second = checkpoints(run)[:2]
    other = tmp_path / "other"
    shutil.copytree(second, other)
    state = json.loads((other / "state.json").read_text())
    state["config"]["model"]["kwargs"] = {"dropout": 0.5}
    (other / "state.json").write_text(json.dumps(state))
    seal(other)
    assert call(average_command, first, other, "--out", tmp_path / "out")[0] == 0


def test_average_of_different_checkpoints_is_an_error(run: Path, digits: Path, tmp_path: Path, call: Callable) -> None:
    """Each exits with its code, three lines at most, and writes nothing."""
    first, second = checkpoints(run)[:2]
    wide = tmp_path / "wide"
    train_here(arguments(digits, wide, "noisy", train__max_steps=1, model__kwargs__width=8))
    shutil.copy(newest(wide) / "model.safetensors", tmp_path / "8.safetensors")
    other = tmp_path / "other"
    shutil.copytree(second, other)
    state = json.loads((other / "state.json").read_text())
    (other / "state.json").write_text(json.dumps(state | {"classes": state["classes"][::-1]}))
    seal(other)
    damaged = tmp_path / "damaged"
    shutil.copytree(second, damaged)
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("mine")
    blurred = tmp_path / "blurred"
    shutil.copytree(second, blurred)
    model = state["config"]["model"] | {"name": "helpers:plain"}
    (blurred / "state.json").write_text(json.dumps(state | {"config": state["config"] | {"model": model}}))
    seal(blurred)
    out = tmp_path / "out"
    for words, code, text in [
        (
            (first, blurred, "--out", out),
            4,
            f"{blurred} has another model than {first}: helpers:plain {{}}, and helpers:noisy {{}}",
        ),
        ((first, blurred, "--out", tmp_path / "out.safetensors"), 4, "helpers:plain {}, and helpers:noisy {}"),
        ((first, wide, "--out", out), 4, "helpers:noisy {'width': 8}, and helpers:noisy {}"),
        ((tmp_path / "8.safetensors", first, "--out", tmp_path / "out.safetensors"), 4, "another model"),
        ((first, other, "--out", out), 4, "other classes"),
        ((first, damaged, "--out", out), 4, "damaged"),
        ((wide, first, "--weights", "ema", "--out", out), 4, "no EMA"),
        ((first, "--out", out), 2, "two checkpoints or more"),
        ((first, second, "--last", 2, "--out", out), 2, "takes one run folder"),
        ((run, "--last", 9, "--out", out), 4, "--last 9 finds 5 checkpoints"),
        ((first, tmp_path / "nowhere", "--out", out), 4, "nowhere"),
        ((first, second, "--out", taken), 2, "not overwritten"),
    ]:
        got, _, err = call(average_command, *words)
        assert got == code and text in err and len(err.splitlines()) <= 3, (words, err)
        assert not out.exists()
    assert [path.name for path in taken.iterdir()] == ["mine"]


def test_average_of_weights_files_of_any_origin(run: Path, digits: Path, tmp_path: Path, call: Callable) -> None:
    """Files of other libraries and checkpoints, into one file for test.py."""
    first, second = checkpoints(run)[:2]
    state = load_file(first / "model.safetensors")
    average = {key: value + 1 for key, value in state.items()}  # `--weights raw` does not want it
    trained = {f"module.{key}": value for key, value in state.items()}
    torch.save({"state_dict": trained, "state_dict_ema": average}, tmp_path / "a.pth")
    save_file(load_file(second / "model.safetensors"), tmp_path / "b.safetensors")
    out = tmp_path / "new" / "soup.safetensors"
    code, _, err = call(average_command, tmp_path / "a.pth", tmp_path / "b.safetensors", newest(run), "--out", out)
    assert (code, err) == (0, "")
    expected = mean_of([first, second, newest(run)])
    soup = load_file(out)
    assert soup.keys() == expected.keys() and all(torch.equal(soup[key], expected[key]) for key in soup)
    words = [DEMO, "model.name=helpers:noisy", f"data.root={digits}", "data.num_workers=0", "eval.crop_px=16"]
    assert call(evaluate_command, *words, out)[0] == 0
    code, _, err = call(average_command, tmp_path / "a.pth", first, "--out", tmp_path / "folder")
    assert code == 2 and "--out average.safetensors" in err
    code, _, err = call(average_command, first, second, "--out", out)
    assert code == 2 and "not overwritten" in err
