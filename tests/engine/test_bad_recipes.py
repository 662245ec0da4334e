"""What is wrong with a recipe is told before anything is trained or written: exit code 2, the key, what is allowed.

Through the real command, in this process, and twice in a process of its own. Beside these: values of mixing, losses and
teachers in `test_mixing_and_losses`, of groups, clipping and SAM in `test_optimizer_parts`, of data and batches in
`test_bad_input`; the ranges of single keys in tests/unit/config.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY, TRAIN, arguments, run
from torch import Tensor, nn

from imagenet_cls.commands.program import main
from imagenet_cls.commands.train import train_command
from imagenet_cls.report.log import close_log

QUICK = REPOSITORY / "configs" / "quick"
MIX = {"mix__mixup_alpha": 0.2, "mix__cutmix_alpha": 1.0}
PROGRESSIVE = "augment__progressive__"
TEACHER = {"distill__teacher__name": "resnet18", "distill__teacher__pretrained": "true"}
RESNET = {"model__name": "resnet18", "model__kwargs": "{layers: [1,1,1,1], channels: [8,16,32,64]}"}


def gives_a_tuple(num_classes: int) -> nn.Module:
    class Pair(nn.Linear):
        def forward(self, images: Tensor) -> Any:
            logits = super().forward(images.mean((2, 3)))
            return logits, logits

    return Pair(3, num_classes)


def has_no_parameters(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(num_classes))


def is_lazy(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


# The changes to a good recipe, and the words that every message must have, its key first.
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    # augmentation
    "policy unknown": (
        {"augment__policy": "randaugment-m9"},
        [
            "augment.policy: unknown policy 'randaugment-m9'",
            "did you mean",
            "timm: rand, augmix",
            "my_module:my_factory",
        ],
    ),
    "policy of torchvision unknown": (
        {"augment__policy": "torchvision:trivial_augment"},
        ["augment.policy", "did you mean 'torchvision:trivial_augment_wide'"],
    ),
    "policy with an unknown setting": (
        {"augment__policy": "rand-m9-std0.5"},
        ["augment.policy: 'std0.5'"],
    ),
    "policy with a setting twice": (
        {"augment__policy": "rand-m9-m7"},
        ["augment.policy: 'rand-m9-m7': 'm' is given twice"],
    ),
    "a policy of operations without end": (
        {"augment__policy": "rand-m9-n99999999"},
        ["augment.policy: 'n99999999'"],
    ),
    "a policy of no operation": (
        {"augment__policy": "rand-m9-n0"},
        ["augment.policy: 'n0'"],
    ),
    "a policy that is never applied": (
        {"augment__policy": "rand-p0"},
        ["augment.policy: 'p0'"],
    ),
    "a policy of chains without end": (
        {"augment__policy": "augmix-w9999999"},
        ["augment.policy: 'w9999999'"],
    ),
    "a policy beyond timm's scale": (
        {"augment__policy": "rand-m99"},
        ["augment.policy: 'm99'"],
    ),
    "a policy in digits of another script": (
        {"augment__policy": "rand-m٣"},
        ["augment.policy: 'm٣'"],
    ),
    "arguments for timm's policy": (
        {"augment__policy": "v0", "augment__policy_kwargs": "{magnitude: 3}"},
        ["augment.policy_kwargs.magnitude"],
    ),
    "arguments that the policy does not take": (
        {"augment__policy": "torchvision:rand_augment", "augment__policy_kwargs": "{magnitud: 3}"},
        ["augment.policy_kwargs.magnitud", "did you mean 'magnitude'"],
    ),
    "interpolation": ({"augment__interpolation": "lanczos"}, ["augment.interpolation", "'lanczos'", "bicubic"]),
    "erasing with a share": ({"augment__erasing__prob": 25}, ["augment.erasing.prob: 25.0 is out of range: 0 to 1"]),
    "erasing mode": ({"augment__erasing__mode": "noise"}, ["augment.erasing.mode", "'noise'", "pixel"]),
    "jitter of hue": ({"augment__color_jitter__hue": 0.6}, ["augment.color_jitter.hue: 0.6 is out of range: 0 to 0.5"]),
    "splits without their loss": (
        {"augment__splits": 3},
        ["augment.splits: 3 views of each image are for loss 'jsd', not 'cross_entropy'"],
    ),
    "jsd without splits": ({"loss__name": "jsd"}, ["loss.name: 'jsd' compares views", "use 3"]),
    "split BatchNorm without splits": (
        {"model__split_bn": "true"},
        ["model.split_bn: has a BatchNorm for each split, and augment.splits is 1"],
    ),
    "splits and mixing": (
        {**MIX, "augment__splits": 3, "loss__name": "bce"},
        ["augment.splits: compares views of one image, and mix joins different images; use one of both"],
    ),
    # repeats
    "no repeats": ({"data__repeats": 0}, ["data.repeats: 0 is out of range: 1 to 100"]),
    "more repeats than a batch": (
        {"data__repeats": 4, "train__global_batch_size": 2},
        ["data.repeats: 4 views of an image are more than train.global_batch_size 2"],
    ),
    "a multiple without repeats": (
        {"data__repeats_multiple": 256},
        ["data.repeats_multiple: cuts epochs of repeated samples, and data.repeats is 1"],
    ),
    # resolution
    "sizes that are no multiple": (
        {f"{PROGRESSIVE}epochs": "[0, 1]", f"{PROGRESSIVE}sizes_px": "[12, 16]", f"{PROGRESSIVE}multiple_px": 8},
        ["augment.progressive.sizes_px: 12 is not a multiple of augment.progressive.multiple_px 8"],
    ),
    "sizes without epochs": (
        {f"{PROGRESSIVE}sizes_px": "[8, 16]"},
        ["augment.progressive.sizes_px: [8, 16] for epochs null: give one size for each epoch"],
    ),
    "sizes beyond the run": (
        {f"{PROGRESSIVE}epochs": "[0, 9]", f"{PROGRESSIVE}sizes_px": "[8, 16]", f"{PROGRESSIVE}multiple_px": 8},
        ["augment.progressive.epochs: 9 is more than train.epochs 2"],
    ),
    "sizes that end elsewhere": (
        {f"{PROGRESSIVE}epochs": "[0, 1]", f"{PROGRESSIVE}sizes_px": "[8, 24]", f"{PROGRESSIVE}multiple_px": 8},
        ["augment.progressive.sizes_px: the largest is 24, but augment.size_px is 16; make them equal"],
    ),
    "sizes over more epochs than can be": (
        {
            "train__epochs": 10**9,
            f"{PROGRESSIVE}epochs": f"[0, {10**9}]",
            f"{PROGRESSIVE}sizes_px": "[8, 16]",
            f"{PROGRESSIVE}multiple_px": 8,
        },
        ["train.epochs: 1000000000 is out of range: 1 to 1,000,000"],
    ),
    # mixing
    "shares of NaN": ({"mix__mixup_alpha": 1e-320}, ["mix.mixup_alpha: ", "is out of range: 0, or 0.001 to 1,000"]),
    "an end of no mixing": (
        {"mix__off_epoch": 1},
        ["mix.off_epoch: 1 is where mixing ends, and there is none; give mix.mixup_alpha, or make it null"],
    ),
    "an odd micro-batch to mix": (
        {**MIX, "train__global_batch_size": 126, "train__micro_batch_size": 63},
        ["train.global_batch_size: makes micro-batches of 63", "an even number", "124 or 128"],
    ),
    "mixing from an unknown epoch on": ({**MIX, "mix__off_epoch": -1}, ["mix.off_epoch: -1 is out of range"]),
    # schedule
    "a warm-up longer than the run": (
        {"schedule__warmup_epochs": 5},
        ["schedule.warmup_epochs: 5 is more than train.epochs 2"],
    ),
    "warm-up and cooldown longer than the run": (
        {"schedule__warmup_epochs": 1, "schedule__cooldown_epochs": 2},
        ["schedule.cooldown_epochs: 2 and 1 of warm-up are more than train.epochs 2"],
    ),
    "milestones beyond the run": (
        {
            "schedule__name": "multistep",
            "schedule__warmup_epochs": 0,
            "schedule__kwargs": "{milestones_epochs: [1, 30]}",
        },
        ["schedule.kwargs.milestones_epochs: 30 is beyond the run, which has 2 epochs", "train.max_steps"],
    ),
    "a ramp beyond the run": (
        {
            "schedule__name": "piecewise",
            "schedule__warmup_epochs": 0,
            "schedule__kwargs": "{epochs: [0, 16], factors: [1, 0]}",
        },
        ["schedule.kwargs.epochs: 16 is beyond the run"],
    ),
    "factors that do not pair": (
        {
            "schedule__name": "piecewise",
            "schedule__warmup_epochs": 0,
            "schedule__kwargs": "{epochs: [0, 1, 2], factors: [1, 0]}",
        },
        ["schedule.kwargs.factors: 2 factors for 3 epochs; give one for each"],
    ),
    "one momentum of two": (
        {"schedule__name": "one_cycle", "schedule__warmup_epochs": 0, "schedule__kwargs": "{min_momentum: 0.8}"},
        ["schedule.kwargs.max_momentum: is missing: give both momenta, or none"],
    ),
    "a schedule that nobody knows": (
        {"schedule__name": "cosin"},
        ["schedule.name: unknown schedule 'cosin'; did you mean 'cosine'?", "built in: cosine"],
    ),
    "a schedule that overflows within an epoch": (
        {
            "train__epochs": 1,
            "schedule__name": "step",
            "schedule__warmup_epochs": 0,
            "schedule__kwargs": "{every_epochs: 0.001, gamma: 1000}",
        },
        ["schedule.kwargs: 'step' gives a learning rate of", "it must be from 0 to 10000"],
    ),
    "a lowest rate above the highest": (
        {"schedule__name": "cosine", "schedule__kwargs": "{min_lr: 1}"},
        ["schedule.kwargs.min_lr: 1 is more than the learning rate 0.03", "give at most that"],
    ),
    "a warm-up that falls": (
        {"schedule__warmup_epochs": 1, "schedule__warmup_start_lr": 0.5},
        ["schedule.warmup_start_lr: 0.5 is more than the learning rate 0.03"],
    ),
    # optimizer, clipping, average
    "arguments that are no numbers": (
        {"optimizer__lr_scales": "{'0.*': .nan}", "schedule__kwargs": "{min_lr: .inf}"},
        [
            "optimizer.lr_scales.0.*: nan is not a finite number",
            "schedule.kwargs.min_lr: inf is not a finite number",
        ],
    ),
    "a rate beyond all numbers": (
        {"optimizer__lr": 1e308},
        ["optimizer.lr: 1e+308 is out of range: at least 0 and less than 2^64"],
    ),
    "an optimizer that timm does not have": (
        {"optimizer__name": "timm:lambb", "optimizer__lr": 0.01},
        ["optimizer.name: unknown optimizer 'timm:lambb'", "did you mean 'timm:lamb'"],
    ),
    "another optimizer without its rate": ({"optimizer__name": "lamb", "optimizer__lr": None}, ["optimizer.lr"]),
    "three ways of clipping": (
        {"train__clip_norm": 1, "train__clip_value": 1, "train__clip_agc": 0.1},
        ["train.clip_value: is given and train.clip_norm, too; keep one way of clipping"],
    ),
    "adaptive clipping by nothing": ({"train__clip_agc": 0}, ["train.clip_agc: 0.0 is out of range: more than 0"]),
    "sharpness in no step": (
        {"train__sam_rho": 0.1, "train__sam_every_steps": 0},
        ["train.sam_every_steps: 0 is out of range: at least 1"],
    ),
    "two rhythms of an average": (
        {"ema__decay": 0.9, "ema__half_life_images": 1000},
        ["ema.half_life_images: is given and ema.decay, too; keep one of both"],
    ),
    "an average of no step": (
        {"ema__decay": 0.9, "ema__every_steps": 1000},
        ["ema.every_steps: 1000 is more than the ", "steps of all epochs"],
    ),
    "an average that never moves": ({"ema__decay": 1}, ["ema.decay: 1.0 is out of range"]),
    # model
    "activations that can't be computed anew": (
        {"train__grad_checkpointing": "true"},
        ["train.grad_checkpointing: Sequential can't compute activations anew; set it to false"],
    ),
    "freezing what is not there": (
        {"model__freeze": "[stem.*]"},
        ["model.freeze: 'stem.*' fits no parameter of helpers:plain", "its parts: 0.*, 2.*, 5.*"],
    ),
    "freezing everything": ({"model__freeze": '["*"]'}, ["model.freeze: leaves no parameter", "freeze less"]),
    "freezing twice": (
        {"model__freeze": "[0.*]", "model__head_only": "true"},
        ["model.freeze: is given and model.head_only is true, which freezes all but the head; keep one"],
    ),
    "freezing BatchNorm where there is none": (
        {"model__freeze_bn": "true"},
        ["model.freeze_bn: helpers:plain has no BatchNorm; set it to false"],
    ),
    "a model that gives no tensor": (
        {"model__name": "test_bad_recipes:gives_a_tuple"},
        ["model.name: test_bad_recipes:gives_a_tuple gives a tuple for one image, not (1, 10)"],
    ),
    "the features of a model": (
        {**RESNET, "model__kwargs": "{layers: [1,1,1,1], channels: [8,16,32,64], features_only: true}"},
        ["model.name: resnet18 gives a list for one image, not (1, 10)"],
    ),
    "a model with nothing to train": (
        {"model__name": "test_bad_recipes:has_no_parameters"},
        ["model.name: test_bad_recipes:has_no_parameters has no parameters, so there is nothing to train"],
    ),
    "a model that waits for its first image": (
        {"model__name": "test_bad_recipes:is_lazy"},
        ["model.name: test_bad_recipes:is_lazy has parameters without a shape (1.weight)", "call the model once"],
    ),
    "a model for grey images": (
        {**RESNET, "model__kwargs": "{layers: [1,1,1,1], channels: [8,16,32,64], in_chans: 1}"},
        ["model.kwargs: resnet18 with {", "in_chans: 1} can't take images: RuntimeError"],
    ),
    "dropout of more than all": (
        {**RESNET, "model__kwargs": "{drop_rate: 2}"},
        ["model.kwargs.drop_rate: 2 is out of range: at least 0 and less than 1"],
    ),
    "dropping of less than no paths": (
        {**RESNET, "model__kwargs": "{drop_path_rate: -1}"},
        ["model.kwargs.drop_path_rate: -1 is out of range"],
    ),
    "BatchNorm of one image's one pixel": (
        {**RESNET, "train__global_batch_size": 1},
        ["train.micro_batch_size: a device gets 1 image at a time", "one value for a channel to BatchNorm"],
    ),
    "BatchNorm of one image at a time": (
        {**RESNET, "train__micro_batch_size": 1},
        ["train.micro_batch_size: a device gets 1 image at a time", "give each 2 or more"],
    ),
    # distillation
    "a teacher for nothing": (TEACHER, ["distill.kind: is none, and distill.teacher.name is 'resnet18'"]),
    "a teacher and splits": (
        {**TEACHER, "distill__kind": "soft", "augment__splits": 3, "loss__name": "jsd"},
        ["distill.kind: can't be used with augment.splits"],
    ),
    "a temperature that divides by nothing": (
        {**TEACHER, "distill__kind": "soft", "distill__temperature": 1e-300},
        ["distill.temperature: 1e-300 is out of range: 0.01 to 1,000"],
    ),
    "weights of no teacher": (
        {"distill__teacher__checkpoint": "teacher.pth"},
        ["distill.kind: is none, and distill.teacher has weights"],
    ),
    "a teacher's share": (
        {**TEACHER, "distill__kind": "soft", "distill__alpha": 3},
        ["distill.alpha: 3.0 is out of range: 0 to 1"],
    ),
}


@pytest.fixture(autouse=True)
def log_closed() -> Iterator[None]:
    yield
    close_log()


def problems_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a command that must end with exit code 2, and quickly."""
    capsys.readouterr()
    code = main(train_command, words)
    output = capsys.readouterr()
    assert code == 2, output.err
    assert "Traceback" not in output.err
    return output.err.splitlines()


def written(folder: Path) -> list[Path]:
    """What a command has left: nothing, but for the lock and the log of a run that got as far as its folder."""
    return [
        path for path in folder.rglob("*") if path.is_file() and path.name != ".lock" and path.parent.name != "logs"
    ]


@pytest.mark.parametrize("case", BAD)
def test_a_bad_recipe_is_told_before_anything_is_written(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    changes, expected = BAD[case]
    lines = problems_of(arguments(digits, tmp_path / "run", **changes), capsys)
    about = [line for line in lines if expected[0] in line]
    assert about, lines
    for text in expected:
        assert any(text in line for line in lines), (text, lines)
    assert len(lines) <= 3
    assert written(tmp_path) == []


def test_repeats_that_do_not_divide_among_ranks(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by the process that would start the ranks."""
    words = arguments(digits, tmp_path / "run", data__repeats=3, data__repeats_multiple=255, device="cpu")
    lines = problems_of([*words, "--gpus", "2"], capsys)
    assert "data.repeats_multiple: 255 samples do not divide among 2 ranks; the next that do: 256, or null" in lines[0]
    assert not (tmp_path / "run").exists()


def test_an_odd_share_of_a_rank_can_not_be_mixed(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """63 each, though 126 are even."""
    words = arguments(digits, tmp_path / "run", **MIX, train__global_batch_size=126, device="cpu")
    lines = problems_of([*words, "--gpus", "2"], capsys)
    assert "train.global_batch_size: makes micro-batches of 63" in lines[0] and "124 or 128" in lines[0]
    assert not (tmp_path / "run").exists()


def test_a_momentum_that_the_optimizer_has_not(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"schedule__name": "one_cycle", "schedule__warmup_epochs": 0}
    settings |= {"schedule__kwargs": "{min_momentum: 0.8, max_momentum: 0.9}", "optimizer__name": "timm:adafactor"}
    lines = problems_of(arguments(digits, tmp_path / "run", **settings), capsys)
    assert any("schedule.kwargs" in line and "momentum" in line for line in lines), lines
    assert [path for path in written(tmp_path) if path.suffix == ".safetensors"] == []


def test_everything_wrong_with_a_recipe_is_told_at_once_in_a_real_process(tmp_path: Path) -> None:
    """A file with four mistakes that need no library: a line each, with the file's lines."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"_base_: {QUICK / 'resnet_tv_v2.yaml'}\n"
        "data: {repeats_multiple: 0}\n"
        "loss: {name: focal}\n"
        "ema: {decay: 0.9}\n"
        "train: {clip_norm: 1, clip_agc: 0.1}\n"
    )
    done = run([sys.executable, TRAIN, str(recipe), "--work-dir", str(tmp_path / "run")])
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    keys = ["data.repeats_multiple", "mix", "ema.half_life_images", "train.clip_agc"]
    assert [any(f"{key}: " in line for line in lines) for key in keys] == [True] * 4, lines
    assert any("mine.yaml:2" in line for line in lines) and len(lines) <= 3 * len(keys)
    assert not (tmp_path / "run").exists()


def test_names_that_need_the_libraries_are_told_at_once_in_a_real_process(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"_base_: {QUICK / 'resnet_rsb_a2.yaml'}\n"
        "augment: {policy: rnd-m9}\n"
        "loss: {name: bce, kwargs: {threshold: 0.2}}\n"
        "schedule: {name: cosine, kwargs: {min_rl: 0}}\n"
    )
    done = run(
        [sys.executable, TRAIN, str(recipe), f"data.root={tmp_path / 'data'}", "--work-dir", str(tmp_path / "run")]
    )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 3 and "mine.yaml:2: augment.policy" in lines[0]
    assert "loss.kwargs.threshold" in lines[1] and "target_threshold" in lines[1]
    assert "schedule.kwargs.min_rl" in lines[2] and "did you mean 'min_lr'" in lines[2]
    assert written(tmp_path) == [recipe]
