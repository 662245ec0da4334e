"""The start-up table, the line of an epoch, and the last lines of a run."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from helpers import arguments, single_rank, succeeds

from imagenet_cls.checkpoint.format import checkpoint_path
from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.commands.train import train_command
from imagenet_cls.config.schema import Config, EvalConfig, ModelConfig
from imagenet_cls.data.turbojpeg import find_turbojpeg
from imagenet_cls.engine.meter import Meter
from imagenet_cls.engine.plan import Plan
from imagenet_cls.engine.summary import epoch_lines, final_message

TRAINING = "train loss 2.0412, 75.2 %"
EVALUATION = {"kind": "eval", "step": 20, "epoch": 3, "top1_pct": 97.213, "top5_pct": 99.9}
EVALUATION |= {"loss": 0.1, "balanced_accuracy_pct": 90.0, "images": 359, "seconds": 0.5}
RAW = {**EVALUATION, "weights": "raw"}
EMA = {**EVALUATION, "weights": "ema", "top1_pct": 96.94}


def run_parts(classes: int, epochs: int = 8, metrics: tuple[str, ...] = ()) -> SimpleNamespace:
    """As much of `TrainingParts` as `epoch_lines` reads."""
    config = Config(eval=EvalConfig(metrics=list(metrics)))
    plan = SimpleNamespace(epochs=epochs, steps_per_epoch=5)
    return SimpleNamespace(num_classes=classes, plan=plan, config=config)


def best(raw: float, ema: float | None = None, step: int = 20) -> Progress:
    values = {"raw": raw} | ({} if ema is None else {"ema": ema})
    return Progress(best={name: {"step": step, "top1_pct": v} for name, v in values.items()})


def test_epoch_has_one_line_with_both_weights_and_a_mark_at_the_best() -> None:
    progress = best(97.213, 96.94)
    assert epoch_lines(run_parts(5), progress, [RAW, EMA], TRAINING) == (
        "epoch 4/8  train loss 2.0412, 75.2 %  val 97.21 % *  EMA 96.94 %"
    )
    records = [{**record, "epoch": 299} for record in (RAW, EMA)]
    long = epoch_lines(run_parts(1000, epochs=300), progress, records, TRAINING)
    assert long.endswith("val 97.21/99.90 % *  EMA 96.94/99.90 %") and len(long) <= 80
    # a better EMA; no training in this process; the best was before; no finite result so far
    assert epoch_lines(run_parts(5), best(97.2, 98.0), [RAW, EMA], "").endswith("96.94 % *")
    assert epoch_lines(run_parts(5), best(97.2), [RAW], "") == "epoch 4/8  val 97.21 % *"
    for without in (best(97.2, step=15), Progress()):
        assert epoch_lines(run_parts(5), without, [RAW], "") == "epoch 4/8  val 97.21 %"


def test_other_values_of_an_evaluation_are_shown_with_metrics_of_the_config_only() -> None:
    parts = run_parts(5, metrics=("helpers:mean_target",))
    records = [{**record, "mean_target": 0.25} for record in (RAW, EMA)]
    first, *others = epoch_lines(parts, best(97.2), records, "").splitlines()
    assert first == "epoch 4/8  val 97.21 % *  EMA 96.94 %"
    for line, title in zip(others, ("val", "EMA"), strict=True):
        assert line.startswith(f"  {title}  loss 0.1000  balanced accuracy 90.00 %  mean_target")


def test_startup_table_fits_80_columns_and_names_the_decoder(digits: Path, call: Callable) -> None:
    words = arguments(digits, "work_dirs/no_run", data__num_workers="auto")
    code, out, _ = call(train_command, *words, "--dry-run")
    decoder = find_turbojpeg()
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert decoder is None or f"regions, by {Path(decoder.path).name}\n" in out


def test_startup_table_names_parameters_without_layer_decay(digits: Path) -> None:
    kwargs = "{img_size: 16, depth: 1, global_pool: avg, class_token: false, fc_norm: true}"
    words = arguments(
        digits,
        "work_dirs/no_run",
        optimizer__layer_decay=0.8,
        model__name="vit_tiny_patch16_224",
        model__kwargs=kwargs,
    )
    out = succeeds(train_command, *words, "--dry-run")
    assert re.search(r"^layer decay .* 4 .*fc_norm\.weight", out, re.MULTILINE)


def test_last_lines_name_the_best_results_and_what_is_missing(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    best = {"raw": {"step": 10, "top1_pct": 90.0}, "ema": {"step": 20, "top1_pct": 91.5}}
    plan = Plan(1, 8, 1, 8, steps_per_epoch=5, epochs=4, total_steps=20)

    def message(progress: Progress, plan: Plan) -> str:
        config = Config(model=ModelConfig("my_model:small"))
        return final_message(progress, config, plan, run, Meter(single_rank(), global_batch=8))

    # without the result of the EMA, as of an older version
    progress = Progress(step=20, best=best, latest={"raw": EVALUATION})
    resumed = message(progress, replace(plan, offset=-5))
    assert "after step 10" in resumed and "epoch" not in resumed
    text = message(progress, plan)
    assert "90.00 % (86.5 to 92.7) in epoch 2\n" in text and "91.50 % in epoch 4\n" in text
    assert (
        "which is missing" in text
        and f"predict.py '{run}' IMAGES --allow-import my_model:small" in text
    )
    checkpoint_path(run / "checkpoints", 20).mkdir(parents=True)
    assert "which is missing" not in message(progress, plan)
    assert "\nbest" not in message(Progress(), plan)
