"""A teacher on two ranks: rank 0 reads its weights, and both have them; what rank 0 refuses, both
do.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import noisy, read_weights
from torch import Tensor

from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import TeacherConfig
from imagenet_cls.errors import UserError
from imagenet_cls.guards.agreement import check_same_config
from imagenet_cls.models.teacher import MeanStd, build_teacher

MEAN_STD = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
OWN = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])


def read(path: str) -> tuple[Mapping[str, Tensor], MeanStd | None]:
    return read_weights(Path(path))[0], OWN


def refuse_to_read(path: str) -> tuple[Mapping[str, Tensor], MeanStd | None]:
    raise AssertionError("only rank 0 reads")


def same_teacher_on_all_ranks(rank: int, world_size: int, folder: Path) -> None:
    context = join_ranks(rank, world_size, folder / "store")
    reader = read if rank == 0 else refuse_to_read
    config = TeacherConfig("helpers:noisy", checkpoint=str(folder / "teacher.pth"))
    teacher = build_teacher(config, 5, context, reader, MEAN_STD, [16], seed=0)
    expected, _ = read_weights(folder / "teacher.pth")
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in teacher.network.state_dict().items()
    )
    # How to convert pixels comes from rank 0, too.
    torch.testing.assert_close(teacher.scale.flatten(), torch.tensor(MEAN_STD[1]) / 0.5)

    # So where the others would find weights is a matter of their machines.
    words = ["optimizer.lr=0.1", "distill.kind=soft", "distill.teacher.name=resnet18"]
    loaded = load_config(None, [*words, f"distill.teacher.checkpoint=on_{rank}.pth"])
    check_same_config(loaded.config, context)

    for file, num_classes in (("none.pth", 5), ("teacher.pth", 7)):
        config = TeacherConfig("helpers:noisy", checkpoint=str(folder / file))
        with pytest.raises(UserError) as caught:
            build_teacher(config, num_classes, context, reader, MEAN_STD, [16], seed=0)
        assert caught.value.printed_elsewhere == (rank != 0)
    destroy_process_groups(context)


def test_only_rank_0_reads_and_all_have_the_same(rank_server: RankServer, tmp_path: Path) -> None:
    network = noisy(5)
    network(torch.randn(4, 3, 16, 16) * 3 + 1)  # statistics that no other network begins with
    torch.save(network.state_dict(), tmp_path / "teacher.pth")
    rank_server.call(same_teacher_on_all_ranks, 2, tmp_path)
