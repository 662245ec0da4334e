"""Write tar and zip archives for tests."""

import io
import tarfile
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

Files = Iterable[tuple[str, bytes]]  # name and content


def write_tar(
    path: Path,
    files: Files,
    form: int = tarfile.PAX_FORMAT,
    mode: Literal["w", "w:gz"] = "w",
    links: Collection[str] = (),
    **fields: Any,
) -> Path:
    """links: names of members that are links. fields: attributes of each member."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=form) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if name in links:
                member.type = tarfile.SYMTYPE
            for field, value in fields.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_zip(path: Path, files: Files, method: int = zipfile.ZIP_STORED, end: bytes = b"") -> Path:
    """end: a comment at the end of the archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files:
            archive.writestr(name, content)
        archive.comment = end
    return path
