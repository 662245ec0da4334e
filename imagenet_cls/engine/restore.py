"""Load the state that a run resumes from, on every rank."""

from torch import Tensor, nn

from imagenet_cls.checkpoint.format import Progress, Snapshot, checkpoint_content
from imagenet_cls.checkpoint.optimizer_state import load_optimizer
from imagenet_cls.checkpoint.select import load_newest, load_newest_in
from imagenet_cls.engine.build import Parts
from imagenet_cls.engine.options import RunOptions
from imagenet_cls.engine.resume import check_resumable
from imagenet_cls.engine.run_folder import RunFolder
from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.weights import state_dict_mismatch
from imagenet_cls.optim.build import state_names
from imagenet_cls.parallel.collectives import broadcast_tensors
from imagenet_cls.parallel.process_group import run_on_main
from imagenet_cls.report.jsonl import missing_steps


def restore(parts: Parts, folder: RunFolder, options: RunOptions) -> tuple[Progress | None, list[str]]:
    """Load weights, EMA, optimizer and loss scale from the checkpoint to resume from. A collective.

    Rank 0 reads and verifies the checkpoint and broadcasts its tensors. Returns the progress, None for a run that
    starts from scratch, and messages for the log. Raises CheckpointError.
    """
    group = parts.group
    snapshot: Snapshot | None = None

    def find() -> dict | None:
        """On rank 0: the checkpoint, and what the other ranks need to know of it."""
        nonlocal snapshot
        snapshot, damaged = load_newest(folder.checkpoints) if options.resume else (None, [])
        own = snapshot is not None
        if snapshot is None and options.resume_from is not None:
            snapshot, damaged = load_newest_in(options.resume_from)
        if snapshot is None:
            return None
        with checkpoint_content(snapshot.path):
            changes = check_resumable(snapshot.state, parts, options.allow_change)
        step = snapshot.state["progress"]["step"]
        messages = [f"{line}; using an older checkpoint" for line in damaged]
        messages += [f"resumed from {snapshot.path} at step {step}", *changes]
        if own and (gap := missing_steps(folder.path / "metrics.jsonl", step)):
            messages.append(gap)
        if own and options.resume_from is not None:
            messages.append(f"--resume-from {options.resume_from} is not used: the run folder has checkpoints")
        return {
            "state": snapshot.state,
            "numbers": snapshot.optimizer_numbers,
            "has_ema": snapshot.ema is not None,
            "messages": messages,
        }

    known = run_on_main(group, find)
    if known is None:
        missing = [f"no checkpoint to resume from in {folder.path}: starting from scratch"] if options.resume else []
        return None, missing
    with checkpoint_content(snapshot.path if snapshot else folder.checkpoints):
        _load_weights(snapshot, parts.model, broadcast_tensors(snapshot.model if snapshot else None, group))
        tensors = broadcast_tensors(snapshot.optimizer if snapshot else None, group)
        before, now = known["state"]["config"]["optimizer"]["kwargs"], parts.config.optimizer.kwargs
        changed = [name for name in {*before, *now} if before.get(name) != now.get(name)]
        needed = state_names(parts.config.optimizer) if changed else ()
        load_optimizer(parts.model, parts.optimizer, tensors, known["numbers"], changed, needed)
        if known["has_ema"]:
            ema = broadcast_tensors(snapshot.ema if snapshot else None, group)
            if parts.ema.module is not None:
                _load_weights(snapshot, parts.ema.module, ema)
        else:
            parts.ema.set(parts.model)
        if parts.scaler.is_enabled() and known["state"]["scaler"]:
            parts.scaler.load_state_dict(known["state"]["scaler"])
    parts.statistics.remember()
    return Progress(**known["state"]["progress"]), known["messages"]


def _load_weights(snapshot: Snapshot | None, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    if mismatch := state_dict_mismatch(model.state_dict(), tensors):
        where = f"{snapshot.path}: " if snapshot else ""
        raise CheckpointError(
            f"{where}the checkpoint's model is not the one that this config builds: {mismatch}\n"
            "Resume with the model of the checkpoint, or start a new run from its weights with model.checkpoint."
        )
    model.load_state_dict(tensors)
