"""Every setting of every recipe is the one that `published_settings.py` has from its source."""

import pytest
from published import PATHS, recipe
from published_settings import ROWS, Settings, settings

NO_RECIPES = {"demo", "own_dataset"}
# Mosaic's baseline, for which no figure is claimed; timm's RegNetY-3.2GF, whose settings are not in timm's repository.
WITHOUT_CONFIG = {20, 37}


def differences(found: Settings, published: Settings) -> list[str]:
    """A line for each column that is not as published; averages within what half-lives of whole images make of them."""
    lines = []
    for column in sorted(found.keys() | published.keys()):
        ours, theirs = found.get(column), published.get(column)
        if isinstance(theirs, float):
            theirs = pytest.approx(theirs, rel=1e-9 if column != "ema" else 1e-6 * (1 - theirs))
        if ours != theirs:
            lines.append(f"{column}: {ours} (published: {theirs})")
    return lines


@pytest.mark.parametrize(("stem", "published"), [pytest.param(*row[1:], id=row[1]) for row in ROWS])
def test_settings_are_those_of_the_source(stem: str, published: Settings) -> None:
    assert differences(settings(recipe(stem)), published) == []


def test_every_config_has_a_row_and_every_published_recipe_a_config() -> None:
    assert sorted(stem for _, stem, _ in ROWS) == sorted({*PATHS} - NO_RECIPES)
    assert {number for number, *_ in ROWS} == {*range(1, 39), None} - WITHOUT_CONFIG
