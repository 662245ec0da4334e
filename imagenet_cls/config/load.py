"""Load a config: a path and overrides in, a checked `Config` of plain dataclasses out; and back into YAML."""

import typing
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from imagenet_cls.config import keys, reader
from imagenet_cls.config.check import unused_values, value_problems
from imagenet_cls.config.interpolate import interpolate
from imagenet_cls.config.layers import (
    Entry,
    Fault,
    Layer,
    command_line_layer,
    file_layers,
    merge,
    near_files,
    tree_layer,
)
from imagenet_cls.config.origin import DEFAULT, Origin, format_line, format_problems, nearest_origin, shown_path
from imagenet_cls.config.schema import REMOVED, Config
from imagenet_cls.errors import ConfigError, Problem, UsageError, format_value
from imagenet_cls.lookup import did_you_mean

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"
"""The default config."""


@dataclass(frozen=True)
class Loaded:
    """A config and where each part of it came from.

    origins: by dotted key, of values and of the sections that a layer mentions. name: the file's stem, the name of the
    run folder. path: the file. warnings: about removed keys, and about keys that are set but have no effect.
    """

    config: Config
    origins: Mapping[str, Origin]
    name: str
    path: Path
    warnings: list[str] = field(default_factory=list)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Loaded:
    """Read, merge and check a config. None: the demo.

    overrides: `key.sub=value` arguments, one layer; values are YAML, and nothing after `=` is null.
    Raises UsageError if there is no such file, else ConfigError with one line for each problem, all at once.
    """
    file = DEMO if path is None else Path(path)
    try:
        layers = file_layers(file)
    except FileNotFoundError:
        if path is None:
            raise UsageError("the demo config is not installed: name a config, such as configs/resnet50.yaml") from None
        raise UsageError(f"no config {shown_path(file)}{near_files(file)}") from None
    layers.append(command_line_layer(overrides))
    if any(fault.is_fatal for layer in layers for fault in layer.faults):
        raise ConfigError([format_line(fault.origin, fault.problem) for layer in layers for fault in layer.faults])
    config, origins, faults, warnings = _assemble(layers)
    unknown = {key for key in map(".".join, keys.leaves()) if any(fault.affects(key) for fault in faults)}
    lines = [format_line(fault.origin, fault.problem) for fault in faults]
    lines += format_problems(value_problems(config, unknown), origins)
    if lines:
        raise ConfigError(lines)
    return Loaded(config, origins, file.stem, file, [*warnings, *format_problems(unused_values(config), origins)])


def config_to_dict(config: Config) -> dict[str, Any]:
    """A config as nested dictionaries of plain values, for JSON."""
    return asdict(config)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted keys. An empty one, such as `kwargs`, is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def config_from_dict(mapping: Mapping[str, Any]) -> Config:
    """The config that `config_to_dict` converted. A missing key has the schema's default.

    Checks names and types but not ranges and rules, so that old checkpoints load even if a rule is newer.
    Raises ConfigError for unknown keys, wrong types and a missing learning rate.
    """
    try:
        node = reader.parse(reader.dump(dict(mapping)))
    except (TypeError, reader.UnreadableError) as error:
        raise ConfigError([f"the stored config can't be read: {error}"]) from None
    config, _, faults, _ = _assemble([tree_layer(node, Origin("the stored config"))])
    if faults:
        raise ConfigError([format_line(fault.origin, fault.problem) for fault in faults])
    return config


def dump_yaml(config: Config) -> str:
    """The config as YAML, every key with its value. Loading it gives an equal config."""
    return reader.dump(config_to_dict(config))


def _assemble(layers: list[Layer]) -> tuple[Config, dict[str, Origin], list[Fault], list[str]]:
    """Layers -> config, origins, faults and warnings. A value at fault is at its default."""
    merged = merge(layers)
    faults = [fault for layer in layers for fault in layer.faults]
    warnings = _replace_removed(merged)
    origins = {".".join(path): origin for layer in layers for path, origin in layer.sections.items()}
    origins.update({".".join(path): entry.origin for path, entry in merged.items()})
    faults += _missing(merged, origins, faults)
    entries, unresolved = interpolate({path: entry for path, entry in merged.items() if not _is_missing(entry.value)})
    faults += unresolved
    values = {path: keys.default_of(path) for path in keys.leaves()}
    values[("optimizer", "lr")] = 0.0  # a placeholder: the one key without a default
    for path, entry in [item for item in entries.items() if item[1].origin is not DEFAULT]:
        try:
            values[path] = _converted(path, entry.value) if path in keys.leaves() else deepcopy(entry.value)
        except ValueError as error:
            faults.append(Fault(entry.origin, Problem(".".join(path), str(error))))
    return _build((), _nested(values)), origins, faults, warnings


def _replace_removed(entries: dict[keys.KeyPath, Entry]) -> list[str]:
    """Replace removed keys by their successors in `entries`; return a warning for each."""
    found = {key: entries.pop(tuple(key.split("."))) for key in REMOVED if tuple(key.split(".")) in entries}
    policy, manifest = (found.get(f"data.{name}", Entry(None, DEFAULT)) for name in ("on_bad_image", "manifest"))
    if policy.value == "exclude" and entries[("data", "exclude")].origin is DEFAULT:
        path = manifest.value if manifest.value is not None else "${data.root}/verified_images.json"
        entries[("data", "exclude")] = Entry(path, policy.origin)
    return [
        format_line(entry.origin, Problem(key, f"was replaced by {REMOVED[key]}; see docs/config.md"))
        for key, entry in found.items()
    ]


def _is_missing(value: Any) -> bool:
    """Whether `???`, which stands for a missing value, is in it."""
    if isinstance(value, list | dict):
        return any(map(_is_missing, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and value.lstrip("\\") == "???"


def _missing(entries: dict[keys.KeyPath, Entry], origins: Mapping[str, Origin], faults: Sequence[Fault]) -> list[Fault]:
    """A fault for each key without a value."""
    found = []
    for path, entry in entries.items():
        key, origin = ".".join(path), entry.origin
        if _is_missing(entry.value) and not (origin.is_default and any(fault.affects(key) for fault in faults)):
            message = "has no value; set it in a config or on the command line"
            if origin.is_default:
                message += f" (it has no default, and a change of {path[0]}.name resets it)"
                origin = nearest_origin(f"{path[0]}.name", origins) or origin
            found.append(Fault(origin, Problem(key, message)))
    return found


def _nested(flat: dict[keys.KeyPath, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for path, value in flat.items():
        inner = whole
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return whole


def _build(path: keys.KeyPath, values: Mapping[str, Any]) -> Any:
    """The dataclass of a section and those below it, from nested values."""
    inner = {name: _build((*path, name), values[name]) for name in values if (*path, name) in keys.sections()}
    return keys.sections()[path](**{**values, **inner})


@cache
def _typed_sections() -> dict[keys.KeyPath, DictConfig]:
    """OmegaConf's typed node of each section, which converts values. Built once, since that takes 20 ms or more."""
    whole: DictConfig = OmegaConf.structured(Config)
    found = {path: OmegaConf.select(whole, ".".join(path)) if path else whole for path in keys.sections()}
    for section in found.values():  # sections of frozen dataclasses are read-only
        OmegaConf.set_readonly(section, False)
    return found


def _converted(path: keys.KeyPath, value: Any) -> Any:
    """A value in its key's type. Raises ValueError with a message."""
    hint = keys.leaves()[path]
    bare, optional = keys.split_optional(hint)
    if type(value) is bare or (value is None and optional):
        return value
    # OmegaConf also converts numbers and texts to booleans, and dicts and lists to text: not here.
    fits = not (bare is bool and not isinstance(value, bool)) and not (bare is str and isinstance(value, list | dict))
    try:
        if fits:
            section = _typed_sections()[path[:-1]]
            OmegaConf.update(section, path[-1], value, merge=False)
            found = section[path[-1]]
            return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    except (OmegaConfBaseException, OverflowError, ValueError):
        pass
    near = did_you_mean(value, typing.get_args(bare)) if isinstance(value, str) and keys.is_text(bare) else ""
    raise ValueError(f"{format_value(value)} is not {keys.describe_type(hint)}{near}")
