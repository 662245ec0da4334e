"""What users get wrong, each through the command line: the exit code, at most three lines, and nothing written over."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import torch
from helpers import (
    DEMO,
    REPOSITORY,
    TRAIN,
    arguments,
    environment,
    evaluations,
    losses,
    run,
    steps_done,
    train_here,
    wait_for,
)
from torch import Tensor
from torch.nn import functional

from imagenet_cls.commands.program import main
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.data import EpochSampler
from imagenet_cls.report.log import close_log

FOLDER = {"data__name": "folder", "data__val": "val", "data__val_fraction": "null"}


@pytest.fixture(autouse=True)
def log_closed() -> Iterator[None]:
    """A run's log belongs to its process; here many runs share one."""
    yield
    close_log()


class Refused:
    """A command that must fail: its exit code and what it said on stderr. stdout may hold a banner, never the error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys

    def __call__(
        self, code: int, words: list[Any], *expected: str, most_lines: int = 3, command: Callable = train_command
    ) -> list[str]:
        """Run it; assert its code and that every text of `expected` is in its few lines, without a traceback."""
        self.capsys.readouterr()
        try:
            got: int | str | None = main(command, [str(word) for word in words])
        except SystemExit as usage:  # argparse's own way out
            got = usage.code
        error = self.capsys.readouterr().err
        lines = error.splitlines()
        assert got == code, error
        assert 0 < len(lines) <= most_lines, error
        assert "Traceback" not in error
        for text in expected:
            assert text in error, error
        return lines


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(capsys)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes, but the lock and the logs, which every attempt writes to."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock" and path.parent.name != "logs"
    }


# ------------------------------------------------------------------------------------------------- configs


def test_all_mistakes_of_a_command_line_at_once_and_before_torch_is_imported(tmp_path: Path) -> None:
    """Two words, both wrong: two lines, in a process that ends before it pays for torch."""
    script = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print(sorted({'torch', 'torchvision', 'timm', 'numpy'} & set(sys.modules))))\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    words = ["configs/demo.yaml", "optimzer.lr=1", "train.epochs=many", "--work-dir", str(tmp_path / "run")]
    done = run([sys.executable, "-c", f"import sys; sys.argv[0] = {TRAIN!r}\n{script}", *words])
    assert done.returncode == 2
    assert done.stdout == "[]\n"
    first, second = done.stderr.splitlines()
    assert "optimzer.lr=1" in first and "did you mean 'optimizer'?" in first
    assert "train.epochs" in second and "'many' is not a whole number" in second
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2\nb: }", ["x.yaml:2"]),
        ("just words", ["holds no mapping"]),
        ("_base_: x.yaml", ["x.yaml:1", "a circle: ", "x.yaml -> "]),
        ("_base_: nowhere.yaml", ["x.yaml:1", "no file"]),
        (f"_base_: {DEMO}\nmodle:\n  name: resnet18", ["x.yaml:2", "did you mean 'model'?"]),
        (f"_base_: {DEMO}\ntrain:\n  precision: fp23", ["x.yaml:3", "train.precision", "did you mean 'fp32'?"]),
        (f"_base_: {DEMO}\noptimizer:\n  name: adamw", ["x.yaml:3", "optimizer.lr"]),
    ],
)
def test_configs_that_cannot_be_read(refused: Refused, tmp_path: Path, text: str, expected: list[str]) -> None:
    (tmp_path / "x.yaml").write_text(text)
    refused(2, [tmp_path / "x.yaml", "--work-dir", tmp_path / "run"], *expected, most_lines=1)
    assert not (tmp_path / "run").exists()


def test_a_config_that_does_not_exist(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    refused(2, ["configs/resnet5.yaml"], "no config configs/resnet5.yaml", "did you mean 'configs/resnet50.yaml'")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model.name": "resnet5O"}, ["model.name", "did you mean 'resnet50'"]),
        ({"model.name": "helpers:plane"}, ["model.name", "'plain'"]),
        ({"model.kwargs": "{widht: 3}"}, ["model.kwargs.widht", "did you mean 'width'?"]),
        ({"optimizer.name": "adamv", "optimizer.lr": 1}, ["optimizer.name", "did you mean 'adamw'"]),
        ({"data.num_workers": -1}, ["data.num_workers", "0 to 256"]),
        ({"eval.resize_px": 12}, ["eval.resize_px", "less than eval.crop_px 16"]),
        ({"train.precision": "fp16", "device": "cpu"}, ["train.precision", "needs a GPU", "fp32 or bf16"]),
    ],
)
def test_values_that_cannot_be_used(
    refused: Refused, digits: Path, tmp_path: Path, changes: dict[str, Any], expected: list[str]
) -> None:
    refused(2, arguments(digits, tmp_path / "run", **changes), *expected, most_lines=1)
    assert not (tmp_path / "run").exists()


def test_options_and_words_that_do_not_exist(refused: Refused, digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path / "run")
    refused(2, [*words, "--epocs=3"], "unrecognized arguments: --epocs=3")
    refused(2, [*words, "--gpus", "0"], "--gpus", "not a whole number of at least 1")
    refused(2, [*words, "another.yaml"], "unexpected argument 'another.yaml'")
    refused(2, [*words, "--resume", "--overwrite"], "Give one of them")
    refused(2, [DEMO, f"data.root={digits}"], "no weights to evaluate", command=evaluate_command)
    assert not (tmp_path / "run").exists()


def test_a_batch_that_does_not_divide_is_found_before_ranks_start(
    refused: Refused, digits: Path, tmp_path: Path
) -> None:
    words = arguments(digits, tmp_path / "run", train__global_batch_size=127, device="cpu")
    refused(2, [*words, "--gpus", "2"], "127 images do not divide among 2 ranks", "126 or 128", most_lines=1)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------- data


def make_folder(digits: Path, root: Path, parts: dict[str, str]) -> Path:
    """Class folders with eight digits each. parts: by folder, `flat` for images without classes, else anything."""
    for part, kind in parts.items():
        for folder in sorted((digits / "train").iterdir()):
            target = root / part / ("" if kind == "flat" else folder.name)
            target.mkdir(parents=True, exist_ok=True)
            for image in sorted(folder.glob("*.jpg"))[:8]:
                shutil.copy(image, target)
    return root


@pytest.mark.parametrize(
    ("parts", "root", "expected"),
    [
        (None, "nowhere", ["nowhere: no such folder", "set data.root"]),
        ({}, "", ["no class folders", "set data.root"]),
        ({"a/b/train": "", "a/b/val": ""}, "", ["no such folder, but", "set data.root="]),
        ({"train/train": "", "train/val": "", "val": ""}, "", ["train, val", "a level deeper"]),
        ({"train": ""}, "", ["data.val=null data.val_fraction=0.1"]),
        ({"train": "", "val": "flat"}, "", ["holds 80 images", "prepare_imagenet.py"]),
    ],
)
def test_folders_that_are_not_what_they_should_be(
    refused: Refused, digits: Path, tmp_path: Path, parts: dict[str, str] | None, root: str, expected: list[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    make_folder(digits, data, parts or {})
    before = contents(data)
    if parts == {}:
        expected = ["holds neither class folders nor images", "set data.root"]
    refused(3, arguments(data / root, tmp_path / "run", **FOLDER), *expected)
    assert contents(data) == before
    assert contents(tmp_path / "run") == {}  # so that the mended command needs no further flag


def test_classes_that_do_not_match(refused: Refused, digits: Path, tmp_path: Path) -> None:
    data = make_folder(digits, tmp_path / "data", {"train": "", "val": ""})
    words = arguments(data, tmp_path / "run", **FOLDER)
    refused(2, [*words, "model.num_classes=5"], "the data set has 10 classes", "at least 10")
    (data / "val" / "9").rename(data / "val" / "nine")
    refused(3, words, "not among the 10 training classes: nine")
    assert contents(tmp_path / "run") == {}


def test_sides_that_a_model_cannot_take_are_told_with_the_key_that_has_them(
    refused: Refused, digits: Path, tmp_path: Path
) -> None:
    """`plain` is made for 16 px."""
    growing = {"augment__progressive": "{epochs: [0, 1], sizes_px: [8, 16], multiple_px: 8}"}
    refused(
        2, arguments(digits, tmp_path / "a", **growing), "augment.progressive.sizes_px: helpers:plain can't take 8 px"
    )
    refused(2, arguments(digits, tmp_path / "b", augment__size_px=8), "augment.size_px: helpers:plain can't take 8 px")


def test_fewer_images_than_one_batch(refused: Refused, digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path / "run", train__global_batch_size=5000)
    refused(3, words, "1438 images an epoch, fewer than one batch", "at most 1438")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_truncated_image_is_named_with_its_index(
    refused: Refused, digits: Path, tmp_path: Path, workers: int
) -> None:
    data = make_folder(digits, tmp_path / "data", {"train": "", "val": ""})
    image = sorted((data / "train" / "3").iterdir())[5]
    image.write_bytes(image.read_bytes()[:300])
    words = arguments(data, tmp_path / "run", **FOLDER, train__global_batch_size=80, data__num_workers=workers)
    refused(3, words, f"{image} (image 29): damaged or truncated", "replace the file", most_lines=1)


# -------------------------------------------------------------------------------------------- the run folder


@pytest.fixture(scope="module")
def finished(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train_here(arguments(digits, folder))
    return folder


def test_a_folder_that_holds_a_run(refused: Refused, digits: Path, finished: Path) -> None:
    before = contents(finished)
    words = arguments(digits, finished)
    refused(2, words, "saved up to step 22", "--resume", "--overwrite", "--work-dir")
    words = arguments(digits, finished, optimizer__lr=0.5)
    refused(4, [*words, "--resume"], "optimizer.lr: 0.03 -> 0.5", "--allow-change optimizer.lr")
    assert contents(finished) == before


def test_overwriting_with_a_run_that_cannot_begin_costs_nothing(refused: Refused, digits: Path, finished: Path) -> None:
    before = contents(finished)

    def words(**changes: Any) -> list[str]:
        return [*arguments(digits, finished, **changes), "--overwrite"]

    refused(3, words(data__name="folder", data__root="nowhere"), "no such folder")
    refused(3, words(train__global_batch_size=5000), "fewer than one batch")
    refused(4, [*words(), "--resume-from", "nowhere"], "neither a checkpoint")
    refused(4, words(model__checkpoint="nowhere.pth"), "no checkpoint 'nowhere.pth'")
    assert contents(finished) == before


def test_all_checkpoints_damaged_is_no_fresh_start(
    refused: Refused, digits: Path, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        (checkpoint / "model.safetensors").write_bytes(b"")
    before = contents(folder)
    words = arguments(digits, folder)
    refused(4, [*words, "--resume"], "all 2 checkpoints are damaged", "step-0000022", "--overwrite")
    refused(4, [DEMO, folder, f"data.root={digits}"], "model.safetensors", command=evaluate_command)
    assert contents(folder) == before


def test_places_that_cannot_be_written(refused: Refused, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(2, arguments(digits, tmp_path / "file"), "is a file, not a folder", "--work-dir")
    refused(5, arguments(digits, tmp_path / "file" / "run"), "can't write to", "--work-dir")
    refused(5, arguments(digits, Path("/proc/run")), "can't write to /proc/run", "--work-dir")
    assert (tmp_path / "file").read_text() == "mine"


def test_two_runs_at_once_on_one_folder(refused: Refused, digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path / "run", "noisy", model__kwargs="{pause_sec: 0.2}", train__epochs=50)
    first = subprocess.Popen([sys.executable, TRAIN, *words], env=environment(), stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: steps_done(tmp_path / "run") > 0, "the first run's first step")
        config = (tmp_path / "run" / "config.yaml").read_bytes()
        refused(2, words, "already holds a run")
        for flag in ("--resume", "--overwrite"):
            refused(2, [*words, flag], f"in use by process {first.pid} on {gethostname()}", "--work-dir")
        assert (tmp_path / "run" / "config.yaml").read_bytes() == config
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()


# -------------------------------------------------------------------------------------------- in the run itself


def turning_nan(after: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy that is NaN after so many training steps."""
    calls = 0

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        return functional.cross_entropy(logits, targets) * (1.0 if calls <= after else float("nan"))

    return loss


def own_loss(after: int) -> dict[str, Any]:
    return {"loss.name": f"{__name__}:turning_nan", "loss.kwargs": f"{{after: {after}}}"}


# Made-up images, so that a run of 22 steps takes no time: what ends it does not look at images.
TINY = {
    "data__name": "synthetic",
    "data__kwargs": "{train_images: 88, val_images: 20, num_classes: 10, size_px: 16}",
    "train__global_batch_size": 8,
}


def test_a_loss_that_turns_nan_ends_the_run_and_spares_the_last_checkpoint(
    refused: Refused, digits: Path, tmp_path: Path
) -> None:
    train_here(arguments(digits, tmp_path / "good", **TINY, **own_loss(1000)))
    words = arguments(digits, tmp_path / "run", **TINY, **own_loss(13), train__max_nonfinite_steps=4)
    sampler = EpochSampler(88, 8, rank=0, world_size=1, seed=0)
    sampler.set_epoch(1, start_step=5)  # the 17th step of all, from 1 on
    seen = [f"synthetic/train[{index}]" for _, index, _ in islice(sampler, 8)]
    told = f"It was the loss on rank 0 of 1, from {', '.join(seen[:3])} and 5 more (logs/rank0.log)."
    refused(6, words, "in 4 steps in a row, the last one step 17 (loss nan, lr", told, "Lower optimizer.lr")
    assert ", ".join(seen) in (tmp_path / "run" / "logs" / "rank0.log").read_text()
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-0000011"]
    assert contents(checkpoints / "step-0000011")["model.safetensors"]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in steps if record.get("skipped")] == [14, 15, 16, 17]
    # The cause mended, it goes on from there and ends as the run that was never disturbed.
    mended = arguments(digits, tmp_path / "run", **TINY, **own_loss(1000))
    train_here([*mended, "--resume", "--allow-change", "loss.kwargs"])
    assert losses(tmp_path / "run") == losses(tmp_path / "good")
    assert evaluations(tmp_path / "run")[-1]["loss"] == evaluations(tmp_path / "good")[-1]["loss"]


def test_a_few_nan_steps_are_left_out_and_told(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer in a row than the limit: the run ends well, and its weights are finite."""
    changes = TINY | own_loss(18) | {"train__max_nonfinite_steps": 10, "log__every_steps": 3}
    train_here(arguments(digits, tmp_path / "run", **changes))
    assert all(record["loss"] < 3 for record in evaluations(tmp_path / "run"))
    told = " ".join(capsys.readouterr().out.split())
    assert "3 steps from 19 to 21: loss or gradient was NaN or infinite (3 such steps since the start)" in told
    assert "step 22: loss or gradient was NaN or infinite (4 such steps since the start)" in told
    assert told.count("it was the last step of the run") == 1


def test_weights_that_give_nan_are_never_the_best(digits: Path, tmp_path: Path) -> None:
    """One huge step, and nothing is finite any more; images of one class are still right, by what NaN sorts to."""
    changes = TINY | {"optimizer__lr": 1e19, "train__max_nonfinite_steps": 1000}
    train_here(arguments(digits, tmp_path / "run", **changes))
    assert all(not math.isfinite(float(record["loss"])) for record in evaluations(tmp_path / "run"))
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-0000022" / "state.json").read_text())
    assert state["progress"]["best"] == {}
    # Nothing of it takes the place of an earlier checkpoint before the end.
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-0000022"]


def huge(num_classes: int) -> torch.nn.Module:
    class Huge(torch.nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.flatten(1)) + torch.empty(1 << 45).sum()

    return Huge(768, num_classes)


def test_memory_that_runs_out(refused: Refused, digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path / "run", **{"model.name": f"{__name__}:huge"})
    refused(5, words, "out of memory", "train.micro_batch_size")
