"""Which runs are compared, and what is refused before the first of them."""

import os

import pytest

from imagenet_cls.commands.compare_parallel import compare_command
from imagenet_cls.commands.compare_ways import LESSON, Way, choose_settings, plan_ways
from imagenet_cls.errors import ConfigError, UserError

CPU = {"device": "cpu", "optimizer.lr": "0.1"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def at_once(ways: list[Way]) -> list[int]:
    return [way.images_at_once for way in ways]


def test_each_way_says_how_many_images_its_batch_norm_sees() -> None:
    """The demo's batch is 64."""
    assert at_once(plan_ways([], CPU, 2)) == [64, 32, 32, 32, 16, 64]
    assert at_once(plan_ways([], CPU, 4)) == [64, 16, 16, 16, 8, 64]
    # 16 at most, so in turn already where nothing else is said.
    assert at_once(plan_ways([], CPU | {"train.micro_batch_size": "16"}, 2)) == [16, 16, 16, 16, 8, 32]
    # 15 on each of two ranks: not 7 and 8, but 5, 5 and 5.
    ways = plan_ways([], CPU | {"train.global_batch_size": "30"}, 2)
    assert at_once(ways) == [30, 15, 15, 15, 5, 30] and ways[4].name == "DDP, 3 in turn"


def test_data_parallel_says_what_it_lacks() -> None:
    missing = [way.missing for way in plan_ways([], CPU, 2)]
    assert missing == ["", "needs 2 GPUs, and there are 0", "", "", "", ""]
    assert plan_ways([], CPU | {"train.compile": "true"}, 2)[1].missing == "not with train.compile"


def test_the_command_line_goes_before_the_lesson() -> None:
    lesson = choose_settings([], lesson=True)
    assert lesson["model.name"] == LESSON["model.name"] and lesson["train.max_steps"] == "12"
    assert "model.name" not in choose_settings([], lesson=False)
    assert choose_settings(["train.max_steps=3"], lesson=True)["train.max_steps"] == "3"
    # Another model, or another optimizer: what the lesson says of its own goes with it.
    other = choose_settings(["model.name=resnet18", "optimizer={name: adamw, lr: 1e-3}"], lesson=True)
    assert {key for key in other if key.startswith(("model", "optimizer"))} == {"model.name", "optimizer"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimizer.lr=fast"], "optimizer.lr"),
        (["train.global_batch_size=63"], "63 images do not divide among 2 ranks; nearest that do: 62 or 64"),
        (["train.global_batch_size=2"], "2 images on 2 ranks leave nothing to take in turn"),
        (["--ranks", "1"], "nothing to compare"),
        (["parallel.sync_bn=true"], "parallel.sync_bn=true: the rows of the table set that"),
        (["parallel={mode: dp}"], "the rows of the table set that"),
        (["seed=1", "seed=2"], "given twice"),
        (["configs/demo.yaml", "configs/resnet50.yaml"], "can't tell what 'configs/resnet50.yaml' is"),
    ],
)
def test_what_is_refused_before_anything_is_run(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as refused:
        compare_command([*words, "device=cpu"])
    assert refused.value.exit_code == 2 and expected in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 3
    assert capsys.readouterr() == ("", "")


def test_a_row_that_its_config_does_not_allow_is_found_before_the_first_is_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("imagenet_cls.commands.compare_ways.why_no_dp", lambda loaded, gpus: "")
    with pytest.raises(ConfigError, match=r"train\.compile.*parallel\.mode dp"):
        plan_ways([], CPU | {"train.compile": "true"}, 2)


def test_a_rank_does_not_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(UserError, match="Start it by itself"):
        plan_ways([], CPU, 2)
