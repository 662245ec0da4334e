"""Averaging the weights of several checkpoints: those of the end of a run (Izmailov et al. 2018, arXiv:1803.05407,
section 3, "Averaging Weights Leads to Wider Optima"), or of several runs from one start (Wortsman et al. 2022,
arXiv:2203.05482, "Model soups").

Owns the choice of a run's checkpoints, the average, and the checkpoint that it is written as, which evaluates and
predicts like any other and says what it was made of. Refuses to average what does not belong together, to write over
anything, and to be gone on from: an average has no optimizer state. BatchNorm's running statistics are averaged like
weights, and not estimated anew with training images. Called by `tools/average_checkpoints.py`.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from imagenet_cls.checkpoint.format import Snapshot, list_checkpoints, verified_files, write_checkpoint
from imagenet_cls.checkpoint.optimizer_state import Progress
from imagenet_cls.checkpoint.select import load_best
from imagenet_cls.errors import CheckpointError, ResourceError, UsageError
from imagenet_cls.lookup import is_factory_name
from imagenet_cls.models.weights import read_weights

RULES = {
    "last": "the newest N of a run folder",
    "best": "its N with the highest top-1",
    "improving": "its newest N that were the best so far when they were saved",
}
# What a checkpoint's outputs mean, and what its inputs are.
_MEANING = ("classes", "num_classes", "preprocessing")


def choose(run: Path, rule: str, count: int, kind: str) -> list[Path]:
    """`count` checkpoints of a run folder, oldest first, by their own records of the `kind` of weights.

    rule: one of `RULES`; of checkpoints with the same top-1 the newest is taken. Raises CheckpointError where there are
    too few, or one of them is damaged.
    """
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    states = {path: json.loads(verified_files(path, "state.json")["state.json"]) for path in list_checkpoints(folder)}
    progress = {path: state["progress"] for path, state in states.items()}  # newest first
    evaluated = [path for path, p in progress.items() if p["evaluated_step"] == p["step"] and kind in p["latest"]]
    fit = {
        "last": list(states),
        "best": sorted(evaluated, key=lambda path: progress[path]["latest"][kind]["top1_pct"], reverse=True),
        "improving": [path for path in evaluated if progress[path]["best"][kind]["step"] == progress[path]["step"]],
    }[rule]
    if len(fit) < count:
        raise CheckpointError(
            f"{run}: {len(fit)} checkpoints fit --{rule} {count} ({kind} weights; {len(states)} are there).\n"
            "Ask for fewer, or train with checkpoint.keep_last=null, which keeps all."
        )
    return sorted(fit[:count], key=lambda path: states[path]["step"])


def average_checkpoints(paths: Sequence[Path], out: Path, kind: str = "raw") -> str:
    """Average checkpoints and write the average to `out`; returns a sentence about it.

    paths: checkpoint folders, or run folders, which stand for their best one. kind: `raw` or `ema`. out: a new folder
    for one checkpoint; or a new `.safetensors` file for weights alone, which may come from foreign files, too (kind
    matters to those that hold both). Raises CheckpointError where they are damaged or do not belong together,
    UsageError for fewer than two and for a place that is taken.
    """
    if len(paths) < 2:
        ways = ", ".join(f"--{rule} N" for rule in RULES)
        raise UsageError(f"an average needs two checkpoints or more.\nName them, or a run folder with one of {ways}.")
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise UsageError(f"{out} is there already and is not written over.\nName another place with --out.")
    written = _write_weights(paths, out, kind) if out.suffix == ".safetensors" else _write_checkpoint(paths, out, kind)
    return (
        f"averaged the weights of {len(paths)} checkpoints ({', '.join(path.name for path in paths)}) into {written}.\n"
        "BatchNorm's running statistics, where there are some, are averaged, too, and not estimated anew."
    )


def _write_weights(paths: Sequence[Path], out: Path, kind: str) -> Path:
    average = Average()
    last = None
    for path in paths:
        if path.is_dir():
            snapshot = _snapshot(path)
            _refuse_other_meaning(snapshot, last)
            average.add(path, _weights(snapshot, kind))
            last = snapshot
        else:
            average.add(path, read_weights(path, averaged=kind == "ema"))
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        save_file(average.result(), out)
    return out


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ResourceError(f"can't write {out}: {error}\nName another place with --out.") from error


def _write_checkpoint(paths: Sequence[Path], out: Path, kind: str) -> Path:
    """What the average's `state.json` says of classes, preprocessing and config is the last one's."""
    average, last = Average(), None
    sources = []
    for path in paths:
        snapshot = _snapshot(path)
        _refuse_other_meaning(snapshot, last)
        average.add(path, _weights(snapshot, kind))
        sources.append({"checkpoint": str(snapshot.path), "step": snapshot.state["step"], "weights": kind})
        last = snapshot
    assert last is not None
    progress = Progress(step=last.state["step"]).to_dict()
    state = {**last.state, "progress": progress, "scaler": {}, "averaged": sources}
    numbers: dict[str, Any] = {"groups": [], "parameters": {}, "on_host": []}
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
    return write_checkpoint(out, Snapshot(average.result(), {}, numbers, state))


def _refuse_other_meaning(snapshot: Snapshot, last: Snapshot | None) -> None:
    """Raise CheckpointError where the same names and shapes of tensors mean something else than in the `last` one."""
    if last is None:
        return
    here, there = _architecture(snapshot), _architecture(last)
    if here != there:
        raise CheckpointError(
            f"{snapshot.path} is of another model than {last.path}: {_named(*here)}, and {_named(*there)}.\n"
            "Average checkpoints of one architecture only."
        )
    if any(snapshot.state[key] != last.state[key] for key in _MEANING):
        raise CheckpointError(
            f"{snapshot.path} was trained on other classes, or with another normalisation, than {last.path}.\n"
            "Average checkpoints that mean the same."
        )


def _architecture(snapshot: Snapshot) -> tuple[str, dict[str, Any]]:
    """Name and keywords of the model, without what makes no other one of it in evaluation: the tag of the weights that
    it started from, and dropout of any kind, in which the runs of a soup may differ."""
    model = snapshot.state["config"]["model"]
    name = model["name"] if is_factory_name(model["name"]) else model["name"].partition(".")[0]
    kwargs = model["kwargs"].items()
    return name, {key: value for key, value in kwargs if not re.search(r"drop|stochastic_depth|^weights$", key)}


def _named(name: str, kwargs: Mapping[str, Any]) -> str:
    return f"{name} {dict(kwargs)}" if kwargs else name


class Average:
    """The mean of state dicts that are added one by one, so that only one of them is in memory beside it.

    Floating-point tensors are summed in float64 and come out in their own dtype; others (BatchNorm's counters) are the
    last one's.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """path: for the message of the CheckpointError where names, shapes or dtypes differ from the first one's."""
        kinds = {key: (tuple(value.shape), value.dtype) for key, value in state.items()}
        if self.count == 0:
            self.kinds, self.first = kinds, path
        if kinds != self.kinds:
            differing = sorted(key for key in {*kinds, *self.kinds} if kinds.get(key) != self.kinds.get(key))
            raise CheckpointError(
                f"{path} is of another model than {self.first}: {len(differing)} tensors differ, such as "
                f"{differing[0]}.\nAverage checkpoints of one architecture only."
            )
        for key, value in state.items():
            if value.is_floating_point():
                self.sums[key] = self.sums[key] + value if self.count else value.double()
            else:
                self.sums[key] = value
        self.count += 1

    def result(self) -> dict[str, Tensor]:
        means = {key: value / self.count if value.is_floating_point() else value for key, value in self.sums.items()}
        return {key: value.to(self.kinds[key][1]) for key, value in means.items()}


def _snapshot(path: Path) -> Snapshot:
    if path.is_file():
        raise UsageError(f"{path} is a file with weights alone.\nWrite weights alone, too: --out average.safetensors")
    snapshot, _, damage = load_best(path)
    if damage:
        raise CheckpointError(f"{damage[0]}\nName the checkpoints to average themselves.")
    return snapshot


def _weights(snapshot: Snapshot, kind: str) -> Mapping[str, Tensor]:
    weights = snapshot.ema if kind == "ema" else snapshot.model
    if weights is None:
        raise CheckpointError(f"{snapshot.path} holds no average (ema).\nAverage its raw weights, or another one.")
    return weights
