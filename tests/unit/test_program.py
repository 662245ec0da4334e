"""The standard streams of a program, whatever they were."""

import subprocess
import sys

import pytest


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
