"""The runs of a sweep: from the values on the command line to the config of each run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from urllib.parse import quote

from imagenet_cls.commands.train import load_run
from imagenet_cls.config.reader import parse
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import ConfigError, UsageError

# Keys whose values repeat a setting: the table has the mean of their runs.
_REPEATS = ("seed", "data.fold")


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep.

    name: the name of its folder. setting: the values of the swept keys, without seed and fold.
    arguments: those of `train`, without the run folder. best_arguments: those of the setting alone,
    without seed and fold.
    """

    name: str
    setting: Mapping[str, str]
    arguments: Sequence[str]
    best_arguments: Sequence[str]
    config: Config
    warnings: Sequence[str]


def load_grid(source: Sequence[str], overrides: Sequence[str], folds: int | None) -> list[SweepRun]:
    """A run for each combination of values, and each fold. With folds, `data.stratify` is set where
    the config neither sets it nor has groups. Raises UsageError, and ConfigError with the problems
    of all configs.
    """
    pairs = [override.partition("=") for override in overrides]
    values = {key.strip(): split_values(text) for key, _, text in pairs}
    if len(values.get("checkpoint.best", "")) > 1:
        raise UsageError(
            "checkpoint.best: results by different metrics can't be compared.", "Give one value."
        )
    of_folds = []
    if folds is not None:
        if "data.fold" in values:
            raise UsageError("data.fold: --folds trains all folds.", "Give one of them.")
        of_folds = [f"{key}=null" for key in ("data.val", "data.val_fraction") if key not in values]
        values["data.fold"] = [f"[{number},{folds}]" for number in range(folds)]
    swept = [key for key, texts in values.items() if key in _REPEATS or len(texts) > 1]
    swept.sort(key=lambda key: (key in _REPEATS, key))
    fixed = [f"{key}={texts[0]}" for key, texts in values.items() if key not in swept]
    runs = []
    lines = []
    for combination in product(*(values[key] for key in swept)):
        chosen = dict(zip(swept, combination, strict=True))
        setting = {key: text for key, text in chosen.items() if key not in _REPEATS}
        alone = [*source, *fixed, *overrides_of(setting)]
        arguments = [*source, *fixed, *of_folds, *overrides_of(chosen)]
        try:
            loaded, _ = load_run(arguments)
            is_free = "data.stratify" not in loaded.origins and loaded.config.data.group is None
            if folds is not None and is_free:
                arguments.append("data.stratify=true")
                loaded, _ = load_run(arguments)
        except ConfigError as error:
            lines += error.lines
            continue
        name = name_of(chosen)
        runs.append(SweepRun(name, setting, arguments, alone, loaded.config, loaded.warnings))
    if lines:
        raise ConfigError(list(dict.fromkeys(lines)))
    return runs


def overrides_of(values: Mapping[str, str]) -> list[str]:
    return [f"{key}={text}" for key, text in values.items()]


def split_values(text: str) -> list[str]:
    """The values between the commas that are neither in brackets nor in quotes."""
    flow = f"[{text}]"
    try:
        items = parse(flow, "").value
    except ConfigError:  # the loader explains what is wrong with it
        return [text]
    values = [flow[item.start_mark.index : item.end_mark.index] for item in items]
    return list(dict.fromkeys(values)) if len(values) > 1 else [text]


def name_of(values: Mapping[str, str]) -> str:
    """The name of a run folder, without characters that paths or shells treat specially."""
    text = re.sub(r"[\[\]]", "", ",".join(overrides_of(values)))
    return quote(text, safe="=,:+") or "run"
