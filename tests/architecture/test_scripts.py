"""The shell scripts: what reaches Python, from any folder and with spaces everywhere, and what a
wrong call gets. The workflows run what exists.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NODES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PORT", "PYTHON")


@pytest.fixture
def scripts(tmp_path):
    """The scripts in a repository of their own, whose path has a space and whose .venv says what it
    was given.
    """
    shutil.copytree(ROOT / "scripts", tmp_path / "a repo" / "scripts")
    python = tmp_path / "a repo" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n')
    python.chmod(0o755)
    return tmp_path / "a repo" / "scripts"


def call(script: Path, *words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in NODES}
    return subprocess.run(
        ["bash", script, *words],
        cwd=cwd,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_dist_train_on_one_machine(scripts, tmp_path):
    result = call(
        scripts / "dist_train.sh", "my config.yaml", "8", "data.root=/a b", "--resume", cwd=tmp_path
    )
    train = str(scripts.parent / "tools" / "train.py")
    words = ["my config.yaml", "--launcher", "pytorch", "--gpus", "8", "data.root=/a b", "--resume"]
    assert result.stdout.splitlines() == [str(tmp_path), train, *words]


def test_dist_train_on_two_machines(scripts, tmp_path):
    env = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    words = call(scripts / "dist_train.sh", "c.yaml", "8", cwd=tmp_path, **env).stdout.splitlines()
    nodes = ["--nodes", "2", "--node-rank", "1", "--master-addr", "host0", "--master-port", "29500"]
    assert words[2:] == ["c.yaml", "--launcher", "pytorch", "--gpus", "8", *nodes]


def test_names_of_mmdetection_are_taken(scripts, tmp_path):
    words = call(
        scripts / "dist_train.sh", "c.yaml", "8", cwd=tmp_path, PORT="29501"
    ).stdout.splitlines()
    assert words[-2:] == ["--master-port", "29501"]
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    for more, expected in (
        (["work", "--resume"], ["--work-dir", "work", "--resume"]),
        (["seed=1"], ["seed=1"]),
    ):
        result = call(
            scripts / "slurm_train.sh",
            "part",
            "job",
            "c.yaml",
            *more,
            cwd=tmp_path,
            PATH=f"{tmp_path}:/usr/bin:/bin",
        )
        assert result.stdout.splitlines()[-len(expected) - 1 :] == ["c.yaml", *expected]


def test_dist_test_takes_the_checkpoint_before_the_gpus(scripts, tmp_path):
    words = call(
        scripts / "dist_test.sh", "c.yaml", "run folder", "2", "--out", "p.csv", cwd=tmp_path
    ).stdout.splitlines()
    assert words[1].endswith("tools/test.py")
    assert words[2:] == [
        "c.yaml",
        "run folder",
        "--launcher",
        "pytorch",
        "--gpus",
        "2",
        "--out",
        "p.csv",
    ]


def test_dist_test_takes_a_run_folder_without_a_config(scripts, tmp_path):
    (tmp_path / "run folder").mkdir()
    words = call(
        scripts / "dist_test.sh", "run folder", "2", "--out", "p.csv", cwd=tmp_path
    ).stdout.splitlines()
    assert words[2:] == ["run folder", "--launcher", "pytorch", "--gpus", "2", "--out", "p.csv"]


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
        ("ssh_train.sh", ["c.yaml", "8"]),  # without HOSTS
        ("dist_test.sh", ["c.yaml", "8"]),
        ("dist_test.sh", ["c.yaml", "8", "checkpoint"]),
        ("setup.sh", ["everything"]),
    ],
)
def test_a_wrong_call_is_two_lines_and_exit_code_2(scripts, tmp_path, script, words):
    result = call(scripts / script, *words, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 2
    assert f"bash scripts/{script}" in result.stderr and "usage: " in result.stderr


def test_setup_without_a_usable_python_says_what_to_do(scripts, tmp_path):
    shutil.copy(ROOT / "setup.cfg", scripts.parent)
    shutil.copy(ROOT / "pyproject.toml", scripts.parent)
    shutil.rmtree(scripts.parent / ".venv")
    result = call(scripts / "setup.sh", cwd=tmp_path, PYTHON="/bin/false")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "Set PYTHON to a Python of 3.11 or newer, or unset it."
    assert not (scripts.parent / ".venv").exists()


@pytest.mark.parametrize(
    "script",
    [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"],
    ids=lambda path: path.name,
)
def test_scripts_parse_and_stop_at_errors(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert "set -euo pipefail" in script.read_text()
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize(
    "workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name
)
def test_workflows_run_what_exists(workflow):
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    commands = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    named = re.findall(r"(?<![\w/.])(?:tests|scripts|docs|\.ci)/[\w./]+", commands)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.fixture
def setup(scripts, tmp_path):
    """Runs `setup.sh` with programs that install nothing; returns the result and which of them was
    to install.
    """
    shutil.rmtree(scripts.parent / ".venv")
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, scripts.parent)
    programs = tmp_path / "programs"
    programs.mkdir()
    log = tmp_path / "calls"
    python = scripts.parent / ".venv" / "bin" / "python"
    make = f'mkdir -p "{python.parent}"; cp "$0" "{python}"'
    write(
        programs / "python3",
        f'case "$*" in *"-m venv"*) {make} ;; *"pip install"*) echo pip >>"{log}" ;; esac',
    )

    def run(with_uv: bool, **env: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        if with_uv:
            make_venv = f'mkdir -p "{python.parent}"; cp "{programs}/python3" "{python}"'
            install = f'echo "uv $UV_TORCH_BACKEND" >>"{log}"; exit $UV_FAILS'
            write(programs / "uv", f'case "$1" in venv) {make_venv} ;; pip) {install} ;; esac')
        path = f"{programs}:/usr/bin:/bin"
        done = call(scripts / "setup.sh", cwd=tmp_path, PATH=path, **env)
        return done, log.read_text().splitlines() if log.exists() else []

    return run


def write(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("with_uv", "env", "code", "installed_by"),
    [
        (True, {}, 0, ["uv "]),
        (False, {}, 0, ["pip"]),
        (True, {"UV_FAILS": "1"}, 0, ["uv ", "pip"]),
        (True, {"UV_TORCH_BACKEND": "cpu"}, 0, ["uv cpu"]),
        # pip would install CUDA
        (True, {"UV_TORCH_BACKEND": "cpu", "UV_FAILS": "1"}, 5, ["uv cpu"]),
        (False, {"UV_TORCH_BACKEND": "cpu"}, 2, []),
        (True, {"PIP_EXTRA_INDEX_URL": "file:///cpu"}, 0, ["pip"]),  # uv would not read it
    ],
)
def test_setup_installs_torch_for_cpus_if_asked(setup, with_uv, env, code, installed_by):
    done, calls = setup(with_uv, **env)
    assert (done.returncode, calls) == (code, installed_by), done.stderr
    assert len(done.stdout.splitlines()) == (1 if code == 2 else 5 if code == 0 else 3)
