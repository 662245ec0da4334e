"""Load a config: from a path and overrides to a checked `Config` of plain dataclasses.

And back into YAML.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from imagenet_cls.config import keys, reader
from imagenet_cls.config.check import NO_VALUE, check_value, rule_problems, unused_values
from imagenet_cls.config.layers import CONFIGS, DELETE, Layers, find_config, flatten, walk
from imagenet_cls.config.reader import Tree
from imagenet_cls.config.schema import COMPONENTS, DEFAULT_KWARGS, REQUIRED, Config
from imagenet_cls.errors import ConfigError, Problem
from imagenet_cls.lookup import did_you_mean
from imagenet_cls.text import format_value, shorten

DEMO = CONFIGS / "demo.yaml"  # the default config
# characters for all `${...}` of a config; a few nested lines could expand to gigabytes
MAX_INSERTED = 1_000_000
MAX_CHAIN = 20  # references from one value to the next

# Paths in which `~` is replaced here, since several modules read them.
_WEIGHTS = ("model.checkpoint", "distill.teacher.checkpoint")
_REFERENCE = re.compile(r"(?<!\\)\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")


@dataclass(frozen=True)
class LoadedConfig:
    """A config. origins: where a layer sets a key or section, by dotted key: `x.yaml:12`. name: the
    file's stem. notes: lines to print at the start, besides warnings.
    """

    config: Config
    origins: Mapping[str, str]
    name: str
    warnings: list[str]
    notes: list[str] = field(default_factory=list)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, merge and check a config, which `find_config` finds. None: the demo.

    overrides: `key.sub=value` arguments. Raises ConfigError with one line for each problem, all at
    once.
    """
    file = DEMO if path is None else find_config(path)
    layers = Layers()
    layers.add_file(file)
    layers.add_overrides(overrides)
    if layers.errors:
        raise ConfigError(layers.errors)
    builder = _Builder(layers.tree)
    problems = take_removed_keys(layers.tree)
    config = builder.build()
    if config.device.isdigit():
        config = replace(config, device=f"cuda:{config.device}")
    problems += builder.problems
    problems += rule_problems(config, builder.invalid_keys)
    if problems:
        raise ConfigError(format_problems(problems, builder.origins))
    warnings: list[str] = []
    for found in (layers.removed_value_warnings(), unused_values(config)):
        warnings += format_problems(found, builder.origins)
    return LoadedConfig(config, builder.origins, file.stem, warnings, layers.replaced)


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


class _InvalidReference(ValueError):
    """A key whose value refers to an invalid key."""


class _Builder:
    """Builds the config from merged layers: replaces `${...}`; OmegaConf converts. An invalid key
    gets its default.

    origins: as in `LoadedConfig`. problems: of single keys. invalid_keys: existing keys whose value
    is not known.
    """

    def __init__(self, tree: Tree, check_ranges: bool = True):
        self.tree = tree
        self.check_ranges = check_ranges
        types = keys.value_types()
        self.values = {key: keys.default_of(key) for key in types}
        self.values |= {
            key: reader.value_of(node, keys.is_text(types.get(key))) for key, node in walk(tree)
        }
        self.origins = {key: reader.place_of(node) for key, node in walk(tree)}
        self.config = deepcopy(_template())
        self.inserted = 0  # characters by `${...}`
        self.problems: list[Problem] = []
        self.invalid_keys: set[str] = set()

    def build(self) -> Config:
        """The config. Its problems are in `problems`."""
        # Keys without references first: a reference to an invalid key is not a problem of its own.
        known = self.known_keys("", self.tree)
        for key in sorted(known, key=lambda key: "${" in str(self.values[key])):
            try:
                value = self.interpolate(self.values[key], (key,))
                if key in _WEIGHTS and isinstance(value, str):
                    value = os.path.expanduser(value)  # noqa: PTH111 (it may be a URL)
                self.assign(key, value)
                if self.check_ranges:
                    value = OmegaConf.select(self.config, key)
                    if OmegaConf.is_config(value):
                        value = OmegaConf.to_container(value)
                    check_value(key, value)
            except _InvalidReference:
                self.assign(key, keys.default_of(key))
                self.invalid_keys.add(key)
            except ValueError as error:
                self.add_problem(key, str(error))
                self.assign(key, keys.default_of(key))
        for key in OmegaConf.missing_keys(self.config):
            if key not in self.invalid_keys:
                self.add_problem(key, NO_VALUE)
            # so that the other keys can be checked; a config with problems is never used
            self.assign(key, 0)
        config = OmegaConf.to_object(self.config)
        assert isinstance(config, Config)
        return config

    def add_problem(self, key: str, message: str) -> None:
        self.problems.append(Problem(key, message))
        self.mark_invalid(key)

    def mark_invalid(self, section: str) -> None:
        """Mark a key, or all keys of a section."""
        for key in keys.value_types():
            if f"{key}.".startswith(f"{section}."):
                self.invalid_keys.add(key)

    def known_keys(self, section: str, tree: Tree) -> Iterator[str]:
        """The keys of the schema that the layers set. Adds a problem for any other key."""
        for name, value in tree.items():
            key = f"{section}.{name}" if section else name
            if "." in name or key not in keys.value_types().keys() | keys.sections().keys():
                message, suggestions = keys.unknown_key(key)
                self.add_problem(key, message)
                if suggestions:
                    self.mark_invalid(suggestions[0])
            elif key in keys.value_types():
                yield key
            elif isinstance(value, Tree):
                yield from self.known_keys(key, value)
            else:
                first = next(known for known in keys.value_types() if known.startswith(f"{key}."))
                advice = keys.ADVICE.get(key, f"give one of them, such as {first}")
                shown = format_value(self.values[key])
                self.add_problem(key, f"{shown} is given for a section of keys; {advice}")

    def interpolate(self, value: Any, chain: tuple[str, ...]) -> Any:
        """A value with each `${section.key}` replaced by the value of that key. Raises ValueError.

        chain: the key of the value, after the keys that refer to it. OmegaConf also has resolvers,
        and no limits.
        """
        if isinstance(value, list):
            return [self.interpolate(item, chain) for item in value]
        if isinstance(value, dict):
            return {name: self.interpolate(item, chain) for name, item in value.items()}
        if value == REQUIRED:
            raise ValueError(NO_VALUE)
        if not isinstance(value, str) or "${" not in value:
            return value
        if chain[0].removesuffix(".name") in COMPONENTS:  # layers reset the section by the name
            raise ValueError(f"{format_value(value)}: a component's name can't be interpolated")
        if "${" in _REFERENCE.sub("", value):
            raise ValueError(
                f"{format_value(value)} is not allowed; only ${{section.key}} is, without resolvers"
            )
        found = {key: self.referenced_value(key, chain) for key in _REFERENCE.findall(value)}
        if whole := _REFERENCE.fullmatch(value):
            return found[whole[1]]
        text = _REFERENCE.sub(lambda match: str(found[match[1]]), value)
        if "${" in text:
            raise ValueError(f"{format_value(text)} has a '${{' after interpolation")
        return text

    def referenced_value(self, key: str, chain: tuple[str, ...]) -> Any:
        if key in chain:
            raise ValueError(f"${{{key}}} refers back to itself")
        if len(chain) > MAX_CHAIN:
            raise ValueError(f"${{{key}}} is reached by more than {MAX_CHAIN} references")
        if key not in self.values or isinstance(self.values[key], dict):
            with_value = [
                other for other, found in self.values.items() if not isinstance(found, dict)
            ]
            raise ValueError(f"${{{key}}} is not a key with a value{did_you_mean(key, with_value)}")
        if key in self.invalid_keys:
            raise _InvalidReference(key)
        value = self.interpolate(self.values[key], (*chain, key))
        self.inserted += 1 + len(str(value))
        if self.inserted > MAX_INSERTED:
            raise ValueError(
                f"the ${{...}} of this config insert more than {MAX_INSERTED} characters"
            )
        return value

    def assign(self, key: str, value: Any) -> None:
        """Set a key to a plain value, converted to its type. Raises ValueError."""
        hint = keys.value_types()[key]
        # OmegaConf also makes booleans of numbers and texts
        if hint is not bool or isinstance(value, bool):
            with suppress(OmegaConfBaseException, OverflowError, ValueError):
                OmegaConf.update(self.config, key, value, merge=False)
                return
        near = did_you_mean(value, keys.choices(hint)) if isinstance(value, str) else ""
        raise ValueError(f"{format_value(value)} is not {keys.describe_type(hint)}{near}")


def config_from_dict(mapping: Mapping[str, Any]) -> Config:
    """Rebuild a config from a dictionary of `dataclasses.asdict`. A missing key has the schema's
    default.

    Raises ConfigError for unknown keys and wrong types. Ranges and rules may be newer than a
    checkpoint.
    """
    tree = reader.to_tree(mapping)
    take_removed_keys(tree)  # `removed_key_warnings` reports them
    builder = _Builder(tree, check_ranges=False)
    config = builder.build()
    if builder.problems:
        raise ConfigError(format_problems(builder.problems, {}))
    return config


def removed_key_warnings(mapping: Mapping[str, Any]) -> list[str]:
    """A warning for each removed key of a checkpoint's config that was not at its default."""
    problems = take_removed_keys(reader.to_tree(mapping))
    return [f"warning: the checkpoint's config: {line}" for line in format_problems(problems, {})]


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
    values = asdict(config)
    kwargs = values["optimizer"]["kwargs"]
    if not DEFAULT_KWARGS.get(config.optimizer.name, {}).keys() <= kwargs.keys():
        values["optimizer"]["kwargs"] = {DELETE: True, **kwargs}
    return reader.dump(values)
