"""Load a config: from a path and overrides to a checked `Config` of plain dataclasses.

And back into YAML.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from imagenet_cls.config import keys, reader
from imagenet_cls.config.layers import CONFIGS, Layers, find_config, flatten, walk
from imagenet_cls.config.reader import Tree
from imagenet_cls.config.rules import check_value, rule_problems, unused_values
from imagenet_cls.config.schema import COMPONENTS, DEFAULT_KWARGS, Config
from imagenet_cls.errors import ConfigError, Problem
from imagenet_cls.lookup import did_you_mean
from imagenet_cls.text import format_value, shorten

DEMO = CONFIGS / "demo.yaml"  # the default config

# Paths in which `~` is replaced here, since several modules read them.
_WEIGHTS = ("model.checkpoint", "distill.teacher.checkpoint")
_REFERENCE = re.compile(r"(?<!\\)\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")


@dataclass(frozen=True)
class LoadedConfig:
    """A config. origins: where a layer sets a key or section, by dotted key: `x.yaml:12`. name: the
    file's stem, or the name of the run whose config it is. notes: lines to print at the start,
    besides warnings. data: the open dataset (`data.datasets.DataSets`) if the config follows from
    it.
    """

    config: Config
    origins: Mapping[str, str]
    name: str
    warnings: list[str]
    notes: list[str] = field(default_factory=list)
    data: Any = None


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), derived: Sequence[str] = ()
) -> LoadedConfig:
    """Read, merge and check a config, which `find_config` finds. None: the demo.

    overrides: `key.sub=value` arguments. derived: such values for a dataset, which overrides
    replace. Raises ConfigError with one line for each problem, all at once.
    """
    file = DEMO if path is None else find_config(path)
    layers = Layers()
    layers.add_file(file)
    layers.add_overrides(derived, "dataset")
    loaded = _check(layers, overrides, file.stem)
    if file.name == "config.yaml" and (file.parent / "env.json").exists():  # of a run
        return replace(loaded, name=file.parent.resolve().name)
    return loaded


def load_stored_config(
    values: Mapping[str, Any], name: str, overrides: Sequence[str] = ()
) -> LoadedConfig:
    """`load_config` for the config in a checkpoint's `state.json`. name: of its run."""
    layers = Layers()
    layers.add(reader.to_tree(asdict(config_from_dict(values))))
    return _check(layers, overrides, name)


def _check(layers: Layers, overrides: Sequence[str], name: str) -> LoadedConfig:
    layers.add_overrides(overrides)
    if layers.errors:
        raise ConfigError(layers.errors)
    origins = {key: reader.place_of(node) for key, node in walk(layers.tree)}
    config = _build(layers.tree, origins)
    optimizer = config.optimizer
    kwargs = DEFAULT_KWARGS.get(optimizer.name, {}) | optimizer.kwargs
    config = replace(config, optimizer=replace(optimizer, kwargs=kwargs))
    if config.device.isdigit():
        config = replace(config, device=f"cuda:{config.device}")
    if problems := list(rule_problems(config)):
        raise ConfigError(format_problems(problems, origins))
    warnings: list[str] = []
    for found in (layers.removed_value_warnings(), unused_values(config)):
        warnings += format_problems(found, origins)
    return LoadedConfig(config, origins, name, warnings)


def take_removed_keys(tree: Tree) -> list[Problem]:
    """Take the keys of earlier versions out of the layers. Returns a problem for each one that is
    not at its former default.
    """
    problems = []
    for key, (default, advice) in keys.REMOVED_KEYS.items():
        section, _, name = key.partition(".")
        values = tree.get(section)
        if isinstance(values, Tree) and name in values:
            value = reader.value_of(values.pop(name))
            if value != default:
                problems.append(Problem(key, f"was removed; {advice}"))
    return problems


def format_problems(problems: Iterable[Problem], origins: Mapping[str, str]) -> list[str]:
    """A line for each, with its origin: `x.yaml:12: optimizer.lr: ...`."""
    lines = []
    for problem in problems:
        parts = [_origin(problem.key, origins), shorten(problem.key, 200), problem.message]
        lines.append(": ".join(part for part in parts if part))
    return lines


@contextmanager
def name_origins(origins: Mapping[str, str]) -> Iterator[None]:
    """Add the origin to each line of a ConfigError that begins with a key."""
    try:
        yield
    except ConfigError as error:
        lines = []
        for line in error.lines:
            key, _, message = line.partition(": ")
            is_key = key.partition(".")[0] in keys.sections()
            lines += format_problems([Problem(key, message)], origins) if is_key else [line]
        with_origins = ConfigError(lines)
        with_origins.printed_elsewhere = error.printed_elsewhere
        raise with_origins from error


def _origin(key: str, origins: Mapping[str, str]) -> str | None:
    """Where a key is set; else where the name of its component or the nearest section is."""
    while key and not origins.get(key):
        section, _, last = key.rpartition(".")
        # which arguments are allowed, or missing, follows from the name
        key = f"{section}.name" if last == "kwargs" and f"{section}.name" in origins else section
    return origins.get(key)


@cache
def _template() -> DictConfig:
    """The schema as a structured config of OmegaConf, with its defaults. Built once, since that
    takes a while.
    """
    template: DictConfig = OmegaConf.structured(Config)
    for key in keys.sections():  # sections of frozen dataclasses are read-only
        OmegaConf.set_readonly(OmegaConf.select(template, key) if key else template, False)
    return template


def _build(tree: Tree, origins: Mapping[str, str], is_stored: bool = False) -> Config:
    """The config of merged layers. Raises ConfigError with a line for each problem of a key.

    is_stored: whether it is the config of a checkpoint, which may be older than a range and than
    the removal of a key.
    """
    removed = take_removed_keys(tree)
    problems = [] if is_stored else removed
    types = keys.value_types()
    values = {key: keys.default_of(key) for key in types}
    for key, node in walk(tree):
        values[key] = reader.value_of(node, keys.is_text(types.get(key)))
    config = deepcopy(_template())
    known_keys = list(_known_keys("", tree, problems))  # problems of other keys come first
    for key in known_keys:
        try:
            if "${" in str(values[key]) and key.removesuffix(".name") in COMPONENTS:
                # layers reset the section by the name
                raise ValueError(f"{values[key]}: a component's name can't be interpolated")
            value = _interpolate(values[key], values)
            if key in _WEIGHTS and isinstance(value, str):
                value = os.path.expanduser(value)  # noqa: PTH111 (for text)
            _assign(config, key, value)
            if not is_stored:
                value = OmegaConf.select(config, key)
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value)
                check_value(key, value)
        except ValueError as error:
            problems.append(Problem(key, str(error)))
    if not problems:  # otherwise one may be a typo of a key that is missing
        missing = OmegaConf.missing_keys(config)
        problems = [Problem(key, _no_value(key, values)) for key in values if key in missing]
    if problems:
        raise ConfigError(format_problems(problems, origins))
    built = OmegaConf.to_object(config)
    assert isinstance(built, Config)
    return built


def _no_value(key: str, values: Mapping[str, Any]) -> str:
    """The message for a key without a value. It shows the name of the component, which may be
    misspelled.
    """
    name = f"{key.rpartition('.')[0]}.name"
    component = f" for {name}={values[name]}" if name in values else ""
    return (
        f"has no value{component}; set it in a config or on the command line (a changed name "
        "resets its section)"
    )


def _known_keys(section: str, tree: Tree, problems: list[Problem]) -> Iterator[str]:
    """The keys of the schema that the layers set. Adds a problem for any other key."""
    types = keys.value_types()
    for name, value in tree.items():
        key = f"{section}.{name}" if section else name
        if "." in name or key not in types.keys() | keys.sections().keys():
            problems.append(Problem(key, keys.unknown_key(key)))
        elif key in types:
            yield key
        elif isinstance(value, Tree):
            yield from _known_keys(key, value, problems)
        else:
            first = next(known for known in types if known.startswith(f"{key}."))
            advice = keys.ADVICE.get(key, f"give one of them, such as {first}")
            shown = format_value(reader.value_of(value))
            message = f"{shown} is given for a section of keys; {advice}"
            problems.append(Problem(key, message))


def _interpolate(value: Any, values: Mapping[str, Any]) -> Any:
    """A value with each `${section.key}` replaced by that one of `values`. Raises ValueError.

    OmegaConf would also run resolvers. A reference to a value with references, which could loop or
    expand to gigabytes, is an error.
    """
    if isinstance(value, list):
        return [_interpolate(item, values) for item in value]
    if isinstance(value, dict):
        return {name: _interpolate(item, values) for name, item in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value
    if "${" in _REFERENCE.sub("", value):
        raise ValueError(
            f"{format_value(value)} is not allowed; only ${{section.key}} is, without resolvers"
        )
    for key in _REFERENCE.findall(value):
        if key not in values or isinstance(values[key], dict):
            with_value = [other for other, found in values.items() if not isinstance(found, dict)]
            raise ValueError(f"${{{key}}} is not a key with a value{did_you_mean(key, with_value)}")
        if "${" in str(values[key]):
            raise ValueError(f"${{{key}}} has a reference itself; write {values[key]} here")
    if whole := _REFERENCE.fullmatch(value):
        return values[whole[1]]
    text = _REFERENCE.sub(lambda match: str(values[match[1]]), value)
    if "${" in text:
        raise ValueError(f"{format_value(text)} has a '${{' after interpolation")
    return text


def _assign(config: DictConfig, key: str, value: Any) -> None:
    """Set a key to a plain value, converted to its type. Raises ValueError."""
    hint = keys.value_types()[key]
    # OmegaConf also makes booleans of numbers and texts
    if hint is not bool or isinstance(value, bool):
        with suppress(OmegaConfBaseException, OverflowError, ValueError):
            OmegaConf.update(config, key, value, merge=False)
            return
    near = did_you_mean(value, keys.choices(hint)) if isinstance(value, str) else ""
    if isinstance(value, str) and hint == list[str]:
        near = f"; write [{value}]"
    raise ValueError(f"{format_value(value)} is not {keys.describe_type(hint)}{near}")


def config_from_dict(mapping: Mapping[str, Any]) -> Config:
    """Rebuild a config from a dictionary of `dataclasses.asdict`. A missing key has the schema's
    default.

    Raises ConfigError for unknown keys and wrong types. Ranges and rules may be newer than a
    checkpoint.
    """
    return _build(reader.to_tree(mapping), {}, is_stored=True)


def values_by_key(config: Config) -> dict[str, Any]:
    """Every value by its dotted key, also in keyword arguments. Empty keyword arguments are a
    value, `{}`.
    """
    return flatten(asdict(config))


def comparable_values(config: Config) -> dict[str, Any]:
    """`values_by_key`, and the order of `optimizer.lr_scales`: the first pattern that matches
    counts.
    """
    return values_by_key(config) | {"optimizer.lr_scales": list(config.optimizer.lr_scales)}


def dump_yaml(config: Config) -> str:
    """The config as YAML, every key with its value. Loading it gives an equal config."""
    return reader.dump(asdict(config))
