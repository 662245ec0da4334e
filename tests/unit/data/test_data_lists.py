"""Annotation files: both formats, both kinds of labels, and errors with file and line."""

from pathlib import Path

import pytest
from helpers import peak_kib

from imagenet_cls.data.classes import match_labels
from imagenet_cls.data.lists import index_list
from imagenet_cls.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for name in ("a 1.jpg", "b.jpg", "c.jpg", "d.jpg"):
        (tmp_path / "images" / name).write_bytes(b"x")
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_index_list_of_names_and_paths_with_spaces(folder: Path) -> None:
    index = index_list(
        write(folder, "t.txt", "images/a 1.jpg dog\n\nimages/b.jpg\tcat\nimages/c.jpg dog\n"),
        folder,
    )
    assert index.classes == ("cat", "dog") and index.targets.tolist() == [1, 0, 1]
    assert index.name(0) == "images/a 1.jpg" and index.path(0).is_file()


@pytest.mark.parametrize(
    "text",
    [
        "images/a 1.jpg,dog\nimages/b.jpg,cat\n",
        "path,label\nimages/a 1.jpg,dog\nimages/b.jpg,cat\n",
        'id,label,filename\n7,dog,"images/a 1.jpg"\n8,cat,images/b.jpg\n',
        "./images/a 1.jpg,dog\nimages/b.jpg,cat\n",
        "\ufeffimage,class\r\nimages/a 1.jpg,dog\r\nimages/b.jpg,cat\r\n",
        ",filename,breed\n0,images/a 1.jpg,dog\n1,images/b.jpg,cat\n",  # row numbers of pandas
        "photo,breed\nimages/a 1.jpg,dog\nimages/b.jpg,cat\n",
    ],
)
def test_index_list_csv(folder: Path, text: str) -> None:
    index = index_list(write(folder, "t.csv", text), folder)
    names = [index.name(i).removeprefix("./") for i in range(2)]
    assert names == ["images/a 1.jpg", "images/b.jpg"]
    assert index.classes == ("cat", "dog") and index.targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("labels", "given", "classes", "targets"),
    [
        # sorted as numbers
        ("0 1 2 3 4 5 6 7 8 9 10", None, "0 1 2 3 4 5 6 7 8 9 10", [*range(11)]),
        ("2 0", "zebra apple mole", "zebra apple mole", [2, 0]),  # positions in classes
        ("mole apple", "zebra apple mole", "zebra apple mole", [2, 1]),
        ("10 2", "0 1 10 2", "0 1 10 2", [2, 3]),  # names that are numbers
        ("x1 2", None, "2 x1", [1, 0]),
        ("2.0 0.0 1.0", None, "0 1 2", [2, 0, 1]),
        ("1 0 1.0 0e0", None, "0 1", [1, 0, 1, 0]),
        ("1.0 0.0", "0 1 2", "0 1 2", [1, 0]),
        ("1.0 0.0", "cat dog", "cat dog", [1, 0]),
        ("1.0 2.0", "1.0 10.0 2.0", "1.0 10.0 2.0", [0, 2]),  # names
        ("2.0 x", None, "2.0 x", [0, 1]),
    ],
)
def test_index_list_labels(
    folder: Path, labels: str, given: str | None, classes: str, targets: list[int]
) -> None:
    file = write(folder, "t.txt", "".join(f"images/b.jpg {label}\n" for label in labels.split()))
    index = index_list(file, folder, given and given.split())
    assert index.classes == tuple(classes.split()) and index.targets.tolist() == targets
    if given is not None:
        write(folder, "classes.txt", "\n".join(given.split()))
        assert index_list(file, folder).targets.tolist() == targets


LONG = "9" * 5000


@pytest.mark.parametrize(
    ("name", "text", "classes", "expected"),
    [
        ("t.txt", "images/b.jpg cat\nimages/c.jpg\n", None, "t.txt:2: "),
        ("t.csv", "images/b.jpg,cat\nimages/c.jpg,\n", None, "t.csv:2: "),
        ("t.csv", "label,img\ncat,images/b.jpg\n", None, "t.csv:1: the header 'label,img'"),
        ("t.csv", "id,file,breed\n1,images/b.jpg,cat\n", None, "t.csv:1: the header"),
        ("t.csv", "path,label\nimages/0001,cat\nimages/b.jpg,dog\n", None, "t.csv:2: no image"),
        ("t.csv", 'images/b.jpg,"cat\nimages/c.jpg,dog\n', None, "not CSV"),
        ("t.csv", "images/b.jpg,cat\n" + "x" * 200_000 + ",dog\n", None, r"t\.csv:\d: not CSV"),
        ("t.txt", "images/b.jpg 0\nimages/c.jpg 3\nimages/c.jpg -1\n", "ab", "t.txt:2: .* 0 to 1"),
        ("t.txt", "images/b.jpg a\nimages/c.jpg x\n", "ab", "t.txt:2: label 'x'"),
        ("t.txt", f"images/b.jpg {LONG}\nimages/c.jpg 0\n", "ab", "t.txt:1: label '"),
        ("t.txt", "images/b.jpg 1\nimages/c.jpg 2\n", None, "numbers 0 to 2"),
        ("t.txt", "images/b.jpg 0.0\nimages/c.jpg 1.5\n", None, "1.5"),
        ("t.txt", "images/b.jpg 0.5\nimages/c.jpg 1.5\n", None, "0.5"),
        ("t.txt", "images/b.jpg 0.0\nimages/c.jpg nan\n", None, "nan"),
        ("t.txt", "images/b.jpg 0.0\nimages/c.jpg 1.5\n", "ab", "1.5"),
        ("t.csv", "path,label,labels\nimages/b.jpg,cat,dog\n", None, "label, labels"),
        ("t.csv", "path,class_name,x,Label\nimages/b.jpg,cat,2,0\n", None, "class_name, Label"),
        ("t.txt", "\nimages/gone.jpg a\nimages/b.jpg b\n", None, "t.txt:2: no image"),
        ("t.txt", "images/" + "n" * 300 + ".jpg dog\n", None, "t.txt:1: no image"),
        ("t.txt", "\n", None, "no images"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_index_list_malformed_list_raises(
    folder: Path, name: str, text: str, classes: str | None, expected: str
) -> None:
    with pytest.raises(DataError, match=expected) as error:
        index_list(write(folder, name, text), folder, classes and list(classes))
    assert len(str(error.value).splitlines()) <= 3 and len(str(error.value)) < 700


def test_index_list_numbers_too_long_to_convert_are_names(folder: Path) -> None:
    index = index_list(
        write(folder, "t.txt", f"images/b.jpg {LONG}\nimages/c.jpg {LONG}1\n"), folder
    )
    assert index.classes == (LONG, f"{LONG}1")


@pytest.mark.parametrize("label", ["1000000000", "4611686018427387904"])
def test_index_list_long_number_among_short_ones_adds_no_class(folder: Path, label: str) -> None:
    text = f"images/b.jpg 0\nimages/c.jpg 1\nimages/b.jpg {label}\n"
    with pytest.raises(DataError, match=label):
        index_list(write(folder, "t.txt", text), folder)


def test_index_list_numbers_that_are_ids_take_no_memory(folder: Path) -> None:
    """Not even that of a list of all numbers up to the highest."""
    before = peak_kib()
    with pytest.raises(DataError, match="numbers 0 to 19999999"):
        index_list(write(folder, "t.txt", "images/b.jpg 0\nimages/c.jpg 19999999\n"), folder)
    assert peak_kib() - before < 1_000_000


def test_index_list_csv_without_header_of_paths_without_suffixes(folder: Path) -> None:
    for name in ("0001", "0002"):
        (folder / "images" / name).write_bytes(b"x")
    index = index_list(write(folder, "t.csv", "images/0001,cat\nimages/0002,dog\n"), folder)
    assert index.names.tolist() == [b"images/0001", b"images/0002"]


def test_index_list_numbers_of_which_only_some_are_names_raise(folder: Path) -> None:
    """1 is the name of class 0, and 2, which is no name, could be the position of `x`."""
    file = write(folder, "t.txt", "images/b.jpg 1\nimages/c.jpg 2\n")
    with pytest.raises(DataError, match="may be the class '1'"):
        index_list(file, folder, ["1", "7", "x"])


def test_index_list_missing_file_or_repeated_class_raises(folder: Path) -> None:
    with pytest.raises(DataError, match=r"none\.txt"):
        index_list(folder / "none.txt", folder)
    write(folder, "classes.txt", "cat\ndog\ncat\n")
    with pytest.raises(DataError, match=r"classes\.txt: cat"):
        index_list(write(folder, "t.txt", "images/b.jpg cat\n"), folder)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ({"1", "2"}, ["01", "02", "03"]),  # a spreadsheet has removed the zeros
        ({"0", "2"}, ["0.0", "1.0", "10.0", "2.0"]),
    ],
)
def test_numbers_that_may_be_names_are_an_error(labels: set[str], classes: list[str]) -> None:
    with pytest.raises(DataError, match="labels"):
        match_labels(labels, classes, "list.csv")


def test_two_ways_to_write_a_number_are_one_class() -> None:
    targets = {"00": 0, "0": 0, "1": 1}
    assert match_labels(targets, None, "list.csv") == (targets, ("0", "1"))


def test_numbers_beside_classes_with_other_numbers_are_positions() -> None:
    assert match_labels({"0", "2"}, ["10", "9", "cat"], "list.csv")[0] == {"0": 0, "2": 2}


@pytest.mark.parametrize("labels", [["0", "1", "2"], ["dog", "ant", "cat"]])
def test_list_with_its_own_classes_is_matched_by_name(tmp_path: Path, labels: list[str]) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jpg").touch()
    (tmp_path / "classes.txt").write_text("dog\nant\ncat\n")
    rows = zip("abc", labels, strict=True)
    (tmp_path / "test.csv").write_text("".join(f"{name}.jpg,{label}\n" for name, label in rows))
    index = index_list(tmp_path / "test.csv", tmp_path, ["ant", "bee", "cat", "dog"])
    assert index.targets.tolist() == [3, 0, 2] and index.classes == ("ant", "bee", "cat", "dog")
    with pytest.raises(DataError, match="dog"):
        index_list(tmp_path / "test.csv", tmp_path, ["ant", "bee", "cat"])
