"""A program's standard streams, whatever they were, and what it says where it can't even begin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from imagenet_cls.program import exit_code_of

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.mark.parametrize(("number", "name"), [(1, "stdout"), (2, "stderr")])
def test_a_closed_stream_takes_what_is_printed(number: int, name: str) -> None:
    """As the shell closes it with `>&-`: Python has None in its place then."""
    program = (
        "import sys\nfrom imagenet_cls.program import main\n"
        "def command(words):\n    print('said', sys.stdout.isatty(), file=sys.stdout)\n"
        "    print('told', sys.stderr.isatty(), file=sys.stderr)\n    return 7\n"
        "main(command)"
    )
    closed = f'exec "$0" -c "$1" {number}>&-'
    done = subprocess.run(["bash", "-c", closed, sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert (done.stdout, done.stderr) == (("", "told False\n") if name == "stdout" else ("said False\n", ""))


@pytest.mark.parametrize("tool", sorted(TOOLS.glob("*.py")), ids=lambda path: path.stem)
def test_before_the_set_up_a_tool_says_what_to_do(tool: Path) -> None:
    """-S: with Python's own modules alone."""
    command = [sys.executable, "-S", str(tool), str(TOOLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 2)
    assert "is not installed for" in done.stderr and "bash scripts/setup.sh" in done.stderr


def test_ctrl_c_while_libraries_are_imported(tmp_path: Path) -> None:
    (tmp_path / "omegaconf.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, str(TOOLS / "train.py"), "configs/demo.yaml"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_what_a_script_starts_in_the_background_does_not_hear_ctrl_c() -> None:
    """It is told to ignore it, and what its command does with Ctrl-C changes nothing."""
    program = (
        "import os, signal\nfrom imagenet_cls.program import main, raise_interrupts\n"
        "def command(words):\n    raise_interrupts()\n    os.kill(os.getpid(), signal.SIGINT)\n    return 7\n"
        "main(command)"
    )
    command = ["bash", "-c", 'trap \'\' INT; exec "$0" -c "$1"', sys.executable, program]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 7


def test_a_module_of_a_users_own_that_is_missing_is_shown_with_its_traceback() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        exit_code_of("no_such_library:command", [])
