"""The batch is global. One rank or two, however they were started: the same steps, samples and
losses.
"""

import csv
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import RankServer
from helpers import REPOSITORY, TRAIN, arguments, evaluations, losses, newest, run, train_here
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def one_rank(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train_here(arguments(digits, folder))
    return folder


def test_two_spawned_ranks_have_the_losses_of_one(
    one_rank: Path, digits: Path, tmp_path: Path
) -> None:
    """With a network that a module under `imports` registers, and a module of the working directory
    named `queue`.
    """
    folder = tmp_path / "run"
    (tmp_path / "queue.py").write_text("raise RuntimeError('not the library')\n")
    words = arguments(
        digits,
        folder,
        log__tensorboard="true",
        model__name="helpers_registered",
        imports="[registered]",
    )
    done = run([sys.executable, TRAIN, *words, "--gpus", "2"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    single, double = losses(one_rank), losses(folder)
    assert len(double) == len(single) == 22
    assert double == pytest.approx(single, rel=1e-4)
    assert done.stdout.count("run folder") == 1, "only rank 0 prints"
    assert len(list((folder / "tensorboard").glob("events*"))) == 1
    logs = {path.name: path.read_text() for path in (folder / "logs").iterdir()}
    assert logs.keys() == {"rank0.log", "rank1.log"}
    assert not [
        line for log in logs.values() for line in log.splitlines() if "FutureWarning" in line
    ]
    for ours, alone in zip(evaluations(folder), evaluations(one_rank), strict=True):
        assert ours["images"] == alone["images"] == 359
        assert ours["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        # one image on the edge may tip
        assert abs(ours["top1_pct"] - alone["top1_pct"]) <= 100 / 359 + 1e-9


SAM_AND_MORE: dict[str, Any] = {
    "train.sam_rho": 0.2,
    "train.clip_agc": 0.05,
    "optimizer.lr_scales": '{"5.*": 2}',
    "optimizer.norm_weight_decay": 0,
    "train.micro_batch_size": 8,
}


def test_two_ranks_with_sam_clipping_and_accumulation_have_the_losses_of_one(
    rank_server: RankServer, digits: Path, tmp_path: Path
) -> None:
    """Three ranks, and other settings: test_world_sizes.py."""
    common = {"train.global_batch_size": 48, "train.max_steps": 6, "optimizer.lr": 0.01}
    common |= SAM_AND_MORE
    train_here(arguments(digits, tmp_path / "one", **common))
    output = tmp_path / "output.txt"
    codes = rank_server.run(arguments(digits, tmp_path / "many", **common), output, 2)
    assert codes == [0, 0], output.read_text()
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert [e["images"] for e in evaluations(tmp_path / "many")] == [359]


def test_other_buffers_may_differ_between_ranks(
    rank_server: RankServer, digits: Path, tmp_path: Path
) -> None:
    """Ranks see other images, so they remember other means: no drift. The checkpoint has those of
    rank 0.
    """
    common = {
        "model.name": "helpers:with_image_sum",
        "ema.decay": 0.5,
        "parallel.check_every_steps": 1,
    }
    output = tmp_path / "output.txt"
    for words in (["train.max_steps=3"], ["train.max_steps=6", "--resume"]):
        words = [*arguments(digits, tmp_path / "run", **common), *words]
        assert rank_server.run(words, output, 2) == [0, 0], output.read_text()
    means = [
        load_file(newest(tmp_path / "run") / f"{name}.safetensors")["0.seen"].item()
        for name in ("model", "ema")
    ]
    assert means[0] != 0 and means[0] != means[1]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"optimizer.lr": 0.5}, 2, "optimizer.lr: rank 1 and rank 0 differ"),
        ({"data.val_fraction": 0.5}, 2, "data.val_fraction: rank 1 and rank 0 differ"),
        ({"data.root": "OTHER CLASS"}, 3, "raining images"),
        pytest.param(
            {"data.root": "OTHER SIZE"},
            3,
            "raining images",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_ranks_with_different_config_or_data_exit(
    rank_server: RankServer,
    digits: Path,
    tmp_path: Path,
    changes: dict[str, object],
    code: int,
    words: str,
) -> None:
    """As on two machines that were not set up alike. One rank says so."""
    common: dict[str, object] = {}
    if "data.root" in changes:
        shutil.copytree(digits, tmp_path / "other")
        if changes["data.root"] == "OTHER CLASS":
            (tmp_path / "other" / "train" / "3").rename(tmp_path / "other" / "train" / "three")
        else:
            for image in (tmp_path / "other" / "train" / "3").iterdir():
                image.write_bytes(b"another image")
        common = {"data.name": "folder", "data.val": "null", "data.val_fraction": 0.2}
        changes = common | {"data.root": tmp_path / "other"}
    of_0, of_1 = (arguments(digits, tmp_path / "run", **own) for own in (common, changes))
    output = tmp_path / "output.txt"
    assert rank_server.run(of_0, output, 2, arguments_of_rank_1=of_1) == [code, code], (
        output.read_text()
    )
    printed = output.read_text()
    assert printed.count(words) == 1 and len(printed.strip().splitlines()) <= 3, printed
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_ranks_of_dist_test_count_every_image_once(digits: Path, tmp_path: Path) -> None:
    """Two ranks do not divide the number of images."""
    own = "[torchmetrics.classification:MulticlassF1Score]"
    words = arguments(digits, tmp_path / "run", "noisy", ema__decay=0.5, eval__metrics=own)
    rows = tmp_path / "rows.csv"
    train_here(words)
    config, *changes = words[: words.index("--work-dir")]
    script = str(REPOSITORY / "scripts" / "dist_test.sh")
    done = run(["bash", script, config, str(tmp_path / "run"), "2", *changes, "--out", str(rows)])
    assert done.returncode == 0, done.stderr
    for record in evaluations(tmp_path / "run")[-2:]:
        assert f"{record['weights']}: top-1 {record['top1_pct']:.3f} %" in done.stdout
        assert f"MulticlassF1Score {record['MulticlassF1Score']:.5f}  over" in done.stdout
    assert done.stdout.count("over 359 images") == 2
    with rows.open() as file:
        images = [row["image"] for row in csv.DictReader(file)]
    assert len(images) == len(set(images)) == 359
