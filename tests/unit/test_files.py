"""Files are written whole or not at all."""

from pathlib import Path

import pytest

from imagenet_cls.errors import ResourceError
from imagenet_cls.files import explain_write_errors, write_file


def test_write_file_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / ".tmp-a").write_text("left by a kill")
    for content in ("first", b"second"):
        write_file(tmp_path / "a", content)
    assert (tmp_path / "a").read_bytes() == b"second" and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_write_file_that_fails_keeps_the_old_one(tmp_path: Path) -> None:
    write_file(tmp_path / "a", "first")
    (tmp_path / ".tmp-a").symlink_to("/dev/full")
    with pytest.raises(ResourceError, match="No space left") as caught, explain_write_errors(tmp_path / "a", "Do this"):
        write_file(tmp_path / "a", "second")
    assert str(caught.value).endswith("\nDo this")
    assert (tmp_path / "a").read_text() == "first" and [path.name for path in tmp_path.iterdir()] == ["a"]
