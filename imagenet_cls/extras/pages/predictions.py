"""Predictions without labels, to look at: a page of the images."""

import math
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from imagenet_cls.extras.pages.render import check_page, render, to_jpeg, write_html

_THUMBNAIL_PX = 96
_MAX_IMAGES = 2000  # of a page, together


class PredictionsPage:
    """For `predict.py --report`: a page of the images by the likeliest class, or `none` where no
    label reaches the threshold. The least certain images of a class are first; of many images, each
    class has an equal number of these.

    An earlier page is replaced. Raises UsageError for another file.
    """

    def __init__(self, page: Path):
        check_page(page)
        self.page = page
        self.images: list[Any] = []

    def add(self, row: dict[str, Any], crop: Tensor) -> None:
        """row: of `Predictor.predict_batch`. crop: its image, uint8 (C, H, W)."""
        label, confidence = row["top"][0] if row["top"] else ("none", math.nan)
        jpeg = to_jpeg(to_pil_image(crop), _THUMBNAIL_PX)
        self.images.append((label, confidence, row["image"], row["top"], jpeg))

    def write(self, used: str) -> None:
        """Write the page. used: a line about the weights. Raises ResourceError."""
        by_label = groupby(sorted(self.images), lambda image: image[0])
        classes = [list(images) for _, images in by_label]
        most = max(1, _MAX_IMAGES // max(1, len(classes)))
        write_html(self.page, render("predictions.html", classes=classes, used=used, most=most))
