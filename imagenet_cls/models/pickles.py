"""What a pickle would call, read off without running it.

Owns the names for a refusal: torch's restricted loader stops at the first byte that it doesn't know, which in old forms
of checkpoints and new ones of pickles comes before anything that tells a user what the file is about. Called by
`models.weights`, once that loader has refused a file.
"""

import io
import pickletools
import re
import tarfile
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

# Enough for the structure of any checkpoint, whose tensors lie elsewhere, and no more, whatever a header promises: how
# many pickles of a file are looked at, how much of each, and what of all of them.
_MOST_PICKLES = 8
_MOST_BYTES = 16 * 2**20
_MOST_OPCODES = 300_000

# What every checkpoint asks for: to put tensors, containers and options together.
_HARMLESS = re.compile(
    r"torch\.\w*Storage|torch\.Size|torch\.device|torch\.(float|bfloat|int|uint|complex|bool)\d*"
    r"|torch\._utils\._rebuild_\w+|collections\.(OrderedDict|defaultdict)|argparse\.Namespace"
    r"|copy_reg\._reconstructor|_codecs\.encode|(__builtin__|builtins)\.(object|set)"
)


def foreign_global(path: Path) -> str | None:
    """A function or class, as `module.name`, that unpickling this file would look up beyond what tensors and containers
    need, the first that is not torch's own if there is one; None where there is none, or the file is no pickle.

    path: a pickle, or a zip or tar of them, as `torch.save` of any age wrote.
    """
    try:
        opcodes = iter(range(_MOST_OPCODES))
        found = [
            name
            for data in islice(_pickles(path), _MOST_PICKLES)
            for name in _globals(data, opcodes)
            if not _HARMLESS.fullmatch(name)
        ]
    except Exception:  # an archive can be broken in nearly as many ways as there are exceptions; it was refused already
        return None
    return next((name for name in found if not name.startswith("torch.")), found[0] if found else None)


def _pickles(path: Path) -> Iterator[bytes]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    with archive.open(name) as data:
                        yield data.read(_MOST_BYTES)
        return
    with path.open("rb") as file:
        start = file.read(_MOST_BYTES)
    if start[257:262] != b"ustar":
        yield start
        return
    with tarfile.open(path, "r:") as archive:  # never compressed
        for entry in archive:
            if (member := archive.extractfile(entry)) is not None:
                yield member.read(_MOST_BYTES)


def _globals(data: bytes, opcodes: Iterator[int]) -> Iterator[str]:
    """The names in pickles that lie one behind the other, up to the first byte that belongs to none, or the last of
    `opcodes`."""
    stream = io.BytesIO(data)
    while stream.tell() < len(data) and next(opcodes, None) is not None:
        strings: list[str] = []
        memo: dict[object, str] = {}
        latest = ""
        try:
            for _, (opcode, argument, _) in zip(opcodes, pickletools.genops(stream), strict=False):
                if opcode.name in ("GLOBAL", "INST"):
                    yield str(argument).replace(" ", ".", 1)
                elif opcode.name == "STACK_GLOBAL" and len(strings) > 1:  # module and name are the two strings on top
                    yield ".".join(strings[-2:])
                elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
                    strings.append(memo.get(argument, ""))
                elif opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
                    memo[argument] = latest
                elif opcode.name == "MEMOIZE":
                    memo[len(memo)] = latest
                elif isinstance(argument, str):
                    strings.append(argument)
                latest = argument if isinstance(argument, str) else ""
        except (ValueError, OverflowError, UnicodeDecodeError):
            return
