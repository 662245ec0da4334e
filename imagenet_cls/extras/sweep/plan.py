"""The runs of a sweep: from the values on the command line to the arguments of each run.

`sweep.json` in the folder of the sweep lists all its runs, also those of earlier calls.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

from imagenet_cls.commands.train import load_run
from imagenet_cls.config.load import LoadedConfig
from imagenet_cls.config.reader import parse
from imagenet_cls.errors import CheckpointError, ConfigError, UsageError, explain_content_errors
from imagenet_cls.files import explain_write_errors, write_file

# Keys whose values repeat a setting: the table has their mean.
REPEATS = ("seed", "data.fold")


@dataclass
class SweepRun:
    """A run of a sweep.

    name: the name of its folder. values: the values of the swept keys. fixed: the other arguments
    of `train`, without those of the run folder. of_folds: the arguments that --folds adds.
    """

    name: str
    values: dict[str, Any]
    fixed: list[str]
    of_folds: list[str] = field(default_factory=list)

    @property
    def setting(self) -> dict[str, Any]:
        return {key: value for key, value in self.values.items() if key not in REPEATS}

    @property
    def conditions(self) -> list[str]:
        """The arguments that the seeds or folds of a setting have in common, and the number of
        folds.
        """
        fold = str(self.values.get("data.fold", "null"))
        num_folds = fold.rpartition(",")[2].strip(" ]")
        folds = [] if num_folds == "null" else [f"data.fold=[...,{num_folds}]"]
        return [*self.fixed, *self.of_folds, *folds]

    @property
    def arguments(self) -> list[str]:
        return [*self.fixed, *self.of_folds, *overrides_of(self.values)]

    @property
    def best_arguments(self) -> list[str]:
        """The arguments of the setting alone, without seed and fold."""
        return [*self.fixed, *overrides_of(self.setting)]


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def read_runs(folder: Path) -> dict[str, SweepRun]:
    """All runs of a sweep by name; none for a new folder. Raises CheckpointError."""
    file = folder / "sweep.json"
    if not file.exists():
        return {}
    with explain_content_errors(CheckpointError, file):
        runs = []
        for row in json.loads(file.read_bytes()):
            runs.append(SweepRun(**row))
        for run in runs:  # a TypeError for other types
            "".join([run.name, *run.values, *run.conditions, *run.values.values()])
            hash(tuple(run.values.items()))
    return {run.name: run for run in runs}


def write_runs(folder: Path, runs: Iterable[SweepRun]) -> None:
    file = folder / "sweep.json"
    with explain_write_errors(file, "Free space, or name another folder with --out."):
        write_file(file, json.dumps([asdict(run) for run in runs], indent=1))


def split_overrides(overrides: Sequence[str]) -> dict[str, list[str]]:
    """The values of each `key=value,value`. If a key is given twice, the last value is used."""
    pairs = [override.partition("=") for override in overrides]
    return {key.strip(): split_values(text) for key, _, text in pairs}


def split_values(text: str) -> list[str]:
    """The values between the commas that are neither in brackets nor in quotes."""
    flow = f"[{text}]"
    try:
        items = parse(flow, "").value
    except ConfigError:  # the loader explains what is wrong with it
        return [text]
    values = [flow[item.start_mark.index : item.end_mark.index] for item in items]
    return list(dict.fromkeys(values)) if len(values) > 1 else [text]


def load_grid(
    folder: Path, source: Sequence[str], overrides: Sequence[str], folds: int | None
) -> tuple[list[SweepRun], list[LoadedConfig]]:
    """The runs of `plan_grid` for a folder, and their configs. With folds, `data.stratify` is set
    where the config neither sets it nor has groups. Raises UsageError, and ConfigError with the
    problems of all configs.
    """
    runs = plan_grid(source, overrides, folds, read_runs(folder).values())
    configs = load_runs([run.arguments for run in runs])
    if folds is None:
        return runs, configs
    for run, loaded in zip(runs, configs, strict=True):
        if "data.stratify" not in loaded.origins and loaded.config.data.group is None:
            run.of_folds = [*run.of_folds, "data.stratify=true"]
    return runs, load_runs([run.arguments for run in runs])


def plan_grid(
    source: Sequence[str], overrides: Sequence[str], folds: int | None, known: Iterable[SweepRun]
) -> list[SweepRun]:
    """A run for each combination of values, and each fold.

    A name has the keys with several values, and those that the names of `known` runs have: a sweep
    may grow by single values.
    """
    known = list(known)
    values = split_overrides(overrides)
    swept = {*REPEATS, *(key for run in known for key in run.values)}
    swept |= {key for key, texts in values.items() if len(texts) > 1}
    fixed = [f"{key}={texts[0]}" for key, texts in values.items() if key not in swept]
    of_folds = []
    if folds is not None:
        if "data.fold" in values:
            raise UsageError("data.fold: --folds trains all folds.", "Give one of them.")
        of_folds = [f"{key}=null" for key in ("data.val", "data.val_fraction") if key not in values]
        values["data.fold"] = [f"[{number},{folds}]" for number in range(folds)]
    keys = sorted(swept & values.keys(), key=lambda key: (key in REPEATS, key))
    runs = []
    for combination in product(*(values[key] for key in keys)):
        chosen = dict(zip(keys, combination, strict=True))
        runs.append(SweepRun(name_of(chosen), chosen, [*source, *fixed], of_folds))
    return runs


def name_of(values: Mapping[str, str]) -> str:
    """The name of a run folder, without characters that paths or shells treat specially."""
    text = re.sub(r"[\[\]]", "", ",".join(overrides_of(values)))
    return quote(text, safe="=,:+") or "run"


def load_runs(runs: Sequence[Sequence[str]]) -> list[LoadedConfig]:
    """The configs of runs. runs: their arguments. Raises ConfigError with the problems of all."""
    configs = []
    lines = []
    for arguments in runs:
        try:
            configs.append(load_run(arguments)[0])
        except ConfigError as error:
            lines += error.lines
    if lines:
        raise ConfigError(list(dict.fromkeys(lines)))
    return configs
