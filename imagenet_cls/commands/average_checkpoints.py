"""`tools/average_checkpoints.py`: the mean of the weights of several checkpoints.

Of the end of one run: Izmailov et al. 2018, arXiv:1803.05407, section 3, "Averaging Weights Leads to Wider Optima". Of
several runs from one start: Wortsman et al. 2022, arXiv:2203.05482, "Model soups". Unlike there, BatchNorm's running
statistics are averaged like weights, not estimated again with training images.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagenet_cls.commands import program
from imagenet_cls.errors import CheckpointError, UsageError
from imagenet_cls.files import explain_write_errors, write_file
from imagenet_cls.lookup import is_factory_name

if TYPE_CHECKING:
    from torch import Tensor

    from imagenet_cls.checkpoint.format import Snapshot

RULES = {
    "last": "the newest N of a run folder",
    "best": "its N with the highest top-1",
    "improving": "its newest N that were the best so far when they were saved",
}


def main() -> None:
    """`tools/average_checkpoints.py`."""
    program.main(average_command)


def average_command(argv: Sequence[str]) -> None:
    description = "Average the weights of checkpoints into one for test.py and predict.py."
    parser = program.build_parser("average_checkpoints.py", description)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="checkpoints, or one run folder")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a new folder; or x.safetensors, for weights alone"
    )
    choice = parser.add_mutually_exclusive_group()
    for rule, meaning in RULES.items():
        choice.add_argument(f"--{rule}", type=program.positive, metavar="N", help=meaning)
    parser.add_argument("--weights", choices=("raw", "ema"), default="raw", help="which weights (default: raw)")
    arguments = parser.parse_args(argv)
    paths: list[Path] = arguments.paths
    for rule in RULES:
        if (count := getattr(arguments, rule)) is not None:
            if len(paths) > 1:
                raise UsageError(f"--{rule} takes one run folder, but {len(paths)} paths are given.\nGive one.")
            paths = choose(paths[0], rule, count, arguments.weights)
    print(average_checkpoints(paths, arguments.out, arguments.weights))


def choose(run: Path, rule: str, count: int, kind: str) -> list[Path]:
    """`count` checkpoints of a run folder, oldest first, chosen by their records of the `kind` of weights.

    rule: one of `RULES`; among equal top-1 the newest wins. Raises CheckpointError for too few or damaged ones.
    """
    from imagenet_cls.checkpoint.format import checkpoint_content, list_checkpoints, verified_files

    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    with checkpoint_content(run):
        states = {p: json.loads(verified_files(p, "state.json")["state.json"]) for p in list_checkpoints(folder)}
        progress = {path: state["progress"] for path, state in states.items()}  # newest first
        evaluated = [path for path, p in progress.items() if p["evaluated_step"] == p["step"] and kind in p["latest"]]
        fitting = {
            "last": list(states),
            "best": sorted(evaluated, key=lambda path: progress[path]["latest"][kind]["top1_pct"], reverse=True),
            "improving": [path for path in evaluated if progress[path]["best"][kind]["step"] == progress[path]["step"]],
        }[rule]
        if len(fitting) < count:
            raise CheckpointError(
                f"{run}: --{rule} {count} finds {len(fitting)} checkpoints of {len(states)} ({kind} weights).\n"
                "Ask for fewer, or train with checkpoint.keep_last=null, which keeps all."
            )
        return sorted(fitting[:count], key=lambda path: states[path]["step"])


def average_checkpoints(paths: Sequence[Path], out: Path, kind: str = "raw") -> str:
    """Average checkpoints and write the result to `out`; returns a message about it.

    paths: checkpoint folders, or run folders, which stand for their best one. kind: `raw` or `ema`. out: a new folder
    for one checkpoint, whose `state.json` is that of the last path; or a new `.safetensors` file for weights alone,
    where `paths` may be files of other libraries, too. Raises CheckpointError for damaged or different checkpoints,
    UsageError for fewer than two, or an `out` that exists.
    """
    from safetensors.torch import save

    from imagenet_cls.checkpoint.format import Progress, Snapshot, write_checkpoint
    from imagenet_cls.models.weights import read_weights

    if len(paths) < 2:
        ways = ", ".join(f"--{rule} N" for rule in RULES)
        raise UsageError(f"an average needs two checkpoints or more.\nGive them, or a run folder with one of {ways}.")
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not overwritten.\nGive another --out.")
    weights_only = out.suffix == ".safetensors"
    snapshots: list[Snapshot] = []

    def weights() -> "Iterator[tuple[Path, Mapping[str, Tensor]]]":
        for path in paths:
            if weights_only and not path.is_dir():
                yield path, read_weights(path, averaged=kind == "ema")
                continue
            snapshot = load_intact(path)
            if snapshots:
                check_same_task(snapshot, snapshots[-1])
            tensors = snapshot.ema if kind == "ema" else snapshot.model
            if tensors is None:
                raise CheckpointError(f"{snapshot.path} has no EMA.\nAverage its raw weights, or give another one.")
            snapshots.append(Snapshot({}, {}, {}, snapshot.state, path=snapshot.path))
            yield path, tensors

    average = mean_of_weights(weights())
    with explain_write_errors(out, "Give another --out."):
        if weights_only:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_file(out, save(average))
        else:
            out.mkdir(parents=True, exist_ok=True)
    if not weights_only:
        state = snapshots[-1].state | {
            "progress": Progress(step=snapshots[-1].state["step"]).to_dict(),
            "scaler": {},
            "averaged": [{"checkpoint": str(s.path), "step": s.state["step"], "weights": kind} for s in snapshots],
        }
        out = write_checkpoint(out, Snapshot(average, {}, {"groups": [], "parameters": {}, "on_host": []}, state))
    return (
        f"averaged the weights of {len(paths)} checkpoints ({', '.join(path.name for path in paths)}) into {out}.\n"
        "BatchNorm's running statistics, if any, are averaged too, not estimated again."
    )


def load_intact(path: Path) -> "Snapshot":
    from imagenet_cls.checkpoint.select import load_best

    if path.is_file():
        raise UsageError(f"{path} is a file with weights alone.\nWrite weights alone, too: --out average.safetensors")
    snapshot, _, damage = load_best(path)
    if damage:
        raise CheckpointError(f"{damage[0]}\nGive the checkpoints to average one by one.")
    return snapshot


def check_same_task(snapshot: "Snapshot", other: "Snapshot") -> None:
    """Raise CheckpointError where two checkpoints have other models, classes or preprocessing."""
    here, there = architecture_of(snapshot), architecture_of(other)
    if here != there:
        raise CheckpointError(
            f"{snapshot.path} has another model than {other.path}: {here[0]} {here[1]}, and {there[0]} {there[1]}.\n"
            "Average checkpoints of one architecture only."
        )
    if any(snapshot.state[key] != other.state[key] for key in ("classes", "num_classes", "preprocessing")):
        raise CheckpointError(
            f"{snapshot.path} was trained with other classes, or another normalisation, than {other.path}.\n"
            "Average checkpoints of one task only."
        )


def architecture_of(snapshot: "Snapshot") -> tuple[str, dict[str, Any]]:
    """Name and arguments of the model, without what does not matter in evaluation: the tag of the pretrained weights,
    and dropout of any kind, in which the runs of a soup may differ."""
    model = snapshot.state["config"]["model"]
    name = model["name"] if is_factory_name(model["name"]) else model["name"].partition(".")[0]
    kwargs = model["kwargs"].items()
    return name, {key: value for key, value in kwargs if not re.search(r"drop|stochastic_depth|^weights$", key)}


def mean_of_weights(states: "Iterable[tuple[Path, Mapping[str, Tensor]]]") -> "dict[str, Tensor]":
    """The mean of state dicts, given with their paths; only one at a time is in memory.

    Floating-point tensors are summed in float64 and keep their dtype; others (BatchNorm's counters) are those of the
    last one. Raises CheckpointError where names, shapes or dtypes differ.
    """
    sums: dict[str, Tensor] = {}
    expected, first, count = {}, None, 0
    for path, state in states:
        kinds = {key: (tuple(value.shape), value.dtype) for key, value in state.items()}
        if count == 0:
            expected, first = kinds, path
        if differing := sorted(key for key in {*kinds, *expected} if kinds.get(key) != expected.get(key)):
            raise CheckpointError(
                f"{path} has another model than {first}: {len(differing)} tensors differ, such as {differing[0]}.\n"
                "Average checkpoints of one architecture only."
            )
        for key, value in state.items():
            if not value.is_floating_point():
                sums[key] = value
            else:
                sums[key] = sums[key] + value if count else value.double()
        count += 1
    means = {key: value / count if value.is_floating_point() else value for key, value in sums.items()}
    return {key: value.to(expected[key][1]) for key, value in means.items()}
