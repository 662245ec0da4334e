"""Settings, parameters, parameter groups and learning rates of each config, without training.

    python tests/configs/golden.py            # prints the differences from golden.json
    python tests/configs/golden.py --write    # writes golden.json, after an intended change

golden.json has one line for each config. `configs/quick/` is left out, since tests train these
configs.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from imagenet_cls.config.load import load_config, values_by_key
from imagenet_cls.config.schema import Config, ModelConfig
from imagenet_cls.data.samplers import samples_per_epoch
from imagenet_cls.models.adapt import freeze, split_batch_norm
from imagenet_cls.models.ema import ema_decay
from imagenet_cls.models.factory import build_model
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.schedule import Schedule, build_schedule, scaled_lr

GOLDEN = Path(__file__).with_name("golden.json")
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
IMAGENET = 1_281_167  # training images
# Training images and classes; of the digits, four fifths of 1,797.
SMALL = {
    "digits": (1438, 10),
    "torchvision:MNIST": (60_000, 10),
    "torchvision:FashionMNIST": (60_000, 10),
    "torchvision:CIFAR10": (50_000, 10),
    "torchvision:CIFAR100": (50_000, 100),
    "torchvision:Imagenette": (9469, 10),
}
RATES = 10

_built: dict[str, nn.Module] = {}


@cache
def loaded(path: Path) -> Config:
    """A config, read once for all tests."""
    return load_config(path).config


def names() -> list[str]:
    """Every config with a line in golden.json, relative to `configs/`."""
    paths = (path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
    return sorted(path.as_posix() for path in paths if path.parts[0] not in ("_base_", "quick"))


def num_classes(config: Config) -> int:
    return config.model.num_classes or SMALL.get(config.data.name, (IMAGENET, 1000))[1]


def meta_model(config: Config) -> nn.Module:
    """The network as it is trained, without memory for its weights. Not to be changed: equal
    configs share it.
    """
    channels = config.data.channels
    key = json.dumps([asdict(config.model), config.augment.splits, num_classes(config), channels])
    if key not in _built:
        plain = ModelConfig(name=config.model.name, kwargs=config.model.kwargs)
        with torch.device("meta"):
            model = split_batch_norm(
                build_model(plain, num_classes(config), channels),
                config.model,
                config.augment.splits,
            )
        freeze(model, config.model, num_classes(config))
        _built[key] = model
    return _built[key]


def schedule_of(config: Config) -> Schedule:
    """The learning rates of the run on all training images of its dataset."""
    images = SMALL.get(config.data.name, (IMAGENET, 1000))[0]
    batch = config.train.global_batch_size
    steps_per_epoch = samples_per_epoch(images, config.data.repeats_multiple) // batch
    return build_schedule(
        config.schedule, scaled_lr(config.optimizer, batch)[0], steps_per_epoch, config.train.epochs
    )


def changed_settings(config: Config) -> dict[str, Any]:
    """The values that differ from the defaults, without the claim."""
    defaults = values_by_key(Config())
    values = values_by_key(config).items()
    return {
        k: v
        for k, v in values
        if not k.startswith("expect.") and (k not in defaults or v != defaults[k])
    }


def golden_of(config: Config) -> dict[str, Any]:
    """A config's line: groups are [weight decay, factor of the rate, tensors, parameters]; rates
    are of evenly spread steps, the first and the last among them; without an average of the weights
    its decay is 0.
    """
    model, schedule = meta_model(config), schedule_of(config)
    last = config.train.epochs * schedule.steps_per_epoch - 1
    groups = parameter_groups(model, config.optimizer)
    return {
        "settings": changed_settings(config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "groups": [
            [
                g["weight_decay"],
                g["lr_scale"],
                len(g["params"]),
                sum(p.numel() for p in g["params"]),
            ]
            for g in groups
        ],
        "steps_per_epoch": schedule.steps_per_epoch,
        "rates": {
            str(step): schedule(step) for step in (last * i // (RATES - 1) for i in range(RATES))
        },
        "ema_decay": ema_decay(config.ema, config.train.global_batch_size) or 0.0,
    }


def lines(golden: dict[str, Any]) -> Iterator[str]:
    for name, values in golden.items():
        yield f"{json.dumps(name)}: {json.dumps(values)}"


def main(write: bool) -> None:
    """Print what differs, or write the file."""
    now = {name: golden_of(loaded(CONFIGS / name)) for name in names()}
    before = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for name in sorted(now.keys() | before.keys()):
        if now.get(name) != before.get(name):
            print(f"{name}\n  was {before.get(name)}\n  is  {now.get(name)}")
    if write:
        GOLDEN.write_text("{\n" + ",\n".join(lines(now)) + "\n}\n")


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
