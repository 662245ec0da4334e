"""A training run from the outside: the folder, what it resumes from, the banner, the loop, and what is left at the end.

Called by `cli` on every rank. The order is the order of what can go wrong: config, group, folder, data, parts, state.
"""

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import Snapshot, checkpoint_path, list_checkpoints
from imagenet_cls.checkpoint.optimizer_state import Progress, load_optimizer
from imagenet_cls.checkpoint.select import load_newest, load_newest_in
from imagenet_cls.config.load import Loaded, dump_yaml, format_problems
from imagenet_cls.config.schema import Config
from imagenet_cls.engine.build import Parts, build, data_parallel_devices
from imagenet_cls.engine.check import check, check_ranks
from imagenet_cls.engine.options import RunOptions, starts_from
from imagenet_cls.engine.resume import check_resumable, versions
from imagenet_cls.engine.run_folder import RunFolder
from imagenet_cls.engine.saving import Saver, too_little_room
from imagenet_cls.engine.step import autocast
from imagenet_cls.engine.train import train
from imagenet_cls.errors import CheckpointError, ConfigError, Problem, Stopped
from imagenet_cls.guards.agreement import check_same_code, check_same_config
from imagenet_cls.guards.memory import explain_resource_errors
from imagenet_cls.models.freeze import is_still, set_training
from imagenet_cls.models.weights import state_dict_mismatch
from imagenet_cls.optim.build import state_names
from imagenet_cls.parallel.collectives import broadcast_tensors, gather_to_main
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group, choose_device, init_group, run_on_main
from imagenet_cls.parallel.signals import StopRequest
from imagenet_cls.report.jsonl import missing_steps
from imagenet_cls.report.log import open_log
from imagenet_cls.report.reporter import Reporter


def raise_problems(problems: list[Problem], loaded: Loaded) -> None:
    """Raise ConfigError with a line for each problem, if there is any."""
    if problems:
        raise ConfigError(format_problems(problems, loaded.origins))


def meet(loaded: Loaded, rank_info: RankInfo, groups: list[Group], training: bool) -> Group:
    """Meet the other ranks, and make stage 2 of the checks on rank 0.

    Our launching process has made most of it; of an elastic job it could not know the number of ranks. groups:
    receives the group as soon as there is one, so that the caller can end it whatever happens.
    """
    logging.captureWarnings(True)  # into the log where there will be one; a library's warnings help no user
    parallel = loaded.config.parallel
    device = choose_device(loaded.config.device, rank_info, None if parallel.mode == "dp" else parallel.device_ids)
    if parallel.mode == "dp" and device.type == "cuda" and rank_info.world_size == 1:
        device = data_parallel_devices(loaded.config).all[0]
    group = init_group(rank_info, device, parallel.mode, parallel.backend, parallel.init_method, parallel.timeout_sec)
    groups.append(group)
    check_same_code(loaded.config, group)
    check_same_config(loaded.config, group)
    stage_2 = check_ranks if rank_info.launched else check
    run_on_main(group, lambda: raise_problems(stage_2(loaded.config, rank_info.world_size, training), loaded))
    return group


def train_run(loaded: Loaded, options: RunOptions, rank_info: RankInfo, groups: list[Group]) -> None:
    """Carry out a whole run on this rank. Returns at its end; raises Stopped (saved) or another UserError."""
    group = meet(loaded, rank_info, groups, training=True)
    with explain_resource_errors(loaded.config, group.world_size):
        if options.dry_run:
            dry_run(loaded.config, options, group)
        else:
            run_in_folder(loaded.config, options, group)


def dry_run(config: Config, options: RunOptions, group: Group) -> None:
    """Everything short of the first update: build the parts, show the banner, try one batch. Writes nothing."""
    parts = build(config, group)
    try:
        with Reporter(None, None, False, group.is_main, parts.plan.total_steps, parts.plan.epochs) as reporter:
            reporter.banner(banner(parts, options, Progress()))
            for message in parts.messages:
                reporter.say(message)
            reporter.say(try_one_batch(parts))
    finally:
        parts.train_loader.close()


def run_in_folder(config: Config, options: RunOptions, group: Group) -> None:
    """The run itself, in its folder, which is this run's alone from here to the end."""
    folder = RunFolder(options.work_dir)
    jobs = gather_to_main(list(options.jobs), group)
    options, goes_on = open_folder(folder, config, options, group)
    log = open_log(options.work_dir, group.rank)
    log.info("rank %d of %d on %s, process %d", group.rank, group.world_size, group.device, os.getpid())
    stop = StopRequest(group)
    stop.listen()
    parts = None
    try:
        parts = build(config, group, start_weights=not goes_on)
        progress, messages = resume(parts, folder, options)
        if options.overwrite:  # only now: a run that can't even begin must not cost the old one
            run_on_main(group, folder.clear)
        resumed_at = progress.step if messages else None
        evaluated = progress.evaluated_step if messages else None
        tensorboard = config.log.tensorboard
        total = (parts.plan.total_steps, parts.plan.epochs)
        endures = config.checkpoint.on_error == "continue"
        with (
            Reporter(options.work_dir, resumed_at, tensorboard, group.is_main, *total, evaluated, endures) as reporter,
            Saver(parts, progress, folder, reporter) as saver,
        ):
            if group.is_main:
                folder.begin(jobs)
                folder.describe(dump_yaml(config), versions())
                parts.messages.extend(filter(None, [too_little_room(parts, folder)]))
            reporter.banner(banner(parts, options, progress))
            reporter.config_text(dump_yaml(config))
            for message in parts.messages:
                reporter.say(message)
            for message in messages:
                reporter.event(progress.step, message)
            number = train(parts, progress, reporter, saver, stop)
            saver.finish()
            if number:
                code = 128 + number
                where = checkpoint_path(folder.checkpoints, progress.step)
                raise Stopped(
                    f"stopped by {signal.Signals(number).name} after step {progress.step} of {parts.plan.total_steps}, "
                    f"saved in {where}\nGo on with the same command and --resume.",
                    code,
                )
            if config.log.plots:
                reporter.plot()
            reporter.say(last_words(parts, progress, options.work_dir))
    except Exception:
        logging.getLogger("imagenet_cls").exception("the run ended early")
        raise
    finally:
        stop.close()
        if parts is not None:
            parts.train_loader.close()
        folder.close()


def open_folder(folder: RunFolder, config: Config, options: RunOptions, group: Group) -> tuple[RunOptions, bool]:
    """Take the folder, on rank 0. Returns each rank's own options, and whether the run goes on from a checkpoint.

    A command that was started again goes on with what the attempt before has saved, as if by --resume; but only where
    that had begun its run: what it was refused to do, or had not removed yet, is as it was. Of several machines any may
    have rank 0 the next time, so all of them count. Raises as `RunFolder` does.
    """
    restarted_by = gather_to_main(list(options.restarted_by), group)

    def open_it() -> tuple[bool, bool]:
        """Whether the command was started again, and whether the folder has a checkpoint."""
        again = folder.begun_by(restarted_by)
        overwrite = options.overwrite and not again
        if overwrite:
            folder.check_removable(starts_from(config, options))
        folder.open(options.resume or again, overwrite)
        return again, bool(list_checkpoints(folder.checkpoints))

    again, has_checkpoints = run_on_main(group, open_it)
    if again:  # not rank 0's options: a rank on another machine may write its log elsewhere
        options = replace(options, resume=True, overwrite=False)
    return options, options.resume_from is not None or (options.resume and has_checkpoints)


def resume(parts: Parts, folder: RunFolder, options: RunOptions) -> tuple[Progress, list[str]]:
    """Load the state to go on from, on every rank; (Progress at 0, []) for a fresh start.

    Rank 0 reads, verifies and compares; the others are handed its tensors. Raises CheckpointError.
    """
    group = parts.group
    found: list[Snapshot] = []

    def find() -> dict | None:
        """Rank 0's half: keeps the snapshot in `found` and returns what all ranks need to know of it."""
        newest, damage = load_newest(folder.checkpoints) if options.resume else (None, [])
        if newest is not None:
            found.append(newest)
        elif options.resume_from is not None:
            named, damage = load_newest_in(options.resume_from)
            found.append(named)
        else:
            return None
        snapshot = found[0]
        changes = check_resumable(snapshot.state, parts, options.allow_change)
        messages = [f"{line}; using an older checkpoint" for line in damage]
        step = snapshot.state["progress"]["step"]
        messages += [f"resumed from {snapshot.path} at step {step}", *changes]
        if newest is not None:
            if gap := missing_steps(folder.path / "metrics.jsonl", step):
                messages.append(gap)
            if options.resume_from is not None:
                messages.append(
                    f"--resume-from {options.resume_from} is not used: this folder has checkpoints of its own"
                )
        return {
            "state": snapshot.state,
            "numbers": snapshot.optimizer_numbers,
            "has_ema": snapshot.ema is not None,
            "messages": messages,
        }

    known = run_on_main(group, find)
    if known is None:
        if options.resume and group.is_main:
            parts.messages.append(f"nothing to resume in {folder.path}: starting fresh")
        return Progress(), []
    snapshot = found[0] if found else None
    load_weights_of(snapshot, parts.model, broadcast_tensors(snapshot.model if snapshot else None, group))
    tensors = broadcast_tensors(snapshot.optimizer if snapshot else None, group)
    before, now = known["state"]["config"]["optimizer"]["kwargs"], parts.config.optimizer.kwargs
    changed = [name for name in {*before, *now} if before.get(name) != now.get(name)]
    needed = state_names(parts.config.optimizer) if changed else ()
    load_optimizer(parts.model, parts.optimizer, tensors, known["numbers"], changed, needed)
    if known["has_ema"]:
        ema = broadcast_tensors(snapshot.ema if snapshot else None, group)
        if parts.ema.module is not None:
            load_weights_of(snapshot, parts.ema.module, ema)
    else:
        parts.ema.set(parts.model)
    if parts.scaler.is_enabled() and known["state"]["scaler"]:
        parts.scaler.load_state_dict(known["state"]["scaler"])
    parts.statistics.remember()
    return Progress(**known["state"]["progress"]), known["messages"]


def load_weights_of(snapshot: Snapshot | None, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Raises CheckpointError where the config builds another model than the checkpoint holds."""
    if lacks := state_dict_mismatch(model.state_dict(), tensors):
        where = f"{snapshot.path}: " if snapshot else ""
        raise CheckpointError(
            f"{where}holds another model than this config builds: {lacks}\n"
            "Resume with the model that it was trained with, or start anew from its weights with model.checkpoint."
        )
    model.load_state_dict(tensors)


def banner(parts: Parts, options: RunOptions, progress: Progress) -> list[tuple[str, str]]:
    """What will happen, in the order in which people ask."""
    plan, group, config = parts.plan, parts.group, parts.config
    parameters = sum(parameter.numel() for parameter in parts.model.parameters())
    assert parts.data.train is not None
    device = str(group.device)
    if group.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(group.device)})"
    else:
        device += f" ({torch.get_num_threads()} threads)"
    precision = {None: "fp32", torch.bfloat16: "bf16 autocast", torch.float16: "fp16 autocast with a loss scale"}
    share_of = f"{plan.devices} GPUs" if plan.devices > 1 else f"{plan.world_size} ranks"
    batch = f"{plan.global_batch} = {share_of} x {plan.accumulation} in turn x {plan.micro_batch} at once"
    at_once = plan.micro_batch * (1 if config.model.split_bn else config.augment.splits)
    seen = f"{at_once} images at a time"
    if config.model.freeze_bn:
        seen = "nothing: its statistics stay (model.freeze_bn)"
    elif config.parallel.sync_bn and group.world_size > 1:
        seen = f"{at_once * group.world_size} images at a time, those of all ranks (SyncBN)"
    rows = [
        ("model", f"{config.model.name}, {parameters / 1e6:.2f} M parameters, {parts.num_classes} classes"),
        ("data", f"{len(parts.data.train)} training and {parts.evaluation.num_images} validation images"),
        ("device", f"{device}, {precision[parts.evaluation.autocast_dtype]}"),
        ("ranks", f"{group.world_size} ({group.rank_info.launcher})"),
        ("batch", batch),
        *([("BatchNorm sees", seen)] if is_still(parts.model, config.model) else []),
        ("steps", f"{plan.total_steps} ({plan.steps_per_epoch} an epoch, {plan.epochs} epochs)"),
        ("optimizer", f"{config.optimizer.name}, lr {parts.lr:g}, {config.schedule.name}"),
        *recipe_rows(config),
        ("seed", str(config.seed)),
        ("run folder", "none: a dry run writes nothing" if options.dry_run else str(options.work_dir)),
    ]
    if progress.step:
        rows.append(("goes on at", f"step {progress.step}"))
    return rows


def recipe_rows(config: Config) -> list[tuple[str, str]]:
    """What a recipe adds to the plain one, where it does."""
    mix, ema, loss, distill = config.mix, config.ema, config.loss, config.distill
    mixing = {"mixup": mix.mixup_alpha, "cutmix": mix.cutmix_alpha or (mix.cutmix_minmax and "by size")}
    smoothing = f", label smoothing {loss.label_smoothing:g}" if loss.label_smoothing else ""
    average = f"half-life {ema.half_life_images:,.0f} images" if ema.half_life_images is not None else ""
    average = average or (f"decay {ema.decay:g}" if ema.decay is not None else "")
    every = f", every {ema.every_steps} steps" if ema.every_steps > 1 else ""
    rows = {
        "layer decay": str(config.optimizer.layer_decay or ""),
        "policy": config.augment.policy or "",
        "mixing": ", ".join(f"{name} {alpha}" for name, alpha in mixing.items() if alpha),
        "loss": loss.name + smoothing if smoothing or loss.name != "cross_entropy" else "",
        "teacher": f"{distill.teacher.name}, {distill.kind}" if distill.kind != "none" else "",
        "average (EMA)": average and average + every,
    }
    return [(label, text) for label, text in rows.items() if text]


def try_one_batch(parts: Parts) -> str:
    """The dry run's last part: one real micro-batch through model, loss and backward. No weight changes."""
    batch = next(iter(parts.train_loader.epoch(0, 0)))
    set_training(parts.model, parts.config.model)
    images, targets = parts.prepare(batch, 0, 0, 0)
    with autocast(parts.group.device, parts.evaluation.autocast_dtype):
        logits = parts.wrapped(images)
        loss = parts.criterion(logits, targets, images)
    loss.backward()
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else [tuple(each.shape) for each in logits]
    return (
        f"dry run: one batch of {tuple(batch.images.shape)} gave logits {shape} and loss {loss.item():.4f}; "
        "no run folder was written"
    )


def last_words(parts: Parts, progress: Progress, work_dir: Path) -> str:
    places = {kind: checkpoint_path(work_dir / "checkpoints", best["step"]) for kind, best in progress.best.items()}
    lines = [
        f"{kind} weights: top-1 {progress.latest[kind]['top1_pct']:.2f} % at the end, best {best['top1_pct']:.2f} % "
        f"at step {best['step']} in {places[kind]}{'' if places[kind].exists() else ', which could not be saved'}"
        for kind, best in progress.best.items()
    ]
    return "\n".join(["done", *lines])
