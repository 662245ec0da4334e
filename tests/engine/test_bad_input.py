"""What users get wrong, on the command line: the exit code, at most three lines that name the cause, no work lost."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
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


@pytest.fixture
def check_error(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Run a command that must fail: assert its exit code, and that its few lines on stderr hold all of `expected`."""

    def check(code: int, argv: list[Any], *expected: str, command: Callable = train_command) -> None:
        capsys.readouterr()
        try:
            got: int | str | None = main(command, [str(word) for word in argv])
        except SystemExit as usage:  # raised by argparse
            got = usage.code
        error = capsys.readouterr().err
        assert got == code, error
        assert 0 < len(error.splitlines()) <= 3 and "Traceback" not in error, error
        for text in expected:
            assert text in error, error

    return check


def contents(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes, except the lock and the logs, which every attempt writes to."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock" and path.parent.name != "logs"
    }


# ------------------------------------------------------------------------------------------------- configs


def test_all_bad_overrides_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    script = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print(sorted({'torch', 'torchvision', 'timm', 'numpy'} & set(sys.modules))))\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    argv = ["configs/demo.yaml", "optimzer.lr=1", "train.epochs=many", "--work-dir", str(tmp_path / "run")]
    done = run([sys.executable, "-c", f"import sys; sys.argv[0] = {TRAIN!r}\n{script}", *argv])
    assert (done.returncode, done.stdout) == (2, "[]\n")
    first, second = done.stderr.splitlines()
    assert "optimzer.lr=1" in first and "'optimizer'" in first and "train.epochs" in second
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2\nb: }", ["x.yaml:2"]),
        ("just words", ["x.yaml"]),
        ("_base_: x.yaml", ["x.yaml:1", "x.yaml -> "]),
        ("_base_: nowhere.yaml", ["x.yaml:1", "nowhere.yaml"]),
        (f"_base_: {DEMO}\nmodle:\n  name: resnet18", ["x.yaml:2", "'model'"]),
        (f"_base_: {DEMO}\ntrain:\n  precision: fp23", ["x.yaml:3", "train.precision"]),
        (f"_base_: {DEMO}\noptimizer:\n  name: adamw", ["x.yaml:3", "optimizer.lr"]),
    ],
)
def test_config_file_with_an_error_is_named_with_its_line(
    check_error: Callable, tmp_path: Path, text: str, expected: list[str]
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    check_error(2, [tmp_path / "x.yaml", "--work-dir", tmp_path / "run"], *expected)
    assert not (tmp_path / "run").exists()


def test_missing_config_suggests_a_similar_name(check_error: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    check_error(2, ["configs/resnet5.yaml"], "configs/resnet5.yaml", "'configs/resnet50.yaml'")


@pytest.mark.parametrize(
    ("changes", "more", "expected"),
    [
        ({"model.name": "resnet5O"}, [], ["model.name", "'resnet50'"]),
        ({"model.name": "helpers:plane"}, [], ["model.name", "'plain'"]),
        ({"model.kwargs": "{widht: 3}"}, [], ["model.kwargs.widht", "'width'"]),
        ({"optimizer.name": "adamv", "optimizer.lr": 1}, [], ["optimizer.name", "'adamw'"]),
        ({"data.num_workers": -1}, [], ["data.num_workers"]),
        ({"eval.resize_px": 12}, [], ["eval.resize_px"]),
        ({"train.precision": "fp16", "device": "cpu"}, [], ["train.precision"]),
        ({"augment.size_px": 8}, [], ["augment.size_px", "helpers:plain"]),
        (
            {"augment.progressive": "{epochs: [0, 1], sizes_px: [8, 16], multiple_px: 8}"},
            [],
            ["augment.progressive.sizes_px", "helpers:plain"],
        ),
        ({}, ["--epocs=3"], ["--epocs=3"]),
        ({}, ["--gpus", "0"], ["--gpus"]),
        ({}, ["another.yaml"], ["another.yaml"]),
        ({}, ["--resume", "--overwrite"], ["--resume", "--overwrite"]),
        ({"train.global_batch_size": 127, "device": "cpu"}, ["--gpus", "2"], ["train.global_batch_size"]),
    ],
)
def test_bad_value_or_option_is_reported_before_the_run_folder_is_created(
    check_error: Callable, digits: Path, tmp_path: Path, changes: dict[str, Any], more: list[str], expected: list[str]
) -> None:
    check_error(2, [*arguments(digits, tmp_path / "run", **changes), *more], *expected)
    assert contents(tmp_path / "run") == {}


# ---------------------------------------------------------------------------------------------------- data


def make_folder(digits: Path, root: Path, parts: dict[str, str]) -> Path:
    """Class folders with eight digits each. parts: by folder, `flat` for images without class folders, or ""."""
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
        ({}, "nowhere", ["nowhere", "data.root"]),
        ({}, "", ["data.root"]),
        ({"a/b/train": "", "a/b/val": ""}, "", ["data.root="]),
        ({"train/train": "", "train/val": "", "val": ""}, "", ["train, val"]),
        ({"train": ""}, "", ["data.val=null data.val_fraction=0.1"]),
        ({"train": "", "val": "flat"}, "", ["80 images", "prepare_imagenet.py"]),
    ],
)
def test_folder_of_another_layout_is_a_data_error(
    check_error: Callable, digits: Path, tmp_path: Path, parts: dict[str, str], root: str, expected: list[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    make_folder(digits, data, parts)
    before = contents(data)
    check_error(3, arguments(data / root, tmp_path / "run", **FOLDER), *expected)
    assert contents(data) == before
    assert contents(tmp_path / "run") == {}  # the corrected command needs no further flag


def test_classes_that_do_not_match_are_named(check_error: Callable, digits: Path, tmp_path: Path) -> None:
    data = make_folder(digits, tmp_path / "data", {"train": "", "val": ""})
    argv = arguments(data, tmp_path / "run", **FOLDER)
    check_error(2, [*argv, "model.num_classes=5"], "10 classes")
    (data / "val" / "9").rename(data / "val" / "nine")
    check_error(3, argv, "nine")
    assert contents(tmp_path / "run") == {}


def test_fewer_images_than_one_batch_is_a_data_error(check_error: Callable, digits: Path, tmp_path: Path) -> None:
    check_error(3, arguments(digits, tmp_path / "run", train__global_batch_size=5000), "1438")


@pytest.mark.parametrize("workers", [0, 2])
def test_truncated_image_is_named_with_its_index(
    check_error: Callable, digits: Path, tmp_path: Path, workers: int
) -> None:
    data = make_folder(digits, tmp_path / "data", {"train": "", "val": ""})
    image = sorted((data / "train" / "3").iterdir())[5]
    image.write_bytes(image.read_bytes()[:300])
    argv = arguments(data, tmp_path / "run", **FOLDER, train__global_batch_size=80, data__num_workers=workers)
    check_error(3, argv, f"{image} (image 29)")


# -------------------------------------------------------------------------------------------- the run folder


@pytest.fixture(scope="module")
def finished(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train_here(arguments(digits, folder))
    return folder


@pytest.mark.parametrize(
    ("code", "changes", "more", "expected"),
    [
        (2, {}, [], ["step 22", "--resume", "--overwrite", "--work-dir"]),
        (4, {"optimizer__lr": 0.5}, ["--resume"], ["optimizer.lr: 0.03 -> 0.5", "--allow-change optimizer.lr"]),
        (3, {"data__name": "folder", "data__root": "nowhere"}, ["--overwrite"], ["nowhere"]),
        (3, {"train__global_batch_size": 5000}, ["--overwrite"], ["1438"]),
        (4, {}, ["--overwrite", "--resume-from", "nowhere"], ["nowhere"]),
        (4, {"model__checkpoint": "nowhere.pth"}, ["--overwrite"], ["nowhere.pth"]),
    ],
)
def test_run_that_cannot_begin_leaves_the_folder_unchanged(
    check_error: Callable, digits: Path, finished: Path, code: int, changes: dict, more: list[str], expected: list[str]
) -> None:
    before = contents(finished)
    check_error(code, [*arguments(digits, finished, **changes), *more], *expected)
    assert contents(finished) == before


def test_resume_with_all_checkpoints_damaged_is_an_error(
    check_error: Callable, digits: Path, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        (checkpoint / "model.safetensors").write_bytes(b"")
    before = contents(folder)
    check_error(4, [*arguments(digits, folder), "--resume"], "step-0000022", "--overwrite")
    check_error(4, [DEMO, folder, f"data.root={digits}"], "model.safetensors", command=evaluate_command)
    assert contents(folder) == before


def test_run_folder_that_cannot_be_written_is_an_error(check_error: Callable, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for code, folder in ((2, tmp_path / "file"), (5, tmp_path / "file" / "run"), (5, Path("/proc/run"))):
        check_error(code, arguments(digits, folder), str(folder), "--work-dir")
    assert (tmp_path / "file").read_text() == "mine"


def test_second_run_on_a_folder_is_an_error(check_error: Callable, digits: Path, tmp_path: Path) -> None:
    argv = arguments(digits, tmp_path / "run", "noisy", model__kwargs="{pause_sec: 0.2}", train__epochs=50)
    first = subprocess.Popen([sys.executable, TRAIN, *argv], env=environment(), stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: steps_done(tmp_path / "run") > 0, "the first run's first step")
        config = (tmp_path / "run" / "config.yaml").read_bytes()
        check_error(2, argv, "--resume")
        for flag in ("--resume", "--overwrite"):
            check_error(2, [*argv, flag], f"process {first.pid}", "--work-dir")
        assert (tmp_path / "run" / "config.yaml").read_bytes() == config
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()


# -------------------------------------------------------------------------------------------- in the run itself


def turning_nan(after: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy that is NaN after a number of training steps."""
    calls = 0

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        return functional.cross_entropy(logits, targets) * (1.0 if calls <= after else float("nan"))

    return loss


def nan_loss(after: int) -> dict[str, Any]:
    return {"loss.name": f"{__name__}:turning_nan", "loss.kwargs": f"{{after: {after}}}"}


# Synthetic images: a run of 22 steps in no time.
TINY = {
    "data__name": "synthetic",
    "data__kwargs": "{train_images: 88, val_images: 20, num_classes: 10, size_px: 16}",
    "train__global_batch_size": 8,
}


def test_loss_that_turns_nan_ends_the_run_and_keeps_the_last_checkpoint(
    check_error: Callable, digits: Path, tmp_path: Path
) -> None:
    train_here(arguments(digits, tmp_path / "good", **TINY, **nan_loss(1000)))
    argv = arguments(digits, tmp_path / "run", **TINY, **nan_loss(13), train__max_nonfinite_steps=4)
    sampler = EpochSampler(88, 8, rank=0, world_size=1, seed=0)
    sampler.set_epoch(1, start_step=5)  # the 17th step of all, counted from 1
    samples = [f"synthetic/train[{index}]" for _, index, _ in islice(sampler, 8)]
    check_error(6, argv, "step 17", "rank 0", ", ".join(samples[:3]), "optimizer.lr")
    assert ", ".join(samples) in (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-0000011"]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record.get("skipped")] == [14, 15, 16, 17]
    # With the loss corrected, it resumes and ends as the undisturbed run.
    corrected = arguments(digits, tmp_path / "run", **TINY, **nan_loss(1000))
    train_here([*corrected, "--resume", "--allow-change", "loss.kwargs"])
    assert losses(tmp_path / "run") == losses(tmp_path / "good")
    assert evaluations(tmp_path / "run")[-1]["loss"] == evaluations(tmp_path / "good")[-1]["loss"]


def test_few_nan_steps_are_skipped_and_reported(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = TINY | nan_loss(18) | {"train__max_nonfinite_steps": 10, "log__every_steps": 3}
    train_here(arguments(digits, tmp_path / "run", **changes))
    assert all(record["loss"] < 3 for record in evaluations(tmp_path / "run"))
    out = " ".join(capsys.readouterr().out.split())
    assert "3 steps from 19 to 21" in out and "step 22: " in out


def test_weights_with_nan_are_never_the_best(digits: Path, tmp_path: Path) -> None:
    """One huge step, and nothing is finite any more."""
    changes = TINY | {"optimizer__lr": 1e19, "train__max_nonfinite_steps": 1000}
    train_here(arguments(digits, tmp_path / "run", **changes))
    assert all(not math.isfinite(float(record["loss"])) for record in evaluations(tmp_path / "run"))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    state = json.loads((checkpoint / "state.json").read_text())
    assert checkpoint.name == "step-0000022" and state["progress"]["best"] == {}


def huge(num_classes: int) -> torch.nn.Module:
    class Huge(torch.nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.flatten(1)) + torch.empty(1 << 45).sum()

    return Huge(768, num_classes)


def test_out_of_memory_is_a_resource_error(check_error: Callable, digits: Path, tmp_path: Path) -> None:
    argv = arguments(digits, tmp_path / "run", **{"model.name": f"{__name__}:huge"})
    check_error(5, argv, "train.micro_batch_size")
