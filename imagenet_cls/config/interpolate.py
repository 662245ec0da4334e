"""`${section.key}` in values: replaced once all layers are merged, before types are checked.

Not OmegaConf's interpolation, which also resolves environment variables (`${oc.env:HOME}`), whose values would end up
in the saved config, and has no limit on the length of the result.
"""

import re
from typing import Any

from imagenet_cls.config import keys
from imagenet_cls.config.layers import Entry, Fault
from imagenet_cls.errors import Problem, format_value
from imagenet_cls.lookup import did_you_mean

MAX_SIZE = 10_000
"""Limit on the characters of a value with interpolations; a few lines of nested ones could expand to gigabytes."""
MAX_CHAIN = 20

_REFERENCE = re.compile(r"(?<!\\)\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")


def interpolate(entries: dict[keys.KeyPath, Entry]) -> tuple[dict[keys.KeyPath, Entry], list[Fault]]:
    """The entries with every `${section.key}` replaced, and the faults. Entries that can't be resolved are left out."""
    by_key = {".".join(path): path for path in entries}
    resolved: dict[keys.KeyPath, Entry] = {}
    faults = []

    def resolve(path: keys.KeyPath, chain: tuple[keys.KeyPath, ...] = ()) -> Any:
        raw = entries[path].value
        if path in chain or len(chain) > MAX_CHAIN:
            raise LookupError(f"{format_value(raw)} refers back to itself")
        if path not in resolved:
            if path[1:] == ("name",) and path[0] in keys.components() and "${" in str(raw):
                raise LookupError(f"{format_value(raw)}: a component's name can't be interpolated")
            resolved[path] = Entry(replace(raw, (*chain, path)), entries[path].origin)
        return resolved[path].value

    def replace(value: Any, chain: tuple[keys.KeyPath, ...]) -> Any:
        if "${" not in str(value):
            return value
        if isinstance(value, dict):
            return dict(zip(value, replace([*value.values()], chain), strict=True))
        is_text = isinstance(value, str)
        if is_text and (whole := _REFERENCE.fullmatch(value)):
            return target(whole[1], chain)
        parts, size = [], 0
        for n, part in enumerate(_REFERENCE.split(value) if is_text else value):  # of a text: text and names in turn
            if not is_text:
                part = replace(part, chain)
            elif n % 2:
                part = str(target(part, chain))
            elif "${" in part:
                raise LookupError(f"{format_value(value)} is not allowed; only ${{section.key}} is, without resolvers")
            parts.append(part)
            size += len(str(part))
            if size > MAX_SIZE:
                raise LookupError(f"{format_value(value)} expands to more than {MAX_SIZE} characters")
        if is_text and "${" in "".join(parts):
            raise LookupError(f"{format_value(value)} has a '${{' after interpolation")
        return "".join(parts) if is_text else parts

    def target(name: str, chain: tuple[keys.KeyPath, ...]) -> Any:
        if name in by_key:
            return resolve(by_key[name], chain)
        if any(key.startswith(f"{name}.") for key in by_key):
            raise LookupError(f"${{{name}}} is a section; name one of its keys")
        raise LookupError(f"${{{name}}} is not a key with a value{did_you_mean(name, by_key)}")

    for path, entry in entries.items():
        try:
            resolve(path)
        except LookupError as error:
            faults.append(Fault(entry.origin, Problem(".".join(path), str(error.args[0]))))
    return {path: resolved[path] for path in entries if path in resolved}, faults
