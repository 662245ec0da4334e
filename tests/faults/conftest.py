"""What the tests of stopped runs share: a few images, for each number of ranks one undisturbed run,
and new runs.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import RankServer
from same_run import Run, link_images, words_for


@pytest.fixture(scope="session")
def few_images(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of the images for a run with this number of ranks."""
    return cache(
        lambda ranks: link_images(digits, tmp_path_factory.mktemp("few") / f"for{ranks}", ranks)
    )


@pytest.fixture(scope="session")
def undisturbed(
    rank_server: RankServer,
    few_images: Callable[[int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], Path]:
    """The folder of the run without a stop, by number of ranks."""

    @cache
    def folder_of(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed") / f"ranks{ranks}"
        run = Run(
            rank_server, words_for(few_images(ranks), folder, ranks), folder, ranks, folder_of
        )
        assert run.start() == [0] * ranks, run.output
        return folder

    return folder_of


@pytest.fixture
def new_run(
    rank_server: RankServer,
    few_images: Callable[[int], Path],
    undisturbed: Callable[[int], Path],
    tmp_path: Path,
) -> Callable[..., Run]:
    """Makes a run: `new_run(ranks, **changes)`, where `folder` may be one of the changes."""

    def make(ranks: int, folder: Path = tmp_path / "run", **changes: Any) -> Run:
        return Run(
            rank_server,
            words_for(few_images(ranks), folder, ranks, **changes),
            folder,
            ranks,
            undisturbed,
        )

    return make
