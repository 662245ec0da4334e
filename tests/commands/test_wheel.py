"""The wheel: its files and, nightly, its commands outside of the repository, with the libraries of
this environment.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from helpers import REPOSITORY, evaluations, run


def run_pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=240)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes to the folder that it builds in."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    source.mkdir()
    for name in ("imagenet_cls", "configs"):
        shutil.copytree(
            REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    build = "wheel --no-deps --no-build-isolation --no-index --wheel-dir"
    run_pip(*build.split(), source.parent, source)
    return next(source.parent.glob("*.whl"))


def test_wheel_contains_every_module_template_and_config(wheel: Path) -> None:
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = [
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "imagenet_cls").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    configs = [path.relative_to(REPOSITORY) for path in (REPOSITORY / "configs").rglob("*.yaml")]
    assert names == {*package, *(f"imagenet_cls/_{path.as_posix()}" for path in configs)}


@pytest.mark.nightly
def test_commands_of_the_wheel_work_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    """In a virtual environment with the wheel and the libraries of this one."""
    venv.create(tmp_path / "venv", with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    programs = tmp_path / "venv" / "bin"
    run_pip("--python", programs / "python", "install", "--no-deps", "--no-index", wheel)
    here = tmp_path / "elsewhere"
    here.mkdir()

    def call(*words: str | Path, program: str = "imagenet-cls") -> str:
        done = run([programs / program, *words], cwd=here, PYTHONPATH="")
        assert done.returncode == 0, done.stderr
        return done.stdout

    short = ["train.max_steps=4", "log.tensorboard=false", "log.plots=false"]
    call("train", *short, "--work-dir", "one")
    (here / "mine.yaml").write_text("_base_: configs/demo.yaml\nseed: 1\n")
    for launcher in ("spawn", "pytorch"):
        options = f"--gpus 2 --launcher {launcher} --work-dir {launcher}"
        call("train", "mine.yaml", *short, *options.split())
        assert evaluations(here / launcher)[0]["images"] == 359
    assert "over 359 images" in call("test", "demo", "one")
    image = next((here / "data" / "digits" / "train" / "3").iterdir())
    assert call("predict", "one", image).startswith(f"{image}: ")
    use = (
        "import sys, imagenet_cls as c; "
        "print(next(c.Predictor('one').predict([sys.argv[1]]))['image'])"
    )
    assert call("-c", use, image, program="python") == f"{image}\n"
    assert "imagenet_cls/_configs/" in call("print-config", "resnet50", "--origin")
    assert "check-dist" in call("--help")
