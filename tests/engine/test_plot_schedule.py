"""plot_schedule.py: needs no data, plots the numbers of the run itself, and reports a bad config as train.py does."""

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import REPOSITORY, run
from PIL import Image

from imagenet_cls.commands.plot_schedule import plot_schedule_command, schedule_curves
from imagenet_cls.commands.program import main
from imagenet_cls.config.load import load_config
from imagenet_cls.engine.plan import plan_run
from imagenet_cls.optim.build import initial_momentum

CONFIG = """
model: {name: resnet18}
data: {root: /nowhere}
augment: {size_px: 192, progressive: {epochs: [1, 3], sizes_px: [128, 192]}}
optimizer: {name: sgd, lr: 0.1, lr_base_batch: 256, kwargs: {momentum: 0.875}}
schedule: {name: cosine, warmup_epochs: 1, warmup_start_lr: 0.0, kwargs: {min_lr: 0.002}}
train: {epochs: 5, global_batch_size: 1024}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "growing.yaml"
    path.write_text(CONFIG)
    return path


def plot(*argv: object) -> int:
    return main(plot_schedule_command, [str(word) for word in argv])


def test_plot_and_summary(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot(config, "--images", 102_500, "--out", "deep/growing.png") == 0
    pixels = np.asarray(Image.open("deep/growing.png").convert("RGB"))
    assert (pixels == (0x1F, 0x77, 0xB4)).all(axis=-1).sum() > 1000  # the first colour of matplotlib
    first, scaling, header, *rows, last = capsys.readouterr().out.splitlines()
    assert first == "500 steps: 5 epochs of 100, 1,024 of 102,500 images in each"
    assert "0.1" in scaling and "0.4" in scaling
    assert header.split() == ["start", "lowest", "highest", "end"]
    assert [row.split()[-4:] for row in rows] == [
        ["0", "0", "0.4", "0.002006"],  # one step before 0.002
        ["0.875", "0.875", "0.875", "0.875"],
        ["128", "128", "192", "192"],
    ]
    assert last == "wrote deep/growing.png"


def test_curves_are_those_of_the_run(config: Path) -> None:
    curves = schedule_curves(load_config(config).config, 102_500)
    assert curves.plan == plan_run(load_config(config).config.train, 102_500, 1)
    assert list(curves.steps) == list(range(500))
    warmup = [0.4 * step / 100 for step in range(100)]
    cosine = [0.002 + 0.398 * 0.5 * (1 + np.cos(np.pi * step / 400)) for step in range(400)]
    assert curves.lr == pytest.approx(warmup + cosine)
    assert curves.size_px == [128] * 200 + [160] * 100 + [192] * 200
    assert curves.momentum == [0.875] * 500
    shorter = schedule_curves(load_config(config, ["train.max_steps=130"]).config, 102_500)
    assert shorter.lr == curves.lr[:130]


def test_momentum_of_a_schedule(config: Path) -> None:
    argv = ["schedule.name=one_cycle", "schedule.kwargs.min_momentum=0.8", "schedule.kwargs.max_momentum=0.95"]
    momentum = schedule_curves(load_config(config, argv).config, 102_500).momentum
    assert momentum is not None and momentum[0] == momentum[-1] == pytest.approx(0.95)
    assert min(momentum) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [("adamw", {"betas": [0.85, 0.99]}, 0.85), ("rmsprop", {"momentum": 0.7}, 0.7), ("timm:adagrad", {}, None)],
)
def test_momentum_of_an_optimizer(config: Path, name: str, kwargs: dict, expected: float | None) -> None:
    argv = [f"optimizer.name={name}", "optimizer.lr=0.1", "optimizer.lr_scales={'head.*': 10}"]
    argv += [f"optimizer.kwargs.{key}={value}" for key, value in kwargs.items()]
    assert initial_momentum(load_config(config, argv).config.optimizer) == expected


def test_optimizer_without_momentum_has_no_panel(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heights = []
    for name in ("adamw", "timm:adagrad"):
        assert plot(config, f"optimizer.name={name}", "optimizer.lr=0.1", "schedule.name=plateau") == 0
        heights.append(Image.open("work_dirs/growing_schedule.png").height)
    assert heights[1] < heights[0]
    out = capsys.readouterr().out
    assert "momentum                none" in out and "schedule plateau:" in out


def test_training_images_are_counted_given_or_assumed(
    config: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["data.val=null", "data.val_fraction=0.2", "train.global_batch_size=100"]
    for more, expected in (
        ([f"data.root={digits}"], "1,438 training images: counted"),
        (["data.name=synthetic", "data.kwargs.train_images=4096"], "4,096 training images: counted"),
        ([f"data.name=digits data.root={tmp_path / 'none'}"], "1,281,167 training images: assumed"),
        (["data.name=torchvision:CIFAR10", f"data.root={tmp_path / 'none'}"], "1,281,167 training images: assumed"),
    ):
        extra = argv[2:] if "synthetic" in more[0] else argv
        assert plot(config, *" ".join(more).split(), *extra) == 0
        assert expected in capsys.readouterr().out and not (tmp_path / "none").exists()
    assert plot(config, f"data.root={digits}", *argv, "--images", 1000) == 0
    out = capsys.readouterr().out
    assert "of 1,000 images" in out and "counted" not in out and "assumed" not in out


@pytest.mark.parametrize(
    ("argv", "code", "expected"),
    [
        (["schedule.nam=cosine"], 2, "schedule.nam"),  # stage 1
        (["schedule.cooldown_epochs=5"], 2, "schedule.cooldown_epochs"),
        (["schedule.name=cosin"], 2, "schedule.name"),  # stage 2
        (["schedule.kwargs.cycles=0"], 2, "schedule.kwargs.cycles"),
        (["schedule.name=multistep", "schedule.kwargs.milestones_epochs=[30]"], 2, "milestones_epochs"),
        (["--out", "plot.jpg"], 2, "plot.jpg"),
        (["--out", "folder.png"], 2, "folder.png"),
        (["--images", "1000"], 3, "1000 images"),
        (["other.yaml"], 2, "other.yaml"),
    ],
)
def test_bad_command_line_is_reported(config: Path, argv: list[str], code: int, expected: str, capsys) -> None:
    Path("folder.png").mkdir()
    assert plot(config, *argv) == code
    error = capsys.readouterr().err
    assert expected in error and len(error.splitlines()) <= 3
    assert list(Path().glob("**/*.png")) == [Path("folder.png")]


def test_missing_config_is_reported(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot() == plot("optimizer.lr=1") == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_tool_ends_with_the_exit_code(config: Path) -> None:
    ended = run([sys.executable, str(REPOSITORY / "tools" / "plot_schedule.py"), str(config), "--out", "drawing.jpg"])
    assert ended.returncode == 2 and "--out drawing.jpg" in ended.stderr
