"""The front door of `config`: a path and command-line words in, a checked, plain `Config` out; and back into YAML.

Owns stage 1 of checking as a whole, and the types: OmegaConf converts and checks each value by itself against the
schema, so that every wrong one is reported and not just the first. Refuses to build a config with any problem left.
Never imports torch. Called by `cli` (load_config), `engine` (dump_yaml for the run folder; dictionaries for
checkpoints).
"""

import typing
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from functools import cache, reduce
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from imagenet_cls.config import keys, reader
from imagenet_cls.config.check import check
from imagenet_cls.config.idle import forgotten
from imagenet_cls.config.interpolate import interpolate, nested, texts
from imagenet_cls.config.layers import (
    DEFAULT,
    Entry,
    Findings,
    Merged,
    command_line_layer,
    file_layers,
    merge,
    near_files,
    tree_layer,
)
from imagenet_cls.config.origin import Origin, format_line, format_problems, nearest_origin, shown_path
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import ConfigError, Problem, UsageError, format_value
from imagenet_cls.lookup import did_you_mean

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"
"""What is trained where no config is named."""


@dataclass(frozen=True)
class Loaded:
    """A config and where each part of it came from.

    origins: by dotted key, of values and of the sections that a layer mentions. name: the file's stem, which names the
    run folder. path: the file that was read. warnings: removed keys that were read, and keys without effect.
    """

    config: Config
    origins: Mapping[str, Origin]
    name: str
    path: Path
    warnings: list[str] = field(default_factory=list)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Loaded:
    """Read, merge and check a config. None: the demo.

    overrides: words `key.sub=value`, all together one layer; the value is YAML, and nothing behind `=` is null.
    Raises UsageError where there is no such file, else ConfigError with one line for each problem, all problems at
    once.
    """
    file = DEMO if path is None else Path(path)
    findings = Findings()
    try:
        layers = file_layers(file, findings)
    except FileNotFoundError:
        if path is None:
            raise UsageError("the demo config is not installed: name a config, such as configs/resnet50.yaml") from None
        raise UsageError(f"no config {shown_path(file)}{near_files(file)}") from None
    merged = merge([*layers, command_line_layer(overrides, findings)])
    if findings.unreadable:
        raise ConfigError(findings.lines)
    warnings = _replace_removed(merged)
    config, origins = _build(merged, findings)
    doubtful = {key for key in map(".".join, keys.leaves()) if findings.in_doubt(key)}
    problems = check(config, doubtful, merged.heights)
    if findings.lines or problems:
        raise ConfigError([*findings.lines, *format_problems(problems, origins)])
    return Loaded(config=config, origins=origins, name=file.stem, path=file, warnings=warnings)


def config_to_dict(config: Config) -> dict[str, Any]:
    """A config as nested dictionaries of plain values, which JSON takes, for checkpoints."""
    return asdict(config)


def config_from_dict(mapping: Mapping[str, Any]) -> Config:
    """The config that `config_to_dict` took apart. A missing key has the schema's default.

    Names and types are checked, ranges and rules are not: what once was trained must load even where a rule is newer.
    Raises ConfigError for unknown keys, wrong types and a missing learning rate.
    """
    findings = Findings()
    try:
        node = reader.parse(reader.dump(dict(mapping)))
    except (TypeError, reader.UnreadableError) as error:
        raise ConfigError([f"the stored config can't be read: {error}"]) from None
    assert isinstance(node, yaml.MappingNode)  # a dict was dumped
    merged = merge([tree_layer(node, Origin("the stored config"), findings)])
    _replace_removed(merged)
    config, _ = _build(merged, findings)
    if findings.lines:
        raise ConfigError(findings.lines)
    return config


def dump_yaml(config: Config) -> str:
    """The config as YAML, every key with its value. Loading it gives an equal config."""
    return reader.dump(config_to_dict(config))


def _replace_removed(merged: Merged) -> list[str]:
    """Turn data.on_bad_image and data.manifest, which are no more, into data.exclude; return a warning for each."""
    found = {path: merged.entries.pop(path) for path in keys.REMOVED if path in merged.entries}
    policy, manifest = (found[path].value if path in found else None for path in keys.REMOVED)
    exclude = merged.entries[("data", "exclude")]
    if policy == "exclude" and exclude.origin is DEFAULT:
        value = "${data.root}/verified_images.json" if manifest is None else manifest
        merged.entries[("data", "exclude")] = Entry(value, found[keys.REMOVED[0]].origin)
    return [
        format_line(entry.origin, Problem(".".join(path), "was replaced by data.exclude, the path of that list"))
        for path, entry in found.items()
    ]


def _build(merged: Merged, findings: Findings) -> tuple[Config, dict[str, Origin]]:
    """Merged layers to dataclasses. What has no value or a wrong type is noted and stays at its default; what a higher
    layer made idle goes back to it."""
    origins = {".".join(path): origin for path, origin in merged.sections.items()}
    origins.update({".".join(path): entry.origin for path, entry in merged.entries.items()})
    entries = interpolate(_without_missing(merged, origins, findings), findings)
    values = {path: keys.default_of(path) for path in keys.leaves()}
    values[("optimizer", "lr")] = 0.0  # stopgap: the one key that has no default
    for path, entry in entries.items():
        if path in values and entry.origin is not DEFAULT:
            try:
                values[path] = _converted(path, entry.value)
            except ValueError as fault:
                findings.add(entry.origin, ".".join(path), str(fault))
    kwargs = deepcopy(nested({path: entry for path, entry in entries.items() if path not in values}))
    for path, hint in keys.leaves().items():
        if keys.is_kwargs(hint):
            values[path] = reduce(lambda inner, name: inner.get(name, {}), path, kwargs)
    idle = forgotten(_section((), values), merged.heights)
    values.update({path: keys.default_of(path) for path in idle})
    origins.update({".".join(path): DEFAULT for path in idle})
    return _section((), values), origins


def _section(path: keys.KeyPath, values: Mapping[keys.KeyPath, Any]) -> Any:
    """The dataclass of a section, those below it included."""
    names = [(*path, field.name) for field in fields(keys.sections()[path])]
    inner = {name[-1]: _section(name, values) if name in keys.sections() else values[name] for name in names}
    return keys.sections()[path](**inner)


def _without_missing(merged: Merged, origins: Mapping[str, Origin], findings: Findings) -> dict[keys.KeyPath, Entry]:
    """The entries that have a value; for `???`, which stands for none, and for a key without a default, a problem."""
    kept = {}
    for path, entry in merged.entries.items():
        if not any(text.lstrip("\\") == "???" for text in texts(entry.value)):
            kept[path] = entry
            continue
        key = ".".join(path)
        if not entry.origin.is_default:
            findings.add(entry.origin, key, "has no value yet ('???'): set it in a config or on the command line")
            continue
        if findings.in_doubt(key):
            continue  # a misspelling of it is reported already
        message = f"has no value and no default; set it in a config or on the command line ({key}=VALUE)"
        if path[0] in merged.resets:
            before, after = merged.resets[path[0]]
            change = f"the change of {path[0]}.name from {before!r} to {after!r}"
            message = f"has no value: {change} forgets it; state both together"
        findings.add(nearest_origin(f"{path[0]}.name", origins), key, message)
    return kept


@cache
def _typed_sections() -> dict[keys.KeyPath, DictConfig]:
    """OmegaConf's view of each section of the schema, in which values are converted. To make it takes 20 ms."""
    whole: DictConfig = OmegaConf.structured(Config)
    found = {path: OmegaConf.select(whole, ".".join(path)) if path else whole for path in keys.sections()}
    for section in found.values():  # those of frozen dataclasses are read-only
        OmegaConf.set_readonly(section, False)
    return found


def _converted(path: keys.KeyPath, value: Any) -> Any:
    """A value as its key's type has it. Raises ValueError with what is wrong with it."""
    hint = keys.leaves()[path]
    bare, optional = keys.split_optional(hint)
    if type(value) is bare or (value is None and optional):
        return value
    # OmegaConf takes numbers and words like 'on' for truth values, and dicts and lists of digits for text; a config
    # does not.
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
    raise ValueError(f"{format_value(value)} is not {keys.words_of(hint)}{near}")
