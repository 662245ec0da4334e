"""Writes docs/config.md from the schema and docs/recipes.md from the configs: `python
docs/generate.py`.

`--check` writes nothing, and ends with exit code 1 if a page is out of date.
"""

import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from imagenet_cls.config import keys, reader, schema  # noqa: E402
from imagenet_cls.config.load import DEMO, load_config  # noqa: E402
from imagenet_cls.config.schema import Config  # noqa: E402

CONFIGS = DEMO.parent

CONFIG_INTRODUCTION = """\
# Config

<!-- Written by `python docs/generate.py` from imagenet_cls/config/schema.py. Don't edit this file. -->

A config is a YAML (or JSON) file of sections. A key that it does not set has the default below.
`python tools/print_config.py CONFIG` prints the resolved config, `--origin` adds where each value comes from, and
`--diff OTHER` prints only the differences to another config.

## Layers

Later layers override earlier ones:

1. the defaults on this page,
2. the files listed under `_base_`, depth first, in their order,
3. the file itself,
4. the overrides on the command line, `key.sub=value`.

Mappings merge key by key, so `kwargs: {}` removes nothing; lists and single values are replaced.

Paths in `_base_` are relative to the file. A file that is reached twice counts once, at its first place. A config that
is no file is one of this package: `configs/resnet/resnet50_rsb_a3.yaml`, or `resnet50_rsb_a3` for short.

## Command line

    python tools/train.py configs/resnet50.yaml seed=1 'augment.scale=[0.2, 1.0]' optimizer.kwargs.nesterov=true

A text is what follows `=`, unless that begins with a quotation mark. Other values are read as YAML. An empty value is
`null`. If a key is given twice, the last value is used. There are also [short keys](your_data.md#short-keys).

Some keys may not be set together (below: "Not with"). A key on the command line then unsets that of the config.

## Components

`model`, `data`, `loss`, `optimizer` and `schedule` choose something by `name` and pass it `kwargs`. A layer that
changes the name first resets that section to the defaults. So momentum meant for `sgd` never reaches `adamw`, and a new
optimizer needs its `lr`. A warning lists each value that a new name removed, and where it was set.

A key that is set without those that it needs (below: "Needs") has no effect and gives a warning.

## Values

- `${section.key}` is replaced by the value of another key, after all layers are merged. Resolvers such as
  `${oc.env:HOME}` are errors, so that no saved config contains a secret.
- `1e-4` is a number. `yes`, `no`, `on` and `off` are booleans, except for text keys. `010` and dates are text. Quoted
  numbers are text in `kwargs`.
- `???` marks a value that a later layer has to set.
- Aliases (`*name`), tags (`!!...`), duplicate keys, and several documents in a file are errors.
- Removed keys of earlier versions are ignored in a checkpoint, and in a config if they have their former defaults.

## Errors

All problems are reported at once, one line each, with exit code 2: first those of files, then of keys and values, then
of values that do not fit together. After that, names of models and optimizers, and their `kwargs`, are checked against
the libraries, before data is read.

    configs/mine.yaml:12: optimizer.lr: 'many' is not a number
    command line 'optimzer.lr=1': optimzer: unknown key; did you mean 'optimizer'?
"""

# What people search for who don't know the name of the key.
SYNONYMS = {
    "data.balance": "class imbalance",
    "parallel.mode": "multi gpu",
    "schedule.warmup_epochs": "warm-up",
    "train.micro_batch_size": "gradient accumulation",
}


def comments() -> dict[tuple[str, str], str]:
    """The comment block directly above each key in `schema.py`, by class and key; "" for a key
    without one.
    """
    found, section = {}, ""
    block: list[str] = []
    for line in inspect.getsource(schema).splitlines():
        if line.startswith("    # "):
            block.append(line.strip().removeprefix("# "))
            continue
        if match := re.match(r"class (\w+)", line):
            section = match[1]
        elif match := re.match(r"    (\w+): ", line):
            found[section, match[1]] = " ".join(block)
        block = []
    return found


# Where the range of the schema says too little.
TYPE_TEXTS = {"data.channels": "int, 3 or 1"}


def _type_text(key: str) -> str:
    if key in TYPE_TEXTS:
        return TYPE_TEXTS[key]
    hint = keys.value_types()[key]
    bare, optional = keys.split_optional(hint)
    texts = ["null"] if optional and keys.default_of(key) is not None else []
    if keys.choices(bare):
        return ", or ".join([keys.describe_type(bare), *texts])
    if bare == schema.Kwargs:
        return "dict"
    types = [
        inspect.formatannotation(member)
        for member in keys.members(hint)
        if member is not type(None) and not keys.choices(member)
    ]
    text = " or ".join(types)
    allowed = keys.info(key).allowed
    if allowed is not None:
        text += f", {allowed}"
    return ", or ".join([text, *keys.choices(hint), *texts])


def _default_text(key: str) -> str:
    default = keys.default_of(key)
    return "none: must be set" if default == schema.REQUIRED else f"`{reader.dump_inline(default)}`"


def _limits_text(key: str) -> str:
    info = keys.info(key)
    texts = [f"At most `{info.at_most}`."] if info.at_most else []
    if info.excludes:
        texts.append(f"Not with {', '.join(f'`{other}`' for other in info.excludes)}.")
    texts += [f"Needs `{info.needs}`."] if info.needs else []
    return " ".join(texts)


def _section_lines(section: str) -> list[str]:
    dataclass_type = keys.sections()[section]
    texts = comments()
    if section:
        lines = [f"## `{section}`", "", inspect.getdoc(dataclass_type) or ""]
    else:
        lines = ["## At the top level"]
    for key in keys.value_types():
        parent, _, name = key.rpartition(".")
        if parent == section:
            synonym = f" ({SYNONYMS[key]})" if key in SYNONYMS else ""
            comment = texts[dataclass_type.__name__, name].replace("](docs/", "](")
            line = f"{_type_text(key)}; default {_default_text(key)}. {comment} {_limits_text(key)}"
            lines += ["", f"### `{key}`{synonym}", "", line.rstrip()]
    if section == "optimizer":
        for name, kwargs in schema.DEFAULT_KWARGS.items():
            lines += ["", f"Defaults of `{name}`: `kwargs: {reader.dump_inline(kwargs)}`"]
    return [*lines, ""]


def config_page() -> str:
    """docs/config.md."""
    lines = [
        line
        for section in sorted(keys.sections(), key=lambda name: not name)
        for line in _section_lines(section)
    ]
    return CONFIG_INTRODUCTION + "\n" + "\n".join(lines).rstrip("\n") + "\n"


# Folders of configs, in the order of the page. A new folder needs a line here.
FAMILIES = [
    "resnet",
    "resnext",
    "mobilenet",
    "efficientnet",
    "regnet",
    "densenet",
    "ghostnet",
    "convnext",
    "deit",
    "vit",
    "swin",
    "maxvit",
    "cifar",
    "fashion_mnist",
]

RECIPES_INTRODUCTION = """\
# Recipes

<!-- Written by `python docs/generate.py` from the configs. Don't edit this file. -->

Each config below has the settings of a published recipe, and names its source. To train on eight GPUs:

    bash scripts/dist_train.sh configs/resnet/resnet50_tv_v2.yaml 8

"Claimed" is the source's top-1 accuracy on ImageNet-1k's validation set, in percent, with one center crop (FFCV: also
with its mirror image); for CIFAR and Fashion-MNIST, on their test images. The claims for Fashion-MNIST are for 300
epochs. {ours}

"px" is the side of images in training and in evaluation. `train.micro_batch_size` is in most configs what each GPU of
the source had. `expect.note` in the config has the notes. `deviates`: settings that no key expresses. `left out`: what
the source's script adds, and the keys for it. `uncertain`: what the source does not state, or what was not checked.

For all recipes: random numbers differ from the source's; an epoch ends with the last whole batch; `train.precision` is
`auto`; and torchvision's moving average copies the weights during the warm-up, where here only its first update does.
Single parts and whole steps were compared with timm, torchvision and plain torch (`tests/parity/`, `tests/quick/`).

"""

OURS = '"Ours" is that of a run with this repository. Other recipes were not trained here.'
NONE_TRAINED = "None of these recipes was trained here."
NOTES = ("deviates", "left out", "uncertain")


@dataclass(frozen=True)
class Recipe:
    """A config that names a source. path: relative to `configs/`."""

    path: Path
    config: Config

    @property
    def family(self) -> str:
        """The folder of the config; those at the top are ResNets."""
        return self.path.parent.name or "resnet"

    @property
    def accuracy(self) -> str:
        """The claimed top-1, and that of a run with this repository."""
        expect = self.config.expect
        claimed = _percent(expect.claimed_top1_pct) or "no single figure"
        ours = _percent(expect.ours_top1_pct)
        return f"{claimed}; ours {ours}" if ours else claimed

    @property
    def row(self) -> str:
        """Its row of the table."""
        config = self.config
        sizes = config.augment.progressive.sizes_px
        cells = [
            f"[`{self.path.stem}`](../configs/{self.path.as_posix()})",
            f"`{config.model.name}`",
            str(config.train.epochs),
            f"{config.train.global_batch_size:,}",
            f"{'-'.join(map(str, sizes or [config.augment.size_px]))}, {config.eval.crop_px}",
            self.accuracy,
            ", ".join(kind for kind in NOTES if f"{kind}: " in (config.expect.note or "")),
        ]
        return f"| {' | '.join(cells)} |"


def recipes() -> list[Recipe]:
    """All recipes, in the order of the page: by family, then by name, numbers in numeric order."""
    found = []
    for path in CONFIGS.rglob("*.yaml"):
        relative = path.relative_to(CONFIGS)
        if relative.parts[0] != "_base_":
            config = load_config(path).config
            if config.expect.source is not None:
                found.append(Recipe(relative, config))
    return sorted(
        found, key=lambda recipe: (FAMILIES.index(recipe.family), _natural(recipe.path.stem))
    )


def recipes_page() -> str:
    """docs/recipes.md."""
    found = recipes()
    header = "| config | model | epochs | batch | px | claimed | notes |"
    lines = [header, f"|{'---|' * 7}", *(recipe.row for recipe in found)]
    trained = any(recipe.config.expect.ours_top1_pct is not None for recipe in found)
    introduction = RECIPES_INTRODUCTION.format(ours=OURS if trained else NONE_TRAINED)
    return introduction + "\n".join([*lines, ""])


def _percent(number: float | None) -> str:
    return "" if number is None else f"{number:g}"


def _natural(name: str) -> list[str | int]:
    """A sort key with numbers in numeric order: `resnet18_ffcv_88e`, `resnet50_ffcv_16e`,
    `resnet101`.
    """
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def main(check_only: bool) -> int:
    """Write the pages, or check them. Returns the exit code."""
    pages = {DOCS / "config.md": config_page(), DOCS / "recipes.md": recipes_page()}
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check_only:
            print(f"{path} is out of date: run python docs/generate.py")
        else:
            path.write_text(pages[path])
            print(f"{path} written")
    return int(check_only and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
