"""docs/your_data.md: every command runs as it stands there, on the digits and small models."""

import csv
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest
from helpers import REPOSITORY, call

from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.extras.datasets.pack import pack_command
from imagenet_cls.extras.datasets.verify_data import verify_command

PAGE = (REPOSITORY / "docs" / "your_data.md").read_text()
COMMANDS = re.findall(r"^python tools/(\w+)\.py (.*)$", PAGE, re.MULTILINE)
TOOLS = {
    "train": train_command,
    "test": evaluate_command,
    "predict": predict_command,
    "pack": pack_command,
    "verify_data": verify_command,
}
SMALL = [
    *("model.pretrained=false", "model.name=test_resnet", "augment.size_px=32", "eval.crop_px=32"),
    *("data.num_workers=0", "train.max_steps=4", "log.tensorboard=false", "log.plots=false"),
]


def write_parquet(images: Path, file: Path) -> None:
    """A dataset with an image column, as the Hub has them."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    paths = sorted(images.rglob("*.jpg"))
    rows = {
        "image": [{"bytes": path.read_bytes(), "path": path.name} for path in paths],
        "label": [path.parent.name for path in paths],
    }
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    datasets.Dataset.from_dict(rows, datasets.Features(features)).to_parquet(file)


@pytest.mark.nightly
def test_every_command_of_your_data_md_runs(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "configs", "configs")
    for digit, name in (("1", "cat"), ("2", "dog")):
        shutil.copytree(digits / "train" / digit, f"photos/{name}")
    shutil.make_archive("photos", "zip", "photos")
    for part in ("train", "val"):
        shutil.copytree("photos", f"dataset/{part}")
    shutil.copytree("photos/cat", "new_photos")
    rows = [
        ("image", "label"),
        *((path, path.parent.name) for path in sorted(Path("photos").rglob("*.jpg"))),
    ]
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    Path("labels.csv").write_text(text.getvalue())
    for part in ("train", "val"):  # with paths relative to their folder
        Path(f"photos/{part}.csv").write_text(text.getvalue().replace("photos/", ""))
    Path("test.csv").write_text(text.getvalue())
    shutil.copytree("photos", "testset")
    shutil.make_archive("testset", "zip", ".", "testset")
    Path("hub/data").mkdir(parents=True)
    for part in ("train", "validation"):
        write_parquet(Path("photos"), Path(f"hub/data/{part}-00000-of-00001.parquet"))

    done = []
    for tool, line in COMMANDS:
        # A folder of Parquet files in place of a dataset of the Hub.
        words = shlex.split(re.sub(r"hf:\S+", "hf:./hub", line))
        if any(name in line for name in ("cifar", "imagenette")):
            continue  # a download: tests/engine/test_small_sets.py
        code, out, err = call(TOOLS[tool], *words, *(SMALL if tool == "train" else ()))
        if tool == "predict":
            assert err.startswith("used the ")
            err = ""
        assert (code, err) == (0, ""), (words, out, err)
        if tool == "train":
            assert "\nbest top-1 (raw weights" in out
        done.append(tool)
    assert [done.count(tool) for tool in TOOLS] == [11, 5, 1, 1, 1]
    assert {path.name for path in Path("work_dirs").iterdir()} == {
        "convnext",
        "photos",
        "dataset",
        "groups",
        "resnet50",
        "scratch",
        "labels",
        "tables",
        "zip",
        "packed",
        "own_dataset",
    }
