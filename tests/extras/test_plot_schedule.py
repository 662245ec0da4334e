"""plot_schedule.py: needs no data, plots the numbers of the run itself, and reports a bad config as
train.py does.
"""

from pathlib import Path

import numpy as np
import pytest
from archive_writers import write_zip
from helpers import MULTILABEL, fails, succeeds
from PIL import Image

from imagenet_cls.config.load import load_config
from imagenet_cls.engine.plan import plan_run, schedule_curves
from imagenet_cls.extras.before_training.plot_schedule import plot_schedule_command

CONFIG = """
model: {name: resnet18}
data: {root: /nowhere}
augment: {size_px: 192, progressive: {epochs: [1, 3], sizes_px: [128, 192]}}
optimizer: {name: sgd, lr: 0.1, lr_base_batch: 256, kwargs: {momentum: 0.875}}
schedule: {name: cosine, warmup_epochs: 1, warmup_start_lr: 0.0, kwargs: {min_lr: 0.002}}
train: {epochs: 5, global_batch_size: 1024}
"""
HELD_OUT = ["data.val=null", "data.val_fraction=0.2"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "growing.yaml"
    path.write_text(CONFIG)
    return path


def test_plot_and_summary(config: Path) -> None:
    out = succeeds(plot_schedule_command, config, "--images", 102_500, "--out", "deep/growing.png")
    pixels = np.asarray(Image.open("deep/growing.png").convert("RGB"))
    assert (pixels == (0x1F, 0x77, 0xB4)).all(axis=-1).sum() > 1000  # the first color of matplotlib
    first, scaling, header, rate, *_ = out.splitlines()
    assert first == "500 steps: 5 epochs of 100, 1,024 of 102,500 images in each"
    assert "0.1" in scaling and "0.4" in scaling
    shown = dict(zip(header.split(), rate.split()[-4:], strict=True))
    # one step before 0.002
    assert shown == {"start": "0", "lowest": "0", "highest": "0.4", "end": "0.002006"}


def test_curves_are_those_of_the_run(config: Path) -> None:
    plan, _, curves = schedule_curves(load_config(config).config, 102_500)
    assert plan == plan_run(load_config(config).config.train, 102_500, 1)
    warmup = [0.4 * step / 100 for step in range(100)]
    cosine = [0.002 + 0.398 * 0.5 * (1 + np.cos(np.pi * step / 400)) for step in range(400)]
    assert curves["learning rate"] == pytest.approx(warmup + cosine)
    assert curves["resolution (px)"] == [128] * 200 + [160] * 100 + [192] * 200
    assert curves["momentum"] == [0.875] * 500
    one_cycle = ["schedule.name=one_cycle", "schedule.warmup_epochs=0"]
    one_cycle.append("optimizer.lr_scales={'head.*': 10}")
    one_cycle.append("schedule.kwargs={min_momentum: 0.8, max_momentum: 0.9}")
    momentum = schedule_curves(load_config(config, one_cycle).config, 102_500)[2]["momentum"]
    assert (min(momentum), max(momentum)) == pytest.approx((0.8, 0.9))
    without = load_config(config, ["optimizer={name: timm:adagrad, lr: 0.1}"]).config
    assert "momentum" not in schedule_curves(without, 102_500)[2]
    shorter = schedule_curves(load_config(config, ["train.max_steps=130"]).config, 102_500)[2]
    assert shorter["learning rate"] == curves["learning rate"][:130]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["data.root=DIGITS", *HELD_OUT], "1,438 training images: counted"),
        (["data.root=DIGITS", "--images", "1000"], "of 1,000 images"),
        (
            ["data.name=synthetic", "data.kwargs.train_images=4096"],
            "4,096 training images: counted",
        ),
        (["data.name=digits", "data.root=new", *HELD_OUT], "1,438 training images: counted"),
        (["data.root=photos.zip"], "130 training images: counted"),
        ([*MULTILABEL], "2,400 training images: counted"),
        (["data.name=folder", "data.root=none"], "1,281,167 training images: assumed"),
        (["data.name=torchvision:CIFAR10", *HELD_OUT], "1,281,167 training images: assumed"),
    ],
)
def test_training_images_are_counted_given_or_assumed(
    config: Path, digits: Path, more: list[str], expected: str
) -> None:
    files = [(f"{part}/cat/{i}.jpg", b"x") for part in ("train", "val") for i in range(130)]
    write_zip(Path("photos.zip"), files)
    words = [word.replace("DIGITS", str(digits)) for word in more]
    out = succeeds(plot_schedule_command, config, "train.global_batch_size=100", *words)
    assert expected in out and ("training images" not in out) == ("--images" in more)
    assert not Path("none").exists()


@pytest.mark.parametrize(
    ("argv", "code", "expected"),
    [
        (["growing.yaml", "schedule.name=cosin"], 2, "schedule.name"),
        (["growing.yaml", "--out", "plot.jpg"], 2, "plot.jpg"),
        (["growing.yaml", "--images", "1000"], 3, "1000 images"),
        (["growing.yaml", "other.yaml"], 2, "other.yaml"),
        (["optimizer.lr=1"], 2, "CONFIG"),
    ],
)
def test_bad_command_line_is_reported(
    config: Path, argv: list[str], code: int, expected: str
) -> None:
    assert expected in fails(code, plot_schedule_command, *argv)
    assert [path.name for path in Path().iterdir()] == ["growing.yaml"]
