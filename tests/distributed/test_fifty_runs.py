"""Runs of two ranks end without an abort: gloo's threads may abort in the interpreter's finalization.

This file is also the program that the test starts: it imports torch once and forks the ranks of each run, which end in
`parallel.exit.end_process`. A rank that reached the finalization instead would print a line.
"""

import atexit
import gc
import os
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY, TRAIN, arguments, losses, run

STEPS = 3


def words_for(images: Path, folder: Path) -> list[str]:
    """Both kinds of collectives in a step, of gradients and of BatchNorm's statistics, and an evaluation behind it."""
    parts = {"data__name": "folder", "data__val": "val", "data__val_fraction": "null"}
    return arguments(images, folder, "noisy", train__max_steps=STEPS, train__global_batch_size=4, device="cpu", **parts)


@pytest.fixture
def images(digits: Path, tmp_path: Path) -> Path:
    """Few of the digits, two of each class in either part, so that a run is over in a moment."""
    for folder in sorted((digits / "train").iterdir()):
        for number, image in enumerate(sorted(folder.glob("*.jpg"))[:4]):
            copy = tmp_path / "images" / ("train", "val")[number % 2] / folder.name / image.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(image)
    return tmp_path / "images"


@pytest.mark.parametrize("runs", [5, pytest.param(30, marks=pytest.mark.nightly)])
def test_many_runs_end_without_an_abort(images: Path, tmp_path: Path, runs: int) -> None:
    paths = f"{REPOSITORY / 'tests'}:{REPOSITORY}"
    done = run([sys.executable, __file__, str(images), str(tmp_path), str(runs)], timeout_sec=120, PYTHONPATH=paths)
    assert done.stdout.split() == ["0,0"] * runs, done.stderr
    assert done.stderr == ""
    assert all(len(losses(tmp_path / str(number))) == STEPS for number in range(runs))


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["spawn", "pytorch"])
def test_many_launched_runs_end_without_an_abort(images: Path, tmp_path: Path, launcher: str) -> None:
    codes = []
    for number in range(4):
        words = [*words_for(images, tmp_path / str(number)), "--launcher", launcher, "--gpus", "2"]
        done = run([sys.executable, TRAIN, *words])
        codes.append((done.returncode, done.stderr))
    assert codes == [(0, "")] * 4


def main(images: Path, folder: Path, runs: int) -> None:
    # Once, in the parent, what takes longest: imports, reading the config, plots.
    import imagenet_cls.engine.run
    import imagenet_cls.parallel.exit  # noqa: F401
    from imagenet_cls.commands.distributed import RankCommand, run_rank
    from imagenet_cls.commands.train import check_work_dir, load_for_training, train_here, train_parser
    from imagenet_cls.report import reporter

    words = [*words_for(images, folder)[:-2], f"parallel.init_method=file://{folder / 'store'}"]
    loaded = load_for_training(train_parser().parse_intermixed_args([*words, "parallel.timeout_sec=30"]))
    command = RankCommand("train.py", train_parser, lambda _: loaded, check_work_dir, train_here)
    reporter.plot_run = lambda *_: []
    gc.freeze()  # garbage collection in a child would copy all modules' pages
    for number in range(runs):
        pids = [os.fork()]
        if pids[0]:
            pids.append(os.fork())
        if not pids[-1]:
            rank = str(len(pids) - 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            atexit.register(os.write, 2, b"a rank reached the finalization\n")
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            run_rank(command, ["--work-dir", str(folder / str(number))])
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(*codes, sep=",", flush=True)
    gc.unfreeze()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
