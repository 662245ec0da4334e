"""Training on classes of different sizes: balanced sampling and class weights."""

from pathlib import Path

import numpy as np
import pytest
from helpers import arguments, assert_resumes, datasets_in, fails, single_rank

from imagenet_cls.commands.train import train_command
from imagenet_cls.config.load import load_config
from imagenet_cls.engine.loaders import build_train_loader
from imagenet_cls.engine.plan import plan_run

RARE = "8"


@pytest.fixture(scope="module")
def imbalanced(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits in train and val, four to one; of one class, train has 5 %."""
    root = tmp_path_factory.mktemp("imbalanced")
    for folder in (digits / "train").iterdir():
        files = sorted(folder.iterdir())
        kept = [file for number, file in enumerate(files) if number % 5]
        if folder.name == RARE:
            kept = kept[: round(0.05 * len(kept))]
        for part, chosen in (("train", kept), ("val", files[::5])):
            (root / part / folder.name).mkdir(parents=True)
            for file in chosen:
                (root / part / folder.name / file.name).symlink_to(file)
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
    targets = source.required_targets("data.balance")
    counts = np.bincount([targets[index] for _, index, _ in loader.sampler], minlength=10)
    assert counts.min() > counts.max() / 2


@pytest.mark.parametrize("setting", ["data.balance=0.5", "loss.class_weights=effective"])
def test_unknown_targets_are_an_error(tmp_path: Path, setting: str) -> None:
    data = {"data.name": "recording_dataset:open_set", "data.kwargs": "{images: 64}"}
    words = arguments(tmp_path / "notes", tmp_path / "run", **data, train__global_batch_size=32)
    assert setting.partition("=")[0] in fails(3, train_command, *words, setting)
