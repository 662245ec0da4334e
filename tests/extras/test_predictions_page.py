"""`predict.py --report` and `--sort-into`: each image is shown once, by its predicted class."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from helpers import call, fails

from imagenet_cls.commands.predict import predict_command
from imagenet_cls.extras.pages.predictions import ShownPredictions

NAMES = ["", "..", "../x", "a/b", "a_b", "A_B", "\0", "<b>", "\udce9", "猫" * 99]


def test_rows_are_printed_and_shown(train_on_digits: Any, digits: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    bad = tmp_path / "bad.png"
    bad.touch()
    words = [train_on_digits(train__max_steps=3), *digits.glob("train/*/10*"), bad, "--json"]
    words += ["--allow-import", "helpers:plain"]
    plain = call(predict_command, *words)[1]
    shown = call(predict_command, *words, "--report", page, "--sort-into", tmp_path / "new")
    assert shown[:2] == (3, plain)
    rows = [json.loads(line) for line in plain.splitlines()]
    expected = sorted((*row["top"][0], row["image"]) for row in rows)
    links = {str(path.readlink()): path.parent.name for path in tmp_path.glob("new/*/*")}
    names = re.findall('figcaption title="(.*?)"', page.read_text())
    assert [(links[name], name) for name in names] == [(row[0], row[2]) for row in expected]


def test_many_images_of_any_names(tmp_path: Path) -> None:
    shown = ShownPredictions(tmp_path / "a#1.html", tmp_path / "new")
    for number in range(600):
        top = [(NAMES[number % len(NAMES)], 0.5)] if number else []
        row = {"image": f"{tmp_path}/{number}/a.jpg", "top": top}
        shown.add(row, torch.zeros(1, 8, 8, dtype=torch.uint8))
    shown.write("")
    assert len({link.readlink() for link in tmp_path.glob("new/*/*")}) == 600
    pages = "".join(page.read_text() for page in tmp_path.glob("a#1_files/*"))
    assert pages.count("<figure") == 600 and "<h2>&lt;b&gt;</h2>" in pages
    assert 'href="a%231_files/class_010.html"' in (tmp_path / "a#1.html").read_text()


def test_wrong_use_ends_before_the_model_is_read(tmp_path: Path) -> None:
    own = tmp_path / "a.html"
    own.write_text("of the user")
    for words in (["--report", own], ["--sort-into", tmp_path], ["--features=x", "--report=y"]):
        fails(2, predict_command, "no_model.pth", own, *words)
