"""A training run in its folder: start or resume, train, finish. Also a dry run."""

import math
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.config.load import LoadedConfig, dump_yaml
from imagenet_cls.config.schema import Config
from imagenet_cls.engine.build import build, devices_per_rank
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.plan import describe_batch_sizes
from imagenet_cls.engine.run import Run
from imagenet_cls.engine.run_folder import RunFolder, RunOptions
from imagenet_cls.engine.state import (
    find_checkpoint,
    open_saver,
    restore,
)
from imagenet_cls.engine.summary import final_message, start_warnings, startup_table
from imagenet_cls.engine.train import compute_gradients, train
from imagenet_cls.errors import NonFiniteError, Stopped, UserError
from imagenet_cls.guards.device import explain_device_errors
from imagenet_cls.guards.hang import HangLog
from imagenet_cls.models.adapt import set_training
from imagenet_cls.parallel.collectives import all_reduce_mean, gather_to_main, run_on_main
from imagenet_cls.parallel.process_group import RankContext, name_flight_recorder_files
from imagenet_cls.parallel.stop_requests import StopRequested, StopSignalHandler
from imagenet_cls.report.console import log_file, open_log
from imagenet_cls.report.reporter import Reporter
from imagenet_cls.versions import library_versions


def run_training(loaded: LoadedConfig, options: RunOptions, context: RankContext) -> None:
    """Make a training run, or a dry run, on this rank. Raises Stopped after a stop signal, or
    another UserError.
    """
    sizes = describe_batch_sizes(loaded.config, context.world_size, devices_per_rank(loaded.config))
    with explain_device_errors(sizes):
        folder, options = open_run_folder(loaded.config, options, context)
        if options.dry_run:
            dry_run(loaded, options, folder, context)
            return
        stop_signals = StopSignalHandler(context)
        # `folder` is open already, and is closed at the end of the block.
        with closing(stop_signals), folder, log_error(folder, context, stop_signals):
            stop_signals.install(block_in_children=bool(loaded.config.train.compile))
            train_in_folder(loaded, options, folder, stop_signals, context)


def train_in_folder(
    loaded: LoadedConfig,
    options: RunOptions,
    folder: RunFolder,
    stop_signals: StopSignalHandler,
    context: RankContext,
) -> None:
    """Build the run, open what it writes, and train."""
    config = loaded.config
    work_dir = options.work_dir
    parts, progress, messages = build_and_restore(loaded, options, folder, context)
    open_log(work_dir, context.rank)
    log_path = log_file(work_dir, context.rank)
    name_flight_recorder_files(os.environ, log_path.parent)
    folder.mark_started(progress, resumed=options.resume)
    # only now, so that a run that fails to start does not remove the existing one
    if options.overwrite:
        run_on_main(context, folder.clear)
    launchers = gather_to_main(list(options.launchers), context)
    with (
        closing(parts.train_loader),
        closing(parts.evaluation),
        open_reporter(loaded, parts, work_dir, progress) as reporter,
        open_saver(parts, progress, folder, reporter) as saver,
    ):
        if context.is_main:
            folder.write_metadata(launchers, dump_yaml(config), library_versions())
        for message in messages:
            reporter.event(progress.step, message)
        # The stacks are logged before the collectives of the other ranks time out.
        with HangLog(log_path, 0.9 * config.parallel.timeout_sec) as hang_log:
            run = Run(parts, progress, reporter, saver, stop_signals, hang_log)
            with run.save_when_stopped():
                # The run may have stopped between the last step of an epoch and its evaluation. A
                # new run makes no evaluation here, since step 0 counts as evaluated.
                run.evaluate_if_due()
                train(run)
        run_on_main(context, saver.wait)
        run.nonfinite_guard.check_any_applied(progress.step)
        pages = [name for name in ("plots", "report") if getattr(config.log, name)]
        reporter.write_pages([f"log.{name}" for name in pages])
        if context.is_main:  # other ranks may not see the run folder
            reporter.message(final_message(progress, config, parts.plan, work_dir, run.meter))


def build_and_restore(
    loaded: LoadedConfig, options: RunOptions, folder: RunFolder, context: RankContext
) -> tuple[TrainingParts, Progress, list[str]]:
    """Build the run in its state at step 0 or, if it resumes, in the state of a checkpoint. Returns
    its parts, its progress, and messages.
    """
    snapshot, messages = find_checkpoint(folder, options, context)
    parts = build(loaded.config, context, snapshot is None, loaded.data)
    if snapshot is None:
        return parts, Progress(), messages
    progress, changes = restore(parts, snapshot, options.allow_change)
    return parts, progress, [*messages, *changes]


def open_run_folder(
    config: Config, options: RunOptions, context: RankContext
) -> tuple[RunFolder, RunOptions]:
    """Lock the run folder, on rank 0; for a dry run, only check it. Returns the folder,
    and the options of the run in it.

    A command that torchrun or SLURM restarted resumes the run that it started before, as with
    --resume. After a restart rank 0 may be on another machine, so the restarts that all ranks
    report are considered.
    """
    restarted_by = gather_to_main(list(options.restarted_by), context)
    folder = RunFolder(options.work_dir)
    if run_on_main(context, partial(folder.was_started_by, restarted_by)):
        options = replace(options, resume=True, overwrite=False)
    run_on_main(context, partial(folder.open, config, options))
    return folder, options


@contextmanager
def log_error(
    folder: RunFolder, context: RankContext, stop_signals: StopSignalHandler
) -> Iterator[None]:
    """Log the error that ends the run. A run that has not started keeps its log in memory, and
    writes it only for an error that is no UserError: the message of a UserError is enough.

    Of a single rank, raises Stopped for an error between a stop signal and the next check: the
    signal may have ended a process that a step waited for, such as a compiler.
    """
    log = open_log(None, context.rank)
    log.info(
        "rank %d of %d on %s, process %d",
        context.rank,
        context.world_size,
        context.device,
        os.getpid(),
    )
    try:
        yield
    except Exception as error:
        with suppress(UserError):  # the log can't be written
            if not folder.has_started and not isinstance(error, UserError):
                open_log(folder.path, context.rank)
            log.exception("the run ended early")
        if stop_signals.signal and not stop_signals.is_stopping and context.world_size == 1:
            raise Stopped(
                f"{StopRequested(stop_signals.signal)}, which interrupted the run "
                f"({type(error).__name__}).",
                "Resume with the same command and --resume.",
                stop_signals.signal,
            ) from error
        raise


def dry_run(
    loaded: LoadedConfig, options: RunOptions, folder: RunFolder, context: RankContext
) -> None:
    """Do everything that a run does up to the gradient of its next step. Writes nothing."""
    parts, progress, messages = build_and_restore(loaded, options, folder, context)
    plan = parts.plan
    with closing(parts.train_loader), open_reporter(loaded, parts, None, progress) as reporter:
        if context.is_main and not options.resume and folder.holds_run():
            messages.append(f"{folder.path} already holds a run; with --resume it is compared")
        for message in messages:
            reporter.message(message)
        set_training(parts.model, parts.config.model)
        # a run that is complete repeats its last step
        step = min(progress.step, plan.total_steps - 1)
        epoch, step_of_epoch = plan.place(step)
        batches = parts.train_loader.epoch(epoch, step_of_epoch)
        loss_and_metric = compute_gradients(parts, batches, epoch, step)
        loss = all_reduce_mean(loss_and_metric, context)[0].item()
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"The loss of step {step + 1} is {loss}.",
                "Check the loss, its weights and the arguments of the model.",
            )
        reporter.message(f"dry run: step {step + 1} has loss {loss:.4f}; no run folder was written")


@contextmanager
def open_reporter(
    loaded: LoadedConfig, parts: TrainingParts, work_dir: Path | None, progress: Progress
) -> Iterator[Reporter]:
    """Open the reporter of a run, and print the start-up table, then the warnings and messages
    about the config and the parts.
    """
    with Reporter(
        work_dir,
        resume_step=progress.step,
        config=parts.config,
        is_main=parts.context.is_main,
        total_steps=parts.plan.total_steps,
        total_epochs=parts.plan.epochs,
        evaluated_step=progress.evaluated_step,
    ) as reporter:
        reporter.table(startup_table(parts, work_dir, progress))
        config_warnings = [f"warning: {line}" for line in loaded.warnings]
        for message in [
            *loaded.notes,
            *config_warnings,
            *parts.messages,
            *([] if progress.step else start_warnings(parts)),
        ]:
            reporter.message(message)
        yield reporter
