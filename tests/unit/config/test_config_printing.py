"""tools/print_config.py, as a user starts it and as a function."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from config_files import LR, write

from imagenet_cls.commands.cli import main
from imagenet_cls.commands.print_config import print_config_command
from imagenet_cls.config.load import load_config

REPO = Path(__file__).resolve().parents[3]
DEMO = str(REPO / "configs" / "demo.yaml")


def test_tool_prints_a_config_that_loads(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "tools" / "print_config.py"), DEMO, "seed=9"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": "/usr/bin"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "printed.yaml").write_text(done.stdout)
    assert load_config(tmp_path / "printed.yaml").config == load_config(DEMO, ["seed=9"]).config


def test_origin_prints_place_of_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            print_config_command,
            [write("x.yaml", f"{LR}train: {{epochs: 9}}\n"), "--origin", "seed=3"],
        )
        == 0
    )
    printed = capsys.readouterr().out
    places = dict(line.split(":", 1) for line in printed.splitlines())
    assert "# command line 'seed=3'" in places["seed"]
    assert "# default" in places["train.compile"] and "# x.yaml:2" in places["train.epochs"]
    assert yaml.safe_load(printed)["train.epochs"] == 9


def test_diff_prints_both_values_of_each_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            print_config_command, [DEMO, "seed=3", "optimizer.kwargs.nesterov=true", "--diff", DEMO]
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        "optimizer.kwargs.nesterov: true | (absent)",
        "seed: 3 | 0",
    ]
    assert main(print_config_command, [DEMO, "model.kwargs.a=1", "--diff", DEMO]) == 0
    assert capsys.readouterr().out == "model.kwargs.a: 1 | (absent)\n"
    assert main(print_config_command, [DEMO, "--diff", DEMO]) == 0
    assert capsys.readouterr().out == ""
