"""Checks at the start that all ranks run the same code, config and data.

Each machine has its own copy of them.

Ranks that differ would train different recipes into one model, or wait for each other in different
collectives.
"""

import hashlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from imagenet_cls.config.keys import per_machine_keys
from imagenet_cls.config.load import comparable_values
from imagenet_cls.config.rules import EVALUATED, code_names
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import ConfigError, DataError, UsageError
from imagenet_cls.lookup import import_from_cwd, is_factory_name
from imagenet_cls.parallel.collectives import find_differences, mark_printed_by_main
from imagenet_cls.parallel.environment import name_ranks
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.versions import library_versions


def check_same_code(config: Config, context: RankContext, training: bool) -> None:
    """Raise UsageError, on all ranks, unless they have the same libraries and the same code of this
    package and of the modules that the config names.

    A collective. Call it before `check_same_config`, since other versions may have other keys.
    training: false for an evaluation, which uses only some of these modules.
    """
    if context.cpu_group is None:
        return
    own = {"Python": "{}.{}".format(*sys.version_info), **library_versions()}
    sources = {"imagenet_cls": Path(__file__).parents[1]} | user_modules(config, training)
    code = {f"the code of {name}": digest_of_sources(path) for name, path in sources.items()}
    different = find_differences(own | code, context)
    if different:
        ranks = sorted({rank for listed in different.values() for rank in listed})
        names = [f"{name} {own[name]}" if name in own else name for name in different]
        raise mark_printed_by_main(
            UsageError(
                f"{name_ranks(ranks)} of {context.world_size} and rank 0 differ in: "
                f"{', '.join(names)}",
                "Install the same code and the same libraries on every machine.",
            ),
            context,
        )


def user_modules(config: Config, training: bool = True) -> dict[str, Path]:
    """The files or folders of the modules that a config names, in `imports` or as
    `my_module:my_factory`. training: see `check_same_code`.

    Modules that can't be imported are left out: the check of names reports them.
    """
    code = code_names(config, ("",) if training else EVALUATED)
    factories = [name for name in code if is_factory_name(name)]
    names = {name.partition(":")[0] for name in factories} | set(config.imports)
    found = {}
    for name in sorted(names - {"torch", "torchvision", "timm"}):
        with suppress(Exception):
            path = Path(str(import_from_cwd(name).__file__))
            found[name] = path.parent if path.name == "__init__.py" else path
    return found


def digest_of_sources(path: Path) -> str:
    """A digest of the names and contents of all Python files in a folder, or of one file."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    for file in files:
        digest.update(file.relative_to(path.parent).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def check_same_config(config: Config, context: RankContext) -> None:
    """Raise ConfigError, on all ranks, unless all have the same config, except for keys that may
    differ between machines. A collective.
    """
    free = per_machine_keys()
    own = {key: repr(value) for key, value in comparable_values(config).items() if key not in free}
    lines = [
        f"{key}: {name_ranks(ranks)} and rank 0 differ; start all ranks with the same config and "
        "overrides"
        for key, ranks in find_differences(own, context).items()
    ]
    if lines:
        raise mark_printed_by_main(ConfigError(lines), context)


def check_same_data(digests: Mapping[str, str], context: RankContext) -> None:
    """Raise DataError, on all ranks, unless all have the same images.

    A collective. digests: by what they are digests of, such as `training images`.
    """
    for name, ranks in find_differences(dict(digests), context).items():
        raise mark_printed_by_main(
            DataError(
                f"The {name} differ between {name_ranks(ranks)} and rank 0: other files, or other "
                "classes.",
                "Give every machine the same dataset; its location (data.root) may differ.",
            ),
            context,
        )
