"""compare_parallel.py without its runs: which modes are planned, which errors come first, and the
table.
"""

import math
import os
from pathlib import Path

import pytest
import torch
from helpers import arguments, losses, train_here

from imagenet_cls.commands.compare_parallel import (
    Mode,
    Outcome,
    compare_command,
    loss_difference,
    plan_modes,
    read_outcome,
    table,
    weight_difference,
    write_config,
)
from imagenet_cls.config.load import load_config
from imagenet_cls.errors import UsageError, UserError

CPU = ["device=cpu", "optimizer.lr=0.1"]
WEIGHTS = {
    "conv.weight": torch.zeros(2, 3),
    "bn.running_mean": torch.zeros(2),
    "steps": torch.tensor(3),
}
ONE = Outcome([2.0, 1.0], WEIGHTS, 100.0, 50.0)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path / "compare.yaml", None)


@pytest.mark.parametrize(
    ("overrides", "ranks", "expected"),
    [
        ([], 2, [64, 32, 32, 32, 16, 64]),  # the demo's batch is 64
        ([], 4, [64, 16, 16, 16, 8, 64]),
        (["train.micro_batch_size=16"], 2, [16, 16, 16, 16, 8, 32]),
        (["train.global_batch_size=63"], 2, [63, 32, 32, 32, 16, 63]),
        (["train.global_batch_size=63", "train.micro_batch_size=16"], 2, [16, 16, 16, 16, 8, 32]),
        # 15 is accumulated as 5 + 5 + 5
        (["train.global_batch_size=30"], 2, [30, 15, 15, 15, 5, 30]),
    ],
)
def test_plan_modes_gives_the_images_in_one_forward_pass(
    config: str, overrides: list[str], ranks: int, expected: list[int]
) -> None:
    assert [
        mode.images_per_forward for mode in plan_modes(config, [*CPU, *overrides], ranks)
    ] == expected


def test_more_ranks_than_gpus_are_an_error_before_the_first_run(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UsageError, match="device=cpu"):
        plan_modes(config, [], 2)
    assert plan_modes(config, CPU, 2)


def test_plan_modes_without_gpus_leaves_data_parallel_out(config: str) -> None:
    assert [bool(mode.missing) for mode in plan_modes(config, CPU, 2)] == [
        False,
        True,
        False,
        False,
        False,
        False,
    ]
    assert "train.compile" in plan_modes(config, [*CPU, "train.compile=true"], 2)[1].missing
    assert "equal shares" in plan_modes(config, [*CPU, "train.global_batch_size=63"], 2)[1].missing


def test_overrides_replace_the_settings_of_a_short_run(config: str) -> None:
    overrides = ["train.max_steps=3", "model.name=resnet18"]
    loaded = load_config(config, overrides).config
    assert (loaded.train.max_steps, loaded.log.every_steps, loaded.model.kwargs) == (3, 4, {})
    assert load_config(config).config.model.name == "resnet10t"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["optimizer.lr=fast"], "optimizer.lr"),
        (["train.global_batch_size=7", "--ranks", "4"], "7 images"),
        (["train.global_batch_size=2"], "2 images"),
        (["--ranks", "1"], "--ranks 1"),
        (["model.kwargs.a=1", "model.kwargs={a: 2}"], "given twice"),
        (["configs/demo.yaml", "configs/resnet50.yaml"], "configs/resnet50.yaml"),
    ],
)
def test_bad_command_line_is_reported_before_any_run(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as caught:
        compare_command([*argv, "device=cpu"])
    assert caught.value.exit_code == 2 and expected in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
    assert capsys.readouterr() == ("", "")


def test_rank_of_a_launcher_is_an_error(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(UserError, match="rank of a launcher"):
        plan_modes(config, CPU, 2)


def test_differences_are_the_largest_of_trained_weights() -> None:
    assert loss_difference([1.0, 2.0, 3.0], [1.5, 2.0, 2.0]) == 1.0
    assert math.isnan(loss_difference([1.0, math.nan], [1.0, 1.0]))
    other = WEIGHTS | {"conv.weight": torch.tensor([[0.0, -0.5, 0.1], [0.0, 0.0, 0.2]])}
    assert weight_difference(other, WEIGHTS) == 0.5
    assert weight_difference(WEIGHTS | {"bn.running_mean": torch.ones(2)}, WEIGHTS) == 0.0


def test_table_compares_outcomes_with_the_first() -> None:
    def mode(name: str, missing: str = "") -> Mode:
        return Mode(name, (), 8, f"use of {name}", missing)

    other = Outcome([2.0, 1.25], WEIGHTS, 90.4, 51.0)
    lines = table(
        [mode("one"), mode("dp", "needs two"), mode("ddp")], [ONE, None, other]
    ).splitlines()
    assert lines[1].split()[:8] == ["one", "8", "-", "-", "-", "100", "50", "use"]
    assert lines[2].split()[:7] == ["dp", *"------"] and lines[2].endswith("not run: needs two")
    assert lines[3].split()[:7] == ["ddp", "8", "0.0e+00", "2.5e-01", "0.0e+00", "90", "51"]


def test_outcomes_of_a_batch_at_once_and_in_four_parts_are_equal(
    digits: Path, tmp_path: Path
) -> None:
    outcomes = []
    for name, micro_batch in (("one", "null"), ("parts", 16)):
        changes = {
            "train__max_steps": 4,
            "train__global_batch_size": 64,
            "train__micro_batch_size": micro_batch,
        }
        train_here(arguments(digits, tmp_path / name, **changes))
        outcomes.append(read_outcome(tmp_path / name))
    one, parts = outcomes
    assert one.losses == losses(tmp_path / "one") and one.images_per_sec > 0 and one.memory_mib > 10
    assert loss_difference(one.losses, parts.losses) < 1e-5
    assert weight_difference(one.weights, parts.weights) < 1e-5
