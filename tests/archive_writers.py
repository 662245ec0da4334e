"""Write tar and zip archives for tests, and ImageNet's own archives."""

import io
import tarfile
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.io import savemat

from imagenet_cls.extras.datasets.prepare_imagenet import DEVKIT, GROUND_TRUTH, TRAIN_TAR, VAL_TAR

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


def write_imagenet(
    folder: Path, train: Mapping[str, Files], val: Sequence[tuple[str, bytes]]
) -> None:
    """A tar of class tars, a flat tar, and the devkit.

    train: the images by WordNet ID. val: WordNet ID and content of each image.
    """
    outer = []
    for wnid, files in train.items():
        inner = write_tar(folder / "class.tar", files)
        outer.append((f"{wnid}.tar", inner.read_bytes()))
        inner.unlink()
    write_tar(folder / TRAIN_TAR, outer, tarfile.USTAR_FORMAT)
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, len(val) + 1)]
    images = zip(names, [content for _, content in val], strict=True)
    write_tar(folder / VAL_TAR, images, tarfile.USTAR_FORMAT)
    write_devkit(folder / f"{DEVKIT}.tar.gz", sorted(train), [wnid for wnid, _ in val])


def write_devkit(file: Path, wnids: Sequence[str], labels: Sequence[str]) -> None:
    """IDs count from 1, in another order than `wnids`. The last row is no class.

    labels: the WordNet ID of each validation image.
    """
    columns = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children")
    rows = [*reversed(wnids), "n00001740"]
    synsets = np.zeros((len(rows), 1), [(name, object) for name in columns])
    for i, wnid in enumerate(rows):
        synsets[i, 0] = (i + 1, wnid, "words", "gloss", 0, np.zeros((1, 0)))
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets})
    truth = "".join(f"{rows.index(label) + 1}\n" for label in labels)
    members = [("meta.mat", meta.getvalue()), (GROUND_TRUTH, truth.encode())]
    files = [(f"{DEVKIT}/data/{name}", content) for name, content in members]
    write_tar(file, files, mode="w:gz")
