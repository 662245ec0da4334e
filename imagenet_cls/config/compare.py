"""Differences between configs."""

from collections.abc import Sequence

from imagenet_cls.config.load import values_by_key
from imagenet_cls.config.reader import dump_inline
from imagenet_cls.config.schema import Config


def differing_values(configs: Sequence[Config]) -> dict[str, list[str]]:
    """The values, as text, of each key in which the configs differ. Keyword arguments are compared
    one by one.
    """
    all_values = []
    for config in configs:
        all_values.append({key: dump_inline(value) for key, value in values_by_key(config).items()})
    differences = {}
    for key in dict.fromkeys(key for values in all_values for key in values):
        row = [values.get(key, "(absent)") for values in all_values]
        # without keyword arguments a section has the value {}, which is no difference
        if len(set(row)) > 1 and set(row) != {"(absent)", "{}"}:
            differences[key] = row
    return differences
