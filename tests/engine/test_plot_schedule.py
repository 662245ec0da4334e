"""The drawing of a run's course: no data, the numbers of the run itself, and a bad config refused as train.py does."""

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import REPOSITORY, run
from PIL import Image

from imagenet_cls.commands.plot_schedule import foresee, plot_schedule_command
from imagenet_cls.commands.program import main
from imagenet_cls.config.load import load_config
from imagenet_cls.engine.plan import plan_run
from imagenet_cls.optim.build import own_momentum

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


def draw(*words: object) -> int:
    return main(plot_schedule_command, [str(word) for word in words])


def colours(path: Path) -> int:
    """Pixels of the first colour of matplotlib's cycle."""
    pixels = np.asarray(Image.open(path).convert("RGB"))
    return int((pixels == (0x1F, 0x77, 0xB4)).all(axis=-1).sum())


def test_a_drawing_and_a_table(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw(config, "--images", 102_500, "--out", "deep/growing.png") == 0
    assert colours(Path("deep/growing.png")) > 1000
    first, scaling, header, *rows, last = capsys.readouterr().out.splitlines()
    assert first == "500 steps: 5 epochs of 100, 1,024 of 102,500 images in each"
    assert scaling == "lr 0.1 for 256 images, scaled linearly x 4 to 0.4 for 1024"
    assert header.split() == ["start", "lowest", "highest", "end"]
    assert [row.split()[-4:] for row in rows] == [
        ["0", "0", "0.4", "0.002006"],  # one step before 0.002
        ["0.875", "0.875", "0.875", "0.875"],
        ["128", "128", "192", "192"],
    ]
    assert last == "wrote deep/growing.png"


def test_the_numbers_are_those_of_the_run(config: Path) -> None:
    course = foresee(load_config(config).config, 102_500)
    assert course.plan == plan_run(load_config(config).config.train, 102_500, 1)
    assert list(course.steps) == list(range(500))
    warmup = [0.4 * step / 100 for step in range(100)]
    cosine = [0.002 + 0.398 * 0.5 * (1 + np.cos(np.pi * step / 400)) for step in range(400)]
    assert course.lr == pytest.approx(warmup + cosine)
    assert course.size_px == [128] * 200 + [160] * 100 + [192] * 200
    assert course.momentum == [0.875] * 500
    shorter = foresee(load_config(config, ["train.max_steps=130"]).config, 102_500)
    assert shorter.lr == course.lr[:130]


def test_a_momentum_that_moves(config: Path) -> None:
    words = ["schedule.name=one_cycle", "schedule.kwargs.min_momentum=0.8", "schedule.kwargs.max_momentum=0.95"]
    momentum = foresee(load_config(config, words).config, 102_500).momentum
    assert momentum[0] == momentum[-1] == pytest.approx(0.95)
    assert min(momentum) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [("adamw", {"betas": [0.85, 0.99]}, 0.85), ("rmsprop", {"momentum": 0.7}, 0.7), ("timm:adagrad", {}, None)],
)
def test_momentum_of_an_optimizer(config: Path, name: str, kwargs: dict, expected: float | None) -> None:
    words = [f"optimizer.name={name}", "optimizer.lr=0.1", "optimizer.lr_scales={'head.*': 10}"]
    words += [f"optimizer.kwargs.{key}={value}" for key, value in kwargs.items()]
    assert own_momentum(load_config(config, words).config.optimizer) == expected


def test_without_momentum_there_is_no_panel_for_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heights = []
    for name in ("adamw", "timm:adagrad"):
        assert draw(config, f"optimizer.name={name}", "optimizer.lr=0.1") == 0
        heights.append(Image.open("work_dirs/growing_schedule.png").height)
    assert heights[1] < heights[0]
    assert "momentum                none" in capsys.readouterr().out


def test_a_plateau_is_told(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw(config, "schedule.name=plateau") == 0
    assert "as if each evaluation were better" in capsys.readouterr().out


def test_images_are_counted_where_they_lie(
    config: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder's are listed, also behind val_fraction; nothing is made where there is nothing, and that is said."""
    words = ["data.val=null", "data.val_fraction=0.2", "train.global_batch_size=100"]
    assert draw(config, f"data.root={digits}", *words) == 0
    out = capsys.readouterr().out
    assert "70 steps: 5 epochs of 14, 100 of 1,438 images in each" in out
    assert f"1,438 training images: counted ({digits})" in out
    assert draw(config, f"data.root={digits}", *words, "--images", 1000) == 0
    out = capsys.readouterr().out
    assert "of 1,000 images" in out and "counted" not in out and "assumed" not in out
    for name in ("folder", "digits", "torchvision:CIFAR10"):
        assert draw(config, f"data.name={name}", f"data.root={tmp_path / 'none'}", *words[:2]) == 0
        assert "1,281,167 training images: assumed" in capsys.readouterr().out and not (tmp_path / "none").exists()
    assert draw(config, "data.name=synthetic", "data.kwargs.train_images=4096") == 0
    assert "4,096 training images: counted (synthetic)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["schedule.nam=cosine"], 2, ["schedule.nam", "did you mean 'schedule.name'"]),  # stage 1
        (["schedule.cooldown_epochs=5"], 2, ["schedule.cooldown_epochs", "train.epochs 5"]),
        (["schedule.name=cosin"], 2, ["schedule.name", "did you mean 'cosine'"]),  # stage 2
        (["schedule.kwargs.cycles=0"], 2, ["schedule.kwargs.cycles", "a whole number, at least 1"]),
        (
            ["schedule.name=multistep", "schedule.kwargs.milestones_epochs=[30]"],
            2,
            ["schedule.kwargs.milestones_epochs", "30 is beyond the run"],
        ),
        (["model.name=resnet19"], 2, ["model.name"]),
        (["--out", "drawing.jpg"], 2, ["drawing.jpg", "*.png"]),
        (["--out", "folder.png"], 2, ["can't write folder.png"]),
        (["--images", "1000"], 3, ["1000 images", "1024"]),
        (["other.yaml", "third.yaml"], 2, ["third.yaml"]),
    ],
)
def test_refusals(config: Path, words: list[str], code: int, told: list[str], capsys) -> None:
    Path("folder.png").mkdir()
    assert draw(config, *words) == code
    error = capsys.readouterr().err
    assert all(text in error for text in told), error
    assert len(error.splitlines()) <= 3
    assert list(Path().glob("**/*.png")) == [Path("folder.png")]


def test_without_a_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw() == draw("optimizer.lr=1") == 2
    error = capsys.readouterr().err
    assert error.count("which config?\nUsage: plot_schedule.py CONFIG") == 2 and len(error.splitlines()) == 4


def test_the_tool(config: Path) -> None:
    """A process, which ends by itself: it takes no interpreter of ours with it. The command's own refusal is enough."""
    ended = run([sys.executable, str(REPOSITORY / "tools" / "plot_schedule.py"), str(config), "--out", "drawing.jpg"])
    assert ended.returncode == 2 and "--out drawing.jpg: the drawing is a PNG file" in ended.stderr
