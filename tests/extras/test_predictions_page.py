"""`predict.py --report`: each image is shown once, by its predicted class."""

import html
import json
import re
from pathlib import Path
from typing import Any

import torch
from helpers import call, fails

from imagenet_cls.commands.predict import predict_command
from imagenet_cls.extras.pages import predictions

NAMES = ["", "a/b", "\0", "<b>", "\udce9", "猫"]


def test_rows_are_printed_and_shown(train_on_digits: Any, digits: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    bad = tmp_path / "bad.png"
    bad.touch()
    words = [train_on_digits(train__max_steps=3), *digits.glob("train/*/10*"), bad, "--json"]
    words += ["--allow-import", "helpers:plain"]
    plain = call(predict_command, *words)[1]
    shown = call(predict_command, *words, "--report", page)
    assert shown[:2] == (3, plain)
    rows = [json.loads(line) for line in plain.splitlines()]
    expected = sorted((*row["top"][0], row["image"]) for row in rows)
    names = []
    for section in page.read_text().split("<h2>")[2:]:
        label = section.partition("<")[0]
        names += [(label, name) for name in re.findall('figcaption title="(.*?)"', section)]
    assert names == [(row[0], row[2]) for row in expected]


def test_many_images_of_any_names(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(predictions, "_MAX_IMAGES", 35)
    shown = predictions.PredictionsPage(tmp_path / "page.html")
    for number in range(60):
        top = [(NAMES[number % len(NAMES)], number / 60)] if number else []
        shown.add({"image": f"{number}.jpg", "top": top}, torch.zeros(1, 8, 8, dtype=torch.uint8))
    shown.write("")
    page = (tmp_path / "page.html").read_text()
    assert "<h2>&lt;b&gt;</h2>" in page and page.count("of which the 5 least certain") == 6
    found = re.findall('figcaption title="(.*?).jpg"', html.unescape(page))
    assert sorted(map(int, found)) == list(range(31))


def test_wrong_use_ends_before_the_model_is_read(tmp_path: Path) -> None:
    own = tmp_path / "a.html"
    own.write_text("of the user")
    for words in (["--report", own], ["--report", "a.txt"], ["--features=x", "--report=y.html"]):
        fails(2, predict_command, "no_model.pth", own, *words)
