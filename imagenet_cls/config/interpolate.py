"""`${section.key}` in values, resolved by OmegaConf once all layers are merged.

Owns which forms are allowed: a key of the config that holds one value or a list. Refuses resolvers (`${oc.env:HOME}`
and anything else with a colon), since what they bring in would stand in the dump, and escapes. `${` in a value is
always an interpolation. Called by `load` only.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from imagenet_cls.config import keys
from imagenet_cls.config.layers import Entry, Findings
from imagenet_cls.errors import format_value
from imagenet_cls.lookup import did_you_mean

MAX_CHARACTERS = 10_000
"""What a value with its interpolations resolved may hold; a few lines of nested ones can stand for gigabytes."""
MAX_CHAIN = 20

_ALLOWED = re.compile(r"(?<!\\)\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")
_RESOLVER = re.compile(r"\$\{\s*([^{}:$]*):")


def texts(value: Any) -> Iterator[str]:
    """Every text in a value, at any depth, keys of dicts included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts(item)


def nested(entries: dict[keys.KeyPath, Entry]) -> dict[str, Any]:
    """Flat entries as nested plain dictionaries."""
    whole: dict[str, Any] = {}
    for path, entry in entries.items():
        inner = whole
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = entry.value
    return whole


def interpolate(entries: dict[keys.KeyPath, Entry], findings: Findings) -> dict[keys.KeyPath, Entry]:
    """The entries with every `${section.key}` replaced. What cannot be replaced goes to `findings` and is left out."""
    with_dollar = {path for path, entry in entries.items() if any("${" in text for text in texts(entry.value))}
    if not with_dollar:
        return entries
    targets = {".".join(path): path for path in entries}
    lengths: dict[keys.KeyPath, float] = {}
    faults = {path: _fault(path, entries[path], targets) for path in with_dollar}
    for path in with_dollar:
        if _length(path, entries, targets, lengths, ()) > MAX_CHARACTERS:
            faults[path] = (
                faults[path] or f"{format_value(entries[path].value)} leads back to itself, or to far too much text"
            )
    whole = OmegaConf.create(nested({path: entry for path, entry in entries.items() if not faults.get(path)}))
    resolved = {path: entry for path, entry in entries.items() if path not in with_dollar}
    for path in (path for path in entries if path in with_dollar):
        message = faults[path]
        if not message:
            try:
                value = _select(whole, path)
                message = (
                    ""
                    if not any("${" in text for text in texts(value))
                    else f"{format_value(value)} holds a '${{' again"
                )
            except OmegaConfBaseException as error:
                message = f"{format_value(entries[path].value)} can't be resolved: {str(error).splitlines()[0]}"
        if message:
            findings.add(entries[path].origin, ".".join(path), message)
        else:
            resolved[path] = Entry(value, entries[path].origin)
    return {path: resolved[path] for path in entries if path in resolved}


def _fault(path: keys.KeyPath, entry: Entry, targets: dict[str, keys.KeyPath]) -> str:
    """What is wrong with the interpolations of one value as they are written; "" for nothing."""
    if len(path) == 2 and path[0] in keys.components() and path[1] == "name":
        return f"{format_value(entry.value)}: a component's name can't be interpolated, since its defaults hang on it"
    for text in texts(entry.value):
        rest = _ALLOWED.sub("", text)
        resolver = _RESOLVER.search(rest)
        if resolver:
            name = resolver.group(1).strip()
            return f"the resolver {name!r} in {format_value(text)} is refused; only ${{section.key}} is allowed"
        if "${" in rest:
            return f"{format_value(text)} is refused; '${{' begins ${{section.key}}, and nothing else is allowed"
        for name in _ALLOWED.findall(text):
            if name not in targets:
                inside = any(target.startswith(name + ".") for target in targets)
                what = (
                    "is a section; name one of its keys"
                    if inside
                    else f"is no key with a value{did_you_mean(name, targets)}"
                )
                return f"${{{name}}} {what}"
    return ""


def _length(
    path: keys.KeyPath,
    entries: dict[keys.KeyPath, Entry],
    targets: dict[str, keys.KeyPath],
    known: dict[keys.KeyPath, float],
    chain: tuple[keys.KeyPath, ...],
) -> float:
    """Characters in a value once resolved, without resolving it; infinite for a circle or too long a chain."""
    if path in chain or len(chain) > MAX_CHAIN:
        return math.inf
    if path not in known:
        total: float = 0
        for text in texts(entries[path].value):
            names = [name for name in _ALLOWED.findall(text) if name in targets]
            total += len(text) + sum(_length(targets[name], entries, targets, known, (*chain, path)) for name in names)
        known[path] = total
    return known[path]


def _select(whole: DictConfig, path: keys.KeyPath) -> Any:
    """One resolved value out of the whole, plain. By parts and not by dotted text: a part may hold dots."""
    inner: Any = whole
    for part in path:
        inner = inner[part]
    return OmegaConf.to_container(inner, resolve=True) if OmegaConf.is_config(inner) else inner
