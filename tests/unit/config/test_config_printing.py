"""tools/print_config.py, as a user starts it and as a function."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from imagenet_cls.commands.print_config import print_config_command
from imagenet_cls.commands.program import main
from imagenet_cls.config.load import load_config
from imagenet_cls.config.origin import shown_path

REPO = Path(__file__).resolve().parents[3]
DEMO = str(REPO / "configs" / "demo.yaml")


def test_tool_prints_a_config_that_loads(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "tools" / "print_config.py"), DEMO, "seed=9"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": "/usr/bin"})
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "printed.yaml").write_text(done.stdout)
    assert load_config(tmp_path / "printed.yaml").config == load_config(DEMO, ["seed=9"]).config


def test_errors_are_lines_on_stderr(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "tools" / "print_config.py"), DEMO, "sead=9", "train.epochs=x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "command line 'sead=9': unknown key 'sead'; did you mean 'seed'?",
        "command line 'train.epochs=x': train.epochs: 'x' is not a whole number",
    ]


def test_origin_prints_place_of_each_value(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    assert main(print_config_command, ["configs/resnet50.yaml", "--origin", "seed=3"]) == 0
    printed = capsys.readouterr().out
    places = dict(line.split(":", 1) for line in printed.splitlines())
    assert places["seed"].split() == ["3", "#", "command", "line", "'seed=3'"]
    assert places["train.compile"].split() == ["false", "#", "default"]
    lines = (REPO / "configs/_base_/schedules/sgd_step_90e.yaml").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.strip().startswith("weight_decay"))
    assert places["optimizer.weight_decay"].split() == [
        "0.0001",
        "#",
        f"configs/_base_/schedules/sgd_step_90e.yaml:{number}",
    ]
    assert yaml.safe_load(printed)["train.epochs"] == 90


def test_diff_prints_both_values_of_each_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(print_config_command, [DEMO, "seed=3", "optimizer.kwargs.nesterov=true", "--diff", DEMO]) == 0
    assert capsys.readouterr().out.splitlines() == ["optimizer.kwargs.nesterov: true | (absent)", "seed: 3 | 0"]
    assert main(print_config_command, [DEMO, "model.kwargs.a=1", "--diff", DEMO]) == 0
    assert capsys.readouterr().out == "model.kwargs.a: 1 | (absent)\n"
    assert main(print_config_command, [DEMO, "--diff", DEMO]) == 0
    assert capsys.readouterr().out == ""


def test_missing_config_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(print_config_command, [str(REPO / "configs" / "demo.yml")]) == 2
    assert f"did you mean {shown_path(REPO / 'configs' / 'demo.yaml')!r}?" in capsys.readouterr().err
