"""The shell scripts: what reaches Python, from any folder and with spaces everywhere, and what a wrong call gets."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHON")


@pytest.fixture
def scripts(tmp_path):
    """The scripts in a repository of their own, whose path has a space and whose .venv says what it was given."""
    shutil.copytree(ROOT / "scripts", tmp_path / "a repo" / "scripts")
    python = tmp_path / "a repo" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n')
    python.chmod(0o755)
    return tmp_path / "a repo" / "scripts"


def call(script: Path, *words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in NODES}
    return subprocess.run(
        ["bash", script, *words], cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=120
    )


def test_dist_train_on_one_machine(scripts, tmp_path):
    result = call(scripts / "dist_train.sh", "my config.yaml", "8", "data.root=/a b", "--resume", cwd=tmp_path)
    train = str(scripts.parent / "tools" / "train.py")
    words = ["my config.yaml", "--launcher", "pytorch", "--gpus", "8", "data.root=/a b", "--resume"]
    assert result.stdout.splitlines() == [str(tmp_path), train, *words]


def test_dist_train_on_two_machines(scripts, tmp_path):
    env = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    words = call(scripts / "dist_train.sh", "c.yaml", "8", cwd=tmp_path, **env).stdout.splitlines()
    nodes = ["--nodes", "2", "--node-rank", "1", "--master-addr", "host0", "--master-port", "29500"]
    assert words[2:] == ["c.yaml", "--launcher", "pytorch", "--gpus", "8", *nodes]


def test_dist_test_takes_the_checkpoint_before_the_gpus(scripts, tmp_path):
    words = call(
        scripts / "dist_test.sh", "c.yaml", "run folder", "2", "--out", "p.csv", cwd=tmp_path
    ).stdout.splitlines()
    assert words[1].endswith("tools/test.py")
    assert words[2:] == ["c.yaml", "run folder", "--launcher", "pytorch", "--gpus", "2", "--out", "p.csv"]


def test_python_of_the_environment_is_used(scripts, tmp_path):
    result = call(scripts / "dist_train.sh", "c.yaml", "1", cwd=tmp_path, PYTHON="/bin/echo")
    assert result.stdout.endswith("train.py c.yaml --launcher pytorch --gpus 1\n")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("dist_train.sh", []),
        ("dist_train.sh", ["c.yaml"]),
        ("dist_train.sh", ["c.yaml", "zero"]),
        ("dist_train.sh", ["c.yaml", "0"]),
        ("dist_test.sh", ["c.yaml", "8"]),
        ("dist_test.sh", ["c.yaml", "8", "checkpoint"]),
        ("dist_train.sh", ["c.yaml", "8", "--gpus", "3"]),
        ("dist_train.sh", ["c.yaml", "8", "seed=1", "--gpus=3"]),
        ("dist_train.sh", ["c.yaml", "8", "--gpu", "3"]),
        ("dist_test.sh", ["c.yaml", "checkpoint", "8", "--out", "p.csv", "--gpus", "3"]),
        ("setup.sh", ["everything"]),
    ],
)
def test_a_wrong_call_is_two_lines_and_exit_code_2(scripts, tmp_path, script, words):
    result = call(scripts / script, *words, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 2
    assert "usage: bash scripts/" + script in result.stderr


def test_setup_without_a_usable_python_says_what_to_do(scripts, tmp_path):
    shutil.copy(ROOT / "setup.cfg", scripts.parent)
    shutil.copy(ROOT / "pyproject.toml", scripts.parent)
    shutil.rmtree(scripts.parent / ".venv")
    result = call(scripts / "setup.sh", cwd=tmp_path, PYTHON="/bin/false")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "Set PYTHON to a Python of 3.11 or newer, or unset it."
    assert not (scripts.parent / ".venv").exists()


@pytest.mark.parametrize(
    "script", [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"], ids=lambda path: path.name
)
def test_scripts_parse_and_stop_at_errors(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert "set -euo pipefail" in script.read_text()
    assert os.access(script, os.X_OK)
