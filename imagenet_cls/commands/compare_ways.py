"""The ways of running in parallel that are compared, each as words for train.py.

Owns what is trained (LESSON, where no config is named) and what makes one way differ from another. Refuses what a row
could not do, before any is run. Starts nothing. Called by `compare.command`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imagenet_cls.config.load import Loaded, load_config
from imagenet_cls.config.origin import format_problems
from imagenet_cls.engine.plan import accumulation_for, batch_problem
from imagenet_cls.errors import ConfigError, UsageError
from imagenet_cls.parallel.environment import find_rank_info

# What is trained where no config is named: the demo's digits, by a small ResNet with BatchNorm. Its activations are
# smooth: behind the kinks of ReLU and max pooling, a rounding error of 1e-7 is one of 1e-2 after four steps, and no way
# could be told from another.
LESSON = {
    "model.name": "resnet10t",
    "model.kwargs.act_layer": "silu",
    "model.kwargs.replace_stem_pool": "true",
    "data.num_workers": "0",
    "optimizer.lr": "0.02",
    "schedule.warmup_epochs": "0",
    "ema.decay": "null",
    "train.precision": "fp32",
}

# For every config, unless the command line says otherwise.
FEW_STEPS = {"train.max_steps": "12", "log.every_steps": "4", "log.tensorboard": "false"}

# What makes one way differ from another, so it is not to be given.
OWN_KEYS = ("parallel.mode", "parallel.device_ids", "parallel.output_device", "parallel.sync_bn")


@dataclass(frozen=True)
class Way:
    """One way to run: a row of the table.

    settings, options: words for train.py. images_at_once: how many one forward pass, and so BatchNorm, sees. missing:
    why it can't run here; "" where it can.
    """

    name: str
    settings: Mapping[str, str]
    options: Sequence[str]
    images_at_once: int
    good_for: str
    missing: str = ""


def choose_settings(changes: Sequence[str], lesson: bool) -> dict[str, str]:
    """The changes to the config, by key, and ours where they leave room: FEW_STEPS, and LESSON where it is taught.

    Raises UsageError for a key that the rows set themselves, or that is given twice.
    """
    given = {key: value for key, _, value in (word.partition("=") for word in changes)}
    if len(given) < len(changes):
        raise UsageError("a key is given twice on the command line.\nKeep one of the two.")
    for key in given:
        if any(_overlap(key, own) for own in OWN_KEYS):
            raise UsageError(f"{key}={given[key]}: the rows of the table set that, each its own.\nLeave it out.")
    renamed = {key.removesuffix("name") for key in given if key.endswith(".name")}  # nothing of ours fits another model
    ours = {**(LESSON if lesson else {}), **FEW_STEPS}
    kept = {
        key: value
        for key, value in ours.items()
        if not any(_overlap(key, other) for other in given) and not key.startswith(tuple(renamed))
    }
    return kept | given


def _overlap(key: str, other: str) -> bool:
    """Whether one of two dotted keys is the other or a part of it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def as_words(settings: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def plan_ways(configs: Sequence[str], settings: Mapping[str, str], ranks: int) -> list[Way]:
    """The rows, in order; the first is the one that the others are compared with.

    Raises ConfigError or UsageError for whatever is wrong with a row, before the first one is run.
    """

    def loaded_with(changes: Mapping[str, str]) -> Loaded:
        return load_config(configs[0] if configs else None, as_words({**settings, **changes}))

    if ranks < 2:
        raise UsageError("--ranks 1: there is nothing to compare.\nAsk for two ranks or more.")
    if find_rank_info(os.environ) is not None:
        raise UsageError("a launcher has started this process as a rank.\nStart it by itself: it starts its own ranks.")
    loaded = loaded_with({})
    train, device = loaded.config.train, loaded.config.device
    problem = batch_problem(train, ranks)
    if problem is not None:
        raise ConfigError(format_problems([problem], loaded.origins))
    batch = train.global_batch_size

    def at_once(devices: int, limit: int | None) -> int:
        return batch // devices // accumulation_for(batch, devices, limit)

    share = at_once(ranks, train.micro_batch_size)
    if share == 1:
        raise UsageError(f"{batch} images on {ranks} ranks leave nothing to take in turn.\nGive a larger batch.")
    half = at_once(ranks, share // 2)
    turns = batch // ranks // half

    from imagenet_cls.parallel.launch import check_gpu_count

    check_gpu_count(ranks, device)
    spawn, torchrun = (["--launcher", name, "--gpus", str(ranks)] for name in ("spawn", "pytorch"))
    devices = {"parallel.mode": "dp", "parallel.device_ids": str(list(range(ranks)))}
    ddp = {"parallel.mode": "ddp"}
    ways = [
        Way("one process", {"parallel.mode": "none"}, ["--launcher", "none"], at_once(1, train.micro_batch_size),
            "one GPU, or a first look"),
        Way(f"DP, {ranks} GPUs", devices, ["--launcher", "none"], share,
            "old scripts: no launcher, but slower", why_no_dp(loaded, ranks)),
        Way("DDP by spawn", ddp, spawn, share, "all GPUs of a machine, without a launcher"),
        Way("DDP by torchrun", ddp, torchrun, share, "one machine or many; can restart"),
        Way(f"DDP, {turns} in turn", ddp | {"train.micro_batch_size": str(half)}, spawn, half,
            "a batch that the GPUs can't hold"),
        Way("DDP with SyncBN", ddp | {"parallel.sync_bn": "true"}, spawn, share * ranks,
            "BatchNorm with few images on each GPU"),
    ]  # fmt: skip
    for way in ways:
        if not way.missing:
            loaded_with(way.settings)
    return ways


def why_no_dp(loaded: Loaded, gpus: int) -> str:
    """Why DataParallel can't be tried here, or "". It wants GPUs, since on a CPU torch calls the module itself."""
    import torch

    if loaded.config.train.compile:
        return "not with train.compile"
    present = 0 if loaded.config.device == "cpu" else torch.cuda.device_count()
    return "" if present >= gpus else f"needs {gpus} GPUs, and there are {present}"
