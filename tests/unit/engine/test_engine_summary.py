"""The start-up table, and the last lines of a run."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import arguments

from imagenet_cls.checkpoint.format import checkpoint_path
from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.commands.train import train_command
from imagenet_cls.data.turbojpeg import find_turbojpeg
from imagenet_cls.engine.meter import Meter
from imagenet_cls.engine.summary import final_message
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group


def test_startup_table_fits_80_columns_and_names_the_decoder_without_its_folder(
    digits: Path, call: Callable
) -> None:
    words = arguments(digits, "work_dirs/demo", ema__decay=0.98, data__num_workers="auto")
    code, out, _ = call(train_command, *words, "--dry-run")
    decoder = find_turbojpeg()
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert decoder is None or f"regions, by {Path(decoder.path).name}\n" in out


@pytest.mark.parametrize("is_saved", [True, False])
def test_last_lines_name_the_best_results_and_the_next_commands(
    tmp_path: Path, is_saved: bool
) -> None:
    run = tmp_path / "my run"
    progress = Progress(
        step=20,
        best={"raw": {"step": 10, "top1_pct": 90.0}, "ema": {"step": 20, "top1_pct": 91.5}},
    )
    (run / "plots").mkdir(parents=True)
    checkpoint = checkpoint_path(run / "checkpoints", 20)
    if is_saved:
        checkpoint.mkdir(parents=True)
    meter = Meter(Group(RankInfo(), torch.device("cpu")), global_batch=8)
    plan = SimpleNamespace(steps_per_epoch=5)
    assert final_message(progress, plan, run, meter).splitlines() == [
        "done",
        f"trained {meter.describe_total()}",
        "best top-1 (raw weights): 90.00 % in epoch 2",
        "best top-1 (ema weights, used by predict.py): 91.50 % in epoch 4",
        f"checkpoint: {checkpoint}{'' if is_saved else ', which is missing'}",
        f"curves: {run / 'plots'}",
        "next:",
        f"  python tools/test.py '{run}' --report 'reports/my run'",
        f"  python tools/report.py '{run}'",
        f"  python tools/predict.py '{run}' IMAGES",
    ]


def test_last_lines_of_a_run_without_finite_results_and_plots(tmp_path: Path) -> None:
    meter = Meter(Group(RankInfo(), torch.device("cpu")), global_batch=8)
    message = final_message(Progress(), SimpleNamespace(steps_per_epoch=5), tmp_path, meter)
    assert [line.partition(" ")[0] for line in message.splitlines()[:3]] == [
        "done",
        "trained",
        "next:",
    ]
