"""Training on classes of different sizes: balanced sampling and class weights."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import arguments, assert_resumes, datasets_in, fails, single_rank
from PIL import Image

from imagenet_cls.commands.train import train_command
from imagenet_cls.config.load import load_config
from imagenet_cls.data.builtin import write_digits
from imagenet_cls.data.sources import required_targets
from imagenet_cls.engine.loaders import build_train_loader
from imagenet_cls.engine.plan import plan_run

RARE = "8"


@pytest.fixture(scope="module")
def imbalanced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits in train and val, four to one; of one class, train has 5 %."""
    root = tmp_path_factory.mktemp("imbalanced")
    write_digits(root, "train")
    for folder in sorted((root / "train").iterdir()):
        files = sorted(folder.iterdir())
        (root / "val" / folder.name).mkdir(parents=True)
        for file in files[::5]:
            shutil.move(file, root / "val" / folder.name)
        kept = [file for number, file in enumerate(files) if number % 5]
        for file in kept[round(0.05 * len(kept)) :] if folder.name == RARE else []:
            file.unlink()
    return root


def test_balanced_run_resumes_and_starts_with_the_class_sizes(
    imbalanced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"data__name": "folder", "data__val": "val", "data__val_fraction": "null"}
    changes = data | {"data__balance": 1, "data__repeats": 2, "loss__class_weights": "effective"}
    assert_resumes(imbalanced, tmp_path, 13, "noisy", **changes)
    assert "7 (8) to 146 (3) per class" in capsys.readouterr().out


def test_balanced_epoch_has_about_as_many_images_of_each_class(imbalanced: Path) -> None:
    words = ["data.balance=1", "train.global_batch_size=32", "data.num_workers=0"]
    config = load_config(None, words).config
    source = datasets_in(imbalanced).train
    plan = plan_run(config.train, len(source), 1, 1)
    loader = build_train_loader(config, source, plan, single_rank(), [0.5] * 3)
    targets = required_targets(source, "data.balance")
    counts = np.bincount([targets[index] for _, index, _ in loader.sampler], minlength=10)
    assert counts.min() > counts.max() / 2


class WithoutTargets:
    classes = ("a", "b")

    def __init__(self, root: str, part: str):
        pass

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        return Image.new("RGB", (16, 16)), i % 2


@pytest.mark.parametrize("setting", ["data.balance=0.5", "loss.class_weights=effective"])
def test_unknown_targets_are_an_error(tmp_path: Path, setting: str) -> None:
    name = f"data.name={__name__}:WithoutTargets"
    err = fails(
        3,
        train_command,
        *arguments(tmp_path, tmp_path / "run", train__global_batch_size=32),
        name,
        setting,
    )
    assert setting.partition("=")[0] in err
