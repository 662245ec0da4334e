"""Law 2: the batch is global. One rank or two, however they were started: the same steps, samples and losses."""

import shutil
import sys
from pathlib import Path

import pytest
from forked_ranks import RankServer
from helpers import DIST_TRAIN, REPOSITORY, TRAIN, arguments, evaluations, losses, newest, run, train_here
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def one_rank(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train_here(arguments(digits, folder))
    return folder


def start_words(way: str, words: list[str]) -> list[str]:
    """The command line that starts two ranks in one of the ways there are."""
    config, *rest = words
    return {
        "dist_train.sh": ["bash", DIST_TRAIN, config, "2", *rest],
        "spawn": [sys.executable, TRAIN, config, *rest, "--gpus", "2"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", TRAIN, config, *rest],
    }[way]


@pytest.mark.parametrize(
    "way", ["spawn", *(pytest.param(way, marks=pytest.mark.nightly) for way in ("dist_train.sh", "torchrun"))]
)
def test_two_ranks_repeat_the_losses_of_one(one_rank: Path, digits: Path, tmp_path: Path, way: str) -> None:
    folder = tmp_path / "run"
    # The same network by two names: a factory's, and one that a module under `imports` registers in each process.
    named = {} if way == "dist_train.sh" else {"model.name": "helpers_registered", "imports": "[registered]"}
    # What lies in the folder where the user stands is not ours to import.
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "queue.py").write_text("raise RuntimeError('not the library')\n")
    words = start_words(way, arguments(digits, folder, log__tensorboard="true", **named))
    done = run(words, cwd=REPOSITORY if way == "torchrun" else tmp_path / "here")  # `-m` does import from there
    assert done.returncode == 0, done.stderr
    single, double = losses(one_rank), losses(folder)
    assert len(double) == len(single) == 22
    assert double == pytest.approx(single, rel=1e-4)
    assert done.stdout.count("run folder") == 1, "only rank 0 speaks"
    assert len(list((folder / "tensorboard").glob("events*"))) == 1
    assert {path.name for path in (folder / "logs").iterdir()} == {"rank0.log", "rank1.log"}
    for ours, alone in zip(evaluations(folder), evaluations(one_rank), strict=True):
        assert ours["images"] == alone["images"] == 359
        assert ours["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert abs(ours["top1_pct"] - alone["top1_pct"]) <= 100 / 359 + 1e-9  # one image on the edge may tip


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.nightly)])
def test_more_ranks_too(rank_server: RankServer, digits: Path, tmp_path: Path, ranks: int) -> None:
    """Three is the odd one: nothing halves evenly, and sums are taken in another order."""
    common = {"train.global_batch_size": 48, "train.max_steps": 6, "optimizer.lr": 0.01}
    train_here(arguments(digits, tmp_path / "one", **common))
    output = tmp_path / "output.txt"
    assert rank_server.run(arguments(digits, tmp_path / "many", **common), output, ranks) == [0] * ranks, (
        output.read_text()
    )
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert [e["images"] for e in evaluations(tmp_path / "many")] == [359]


def test_a_buffer_of_a_models_own_is_each_ranks(rank_server: RankServer, digits: Path, tmp_path: Path) -> None:
    """Ranks see other images, so they remember other means: no drift. The checkpoint has those of rank 0."""
    common = {"model.name": "helpers:remembering", "ema.decay": 0.5, "parallel.check_every_steps": 1}
    output = tmp_path / "output.txt"
    for words in (["train.max_steps=3"], ["train.max_steps=6", "--resume"]):
        words = [*arguments(digits, tmp_path / "run", **common), *words]
        assert rank_server.run(words, output, 2) == [0, 0], output.read_text()
    means = [load_file(newest(tmp_path / "run") / f"{name}.safetensors")["0.seen"].item() for name in ("model", "ema")]
    assert means[0] != 0 and means[0] != means[1]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"optimizer.lr": 0.5}, 2, "optimizer.lr: rank 1 and rank 0 differ"),
        ({"data.val_fraction": 0.5}, 2, "data.val_fraction: rank 1 and rank 0 differ"),
        ({"data.root": "OTHER"}, 3, "the training images of rank 1 are not those of rank 0"),
    ],
)
def test_ranks_that_differ_end_before_they_train(
    rank_server: RankServer, digits: Path, tmp_path: Path, changes: dict[str, object], code: int, words: str
) -> None:
    """As on two machines that were not set up alike. One rank says so."""
    common: dict[str, object] = {}
    if "data.root" in changes:
        shutil.copytree(digits, tmp_path / "other")
        (tmp_path / "other" / "train" / "3").rename(tmp_path / "other" / "train" / "three")
        common = {"data.name": "folder", "data.val": "null", "data.val_fraction": 0.2}
        changes = common | {"data.root": tmp_path / "other"}
    of_0, of_1 = (arguments(digits, tmp_path / "run", **own) for own in (common, changes))
    output = tmp_path / "output.txt"
    assert rank_server.run(of_0, output, 2, arguments_of_rank_1=of_1) == [code, code], output.read_text()
    said = output.read_text()
    assert said.count(words) == 1 and len(said.strip().splitlines()) <= 3, said
    assert not (tmp_path / "run" / "checkpoints").exists()
