"""The warning that training images may be among those evaluated, compared with the actual files."""

from pathlib import Path

import pytest

from imagenet_cls.config.schema import Config, DataConfig, EvalConfig
from imagenet_cls.data import open_datasets
from imagenet_cls.engine.inference import evaluation_differences

PIXELS = {"mean": [0.5] * 3, "std": [0.2] * 3}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of ten files in `train`, of four in `val`. Nothing is decoded."""
    folder = tmp_path_factory.mktemp("images")
    for part, count in (("train", 10), ("val", 4)):
        for name in ("a", "b", "c"):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                (folder / part / name / f"{number}.jpg").touch()
    return folder


WAYS = [
    {"val": None, "val_fraction": 0.2},
    {"val": None, "val_fraction": 0.5},
    {"val": "val"},
    {"val": "train"},
    {"train": "val", "val": None, "val_fraction": 0.5},
]


@pytest.mark.parametrize("trained", WAYS)
@pytest.mark.parametrize("tested", WAYS)
def test_warning_if_and_only_if_training_images_are_evaluated(root: Path, trained: dict, tested: dict) -> None:
    before, now = (Config(data=DataConfig(root=str(root), **way)) for way in (trained, tested))
    train, val = open_datasets(before.data, ("train",)).train, open_datasets(now.data, ("val",)).val
    assert train is not None and val is not None
    places = [
        {(root / part / source.name(i)).resolve() for i in range(len(source))}
        for part, source in ((before.data.train, train), (now.data.val or now.data.train, val))
    ]
    lines = evaluation_differences(now, before, PIXELS, root / "checkpoints" / "step-0000001")
    assert any(line.startswith("warning") for line in lines) == bool(places[0] & places[1])
    assert (not lines) == (trained == tested and trained.get("val") != "train")


def test_warning_for_the_same_folder_by_another_path(root: Path) -> None:
    before = Config(data=DataConfig(root=str(root), val=None, val_fraction=0.2))
    now = Config(data=DataConfig(root=str(root / "train"), train=".", val=None, val_fraction=0.4))
    assert any(line.startswith("warning") for line in evaluation_differences(now, before, PIXELS, root))


def test_batch_size_is_not_a_difference(root: Path) -> None:
    data = DataConfig(root=str(root))
    before = Config(data=data, eval=EvalConfig(batch_size=1, every_epochs=2))
    assert evaluation_differences(Config(data=data), before, PIXELS, root) == []
