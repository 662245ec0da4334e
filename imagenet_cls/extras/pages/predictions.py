"""Predictions without labels, to look at: a page of the images, and folders of links to them.

The names of classes and files may be any text.
"""

import math
import os
import re
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from imagenet_cls.extras.pages.render import render, to_jpeg, utf8_text
from imagenet_cls.files import (
    check_output_path,
    check_replaced,
    explain_write_errors,
    write_output,
)

_THUMBNAIL_PX = 96
_MAX_IMAGES = 500  # of a page with the images of all classes


class ShownPredictions:
    """For `predict.py`: what it predicts, by the likeliest class of each image, or `none` where no
    label reaches the threshold.

    page: a page of the images, the least certain of a class first. With more than 500 images it
    only lists the classes, and each class has its own page in a folder beside it:
    `page_files/class_000.html` for `page.html`. Earlier pages are replaced.

    folder: gets a folder for each class, with a link to each image, or a copy where the file system
    has no links. The folder has the name of the class, without what a file system may reject.

    Raises UsageError for another file in the place of the page, or a folder that is not empty.
    """

    def __init__(self, page: Path | None, folder: Path | None):
        if page:
            check = check_replaced if page.is_file() else check_output_path
            check(page, "--report")
        if folder and (not folder.is_dir() or any(folder.iterdir())):
            check_output_path(folder, "--sort-into")
        self.page = page
        self.folder = folder
        self.images: list[Any] = []

    def add(self, row: dict[str, Any], crop: Tensor) -> None:
        """row: of `Predictor.predict_batch`. crop: its image, uint8 (C, H, W)."""
        label, confidence = row["top"][0] if row["top"] else ("none", math.nan)
        jpeg = self.page and to_jpeg(to_pil_image(crop), _THUMBNAIL_PX)
        self.images.append((label, confidence, row["image"], row["top"], jpeg))

    def write(self, used: str) -> None:
        """Write page and folders. used: a line about the weights. Raises ResourceError."""
        by_label = groupby(sorted(self.images), lambda image: image[0])
        classes = [list(images) for _, images in by_label]
        if self.folder:
            with explain_write_errors(self.folder, "Name another folder with --sort-into."):
                link_images(self.folder, classes)
        if self.page:
            with explain_write_errors(self.page, "Name another page with --report."):
                self._write_page(self.page, classes, used)

    def _write_page(self, page: Path, classes: list[list[Any]], used: str) -> None:
        folder = page.with_name(f"{page.stem}_files")
        links = None
        if len(self.images) > _MAX_IMAGES:
            links = quote(os.fsencode(folder.name))
            folder.mkdir(exist_ok=True)
            for number, images in enumerate(classes):
                content = render("predictions.html", classes=[images], used=used)
                write_output(folder / f"class_{number:03}.html", content, "--report")
        content = render("predictions.html", classes=classes, used=used, links=links)
        write_output(page, content, "--report")


def link_images(parent: Path, classes: list[list[Any]]) -> None:
    """Make a folder for each class, with links to its images. Raises OSError."""
    for number, images in enumerate(classes):
        folder = unused(parent / folder_name(images[0][0]), number)
        folder.mkdir(parents=True)
        for position, (_, _, image, *_) in enumerate(images):
            path = unused(folder / Path(image).name, position)
            try:
                path.symlink_to(Path(image).resolve())
            except OSError:
                shutil.copyfile(image, path)


def folder_name(label: str) -> str:
    """The name of a class, without what file systems reject or treat specially, in 200 bytes."""
    name = re.sub(r'^$|^[.-]|[/\\:*?"<>|]', "_", utf8_text(label))
    return name.encode()[:200].decode(errors="ignore")


def unused(path: Path, number: int) -> Path:
    """The path, with a number at the end of its name if there is a file or folder."""
    while os.path.lexists(path):
        path = path.with_name(f"{path.stem}_{number}{path.suffix}")
    return path
