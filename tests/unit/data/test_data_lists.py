"""Annotation files: both formats, both kinds of labels, and errors with file and line."""

from pathlib import Path

import pytest
from helpers import write_files

from imagenet_cls.data.lists import index_list
from imagenet_cls.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = ("a 1.jpg", "b.jpg", "c.jpg", "two.png", "two.gif")
    write_files(tmp_path / "images", dict.fromkeys(names, "x"))
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.txt", "images/a 1.jpg dog\n\nimages/b.jpg\tcat\n"),
        ("t.csv", "images/a 1.jpg,dog\nimages/b.jpg,cat\n"),
        ("t.csv", 'id,label,filename\n7,dog,"images/a 1.jpg"\n8,cat,images/b.jpg\n'),
        ("t.csv", "\ufeffimage,class\r\nimages/a 1.jpg,dog\r\nimages/b.jpg,cat\r\n"),
        ("t.tsv", "id\timage_name\tlabel\n7\timages/a 1.jpg\tdog\n8\timages/b.jpg\tcat\n"),
        # row numbers of pandas
        ("t.csv", ",filename,breed\n0,images/a 1.jpg,dog\n1,images/b.jpg,cat\n"),
        ("t.csv", "photo,breed\nimages/a 1.jpg,dog\nimages/b.jpg,cat\n"),
        ("t.csv", "id;file;label\n7;images/a 1.jpg;dog\n8;images/b.jpg;cat\n"),
    ],
)
def test_index_list_of_each_form_has_its_paths_and_labels(
    folder: Path, name: str, text: str
) -> None:
    index = index_list(write(folder, name, text), folder)
    assert [index.name(i) for i in range(2)] == ["images/a 1.jpg", "images/b.jpg"]
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
        ("0_1 1 00e1", None, "00e1 0_1 1", [1, 2, 0]),  # ids
        ("1.0 2.0", "1.0 10.0 2.0", "1.0 10.0 2.0", [0, 2]),  # names
        ("2.0 x", None, "2.0 x", [0, 1]),
    ],
    ids=range(8),
)
def test_index_list_labels_are_names_or_positions_of_classes(
    folder: Path, labels: str, given: str | None, classes: str, targets: list[int]
) -> None:
    paths = ["images/b.jpg", *(f"images/{i}.jpg" for i in range(10))]
    rows = zip(paths, labels.split(), strict=False)
    file = write(folder, "t.txt", "".join(f"{path} {label}\n" for path, label in rows))
    index = index_list(file, folder, given and given.split())
    assert index.classes == tuple(classes.split()) and index.targets.tolist() == targets
    if given is not None:
        write(folder, "classes.txt", "\n".join(given.split()))
        assert index_list(file, folder).targets.tolist() == targets


@pytest.mark.parametrize(
    ("name", "text", "classes", "named"),
    [
        ("t.txt", "images/b.jpg cat\nimages/c.jpg\n", None, "t.txt:2:"),
        ("t.csv", "images/b.jpg,cat\nimages/c.jpg,\n", None, "t.csv:2:"),
        (
            "t.csv",
            "image,label,is_valid\nimages/b.jpg,a,True\nimages/c.jpg,b,False\n",
            None,
            "'is_valid'",
        ),
        ("t.csv", "breed,photo\ncat,images/c.jpg\n", None, "t.csv:2:"),
        ("t.csv", "image,label,x\nimages/b.jpg,a,train\nimages/c.jpg,b,test\n", None, "'x'"),
        ("t.csv", "images/b.jpg,3,7,cat\n", None, "t.csv:1:"),
        ("t.csv", "image,label\nimages/b.jpg,a\nimages/b.jpg,b\n", None, "t.csv:3:"),
        ("t.csv", "id,label\nimages/two,a\n", None, ".gif or .png"),
        ("t.csv", "path,class_name,x,Label\nimages/b.jpg,cat,2,0\n", None, "t.csv:1:"),
        ("t.csv", "path,label\nimages/0002,cat\nimages/b.jpg,dog\n", None, "t.csv:2:"),
        ("t.csv", 'images/b.jpg,"cat\nimages/c.jpg,dog\n', None, "t.csv:2:"),
        ("t.txt", "images/b.jpg 0\nimages/c.jpg 3\nimages/c.jpg -1\n", "a b", "t.txt:2:"),
        ("t.txt", "images/b.jpg a\nimages/c.jpg x\n", "a b", "t.txt:2:"),
        ("t.txt", "images/b.jpg 1\nimages/c.jpg 2\n", None, "not 0 to 1"),
        ("t.txt", "images/b.jpg 0\nimages/c.jpg 19999999\n", None, "19999999"),  # ids
        ("t.txt", "images/b.jpg 0\nimages/c.jpg 1.0\n", None, "1.0"),
        # 1 is a name, and 2 may be the position of `x`
        ("t.txt", "images/b.jpg 1\nimages/c.jpg 2\n", "1 7 x", "'1'"),
        # a spreadsheet has removed the zeros
        ("t.txt", "images/b.jpg 1\nimages/c.jpg 2\n", "01 02 03", "'01'"),
        ("t.txt", "images/b.jpg 0\nimages/c.jpg 2\n", "0.0 1.0 10.0 2.0", "'0.0'"),
        ("t.txt", "\nimages/gone.jpg a\nimages/b.jpg b\n", None, "t.txt:2:"),
        ("t.txt", "\n", None, "t.txt"),
        ("t.csv", "path,label\nimages/b.jpg,cat\nimages/c.jpg,nan\n", None, "nan"),
        ("t.csv", "path,label\nimages/b.jpg,01\nimages/c.jpg,1\n", None, "01"),
        ("t.csv", "images/b.jpg,a\nimages/d.jpg,b\nimages/c.jpg,a; b\n", None, "'a; b'"),
    ],
    ids=range(24),
)
def test_index_list_malformed_list_raises(
    folder: Path, name: str, text: str, classes: str | None, named: str
) -> None:
    with pytest.raises(DataError) as error:
        index_list(write(folder, name, text), folder, classes and classes.split())
    assert named in str(error.value)


def test_list_with_its_own_classes_is_matched_by_name(folder: Path) -> None:
    write(folder, "classes.txt", "dog\nant\ncat\n")
    file = write(folder, "test.csv", "images/b.jpg,0\nimages/c.jpg,1\nimages/d.jpg,2\n")
    index = index_list(file, folder, ["ant", "bee", "cat", "dog"])
    assert index.targets.tolist() == [3, 0, 2] and index.classes == ("ant", "bee", "cat", "dog")
    with pytest.raises(DataError, match="dog"):
        index_list(file, folder, ["ant", "bee", "cat"])


def test_ids_without_suffix_are_found(folder: Path) -> None:
    for header in ("id,breed\n", ""):
        file = write(folder, "t.csv", f"{header}images/b,cat\nimages/c,dog\n")
        assert index_list(file, folder).names.tolist() == [b"images/b.jpg", b"images/c.jpg"]
