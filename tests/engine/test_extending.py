"""The examples of docs/extending.md, run as they stand there: each part is really used, the own
loop is the loop.
"""

import csv
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_ranks import KillPoint, RankServer
from helpers import (
    REPOSITORY,
    arguments,
    before_classes,
    evaluations,
    losses,
    newest,
    records,
    saved_bytes,
    state_of,
    succeeds,
    train_here,
)
from safetensors.torch import load_file
from sklearn.metrics import f1_score, recall_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.load import load_config
from imagenet_cls.engine.training_model import build_initial_model

PAGE = (REPOSITORY / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# ([\w.]+)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def beside_the_page(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The working directory of a reader: the page's files and the digits."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(digits)
    monkeypatch.chdir(tmp_path)
    # own modules are found from the working directory
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(Path(name).stem, None)


# The network of the tests' own: for the examples that are not about the model.
SMALL_MODEL = ["model.name=helpers:plain", "augment.size_px=16", "eval.crop_px=16"]
SMALL = [*SMALL_MODEL, "optimizer.lr=0.03"]
SMALL_SIZE = [*SMALL_MODEL[1:], "data.num_workers=0", "log.tensorboard=false", "log.report=false"]


def train(config: str, *words: str, steps: int = 3) -> Path:
    """A few steps with one of the page's configs; the run folder that train.py chooses itself."""
    short = [f"train.max_steps={steps}", "data.num_workers=0", "log.tensorboard=false"]
    train_here([config, *short, *words])
    return Path("work_dirs") / Path(config).stem


def test_every_block_of_the_page_is_a_file_that_a_test_runs() -> None:
    assert PAGE.count("```python\n") + PAGE.count("```yaml\n") == len(FILES)
    parts = {Path(name).stem for name in FILES}
    source = Path(__file__).read_text()
    assert all(f'"{part}.yaml"' in source or f'"{part}.py"' in source for part in parts)


def test_own_model(beside_the_page: Path) -> None:
    run = train("my_model.yaml")
    weights = load_file(newest(run) / "model.safetensors")
    # the width of my_model.yaml, the patch of the signature
    assert weights["patches.weight"].shape == (48, 3, 4, 4)
    assert weights["head.weight"].shape == (10, 48)
    assert "over 359 images" in succeeds(evaluate_command, "my_model.yaml", run)
    # The class itself is a factory, too.
    words = ["model.name=my_model:PatchMLP", "model.kwargs.width=32", "model.kwargs.patch_px=8"]
    run = train("my_model.yaml", *words, "--overwrite")
    weights = load_file(newest(run) / "model.safetensors")
    assert weights["patches.weight"].shape == (32, 3, 8, 8)


def test_own_data(beside_the_page: Path) -> None:
    run = train("my_data.yaml", *SMALL)
    assert state_of(run)["classes"] == ["disc", "square"]
    assert state_of(run)["plan"]["steps_per_epoch"] == 1024 // 64
    assert {record["images"] for record in evaluations(run)} == {100}


def test_own_augmentation(beside_the_page: Path) -> None:
    plain = losses(train("configs/demo.yaml", *SMALL))
    striped = losses(train("my_policy.yaml", *SMALL))
    never = losses(train("my_policy.yaml", *SMALL, "augment.policy_kwargs.prob=0", "--overwrite"))
    assert plain == never and plain != striped


def test_own_optimizer(beside_the_page: Path) -> None:
    """One step moves every weight by lr, whatever its gradient is, after a pull towards zero."""
    words = [*SMALL_MODEL, "ema.decay=null", "schedule.warmup_epochs=0"]
    run = train("my_optimizer.yaml", *words, steps=1)
    tensors = load_file(newest(run) / "optimizer.safetensors")
    assert {name.split("//")[1] for name in tensors} == {"average"}
    config = load_config(run / "config.yaml").config
    before = build_initial_model(config, 10)[0].state_dict()  # the same draws again
    after = load_file(newest(run) / "model.safetensors")
    moved = after["5.weight"] - before["5.weight"] * (1 - 1e-3 * config.optimizer.weight_decay)
    for value in (moved.abs().max(), moved.abs().median()):
        assert value.item() == pytest.approx(1e-3, rel=2e-4)


def test_own_loss(beside_the_page: Path) -> None:
    plain = losses(train("configs/demo.yaml", *SMALL))
    focal = losses(train("my_loss.yaml", *SMALL))
    # At the start every class has about a tenth of the probability, so the factor is about 0.9 **
    # 1.5.
    assert focal[0] == pytest.approx(0.9**1.5 * plain[0], rel=0.03)
    assert losses(
        train("my_loss.yaml", *SMALL, "loss.kwargs.gamma=0", "--overwrite")
    ) == pytest.approx(plain)


def test_own_schedule(beside_the_page: Path) -> None:
    run = train("my_schedule.yaml", *SMALL, "train.global_batch_size=256", steps=10)
    rates = [record["lr"] for record in records(run, "train")]
    assert rates == pytest.approx([0.03] * 5 + [0.03 * (10 - step) / 5 for step in range(5, 10)])


def test_own_step_on_two_ranks_resumes_after_a_kill(
    beside_the_page: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    words = ["my_step.yaml", "model.kwargs={name: resnet10t, width: 8}", *SMALL_SIZE]
    words += ["train.max_steps=4", "checkpoint.every_steps=2", "--work-dir"]
    here = {"PWD": str(beside_the_page)}
    assert rank_server.run([*words, "whole"], tmp_path / "out.txt", 2, **here) == [0, 0]
    kills = [KillPoint("after_optimizer_step", 3, rank=1)]
    codes = rank_server.run([*words, "parts"], tmp_path / "out.txt", 2, kills, **here)
    assert codes[1] == -9
    codes = rank_server.run([*words, "parts", "--resume"], tmp_path / "out.txt", 2, **here)
    assert codes == [0, 0], (tmp_path / "out.txt").read_text()
    whole, parts = Path("whole"), Path("parts")
    assert saved_bytes(parts) == saved_bytes(whole) and losses(parts) == losses(whole)
    weights = load_file(newest(whole) / "model.safetensors")
    config = load_config(whole / "config.yaml").config
    start = build_initial_model(config, 10)[0].state_dict()
    assert (weights["projection.weight"] != start["projection.weight"]).any()
    # the cross-entropy of ten classes at the start is about 2.3; the other term adds to it
    assert losses(whole)[0] > 2.5


def test_own_step_with_a_gradient_penalty(beside_the_page: Path) -> None:
    plain = records(train("configs/demo.yaml", *SMALL, "train.precision=fp32"), "train")[0]
    penalized = records(train("my_penalty.yaml", *SMALL), "train")[0]
    # The reported loss is without the penalty.
    assert penalized["loss"] == plain["loss"] and penalized["grad_norm"] != plain["grad_norm"]


def test_own_metrics(beside_the_page: Path) -> None:
    """In the records, in TensorBoard and in the line of test.py; as scikit-learn counts them."""
    rows = beside_the_page / "rows.csv"
    words = [*SMALL, "ema.decay=0.5", "log.tensorboard=true"]
    run = train("my_metric.yaml", *words, steps=12)
    words = ["--out", rows, "--weights", "ema"]
    out = succeeds(evaluate_command, "my_metric.yaml", run, *words, *SMALL)
    with rows.open() as file:
        rows_read = [(int(row["target"]), int(row["class_1"])) for row in csv.DictReader(file)]
    targets, predicted = zip(*rows_read, strict=True)
    expected = {"macro_f1": f1_score(targets, predicted, average="macro")}
    recalls = recall_score(targets, predicted, average=None)
    expected |= {"worst_class": recalls.argmin(), "worst_recall": recalls.min()}
    raw, ema = evaluations(run)[-2:]
    assert {field: ema[field] for field in expected} == pytest.approx(expected, abs=1e-6)
    assert raw["macro_f1"] != ema["macro_f1"] and 0.5 < ema["AUROC"] < 1
    assert f"macro_f1 {ema['macro_f1']:.5f}" in before_classes(out)[-1]
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert events.Scalars("val_ema/worst_recall")[-1].value == pytest.approx(ema["worst_recall"])


def test_own_writer(beside_the_page: Path) -> None:
    run = train("my_writer.yaml", *SMALL, "checkpoint.every_steps=2")
    train("my_writer.yaml", *SMALL, "checkpoint.every_steps=2", "--resume", steps=5)
    lines = (run / "writers" / "my_writer.LossFile" / "loss.txt").read_text().splitlines()
    assert lines == [f"{step} {loss}" for step, loss in enumerate(losses(run), start=1)]
    assert len(lines) == 5


def test_own_loop_has_the_losses_of_the_loop(
    beside_the_page: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = arguments(digits, beside_the_page / "run", device="cpu", train__global_batch_size=256)
    train_here(words)
    words = words[: words.index("--work-dir")]
    monkeypatch.setattr(sys, "argv", ["my_loop.py", *words])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert runpy.run_path("my_loop.py")["losses"] == losses(beside_the_page / "run")
