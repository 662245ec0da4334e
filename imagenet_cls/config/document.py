"""`docs/config.md`, written from the schema: `python -m imagenet_cls.config.document > docs/config.md`.

Owns the page's form and its introduction. The comment block above a key in `schema.py` is its description, so that page
and source can't drift apart; a test fails when the page is older than the schema. Not used in a run.
"""

import ast
import inspect
import sys

from imagenet_cls.config import keys, reader, schema

INTRODUCTION = """\
# Config

<!-- Written by `python -m imagenet_cls.config.document`. Change schema.py or document.py, not this file. -->

A config is a YAML file of sections. What it does not say has the default that stands below.
`python tools/print_config.py CONFIG` shows it as a run will see it, `--origin` shows where each value comes from, and
`--diff OTHER` shows what another config does differently.

## Layers

Each layer says only what it changes, and a later one wins:

1. the defaults on this page,
2. the files named by `_base_`, depth first, in the order in which they stand there,
3. the file itself,
4. the words of the command line, `key.sub=value`.

Dictionaries merge key by key; lists and single values replace. `kwargs: {}` therefore takes nothing away.
`_base_: [_base_/models/resnet50.yaml, _base_/datasets/imagenet_224.yaml]` names paths relative to the file that says
it. A file that is reached twice counts once, at its first place. A circle is an error. An empty file is an empty layer.

## Command line

    python tools/train.py configs/resnet50.yaml seed=1 'augment.scale=[0.2, 1.0]' optimizer.kwargs.nesterov=true

What stands behind `=` is read as YAML; nothing at all is `null`. All words are one layer and have no order, so giving
the same key twice is an error.

## Components

`model`, `data`, `loss`, `optimizer` and `schedule` choose something by `name` and pass it `kwargs`. A layer that
changes the name starts that section anew, from the defaults of the new component, and then applies what the same layer
says. Momentum meant for `sgd` never reaches `adamw`. The learning rate has no default, so changing the optimizer
without stating `lr` is an error. Naming the same component again changes nothing else.

## Keys that do nothing

`mix.prob` without mixing, `ema.warmup` without an average, `eval.crop_pct` beside `eval.resize_px`: a key that is
written where it does nothing is an error, unless it has its default. Where a later layer takes away what a key needs
(`mix.mixup_alpha=0`, `ema.decay=null`), it falls back to its default, and nothing is said.

## Values

- `${section.key}` stands for the value of another key that holds one value or a list, once all layers are merged.
  Resolvers such as `${oc.env:HOME}` are refused, so that no saved config ever holds a secret. There is no way to write
  a literal `${`.
- `1e-4` is a number, here and in `kwargs`. `yes`, `no`, `on` and `off` are truth values, except where a key holds text:
  there what was written counts. `010` and dates are text. Numbers in quotes are text in `kwargs`.
- `???` means: has to be set by a later layer.
- Aliases of anchors (`*name`), merge keys (`<<`), tags (`!!...`), a key twice in one mapping, and more than one
  document are refused.

## Errors

Whatever is wrong is reported at once, one line each, with exit code 2, before torch is loaded:

    configs/mine.yaml:12: optimizer.lr: 'many' is not a number
    command line 'optimzer.lr=1': unknown key 'optimzer'; did you mean 'optimizer'?

Names of models and optimizers, and their `kwargs`, are compared with the libraries right after that, before data is
read.
"""


def comments() -> dict[tuple[str, str], str]:
    """The comment block directly above each key in `schema.py`, by class and key; "" for a key without one."""
    source = inspect.getsource(schema)
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        for statement in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                block: list[str] = []
                number = statement.lineno - 2  # the line above, counted from 0
                while lines[number].strip().startswith("#"):
                    block.insert(0, lines[number].strip().removeprefix("#").strip())
                    number -= 1
                found[(node.name, statement.target.id)] = " ".join(block)  # type: ignore[attr-defined]
    return found


def _type_text(hint: object) -> str:
    bare, optional = keys.split_optional(hint)
    text = keys.words_of(bare) if keys.is_text(bare) and bare is not str else inspect.formatannotation(bare)
    text = "dict" if keys.is_kwargs(bare) else text
    return f"{text} or null" if optional else text


def _default_text(path: keys.KeyPath) -> str:
    default = keys.default_of(path)
    return "none: must be stated" if default == "???" else f"`{reader.dump([default]).strip()[1:-1]}`"


def _section_lines(path: keys.KeyPath, section: type) -> list[str]:
    told = comments()
    lines = [f"## `{'.'.join(path)}`" if path else "## At the top level", ""]
    if path:
        lines += [(section.__doc__ or "").strip(), ""]
    for leaf, hint in keys.leaves().items():
        if leaf[:-1] == path:
            description = told[(section.__name__, leaf[-1])]
            lines.append(f"- **`{'.'.join(leaf)}`** ({_type_text(hint)}; default {_default_text(leaf)}).")
            lines.append(f"  {description}")
    if any(path == (component,) for component in schema.COMPONENT_DEFAULTS):
        own = schema.COMPONENT_DEFAULTS[path[0]]
        told_own = "; ".join(f"`{name}`: `{reader.dump([values]).strip()[2:-2]}`" for name, values in own.items())
        lines += ["", f"Components with defaults of their own: {told_own}"]
    return [*lines, ""]


def page() -> str:
    """The whole page, as Markdown."""
    parts = [section for section in keys.sections().items() if section[0]] + [((), schema.Config)]
    lines = [line for path, section in parts for line in _section_lines(path, section)]
    return INTRODUCTION + "\n" + "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
