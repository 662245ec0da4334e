"""A training run in its folder: start or resume, what the loop reports and saves, and the end."""

import copy
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from math import isfinite
from pathlib import Path

from torch import Tensor

from imagenet_cls.checkpoint.format import METRICS, Progress, checkpoint_path, score
from imagenet_cls.checkpoint.optimizer_state import base_optimizer
from imagenet_cls.checkpoint.saver import CheckpointSaver
from imagenet_cls.config.load import LoadedConfig, dump_yaml
from imagenet_cls.config.schema import Config, format_size
from imagenet_cls.data.device import prefetch_to_device
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.engine.build import TrainingParts, build, num_devices
from imagenet_cls.engine.evaluate import evaluate, stops_early
from imagenet_cls.engine.loaders import Batch, DataWaitCheck
from imagenet_cls.engine.meter import Meter
from imagenet_cls.engine.plan import micro_batch_for
from imagenet_cls.engine.profiler import StepProfiler
from imagenet_cls.engine.run_folder import RunOptions, open_run_folder
from imagenet_cls.engine.state import disk_space_warning, open_saver, restore
from imagenet_cls.engine.summary import final_message, start_warnings, startup_table
from imagenet_cls.engine.train import forward_backward, train
from imagenet_cls.errors import Stopped, UserError
from imagenet_cls.guards.agreement import versions
from imagenet_cls.guards.device import explain_device_errors
from imagenet_cls.guards.hang import HangLog
from imagenet_cls.guards.nonfinite import NonFiniteGuard, check_finite_weights
from imagenet_cls.guards.replicas import ReplicaCheck, replicated_tensors
from imagenet_cls.models.adapt import set_training
from imagenet_cls.parallel.collectives import all_reduce_mean, gather_to_main, run_on_main
from imagenet_cls.parallel.process_group import Group, name_flight_recorder_files
from imagenet_cls.parallel.signals import StopRequested, StopSignalHandler
from imagenet_cls.report.console import log_file, open_log
from imagenet_cls.report.reporter import Reporter


def run_training(loaded: LoadedConfig, options: RunOptions, group: Group) -> None:
    """A training run, or a dry run, on this rank. Raises Stopped after a stop signal, or another UserError."""
    with explain_device_errors(describe_batch_sizes(loaded.config, group.world_size)):
        (dry_run if options.dry_run else train_in_folder)(loaded, options, group)


def describe_batch_sizes(config: Config, world_size: int) -> str:
    """Batch and image size of a device as text, for the message of an out-of-memory error."""
    train, devices = config.train, num_devices(config, world_size)
    micro_batch = micro_batch_for(train.global_batch_size, devices, train.micro_batch_size)
    return (
        f"{micro_batch} images at once of {format_size(config.augment.size_px)} "
        f"({config.eval.batch_size} of {format_size(config.eval.crop_px)} in evaluation)"
    )


def train_in_folder(loaded: LoadedConfig, options: RunOptions, group: Group) -> None:
    """Train in the run folder. Rank 0 locks it until the run ends."""
    config = loaded.config
    folder, options, resumes = open_run_folder(config, options, group)
    log = open_log(None, group.rank)
    log.info(
        "rank %d of %d on %s, process %d", group.rank, group.world_size, group.device, os.getpid()
    )
    stop_signals = StopSignalHandler(group)
    stop_signals.install()
    parts, progress, started = None, Progress(), False
    try:
        parts = build(config, group, load_initial_weights=not resumes)
        progress, messages = restore(parts, folder, options)
        open_log(options.work_dir, group.rank)
        name_flight_recorder_files(os.environ, log_file(options.work_dir, group.rank).parent)
        started = True
        if (
            options.overwrite
        ):  # only now, so that a run that fails to start does not remove the existing one
            run_on_main(group, folder.clear)
        launchers = gather_to_main(list(options.launchers), group)
        with (
            open_reporter(loaded, parts, options.work_dir, progress) as reporter,
            open_saver(parts, progress, folder, reporter) as saver,
        ):
            if group.is_main:
                folder.write_metadata(launchers, dump_yaml(config), versions())
                messages += filter(None, [disk_space_warning(parts, folder.checkpoints)])
            for message in messages:
                reporter.event(progress.step, message)
            profiled = config.train.profile if group.is_main else None
            profiler = StepProfiler(profiled, options.work_dir / "profile", group.device.type)
            # Earlier than the collectives of the other ranks time out.
            with HangLog(
                log_file(options.work_dir, group.rank), 0.9 * config.parallel.timeout_sec
            ) as hang_log:
                run = Run(
                    parts,
                    progress,
                    reporter,
                    saver,
                    stop_signals,
                    hang_log,
                    profiler,
                    options.overwrite,
                )
                run.train_to_last_step()
            run_on_main(group, saver.wait)
            if config.log.plots:
                reporter.plot()
            reporter.message(final_message(progress, options.work_dir, run.meter))
    except Exception as error:
        with suppress(UserError):
            if not (started or isinstance(error, UserError)):
                open_log(options.work_dir, group.rank)
            log.exception("the run ended early")
            if (
                started
                and group.is_main
                and progress.step == 0
                and not (options.resume or isinstance(error, Stopped))
            ):
                folder.clear()  # so that the corrected command needs no --overwrite
        raise
    finally:
        stop_signals.close()
        if parts is not None:
            parts.train_loader.close()
        folder.close() if started else folder.discard()


def dry_run(loaded: LoadedConfig, options: RunOptions, group: Group) -> None:
    """All that a run does up to its first gradient. Writes nothing."""
    folder, options, resumes = open_run_folder(loaded.config, options, group)
    parts = build(loaded.config, group, load_initial_weights=not resumes)
    try:
        progress, messages = restore(parts, folder, options)
        with open_reporter(loaded, parts, None, progress) as reporter:
            for message in messages:
                reporter.message(message)
            set_training(parts.model, parts.config.model)
            micro_batches = islice(parts.train_loader.epoch(0), parts.plan.accumulation)
            loss = all_reduce_mean(forward_backward(parts, micro_batches, 0, 0), group)[0].item()
            reporter.message(
                f"dry run: the first step has loss {loss:.4f}; no run folder was written"
            )
    finally:
        parts.train_loader.close()


@contextmanager
def open_reporter(
    loaded: LoadedConfig, parts: TrainingParts, work_dir: Path | None, progress: Progress
) -> Iterator[Reporter]:
    """The reporter of a run, after the start-up table, and warnings and messages about the config and the parts."""
    with Reporter(
        work_dir,
        resume_step=progress.step,
        config=parts.config,
        is_main=parts.group.is_main,
        total_steps=parts.plan.total_steps,
        total_epochs=parts.plan.epochs,
        evaluated_step=progress.evaluated_step,
    ) as reporter:
        reporter.table(startup_table(parts, work_dir, progress))
        config_warnings = [f"warning: {line}" for line in loaded.warnings]
        for message in [*config_warnings, *parts.messages, *start_warnings(parts, progress)]:
            reporter.message(message)
        yield reporter


class Run:
    """What the loop needs besides the computation: batches, reports, evaluations, stop requests and saves."""

    def __init__(
        self,
        parts: TrainingParts,
        progress: Progress,
        reporter: Reporter,
        saver: CheckpointSaver,
        stop_signals: StopSignalHandler,
        hang_log: HangLog | None = None,
        profiler: StepProfiler | None = None,
        overwrite: bool = False,
    ):
        self.parts, self.progress = parts, progress
        self.reporter, self.saver, self.stop_signals = reporter, saver, stop_signals
        progress.stopped_early = stops_early(progress.history, parts.config.train.early_stop)
        self.hang_log, self.profiler, self.overwrite = hang_log, profiler, overwrite
        self.meter = Meter(parts.group, parts.plan.global_batch)
        self.nonfinite_guard = NonFiniteGuard(
            parts.group,
            parts.config.train.max_nonfinite_steps,
            parts.plan.total_steps,
            fp16=parts.scaler.is_enabled(),
            samples_of=self.sample_names,
        )
        self.data_wait_check = DataWaitCheck(parts.config, parts.plan, parts.group)
        self.replica_check = ReplicaCheck(
            parts.group,
            parts.config.parallel.check_every_steps,
            progress.step,
            lambda: replicated_tensors(
                parts.model, parts.ema.module, base_optimizer(parts.optimizer).state
            ),
        )

    def train_to_last_step(self) -> None:
        """Train to the last step. Raises Stopped, after a save, if a signal stops the run."""
        try:
            self.evaluate_if_due()  # the run may have stopped between the last step of an epoch and its evaluation
            self.profile()
            train(self)
        except StopRequested as request:
            self.log_steps()
            self.save()
            run_on_main(self.parts.group, self.saver.wait)
            step, total = self.progress.step, self.parts.plan.total_steps
            raise Stopped(
                f"stopped by {signal.Signals(request.signal_number).name} after step {step} of {total}, "
                f"saved in {checkpoint_path(self.saver.checkpoints, step)}\n"
                f"Resume with the same command and --resume{' in place of --overwrite' if self.overwrite else ''}.",
                request.signal_number,
            ) from None
        finally:
            self.profile(ends=True)

    def epoch_batches(self, epoch: int, first_step: int) -> Iterator[TrainBatch]:
        """This rank's micro-batches of an epoch from `first_step` on. TensorBoard shows the first one of a run."""
        parts = self.parts
        set_training(parts.model, parts.config.model)
        self.meter.restart_clock()
        is_first = self.progress.step == 0
        batches = prefetch_to_device(
            parts.train_loader.epoch(epoch, first_step), parts.group.device
        )
        for batch in self.meter.time_waiting(batches):
            if is_first:
                self.reporter.first_batch(
                    batch.images[: len(batch.targets)], batch.targets, parts.data.classes
                )
                is_first = False
            yield batch

    def after_step(
        self,
        epoch: int,
        lr: float,
        loss_and_top1: Tensor,
        grad_norm: Tensor | None,
        skipped: Tensor,
    ) -> None:
        """Record a step; log, check replicas, stop and save where that is due, in this order. A collective."""
        step = self.progress.step
        if self.hang_log:
            self.hang_log.reset()
        self.meter.add(step, epoch, lr, loss_and_top1, grad_norm, skipped)
        if step % self.parts.config.log.every_steps == 0:
            self.log_steps()  # waits for the device; raises after too many non-finite steps in a row
        self.replica_check.check_if_due(step)  # raises if replicas have diverged
        # Raises StopRequested, on all ranks at the same step.
        self.stop_signals.check_after_step(
            force=self.save_scheduled() or step % self.parts.plan.steps_per_epoch == 0
        )
        self.saver.check()  # raises if a save in the background has failed
        if self.save_scheduled() and not self.evaluation_due():  # else saved after the evaluation
            self.log_steps()  # before `save_due`, which reads whether this step was finite
            if self.save_due():
                self.save()
            self.meter.restart_clock()
        self.profile()

    def after_epoch(self) -> None:
        """Log the epoch's last steps; evaluate and save if that is due."""
        self.log_steps()
        self.evaluate_if_due()

    def evaluate_if_due(self) -> None:
        """Evaluate, if that is due, and save if the result is the best so far or a save is due."""
        if self.evaluation_due():
            improved = self.evaluate()
            if improved or self.save_due():
                self.save()

    def profile(self, ends: bool = False) -> None:
        """Start or end the profile of `train.profile` if that is due. ends: end it in any case."""
        if self.profiler and (message := self.profiler.update(self.progress.step, ends)):
            self.reporter.event(self.progress.step, message)

    def log_steps(self) -> None:
        """Report the steps since the last call, and raise NonFiniteError after too many non-finite ones in a row."""
        records = self.meter.flush()
        if records:
            self.stop_signals.set_interval(*self.meter.last_interval)
        self.reporter.report_steps(records)
        for line in (
            self.data_wait_check.warning(records),
            self.nonfinite_guard.count_and_describe(records),
        ):
            if line is not None:
                self.reporter.event(self.progress.step, line)
        self.nonfinite_guard.check(records, self.meter.own_losses)

    def save(self) -> None:
        """Save in the background. Raises without saving if replicas have diverged or weights are not finite."""
        self.replica_check.check(self.progress.step)
        check_finite_weights(self.parts.model, self.progress.step, self.parts.group)
        self.saver.save()

    @property
    def at_end(self) -> bool:
        return self.progress.step >= self.parts.plan.total_steps or self.progress.stopped_early

    @property
    def at_scheduled_evaluation(self) -> bool:
        return (
            self.progress.step
            % (self.parts.plan.steps_per_epoch * self.parts.config.eval.every_epochs)
            == 0
        )

    def save_scheduled(self) -> bool:
        """Whether this step is the last one or one of `checkpoint.every_steps` or `checkpoint.every_epochs`."""
        checkpoint, step = self.parts.config.checkpoint, self.progress.step
        by_steps = checkpoint.every_steps is not None and step % checkpoint.every_steps == 0
        steps = (checkpoint.every_epochs or 0) * self.parts.plan.steps_per_epoch
        return self.at_end or by_steps or (steps > 0 and step % steps == 0)

    def save_due(self) -> bool:
        """`save_scheduled`, but false after a non-finite step before the end, so that older checkpoints are kept."""
        return self.at_end or (self.save_scheduled() and self.nonfinite_guard.last_step_finite)

    def evaluation_due(self) -> bool:
        """Whether to evaluate: after every `eval.every_epochs` epochs and after the last step, unless already done."""
        is_due = self.at_end or self.at_scheduled_evaluation
        return is_due and self.progress.evaluated_step < self.progress.step

    def evaluate(self) -> bool:
        """Evaluate the raw and the EMA weights and record both. Returns whether either is the best so far.

        Raises StopRequested; then nothing is recorded, and a resumed run repeats the evaluation.
        """
        parts, progress = self.parts, self.progress
        models = (
            {"raw": parts.model}
            if parts.ema.module is None
            else {"raw": parts.model, "ema": parts.ema.module}
        )
        pad_to = parts.config.eval.batch_size if parts.config.train.compile else None
        outputs = parts.evaluation.outputs(models, self.evaluation_batches(), pad_to)
        position = {
            "step": progress.step,
            "epoch": (progress.step - 1) // parts.plan.steps_per_epoch,
        }
        improved, metric = False, METRICS[parts.config.checkpoint.best]
        labels = parts.evaluation.labels
        evaluated = evaluate(
            outputs, list(models), parts.group, parts.num_classes, labels, parts.metrics
        )
        for name, result in evaluated.items():
            self.reporter.eval_result({"kind": "eval", **position, "weights": name, **result})
            progress.latest[name] = {
                field: value for field, value in result.items() if field != "seconds"
            }
            best = progress.best.get(name, {})
            is_better = metric not in best or score(result, metric) > score(best, metric)
            if (
                isfinite(result["loss"]) and is_better
            ):  # NaN logits have a top-1, too: topk sorts NaN first
                progress.best[name] = {metric: result[metric], "step": progress.step}
                improved = True
        progress.evaluated_step = progress.step
        # Not an extra evaluation after the last step (`max_steps`, or epochs that are no multiple of every_epochs).
        if self.at_scheduled_evaluation:
            progress.evaluations.append((progress.step, progress.latest["raw"]["top1_pct"]))
            results = progress.latest[list(models)[-1]]
            progress.history.append({metric: results[metric] for metric in METRICS.values()})
        progress.stopped_early = stops_early(progress.history, parts.config.train.early_stop)
        if progress.stopped_early and progress.step < parts.plan.total_steps:
            stop = parts.config.train.early_stop
            text = f"no better {stop.metric} of the {list(models)[-1]} weights in {stop.patience_evals} evaluations"
            self.reporter.event(progress.step, f"stopped early: {text} (train.early_stop)")
        return improved

    def evaluation_batches(self) -> Iterator[Batch]:
        """This rank's validation batches, with a progress bar. Raises StopRequested after a stop signal."""
        evaluation, world_size = self.parts.evaluation, self.parts.group.world_size
        # Shards differ by at most one image. `check` is a collective: not called before a batch that a rank lacks.
        batch_size = self.parts.config.eval.batch_size * self.parts.plan.devices
        batches_on_all_ranks = -(-(evaluation.num_images // world_size) // batch_size)
        done = 0
        self.reporter.eval_progress(done, evaluation.num_images)
        for number, batch in enumerate(evaluation.batches()):
            if number < batches_on_all_ranks:
                self.stop_signals.check()
            if self.hang_log:
                self.hang_log.reset()
            yield batch
            done = min(done + len(batch[1]) * world_size, evaluation.num_images)
            self.reporter.eval_progress(done, evaluation.num_images)

    def sample_names(self, step: int) -> list[str]:
        """Names of the images that this rank reads in a step (counted from 1), each once."""
        source, sampler = self.parts.data.train, copy.copy(self.parts.train_loader.sampler)
        assert source is not None
        sampler.set_epoch(*divmod(step - 1, sampler.steps_per_epoch))
        share = islice(sampler, sum(sampler.micro_batch_sizes))
        return list(dict.fromkeys(source.name(index) for _, index, _ in share))
