"""Standard streams, Ctrl-C and missing libraries."""

import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from helpers import fails, python_path, run, succeeds, write_files

from imagenet_cls.commands import LIBRARIES
from imagenet_cls.commands.cli import parse
from imagenet_cls.commands.configs import configs_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command, train_parser
from imagenet_cls.entry_points import COMMANDS
from imagenet_cls.extras.datasets.pack import pack_command
from imagenet_cls.extras.weights.export import export_command
from imagenet_cls.text import command_line

TOOLS = Path(__file__).resolve().parents[3] / "tools"
NO_REPORTS = {"IMAGENET_CLS_NO_REPORTS": "1"}


@pytest.mark.parametrize(
    ("number", "printed"), [(1, ("", "error False\n")), (2, ("output False\n", ""))]
)
def test_closed_stream_accepts_output(number: int, printed: tuple[str, str]) -> None:
    """As the shell closes it with `>&-`: Python has None in its place then."""
    program = (
        "import sys\nfrom imagenet_cls.commands.cli import main\n"
        "def command(words):\n    print('output', sys.stdout.isatty(), file=sys.stdout)\n"
        "    print('error', sys.stderr.isatty(), file=sys.stderr)\n    return 7\n"
        "main(command)"
    )
    done = run(["bash", "-c", f'exec "$0" -c "$1" {number}>&-', sys.executable, program])
    assert (done.returncode, done.stdout, done.stderr) == (7, *printed)


@pytest.mark.parametrize(
    ("missing", "variables", "expected"),
    [
        (["matplotlib", "sklearn", "tensorboard"], NO_REPORTS, 0),
        (["omegaconf"], NO_REPORTS, 2),
        (["matplotlib"], {}, 2),
    ],
)
def test_libraries_of_reports_may_be_missing_on_a_gpu_machine(
    missing: list[str], variables: dict[str, str], expected: int
) -> None:
    code = (
        "import importlib.util, sys\nfind = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name in {missing} else find(name)\n"
        "sys.argv = ['imagenet-cls', 'train', '--help']\n"
        "from imagenet_cls.commands.main import main\nmain()"
    )
    done = run([sys.executable, "-c", code], **variables)
    assert done.returncode == expected, done.stderr
    assert done.stderr.startswith(missing[0] + ":" if expected else "")


@pytest.mark.parametrize("tool", sorted(TOOLS.glob("*.py")), ids=lambda path: path.stem)
def test_tool_without_libraries_names_the_setup_script(tool: Path) -> None:
    """-S: with Python's own modules alone."""
    done = run([sys.executable, "-S", tool, TOOLS])
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 2)
    assert "bash scripts/setup.sh" in done.stderr


def test_ctrl_c_during_imports_exits_130_silently(tmp_path: Path) -> None:
    """By one that catches every exception and continues, as some do."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n"
        "    pass\n"
    )
    words = ["configs/demo.yaml", "--dry-run", "--work-dir", tmp_path / "run"]
    command = [sys.executable, TOOLS / "train.py", *words]
    done = run(command, PYTHONPATH=python_path(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_during_imports_of_a_spawned_rank_ends_it(tmp_path: Path) -> None:
    """Multiprocessing imports the modules of the target after the main module."""
    (tmp_path / "library.py").write_text(
        "import os, signal\nif os.environ['IMAGENET_CLS_LAUNCHED'] == str(os.getppid()):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except BaseException:\n        pass\n"
        "def target():\n    pass\n"
    )
    (tmp_path / "main.py").write_text(
        "import multiprocessing, os, sys\nfrom imagenet_cls.commands.main import main\n"
        "if __name__ == '__main__':\n"
        "    os.environ['IMAGENET_CLS_LAUNCHED'] = str(os.getpid())\n    import library\n"
        "    rank = multiprocessing.get_context('spawn').Process(target=library.target)\n"
        "    rank.start()\n    rank.join()\n    sys.exit(rank.exitcode)\n"
    )
    done = run([sys.executable, tmp_path / "main.py"], PYTHONPATH=python_path(tmp_path))
    assert done.returncode == 130


def test_ctrl_c_ignored_by_the_shell_stays_ignored() -> None:
    """Also if the command sets a handler."""
    program = (
        "import os, signal\nfrom imagenet_cls.commands.cli import main\n"
        "from imagenet_cls.parallel.exit import handle_interrupts\n"
        "def command(words):\n    handle_interrupts(signal.default_int_handler)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    return 7\n"
        "main(command)"
    )
    command = ["bash", "-c", 'trap \'\' INT; exec "$0" -c "$1"', sys.executable, program]
    assert run(command).returncode == 7


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--lr=0.1 --amp --batch-size 64", "optimizer.lr= train.precision= batch_size="),
        ("--test-only", command_line("test")),
        ("--workdir x", "'--work-dir'"),
        ("a.yaml optimizer.lr 0.1", "optimizer.lr=value"),
        ("a.yaml b.yaml", "'b.yaml'"),
        # --resume takes no checkpoint
        ("a.yaml --resume run/checkpoints/step-0000001", "--resume-from"),
        # the demo, the default, is rarely the config of the checkpoint
        ("--resume-from some/checkpoint", "some/checkpoint"),
    ],
)
def test_wrong_arguments_exit_with_2_and_name_the_right_ones(
    words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ("a.yaml", "run/config.yaml", "run/checkpoints/step-0000001/optimizer.json")
    write_files(tmp_path, dict.fromkeys(files, ""))
    err = fails(2, train_command, *words.split())
    assert all(text in err for text in named.split())


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ("--resume", []),
        ("--resume auto a.yaml", ["a.yaml"]),
        ("--resume a.yaml", ["a.yaml"]),
        ("--resume seed=1 a.yaml", ["seed=1", "a.yaml"]),
    ],
)
def test_resume_takes_no_word_but_auto(words: str, others: list[str]) -> None:
    arguments = parse(train_parser(), words.split())
    assert (arguments.resume, arguments.arguments) == (True, others)


@pytest.mark.parametrize("words", [["run"], ["a.yaml", "run"]])
def test_weights_beside_those_of_a_run_are_an_error(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's would be evaluated."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    assert "model.checkpoint" in fails(2, evaluate_command, *words, "model.checkpoint=b.pth")


def test_python_api_without_libraries_raises_import_error() -> None:
    """Also in a notebook, which SystemExit would end. -S: with Python's own modules alone."""
    program = (
        "import imagenet_cls\ntry:\n    imagenet_cls.train\n"
        "except ImportError as error:\n    print(error)"
    )
    done = run([sys.executable, "-S", "-c", program], PYTHONPATH=python_path(TOOLS.parent))
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout and "scripts/setup.sh" in done.stdout


def test_libraries_are_those_of_setup_cfg() -> None:
    """By the names that they are imported by, which are not always those that they are installed
    by.
    """
    setup = ConfigParser()
    setup.read(TOOLS.parent / "setup.cfg")
    wanted = {line.partition(">")[0] for line in setup["options"]["install_requires"].split()}
    packages = {
        name: {package.lower() for package in given}
        for name, given in packages_distributions().items()
    }
    assert {package for name in LIBRARIES for package in packages[name] & wanted} == wanted


def test_verify_data_on_ctrl_c_exits_with_130(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1.jpg": "none", "a/2.jpg": "none", "b/1.jpg": "none"})
    program = (
        "import os, runpy, signal, sys, time\n"
        "from imagenet_cls.data import every_image\n"
        "def interrupted(*_):\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(20)\n"
        "every_image.image_problem = interrupted\nsys.argv[0] = 'verify_data'\n"
        f"runpy.run_path({str(TOOLS / 'verify_data')!r} + '.py', run_name='__main__')"
    )
    assert run([sys.executable, "-c", program, tmp_path]).returncode == 130


def console_script(*words: str, cwd: Path | None = TOOLS) -> subprocess.CompletedProcess[str]:
    """The console script `imagenet-cls`, as pip installs it. Prints to stdout whether torch was
    imported.
    """
    program = (
        "import atexit, sys\nsys.argv[0] = '/usr/bin/imagenet-cls'\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "from imagenet_cls.commands.main import main\nmain()"
    )
    return run([sys.executable, "-c", program, *words], cwd=cwd)


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        ("train --work-dir .", 2, "--overwrite"),
        ("train --work-dir . --gpus 2", 2, "--overwrite"),
        ("trian", 2, "imagenet-cls"),
        ("train --no-such-option", 2, "imagenet-cls"),
        ("test", 2, "imagenet-cls"),
        # a wrong override, or a missing file
        ("train optimzer.lr=1 train.epochs=many", 2, "optimzer.lr=1 train.epochs=many"),
        ("train data.name=folder data.root=nowhere data.val=val", 3, "data.root"),
        ("train data.name=list data.train=nowhere.txt data.val=val.txt", 3, "data.train"),
        ("train data.exclude=nowhere.txt", 3, "data.exclude"),
        ("train model.checkpoint=nowhere.pth", 4, "model.checkpoint"),
        ("train demo --resume-from nowhere --launcher pytorch --gpus 2", 4, "--resume-from"),
    ],
)
def test_error_of_the_arguments_is_found_before_torch_is_imported(
    tmp_path: Path, words: str, code: int, named: str
) -> None:
    """In a folder that holds a run."""
    (tmp_path / "checkpoints" / "step-0000012").mkdir(parents=True)
    before = [*tmp_path.rglob("*")]
    done = console_script(*words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "False\n"), done.stderr
    assert all(text in done.stderr for text in named.split())
    assert len(done.stderr.splitlines()) in (2, 3) and [*tmp_path.rglob("*")] == before


def test_export_with_an_unknown_format_exits_with_2(tmp_path: Path) -> None:
    fails(2, export_command, tmp_path, "--out", "model.bin")


@pytest.mark.parametrize("words", ["photos", "photos a b", "photos a --out b"])
def test_pack_takes_one_output_folder(words: str) -> None:
    assert "--out DIR" in fails(2, pack_command, *words.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("demo gpus=2", "--gpus 2"),
        ("demo work-dir=a", "--work-dir a"),
        ("dropout=0.1", "drop_rate"),
    ],
)
def test_option_or_other_name_as_a_key_is_an_error_that_names_the_right_one(
    words: str, named: str
) -> None:
    assert named in fails(2, train_command, *words.split())


def test_gpus_all_is_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert parse(train_parser(), ["--gpus", "all"]).gpus == 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "no GPU" in fails(2, train_command, "--gpus", "all")


def test_removed_working_directory_exits_with_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    done = console_script("train", "resnet50", cwd=None)
    assert (done.returncode, done.stdout) == (5, "False\n") and len(done.stderr.splitlines()) <= 3


def test_console_script_has_every_tool() -> None:
    """But the benchmark, which runs in a clone only."""
    assert {name.replace("-", "_") for name in COMMANDS} == {
        path.stem for path in TOOLS.glob("*.py")
    } - {"benchmark"}


def test_console_script_imports_no_torch_for_help_and_lists_the_commands() -> None:
    done = console_script("train", "--help")
    assert (done.returncode, done.stdout.split()[-1]) == (0, "False")
    assert done.stdout.startswith("usage: imagenet-cls train ")
    done = console_script()
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_configs_lists_imagenet_first() -> None:
    found = [line.split()[1] for line in succeeds(configs_command).splitlines()[1:]]
    assert "digits" in found and found.index("digits") >= found.count("imagenet") > 0
