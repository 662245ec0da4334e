"""Opening every kind of data set, and the problems of its config."""

import gzip
import multiprocessing
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.datasets import data_problems, open_datasets
from imagenet_cls.data.digits import write_digits
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.data.synthetic import SyntheticSource
from imagenet_cls.errors import DataError

FACTORIES = """
import numpy as np
import torch
from PIL import Image


class Grey:
    classes = ["even", "odd"]

    def __init__(self, part, size):
        self.part, self.size = part, size

    def __len__(self):
        return 10 if self.part == "fit" else 4

    def __getitem__(self, i):
        return Image.new("L", (self.size, self.size), 3 * i), i % 2


class Own:
    def __init__(self, item, **attributes):
        self.item = item
        vars(self).update(attributes)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.item


def grey(root, part, size=8):
    assert root.endswith("somewhere")
    return Grey(part, size)


def tensors(root, part):
    return Own((torch.full((1, 5, 6), 7, dtype=torch.uint8), torch.tensor(1)), num_classes=3)


def no_part(root):
    return None


def generator(**kwargs):
    return (i for i in range(3))


def floats(**kwargs):
    return Own((torch.rand(3, 4, 4), 0), num_classes=2)


def not_a_pair(**kwargs):
    return Own({"image": 1}, num_classes=2)


def out_of_range(**kwargs):
    return Own((Image.new("RGB", (4, 4)), 2), num_classes=2)


def without_classes(**kwargs):
    return Own((Image.new("RGB", (4, 4)), 2))
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_sets.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_sets", raising=False)
    return tmp_path


def names(source: ImageSource | None) -> list[str]:
    assert source is not None
    return [source.name(i) for i in range(len(source))]


def open_error(data: DataConfig) -> str:
    """The message of the DataError that opening, or reading the first training image, raises."""
    with pytest.raises(DataError) as error:
        opened = open_datasets(data)
        assert opened.train is not None
        opened.train.load(0)
    assert len(str(error.value).splitlines()) <= 3
    return str(error.value)


def test_open_folder(image_folder: Path) -> None:
    opened = open_datasets(DataConfig(root=str(image_folder)))
    assert opened.classes == ("cat", "dog", "eel")
    assert opened.train is not None and opened.val is not None and len(opened.train) == 40 and len(opened.val) == 9
    image, target = opened.train.load(39)
    expected = np.array(Image.open(image_folder / "train" / "eel" / "019.JPEG").convert("RGB"))
    assert np.array_equal(image.permute(1, 2, 0).numpy(), expected) and target == 2
    assert opened.train.name(39) == "eel/019.JPEG"
    only_val = open_datasets(DataConfig(root=str(image_folder)), parts=("val",))
    assert only_val.train is None and names(only_val.val) == names(opened.val)


def test_open_folder_with_val_fraction(image_folder: Path) -> None:
    data = DataConfig(root=str(image_folder), val=None, val_fraction=0.25)
    opened = open_datasets(data)
    assert opened.val is not None and opened.train is not None and len(opened.val) == 10
    assert not set(names(opened.train)) & set(names(opened.val))
    assert names(open_datasets(data, parts=("val",)).val) == names(opened.val)
    assert "val_fraction" in open_error(DataConfig(root=str(image_folder), val=None))


def test_open_folder_with_other_validation_classes_raises(tmp_path: Path) -> None:
    for name in ("train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/c/1.jpg"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"x")
    for parts in (("train", "val"), ("val",)):
        with pytest.raises(DataError, match="1 of 2 class folders"):
            open_datasets(DataConfig(root=str(tmp_path)), parts)


def test_open_list(image_folder: Path, tmp_path: Path) -> None:
    lists = image_folder / "lists"
    lists.mkdir(exist_ok=True)
    (lists / "train.txt").write_text("train/dog/000.JPEG woof\ntrain/cat/000.JPEG meow\n")
    (lists / "val.csv").write_text("path,label\nval/cat/000.JPEG,meow\n")
    data = DataConfig(name="list", root=str(image_folder), train="lists/train.txt", val="lists/val.csv")
    for parts in (("train", "val"), ("val",)):
        opened = open_datasets(data, parts)
        assert opened.classes == ("meow", "woof") and opened.val is not None and opened.val.load(0)[1] == 0


def test_open_digits_writes_them_once(tmp_path: Path) -> None:
    data = DataConfig(name="digits", root=str(tmp_path / "digits"), val=None, val_fraction=0.2)
    opened = open_datasets(data)
    assert opened.train is not None and opened.val is not None
    assert opened.classes == tuple("0123456789") and len(opened.train) + len(opened.val) == 1797
    assert abs(len(opened.val) - 359) <= 5
    index = opened.train.index  # type: ignore[attr-defined]
    stamps = [(index.path(i), index.path(i).stat().st_mtime_ns) for i in range(0, len(index), 100)]
    assert open_datasets(data).train.digest() == opened.train.digest()  # type: ignore[union-attr]
    assert [(path, path.stat().st_mtime_ns) for path, _ in stamps] == stamps
    reference = load_digits()
    for i in range(0, len(opened.train), 200):
        image, target = opened.train.load(i)
        number = int(Path(opened.train.name(i)).stem)
        small = torch.nn.functional.avg_pool2d(image[:1].float(), 4)[0].numpy() / 255 * 16
        assert image.shape == (3, 32, 32) and target == reference.target[number]
        assert np.abs(small - reference.images[number]).mean() < 1.0
    assert sorted(path.name for path in (tmp_path / "digits").iterdir()) == ["train"]


def test_write_digits_by_several_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_digits, args=(tmp_path, "train")) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["train"]
    assert len(list(tmp_path.glob("train/*/*.jpg"))) == 1797
    next(tmp_path.glob("train/3/*.jpg")).unlink()
    with pytest.raises(DataError, match="1796 images"):
        write_digits(tmp_path, "train")


def test_open_synthetic() -> None:
    data = DataConfig(name="synthetic", kwargs={"train_images": 30, "val_images": 7, "num_classes": 5, "size_px": 16})
    assert data_problems(data) == []
    opened = open_datasets(data)
    assert isinstance(opened.train, SyntheticSource) and opened.val is not None
    assert (len(opened.train), len(opened.val), len(opened.classes)) == (30, 7, 5)
    image, target = opened.train.load(3)
    assert image.shape == (3, 16, 16) and image.dtype == torch.uint8 and 0 <= target < 5
    assert torch.equal(image, opened.train.load(3)[0]) and not torch.equal(image, opened.val.load(3)[0])


def test_open_torchvision_with_a_train_flag(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, count in (("train", 20), ("t10k", 10)):
        images, labels = np.arange(count * 784, dtype=np.uint64).astype(np.uint8), np.arange(count, dtype=np.uint8) % 10
        image_bytes = struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes()
        label_bytes = struct.pack(">II", 0x801, count) + labels.tobytes()
        for name, content in ((f"{part}-images-idx3-ubyte", image_bytes), (f"{part}-labels-idx1-ubyte", label_bytes)):
            (folder / name).write_bytes(content)
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    opened = open_datasets(DataConfig(name="torchvision:MNIST", root=str(tmp_path)))
    assert opened.train is not None and opened.val is not None
    assert (len(opened.train), len(opened.val)) == (20, 10) and opened.classes[3] == "3 - three"
    image, target = opened.train.load(13)
    assert image.shape == (3, 28, 28) and target == 3
    assert image[0].flatten()[:3].tolist() == [(13 * 784 + k) % 256 for k in range(3)] and torch.equal(
        image[0], image[2]
    )
    held_out = open_datasets(DataConfig(name="torchvision:MNIST", root=str(tmp_path), val=None, val_fraction=0.5))
    assert held_out.val is not None and sorted(held_out.val.load(i)[1] for i in range(10)) == list(range(10))


def test_open_torchvision_with_wrong_files_raises(tmp_path: Path) -> None:
    from scipy.io import savemat

    for part, count in (("train", 6), ("test", 3)):
        images = np.zeros((32, 32, 3, count), np.uint8)
        savemat(tmp_path / f"{part}_32x32.mat", {"X": images, "y": np.arange(1, count + 1).reshape(-1, 1)})
    data = DataConfig(name="torchvision:SVHN", root=str(tmp_path))
    # SVHN checks MD5 sums of the published files, which these are not
    assert f"put its files under {tmp_path}" in open_error(data)


def test_open_torchvision_without_parts(tmp_path: Path) -> None:
    data = DataConfig(
        name="torchvision:FakeData",
        root=str(tmp_path),
        val=None,
        val_fraction=0.25,
        kwargs={"size": 12, "image_size": [3, 9, 8], "num_classes": 4},
    )
    assert data_problems(data) == []
    opened = open_datasets(data)
    assert opened.train is not None and opened.val is not None
    assert (len(opened.train), len(opened.val), len(opened.classes)) == (9, 3, 4)
    assert opened.train.load(0)[0].shape == (3, 9, 8)


def test_open_factory(factories: Path) -> None:
    data = DataConfig(name="own_sets:grey", root="somewhere", train="fit", kwargs={"size": 6})
    assert data_problems(data) == []
    opened = open_datasets(data)
    assert opened.train is not None and opened.val is not None
    assert (len(opened.train), len(opened.val), opened.classes) == (10, 4, ("even", "odd"))
    image, target = opened.train.load(5)
    assert image.shape == (3, 6, 6) and image.unique().tolist() == [15] and target == 1
    tensors = open_datasets(DataConfig(name="own_sets:tensors", root="somewhere"))
    assert tensors.train is not None and tensors.classes == ("0", "1", "2")
    assert tensors.train.load(0)[0].shape == (3, 5, 6) and tensors.train.load(0)[1] == 1


@pytest.mark.parametrize("factory", ["generator", "floats", "not_a_pair", "out_of_range", "without_classes"])
def test_open_factory_with_a_wrong_data_set_raises(factories: Path, factory: str) -> None:
    open_error(DataConfig(name=f"own_sets:{factory}"))


@pytest.mark.parametrize(
    ("name", "kwargs", "key", "hint"),
    [
        ("foldr", {}, "name", "did you mean 'folder'"),
        ("CIFAR10", {}, "name", "'torchvision:CIFAR10'"),
        ("torchvision:CIFAR11", {}, "name", "did you mean 'CIFAR10"),
        ("torchvision:VOCDetection", {}, "name", ""),
        ("torchvision:CIFAR10", {"download": True}, "kwargs.download", ""),
        ("torchvision:EMNIST", {"split": "letters", "splt": 1}, "kwargs.splt", "'split'"),
        ("torchvision:EMNIST", {}, "kwargs", "'split'"),
        ("torchvision:FakeData", {}, "val", "data.val=null"),
        ("synthetic", {"train_image": 3}, "kwargs.train_image", "'train_images'"),
        ("synthetic", {"num_classes": 0}, "kwargs.num_classes", ""),
        ("folder", {"x": 3}, "kwargs.x", ""),
        ("digits", {}, "val", "data.val=null"),
        ("own_sets:gray", {}, "name", "'grey'"),
        ("no_such_sets:f", {}, "name", ""),
        ("own_sets:no_part", {}, "name", "part="),
        ("own_sets:grey", {"sise": 3}, "kwargs.sise", "'size'"),
    ],
)
def test_data_problems_name_the_key(factories: Path, name: str, kwargs: dict, key: str, hint: str) -> None:
    (problem,) = data_problems(DataConfig(name=name, kwargs=kwargs))
    assert problem.key == f"data.{key}" and hint in problem.message


def test_data_problems_of_valid_sections_are_none() -> None:
    assert data_problems(DataConfig()) == []
    assert data_problems(DataConfig(name="digits", val=None, val_fraction=0.2)) == []
    assert data_problems(DataConfig(name="torchvision:EMNIST", kwargs={"split": "letters"})) == []
    assert data_problems(DataConfig(name="torchvision:STL10", kwargs={"folds": 1})) == []
