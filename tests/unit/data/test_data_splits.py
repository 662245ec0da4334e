"""Folds, groups and shares of a training part: by hashes of names."""

import os
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from helpers import write_files
from test_data_datasets import names

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.datasets import DataSets, open_datasets
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.splits import (
    fold_mask,
    fraction_rows,
    group_names,
    held_out_mask,
    stratified_fold_mask,
)
from imagenet_cls.errors import DataError

# 200 images of four classes, by 40 persons; each person has images of two classes.
NAMES = [
    f"{folder}/p{person:02d}_{i}.jpg"
    for number, folder in enumerate("abcd")
    for person in range(number % 2, 40, 2)
    for i in range(2 + number // 2)
]
KEYS = list(map(os.fsencode, NAMES))
CLASSES = np.array(["abcd".index(name[0]) for name in NAMES])
PERSONS = r"p\d+"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """The images of NAMES, empty, in `train` and in a list, `all.txt`."""
    texts = {f"train/{name}": "" for name in NAMES}
    lines = [f"train/{name} {name[0]}\n" for name in NAMES]
    write_files(tmp_path, texts | {"all.txt": "".join(lines)})
    return tmp_path


def opened(root: Path, kind: str, **changes: object) -> DataSets:
    train = "train" if kind == "folder" else "all.txt"
    return open_datasets(DataConfig(name=kind, root=str(root), train=train, val=None, **changes))


@pytest.mark.parametrize(
    "split",
    [
        {"fold": [0, 3]},
        {"val_fraction": 0.2},
        {"val_fraction": 0.2, "group": r"^(?:/.*/)?train/(.*)"},
    ],
)
def test_rows_of_one_image_are_on_one_side(photos: Path, split: dict) -> None:
    (photos / "link").symlink_to(photos)
    prefixes = ("", "./", "train/../", f"{photos}/", f"{photos}/link/")
    paths = [f"{prefix}train/{name}" for name in NAMES for prefix in prefixes]
    lines = [f"{path} {'abcd'[i % 4]}\n" for i, path in enumerate(paths)]
    (photos / "all.txt").write_text("".join(lines))
    data = opened(photos, "list", **split)
    train, val = (
        {os.path.realpath(photos / name) for name in names(part)} for part in (data.train, data.val)
    )
    assert len(data.train) + len(data.val) == len(paths)
    assert val and train.isdisjoint(val)


def test_fold_is_the_hash_of_the_name_modulo_the_folds() -> None:
    hashes = [int.from_bytes(blake2b(key, digest_size=8).digest(), "little") for key in KEYS]
    assert fold_mask(KEYS, [3, 5]).tolist() == [number % 5 == 3 for number in hashes]


@pytest.mark.parametrize("folds", [2, 3, 7, 45])
def test_stratified_folds_have_their_share_of_each_class(folds: int) -> None:
    masks = [stratified_fold_mask(KEYS, CLASSES, [i, folds]) for i in range(folds)]
    assert np.array_equal(np.sum(masks, axis=0), np.ones(200))
    counts = np.array([np.bincount(CLASSES[mask], minlength=4) for mask in masks])
    assert (abs(counts - np.bincount(CLASSES) / folds) < 1).all()


def test_images_added_to_a_class_move_few_images_of_it_to_another_fold() -> None:
    added = 3

    def fold_of(keys: list[bytes], classes: np.ndarray) -> dict[bytes, int]:
        masks = [stratified_fold_mask(keys, classes, [i, 5]) for i in range(5)]
        return dict(zip(keys, np.argmax(masks, axis=0), strict=True))

    before = fold_of(KEYS, CLASSES)
    new = [b"c/new_%d.jpg" % i for i in range(added)]
    after = fold_of(KEYS + new, np.append(CLASSES, [2] * added))
    moved = [key for key in KEYS if before[key] != after[key]]
    assert len(moved) <= 4 * added and all(key.startswith(b"c/") for key in moved)


def persons_of(source: ImageSet) -> set[str]:
    return {name.split("/")[-1][:3] for name in names(source)}


@pytest.mark.parametrize(
    "split", [{"fold": [1, 4]}, {"fold": [1, 4], "stratify": True}, {"val_fraction": 0.25}]
)
@pytest.mark.parametrize("kind", ["folder", "list"])
def test_group_is_on_one_side(photos: Path, kind: str, split: dict) -> None:
    alone, together = (opened(photos, kind, **split, group=group) for group in (None, PERSONS))
    assert persons_of(alone.train) & persons_of(alone.val)
    assert persons_of(together.train).isdisjoint(persons_of(together.val))
    assert 30 < len(together.val) < 70


def test_val_fraction_of_groups_is_nearest_and_as_of_images_without_groups() -> None:
    for fraction in (0.01, 0.3, 0.5, 0.99):
        alone = held_out_mask(KEYS, CLASSES, fraction)
        assert np.array_equal(held_out_mask(KEYS, CLASSES, fraction, KEYS), alone)
        by_person = held_out_mask(KEYS, CLASSES, fraction, group_names(KEYS, PERSONS))
        # each has five images
        assert abs(by_person.sum() - min(max(200 * fraction, 5), 195)) <= 2.5
    classes = np.repeat([0, 1], [90, 10])
    keys = [b"%d" % i for i in range(100)]
    held_out = held_out_mask(keys, classes, 0.2, [b"%d" % (i // 3) for i in range(100)])
    assert abs(held_out[:90].sum() - 18) <= 1.5 and abs(held_out[90:].sum() - 2) <= 1.5


def test_val_fraction_is_stratified_and_a_function_of_names() -> None:
    classes = np.repeat(range(4), [10, 25, 2, 1])
    keys = [b"%d.jpg" % i for i in range(38)]
    held_out = held_out_mask(keys, classes, 0.2)
    assert np.bincount(classes[held_out], minlength=4).tolist() == [2, 5, 1, 0]
    # images added to one class change nothing in the others
    more = [b"more %d.jpg" % i for i in range(20)]
    of_more = held_out_mask(keys + more, np.append(classes, [0] * 20), 0.2)
    assert np.array_equal(of_more[10:38], held_out[10:])


def test_group_1_names_the_group_and_a_path_without_match_is_an_error(photos: Path) -> None:
    for pattern in (r"(p\d+)_\d", PERSONS):
        assert group_names([b"a/p01_1.jpg"], pattern) == [b"p01"]
    for pattern in (r"q\d+", r"(q)?p"):
        with pytest.raises(DataError, match=r"^data\.group: "):
            opened(photos, "folder", fold=[0, 2], group=pattern)


def test_fraction_is_nested_and_of_each_class() -> None:
    smaller: set[int] = set()
    for share in (0.001, 0.1, 0.2, 0.5, 1.0):
        rows = fraction_rows(KEYS, CLASSES, share)
        assert smaller < set(rows)
        smaller = set(rows)
        expected = [max(round(n * share), 1) for n in np.bincount(CLASSES)]
        assert np.bincount(CLASSES[rows]).tolist() == expected
