"""What a key of the schema carries besides its type: default, range, form, when it has an effect, and flags."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

TOO_LARGE = 2.0**64
"""No number of a config reaches it: such numbers overflow in float32 or in 64 bits somewhere."""


@dataclass(frozen=True)
class Range:
    """Which finite numbers are allowed: low to high, the ends included unless open.

    or_zero: 0 is allowed too, where low is more. Where high is infinite, numbers from 2^64 on are out of range.
    """

    low: float = 0.0
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    or_zero: bool = False

    def __contains__(self, number: float) -> bool:
        if self.or_zero and number == 0:
            return True
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        return above and below and abs(number) < TOO_LARGE  # not math.isfinite, which overflows for long integers

    def limits_for(self, number: float) -> str:
        """The range as text for an error about `number`; names the limit of 2^64 only where it was exceeded."""
        return f"{self} and less than 2^64" if self.high == math.inf and number >= TOO_LARGE else str(self)

    def __str__(self) -> str:
        if not (self.low_open or self.high_open or self.high == math.inf):
            high = f"{self.high:,}" if isinstance(self.high, int) else f"{self.high:g}"
            return f"{'0, or ' if self.or_zero else ''}{self.low:g} to {high}"
        low = f"more than {self.low:g}" if self.low_open else f"at least {self.low:g}"
        high = f"less than {self.high:g}" if self.high_open else f"at most {self.high:g}"
        return low if self.high == math.inf else f"{low} and {high}"


NOT_NEGATIVE = Range()
POSITIVE = Range(low_open=True)
COUNT = Range(1)
BATCH = Range(1, 10**9)
PIXELS = Range(1, 100_000)
SHARE = Range(0, 1)
SHARE_BELOW_1 = Range(0, 1, high_open=True)
POSITIVE_SHARE = Range(0, 1, low_open=True)
PERCENT = Range(0, 100)
RATIO = Range(0.001, 1000)
JITTER = Range(0, 1000)
ALPHA = Range(0.001, 1000, or_zero=True)  # of a beta distribution: numpy draws NaN from tiny ones


@dataclass(frozen=True)
class Condition:
    """When a key has an effect. text: what has to be the case. is_met: takes the whole Config."""

    text: str
    is_met: Callable[[Any], bool]


@dataclass(frozen=True)
class KeyInfo:
    """What the schema states about a key, or about all keys of a section.

    allowed: of the number, or of each number of a list. count, ascending: of a list. form: a regular expression for the
    text, or for each text of a list, and its description. needs: when the key has an effect; None: always. recipe:
    whether it decides what is computed, so that it is compared on resume. per_machine: whether the machines of a run
    may differ in it.
    """

    allowed: Range | None = None
    count: int | None = None
    ascending: bool = False
    form: tuple[str, str] | None = None
    needs: Condition | None = None
    recipe: bool = True
    per_machine: bool = False


def key(default: Any, allowed: Range | None = None, **info: Any) -> Any:
    """A field of the schema: a key with its default and, as keywords, the other attributes of `KeyInfo`."""
    metadata = {"info": KeyInfo(allowed, **info)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(of: type, **info: Any) -> Any:
    """A field of the schema that holds a section; the flags in `info` hold for all its keys."""
    return field(default_factory=of, metadata={"info": KeyInfo(**info)})
