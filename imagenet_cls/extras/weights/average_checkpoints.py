"""`tools/average_checkpoints.py`: the mean of the weights of several checkpoints.

Of one run: Izmailov et al. 2018, arXiv:1803.05407, section 3, "Averaging Weights Leads to Wider
Optima". Of several: Wortsman et al. 2022, arXiv:2203.05482, "Model soups". BatchNorm's running
statistics are averaged like weights.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagenet_cls.commands import cli
from imagenet_cls.errors import CheckpointError, UsageError, explain_content_errors
from imagenet_cls.files import explain_write_errors, write_file

if TYPE_CHECKING:
    from torch import Tensor

    from imagenet_cls.engine.stored_weights import Weights

RULES = {
    "last": "the newest N of a run folder",
    "best": "its N with the highest top-1, or mAP with data.labels multi",
}


def average_command(argv: Sequence[str]) -> None:
    """Write the average to --out: a checkpoint with the `state.json` of the last path, or a file of
    weights alone.
    """
    description = "Average the weights of checkpoints into one for test.py and predict.py."
    parser = cli.build_parser("average-checkpoints", description)
    parser.add_argument(
        "paths", nargs="+", type=cli.path, metavar="PATH", help="checkpoints, or one run folder"
    )
    parser.add_argument(
        "--out",
        type=cli.path,
        required=True,
        metavar="DIR",
        help="a new folder; or x.safetensors, for weights alone",
    )
    choice = parser.add_mutually_exclusive_group()
    for rule, meaning in RULES.items():
        choice.add_argument(f"--{rule}", type=cli.positive, metavar="N", help=meaning)
    parser.add_argument(
        "--weights", choices=("raw", "ema"), default="raw", help="which weights (default: raw)"
    )
    arguments = parser.parse_args(argv)
    paths, out, kind = arguments.paths, arguments.out, arguments.weights
    for rule in RULES:
        if (count := getattr(arguments, rule)) is not None:
            if len(paths) > 1:
                raise UsageError(
                    f"--{rule} takes one run folder, but {len(paths)} paths are given.",
                    "Give one.",
                )
            paths = choose(paths[0], rule, count, kind)
    if len(paths) < 2:
        raise UsageError(
            "An average needs two checkpoints or more.",
            "Give them, or a run folder with --last N or --best N.",
        )
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UsageError(f"{out} exists and is not overwritten.", "Give another --out.")
    from safetensors.torch import save

    from imagenet_cls.checkpoint.format import Snapshot, class_metadata, write_checkpoint

    weights_only = out.suffix == ".safetensors"
    average, sources = mean_of_weights(read_weights(paths, kind, weights_only))
    classes = {tuple(source.classes) for source in sources if source.classes is not None}
    if len(classes) > 1:
        raise CheckpointError(
            "The weights are of other classes, or in another order of them.",
            "Average weights of one task only.",
        )
    with explain_write_errors(out, "Give another --out."):
        out.parent.mkdir(parents=True, exist_ok=True)
        if weights_only:
            write_file(out, save(average, *map(class_metadata, classes)))
        else:
            states = [source.state or {} for source in sources]
            step = states[-1]["step"]
            state = {
                **states[-1],
                "progress": {"step": step, "evaluated_step": 0, "best": {}, "latest": {}},
                "scaler": {},
                "averaged": [
                    {"checkpoint": str(source.path), "step": state["step"], "weights": kind}
                    for source, state in zip(sources, states, strict=True)
                ],
            }
            out = write_checkpoint(
                out, Snapshot(average, {}, {"groups": [], "parameters": {}}, state)
            )
    print(
        f"averaged the weights of {len(paths)} checkpoints "
        f"({', '.join(path.name for path in paths)}) into {out}."
    )
    print("BatchNorm's running statistics, if any, are averaged too, not estimated again.")


def choose(run: Path, rule: str, count: int, kind: str) -> list[Path]:
    """`count` checkpoints of a run folder, oldest first, by one of `RULES`; among equal results
    the newest wins.

    kind: of weights, `raw` or `ema`. Raises CheckpointError for too few or damaged ones.
    """
    from imagenet_cls.checkpoint.folders import list_run, read_state, step_of
    from imagenet_cls.config.metrics import main_metric

    def result_of(path: Path) -> float:
        result = progress[path]["latest"][kind]
        return result[main_metric(result).field]

    fitting = paths = list_run(run)
    if rule == "best":
        progress = {path: read_state(path)["progress"] for path in paths}
        with explain_content_errors(CheckpointError, run):
            evaluated = [
                path
                for path, p in progress.items()
                if p["evaluated_step"] == p["step"] and kind in p["latest"]
            ]
            fitting = sorted(evaluated, key=result_of, reverse=True)
    if len(fitting) < count:
        raise CheckpointError(
            f"{run}: --{rule} {count} finds only {len(fitting)} of {len(paths)} checkpoints "
            f"({kind} weights).",
            "Ask for fewer, or train with checkpoint.keep_last=null, which keeps all.",
        )
    return sorted(fitting[:count], key=step_of)


def read_weights(
    paths: Sequence[Path], kind: str, weights_only: bool
) -> "Iterator[tuple[Path, Weights]]":
    """Each path with its weights.

    paths: checkpoints, run folders (their best one), or with `weights_only` files of any library.
    Raises CheckpointError if one is damaged, or of another model or task than the first.
    """
    from imagenet_cls.engine.stored_weights import open_weights
    from imagenet_cls.models.weights import without_wrappers

    first: Weights | None = None
    for path in paths:
        stored = open_weights(path, kind)
        if stored.state is None and not weights_only:
            raise UsageError(
                f"{path} is no checkpoint.",
                "Give checkpoints; or average files of weights with --out average.safetensors.",
            )
        tensors = stored.tensors
        if stored.state is None:
            tensors = without_wrappers(tensors, ())
        stored = replace(stored, by_kind={kind: tensors})
        if stored.warnings:
            raise CheckpointError(stored.warnings[0], "Give the checkpoints to average one by one.")
        if stored.state is not None:
            first = first or replace(stored, by_kind={})
            mine, others = required_settings(stored), required_settings(first)
            if different := [key for key in mine if mine[key] != others[key]]:
                text = f"{stored.path} and {first.path} differ in {', '.join(different)}"
                raise CheckpointError(
                    f"{text}.", "Average checkpoints of one architecture and one task only."
                )
        yield path, stored


def required_settings(stored: "Weights") -> dict[str, Any]:
    """What must be the same in checkpoints that are averaged: model without dropout, kind of
    labels, classes and preprocessing.
    """
    state = stored.state
    assert state is not None
    with explain_content_errors(CheckpointError, stored.path):
        config = state["config"]
        name, kwargs = (config["model"][key] for key in ("name", "kwargs"))
        return {
            "data.labels": config["data"].get("labels", "single"),  # older ones lack the key
            "model.name": name if ":" in name else name.partition(".")[0],
            "model.kwargs": {
                k: v
                for k, v in kwargs.items()
                if not re.search(r"drop|stochastic_depth|^weights$", k)
            },
            **{key: state[key] for key in ("num_classes", "classes", "preprocessing")},
        }


def mean_of_weights(
    all_weights: "Iterable[tuple[Path, Weights]]",
) -> "tuple[dict[str, Tensor], list[Weights]]":
    """The mean of weights, summed in float64, and what they are from, without the tensors; one
    state dict at a time is in memory.

    Integers are taken from the last one. Raises CheckpointError if names, shapes or dtypes differ.
    """
    sums: dict[str, Tensor] = {}
    sources: list[Weights] = []
    for count, (path, stored) in enumerate(all_weights, start=1):
        sources.append(replace(stored, by_kind={}))
        state = stored.tensors
        kinds = {key: (value.shape, value.dtype) for key, value in state.items()}
        if count == 1:
            first, expected = path, kinds
        if different := sorted({key for key, _ in kinds.items() ^ expected.items()}):
            raise CheckpointError(
                f"{path} has another model than {first}: {len(different)} tensors differ, such as "
                f"{different[0]}.",
                "Average checkpoints of one architecture only.",
            )
        for key, value in state.items():
            if value.is_floating_point():
                sums[key] = sums[key] + value if key in sums else value.double()
            else:
                sums[key] = value
    for key, (_, dtype) in expected.items():
        if dtype.is_floating_point:
            sums[key] = (sums[key] / count).to(dtype)
    return sums, sources
