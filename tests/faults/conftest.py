"""What the cases of a kill share: a few images, and for each world size one whole run."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from forked_ranks import RankServer
from same_run import link_images, words_for


@pytest.fixture(scope="session")
def few_images(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of the images for a run with this number of ranks."""
    return cache(lambda ranks: link_images(digits, tmp_path_factory.mktemp("few") / f"for{ranks}", ranks))


@pytest.fixture(scope="session")
def undisturbed(
    rank_server: RankServer, few_images: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """The folder of the run that nobody touched, by number of ranks."""

    @cache
    def folder_of(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed") / f"ranks{ranks}"
        output = folder.with_suffix(".txt")
        assert rank_server.run(words_for(few_images(ranks), folder, ranks), output, ranks) == [0] * ranks, (
            output.read_text()
        )
        return folder

    return folder_of
