"""A teacher on two ranks: rank 0 reads its weights, and both have them."""

from functools import partial
from pathlib import Path

import pytest
import torch
from forked_ranks import RankServer
from helpers import arguments, losses, noisy, train_here


def test_only_rank_0_reads_the_teacher_and_both_have_its_losses(
    rank_server: RankServer, digits: Path, tmp_path: Path
) -> None:
    """Where the other would find the weights is a matter of its machine."""
    network = noisy(10)
    network(torch.randn(4, 3, 16, 16) * 3 + 1)  # statistics that no other network begins with
    torch.save(network.state_dict(), tmp_path / "teacher.pth")
    distilled = {"distill__kind": "soft", "distill__teacher__name": "helpers:noisy"}
    words = partial(arguments, digits, **distilled, train__max_steps=2)
    file = "distill__teacher__checkpoint"
    train_here(words(tmp_path / "one", **{file: tmp_path / "teacher.pth"}))
    of_0, of_1 = (
        words(tmp_path / "two", **{file: tmp_path / name}) for name in ("teacher.pth", "none.pth")
    )
    output = tmp_path / "output.txt"
    codes = rank_server.run(of_0, output, 2, arguments_of_rank_1=of_1)
    assert codes == [0, 0], output.read_text()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert len(set(rank_server.run(of_1, output, 2))) == 1, "what rank 0 refuses, both do"
