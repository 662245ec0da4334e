"""tools/print_config.py, as a user starts it and as a function."""

import sys

from config_files import LR, load, write
from helpers import DEMO, REPOSITORY, run, succeeds

from imagenet_cls.commands.print_config import print_config_command
from imagenet_cls.config.load import load_config


def test_tool_prints_a_config_that_loads() -> None:
    done = run([sys.executable, REPOSITORY / "tools" / "print_config.py", DEMO, "seed=9"], cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert load(done.stdout).config == load_config(DEMO, ["seed=9"]).config


def test_origin_prints_place_of_each_value() -> None:
    file = write("x.yaml", f"{LR}train: {{epochs: 9}}\n")
    out = succeeds(print_config_command, file, "--origin", "seed=3")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "seed: 3 # command line 'seed=3'" in lines
    assert "train.epochs: 9 # x.yaml:2" in lines
    assert "train.compile: false # default" in lines


def test_diff_prints_both_values_of_each_difference() -> None:
    words = ["seed=3", "optimizer.kwargs.nesterov=true", "model.kwargs.a=1"]
    assert succeeds(print_config_command, DEMO, *words, "--diff", DEMO).splitlines() == [
        "model.kwargs.a: 1 | (absent)",
        "optimizer.kwargs.nesterov: true | (absent)",
        "seed: 3 | 0",
    ]
    assert succeeds(print_config_command, DEMO, "--diff", DEMO) == ""
