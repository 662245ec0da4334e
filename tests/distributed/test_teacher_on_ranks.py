"""A teacher on two ranks: rank 0 reads its weights, and both have them."""

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

    def words(folder: str, teacher: str) -> list[str]:
        checkpoint = {"distill__teacher__checkpoint": tmp_path / teacher}
        distilled = {"distill__kind": "soft", "distill__teacher__name": "helpers:noisy"}
        return arguments(digits, tmp_path / folder, **distilled, **checkpoint, train__max_steps=2)

    train_here(words("one", "teacher.pth"))
    of_0, of_1 = (words("two", teacher) for teacher in ("teacher.pth", "none.pth"))
    output = tmp_path / "output.txt"
    codes = rank_server.run(of_0, output, 2, arguments_of_rank_1=of_1)
    assert codes == [0, 0], output.read_text()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    refused = rank_server.run(words("three", "none.pth"), output, 2)
    assert refused == [4, 4], "what rank 0 refuses, both do"
