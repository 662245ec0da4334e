"""Folds, groups and shares of a training part: by hashes of names."""

import os
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from test_data_datasets import names

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.datasets import DataSets, open_datasets
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
    b"%s/p%02d_%d.jpg" % (b"abcd"[c : c + 1], p, i)
    for c in range(4)
    for p in range(40)
    if p % 2 == c % 2
    for i in range(2 + c // 2)
]
CLASSES = np.array([b"abcd".index(name[:1]) for name in NAMES])
PERSONS = r"p\d+"


class Numbered:
    """A map-style dataset."""

    classes = ("a", "b")
    targets = tuple(i % 2 for i in range(90))

    def __init__(self, root: str, part: str):
        pass

    def __len__(self) -> int:
        return 90

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 8, 8), i, dtype=torch.uint8), i % 2


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """The images of NAMES, empty, in `train` and in a list, `all.txt`."""
    for name in map(os.fsdecode, NAMES):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).touch()
    (tmp_path / "all.txt").write_text(
        "".join(f"train/{name} {name[0]}\n" for name in map(os.fsdecode, NAMES))
    )
    return tmp_path


def opened(root: Path, kind: str, **changes: object) -> DataSets:
    name, train = {
        "folder": ("folder", "train"),
        "list": ("list", "all.txt"),
        "map-style": (f"{__name__}:Numbered", "train"),
    }[kind]
    return open_datasets(DataConfig(name=name, root=str(root), train=train, val=None, **changes))


@pytest.mark.parametrize("stratify", [False, True])
@pytest.mark.parametrize("kind", ["folder", "list", "map-style"])
def test_each_image_is_held_out_in_one_fold(photos: Path, kind: str, stratify: bool) -> None:
    folds = [opened(photos, kind, fold=[number, 3], stratify=stratify) for number in range(3)]
    held_out = [names(fold.val) for fold in folds]
    whole = sorted(names(folds[0].train) + held_out[0])
    assert sorted(chain(*held_out)) == whole and min(map(len, held_out)) > 20
    assert all(sorted(names(fold.train) + names(fold.val)) == whole for fold in folds)
    if kind == "map-style":
        image, target = folds[1].val.load(0)
        number = int(image[0, 0, 0])
        assert (held_out[1][0], target) == (f"{__name__}:Numbered/train[{number}]", number % 2)


@pytest.mark.parametrize(
    "split",
    [
        {"val_fraction": 0.2},
        {"val_fraction": 0.2, "labels": "multi"},
        {"val_fraction": 0.2, "group": r"[^/.]+[.]jpg"},
        {"val_fraction": 0.2, "group": r"^(?:/.*/)?train/(.*)"},
        {"fold": [0, 3], "val_fraction": None},
        {"fold": [0, 3], "val_fraction": None, "stratify": True},
    ],
)
def test_rows_of_one_image_are_on_one_side(photos: Path, split: dict) -> None:
    lines: list[str] = []
    link = photos / "link"
    link.symlink_to(photos)
    for number, name in enumerate(map(os.fsdecode, NAMES)):
        path = f"train/{name}"
        others = (path, f"./{path}", f"train/../{path}", str(photos / path), str(link / path))
        for other in others[: number % 6]:
            lines.append(f"{other} {'abcd'[len(lines) % 4]}\n")
    (photos / "all.txt").write_text("".join(lines))
    opened_parts = opened(photos, "list", **split)
    train, val = (
        [os.path.realpath(photos / name) for name in names(part)]
        for part in (opened_parts.train, opened_parts.val)
    )
    assert len(train) + len(val) == len(lines) > len(set(train)) + len(set(val))
    assert val and set(train).isdisjoint(val)


def test_fold_is_the_hash_modulo_the_folds_whatever_else_is_there() -> None:
    expected = [
        int.from_bytes(blake2b(name, digest_size=8).digest(), "little") % 5 == 3 for name in NAMES
    ]
    assert fold_mask(NAMES, [3, 5]).tolist() == expected
    assert fold_mask(NAMES[::7], [3, 5]).tolist() == expected[::7]


@pytest.mark.parametrize("folds", [2, 3, 7, 45])
def test_stratified_folds_have_their_share_of_each_class(folds: int) -> None:
    masks = [stratified_fold_mask(NAMES, CLASSES, [i, folds]) for i in range(folds)]
    assert np.array_equal(np.sum(masks, axis=0), np.ones(len(NAMES)))
    counts = np.array([np.bincount(CLASSES[mask], minlength=4) for mask in masks])
    assert (abs(counts - np.bincount(CLASSES) / folds) < 1).all()


def test_stratified_folds_of_many_classes_have_the_same_size() -> None:
    numbered = [b"%d" % i for i in range(70)]
    masks = [stratified_fold_mask(numbered, np.arange(70) // 7, [i, 5]) for i in range(5)]
    assert [mask.sum() for mask in masks] == [14] * 5


@pytest.mark.parametrize("added", [1, 3, 20])
def test_images_added_to_a_class_move_few_images_of_it_to_another_fold(added: int) -> None:
    def fold_of(names: list[bytes], classes: np.ndarray) -> dict[bytes, int]:
        masks = [stratified_fold_mask(names, classes, [i, 5]) for i in range(5)]
        return dict(zip(names, np.argmax(masks, axis=0), strict=True))

    before = fold_of(NAMES, CLASSES)
    for seed in range(20):
        new = [b"c/new_%d_%d.jpg" % (seed, i) for i in range(added)]
        after = fold_of(NAMES + new, np.append(CLASSES, [2] * added))
        moved = [name for name in NAMES if before[name] != after[name]]
        assert len(moved) <= 4 * added and all(name.startswith(b"c/") for name in moved)


def test_groups_are_not_stratified(photos: Path) -> None:
    split = {"fold": [1, 4], "group": PERSONS}
    plain, stratified = (opened(photos, "folder", **split, stratify=on) for on in (False, True))
    assert names(plain.val) == names(stratified.val)


@pytest.mark.parametrize("split", [{"fold": [1, 4]}, {"val_fraction": 0.25}])
@pytest.mark.parametrize("kind", ["folder", "list"])
def test_group_is_on_one_side(photos: Path, kind: str, split: dict) -> None:
    alone, together = (opened(photos, kind, **split, group=group) for group in (None, PERSONS))
    persons = [
        {name.split("/")[-1][:3] for name in names(part)} for part in (alone.train, alone.val)
    ]
    assert persons[0] & persons[1]
    persons = [
        {name.split("/")[-1][:3] for name in names(part)} for part in (together.train, together.val)
    ]
    assert not persons[0] & persons[1] and len(persons[0] | persons[1]) == 40
    assert 30 < len(names(together.val)) < 70


def test_val_fraction_of_groups_is_nearest_and_as_of_images_without_groups() -> None:
    for fraction in (0.01, 0.3, 0.5, 0.99):
        alone = held_out_mask(NAMES, CLASSES, fraction)
        assert np.array_equal(held_out_mask(NAMES, CLASSES, fraction, NAMES), alone)
        by_person = held_out_mask(NAMES, CLASSES, fraction, group_names(NAMES, PERSONS))
        # each has five images
        assert abs(by_person.sum() - min(max(200 * fraction, 5), 195)) <= 2.5
    classes = np.repeat([0, 1], [90, 10])
    sizes = held_out_mask(
        [b"%d" % i for i in range(100)], classes, 0.2, [b"%d" % (i // 3) for i in range(100)]
    )
    assert abs(sizes[:90].sum() - 18) <= 1.5 and abs(sizes[90:].sum() - 2) <= 1.5  # groups of three


def test_val_fraction_is_stratified_and_a_function_of_names() -> None:
    classes = np.repeat(range(4), [10, 25, 2, 1])
    names = [b"%d/%d.jpg" % (number, i) for i, number in enumerate(classes)]
    held_out = held_out_mask(names, classes, 0.2)
    assert np.bincount(classes[held_out], minlength=4).tolist() == [2, 5, 1, 0]
    # images added to one class change nothing in the others
    names += [b"0/more%d.jpg" % i for i in range(20)]
    of_more = held_out_mask(names, np.append(classes, [0] * 20), 0.2)
    assert np.array_equal(of_more[10:38], held_out[10:])


def test_group_1_names_the_group_and_a_path_without_match_is_an_error(photos: Path) -> None:
    assert (
        group_names([b"a/p01_1.jpg"], r"(p\d+)_\d")
        == group_names([b"a/p01_1.jpg"], PERSONS)
        == [b"p01"]
    )
    for pattern in (r"q\d+", r"(q)?p"):
        with pytest.raises(DataError, match=r"^data\.group: "):
            opened(photos, "folder", fold=[0, 2], group=pattern)


def test_fraction_is_nested_and_of_each_class() -> None:
    shares = {
        share: set(fraction_rows(NAMES, CLASSES, share)) for share in (0.001, 0.1, 0.2, 0.5, 1.0)
    }
    for smaller, larger in zip(shares, list(shares)[1:], strict=False):
        assert shares[smaller] < shares[larger]
    counts = np.bincount(CLASSES)
    for share, rows in shares.items():
        assert np.bincount(CLASSES[sorted(rows)]).tolist() == [
            max(round(n * share), 1) for n in counts
        ]


@pytest.mark.parametrize("kind", ["folder", "list", "map-style"])
def test_fraction_is_of_the_training_images_only(photos: Path, kind: str) -> None:
    split = {"fold": [0, 4]}
    whole, tenth = opened(photos, kind, **split), opened(photos, kind, **split, fraction=0.1)
    assert names(tenth.val) == names(whole.val) and set(names(tenth.train)) < set(
        names(whole.train)
    )
    assert len(names(tenth.train)) == pytest.approx(0.1 * len(names(whole.train)), abs=2)
    assert tenth.train.digest() != whole.train.digest()
