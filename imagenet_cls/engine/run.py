"""A training run in its folder: start or resume, what the loop reports and saves, and the end."""

import copy
import logging
import os
import signal
from collections.abc import Iterator
from functools import partial
from itertools import islice
from math import isfinite

from torch import Tensor, nn

from imagenet_cls.checkpoint.format import Progress, checkpoint_path
from imagenet_cls.checkpoint.optimizer_state import base_optimizer
from imagenet_cls.checkpoint.saver import CheckpointSaver
from imagenet_cls.config.load import Loaded, dump_yaml
from imagenet_cls.data import TrainBatch, worker_death
from imagenet_cls.engine.build import TrainingParts, build, num_devices
from imagenet_cls.engine.dry_run import dry_run
from imagenet_cls.engine.evaluate import Batch, evaluate, model_outputs
from imagenet_cls.engine.meter import Meter
from imagenet_cls.engine.plan import micro_batch_for
from imagenet_cls.engine.resume import restore
from imagenet_cls.engine.run_folder import RunFolder, RunOptions, open_run_folder
from imagenet_cls.engine.saving import disk_space_warning, open_saver
from imagenet_cls.engine.summary import final_message, startup_table
from imagenet_cls.engine.train import train
from imagenet_cls.errors import Stopped
from imagenet_cls.guards.agreement import versions
from imagenet_cls.guards.memory import explain_resource_errors, out_of_memory
from imagenet_cls.guards.nonfinite import NonFiniteGuard, check_finite_weights
from imagenet_cls.guards.replicas import ReplicaCheck, replicated_tensors
from imagenet_cls.models.adapt import set_training
from imagenet_cls.parallel.collectives import gather_to_main
from imagenet_cls.parallel.process_group import Group, run_on_main
from imagenet_cls.parallel.signals import StopRequested, StopSignalHandler
from imagenet_cls.report.log import open_log
from imagenet_cls.report.reporter import Reporter


def train_run(loaded: Loaded, options: RunOptions, group: Group) -> None:
    """A training run, or a dry run, on this rank. Raises Stopped (after a save) or another UserError."""
    micro_batch = micro_batch_for(loaded.config.train, num_devices(loaded.config, group.world_size))
    explain_memory = partial(out_of_memory, config=loaded.config, micro_batch=micro_batch)
    with explain_resource_errors(explain_memory, worker_death):
        if options.dry_run:
            dry_run(loaded, group)
        else:
            run_in_folder(loaded, options, group)


def run_in_folder(loaded: Loaded, options: RunOptions, group: Group) -> None:
    """Train in the run folder, which this process locks until the run ends."""
    config, folder = loaded.config, RunFolder(options.work_dir)
    jobs = gather_to_main(list(options.jobs), group)
    options, resumes = open_run_folder(folder, config, options, group)
    log = open_log(options.work_dir, group.rank)
    log.info("rank %d of %d on %s, process %d", group.rank, group.world_size, group.device, os.getpid())
    stop = StopSignalHandler(group)
    stop.install()
    parts = None
    try:
        parts = build(config, group, load_initial_weights=not resumes)
        progress, messages = restore(parts, folder, options)
        if options.overwrite:  # only now, so that a run that fails to start does not remove the existing one
            run_on_main(group, folder.clear)
        with (
            open_reporter(parts, options, progress) as reporter,
            open_saver(parts, progress, folder, reporter) as saver,
        ):
            if group.is_main:
                folder.write_metadata(jobs, dump_yaml(config), versions())
                messages += filter(None, [disk_space_warning(parts, folder.checkpoints)])
            reporter.table(startup_table(parts, options.work_dir, progress))
            reporter.config(dump_yaml(config))
            for message in [*(f"warning: {line}" for line in loaded.warnings), *parts.messages]:
                reporter.message(message)
            for message in messages:
                reporter.event(progress.step, message)
            Run(parts, progress, reporter, saver, stop).train_to_last_step(folder)
            run_on_main(group, saver.wait)
            if config.log.plots:
                reporter.plot()
            reporter.message(final_message(parts, progress, options.work_dir))
    except Exception:
        logging.getLogger("imagenet_cls").exception("the run ended early")
        raise
    finally:
        stop.close()
        if parts is not None:
            parts.train_loader.close()
        folder.close()


def open_reporter(parts: TrainingParts, options: RunOptions, progress: Progress) -> Reporter:
    return Reporter(
        options.work_dir,
        progress.step,
        parts.config.log.tensorboard,
        parts.group.is_main,
        parts.plan.total_steps,
        parts.plan.epochs,
        progress.evaluated_step,
        parts.config.checkpoint.on_error == "continue",
    )


class Run:
    """What the loop needs besides the computation: batches, reports, evaluations, stop requests and saves."""

    def __init__(
        self,
        parts: TrainingParts,
        progress: Progress,
        reporter: Reporter,
        saver: CheckpointSaver,
        stop: StopSignalHandler,
    ):
        self.parts, self.progress = parts, progress
        self.reporter, self.saver, self.stop = reporter, saver, stop
        self.meter = Meter(parts.group, parts.plan.global_batch)
        self.nonfinite = NonFiniteGuard(
            parts.group,
            parts.config.train.max_nonfinite_steps,
            parts.plan.total_steps,
            fp16=parts.scaler.is_enabled(),
            samples_of=self._image_names,
        )
        self.replicas = ReplicaCheck(
            parts.group,
            parts.config.parallel.check_every_steps,
            progress.step,
            lambda: replicated_tensors(parts.model, parts.ema.module, base_optimizer(parts.optimizer).state),
        )

    def train_to_last_step(self, folder: RunFolder) -> None:
        """Train to the last step. Raises Stopped, after a save, if a signal stops the run."""
        try:
            self.after_epoch()  # the run may have stopped between the last step of an epoch and its evaluation
            train(self)
        except StopRequested as request:
            self.log_steps()
            self.save()
            run_on_main(self.parts.group, self.saver.wait)
            step, total = self.progress.step, self.parts.plan.total_steps
            raise Stopped(
                f"stopped by {signal.Signals(request.signal_number).name} after step {step} of {total}, "
                f"saved in {checkpoint_path(folder.checkpoints, step)}\nResume with the same command and --resume.",
                128 + request.signal_number,
            ) from None

    def epoch_batches(self, epoch: int, first_step: int) -> Iterator[TrainBatch]:
        """This rank's micro-batches of an epoch from `first_step` on. The first one of a run is plotted."""
        parts = self.parts
        set_training(parts.model, parts.config.model)
        self.meter.restart_clock()
        is_first = self.progress.step == 0
        for batch in self.meter.time_waiting(parts.train_loader.epoch(epoch, first_step)):
            if is_first:
                self.reporter.first_batch(batch.images[: len(batch.targets)], batch.targets, parts.data.classes)
                is_first = False
            yield batch

    def after_step(self, epoch: int, lr: float, loss: Tensor, grad_norm: Tensor, skipped: Tensor) -> None:
        """Record a step; log, check replicas, stop and save where that is due, in this order. A collective."""
        step = self.progress.step
        self.meter.add(step, epoch, lr, loss, grad_norm, skipped)
        if step % self.parts.config.log.every_steps == 0:
            self.log_steps()  # waits for the device; raises after too many non-finite steps in a row
        self.replicas.check_if_due(step)  # raises if replicas have diverged
        self.stop.check()  # raises StopRequested, on all ranks at the same step
        self.saver.check()  # raises if a save in the background has failed
        if self.save_scheduled() and not self.evaluation_due():  # an evaluation is followed by a save
            self.log_steps()
            if self.save_due():
                self.save()
            self.meter.restart_clock()

    def after_epoch(self) -> None:
        """Log the epoch's last steps; evaluate and save where that is due."""
        self.log_steps()
        if self.evaluation_due():
            improved = self.evaluate()
            if improved or self.save_due():
                self.save()

    def log_steps(self) -> None:
        """Report the steps since the last call, and raise NonFiniteError after too many non-finite ones in a row."""
        records = self.meter.flush()
        self.reporter.train(records)
        if note := self.nonfinite.note(records):
            self.reporter.event(self.progress.step, note)
        self.nonfinite.check(records, self.meter.own_losses)

    def save(self) -> None:
        """Save in the background. Raises without saving if replicas have diverged or weights are not finite."""
        self.replicas.check(self.progress.step)
        check_finite_weights(self.parts.model, self.progress.step, self.parts.group)
        self.saver.save()

    @property
    def at_end(self) -> bool:
        return self.progress.step >= self.parts.plan.total_steps

    def save_scheduled(self) -> bool:
        """Whether this step is the last one or one of `checkpoint.every_steps` or `checkpoint.every_epochs`."""
        checkpoint = self.parts.config.checkpoint
        epochs, rest = divmod(self.progress.step, self.parts.plan.steps_per_epoch)
        by_steps = checkpoint.every_steps is not None and self.progress.step % checkpoint.every_steps == 0
        by_epochs = checkpoint.every_epochs is not None and rest == 0 and epochs % checkpoint.every_epochs == 0
        return self.at_end or by_steps or by_epochs

    def save_due(self) -> bool:
        """`save_scheduled`, but false after a non-finite step before the end, so that older checkpoints are kept."""
        return self.at_end or (self.save_scheduled() and self.nonfinite.last_step_finite)

    def evaluation_due(self) -> bool:
        """Whether to evaluate: after every `eval.every_epochs` epochs and after the last step, unless already done."""
        epochs, rest = divmod(self.progress.step, self.parts.plan.steps_per_epoch)
        at_epoch = rest == 0 and epochs > 0 and epochs % self.parts.config.eval.every_epochs == 0
        return (self.at_end or at_epoch) and self.progress.evaluated_step < self.progress.step

    def evaluate(self) -> bool:
        """Evaluate the raw and the EMA weights and record both. Returns whether either is the best so far.

        Raises StopRequested; then nothing is recorded, and a resumed run repeats the evaluation.
        """
        parts, plan, progress = self.parts, self.parts.plan, self.progress
        models: dict[str, nn.Module] = {"raw": parts.model} | (
            {} if parts.ema.module is None else {"ema": parts.ema.module}
        )
        models = {kind: parts.evaluation.on_devices(model) for kind, model in models.items()}
        outputs = model_outputs(
            models,
            self._evaluation_batches(),
            parts.evaluation.preprocess,
            parts.group.device,
            parts.evaluation.autocast_dtype,
            parts.config.eval.flip_tta,
        )
        epoch, improved = (progress.step - 1) // plan.steps_per_epoch, False
        for kind, result in evaluate(outputs, list(models), parts.group).items():
            position = {"step": progress.step, "epoch": epoch}
            self.reporter.eval_result({"kind": "eval", **position, "weights": kind, **result})
            progress.latest[kind] = {name: value for name, value in result.items() if name != "seconds"}
            # NaN logits have a top-1 too (topk sorts NaN first), so the loss must be finite.
            if isfinite(result["loss"]) and result["top1_pct"] > progress.best.get(kind, {}).get("top1_pct", -1.0):
                progress.best[kind] = {"top1_pct": result["top1_pct"], "step": progress.step}
                improved = True
        progress.evaluated_step = progress.step
        # False for an additional evaluation at the end of the run (`max_steps`, or epochs not divided by every_epochs).
        if progress.step % (plan.steps_per_epoch * parts.config.eval.every_epochs) == 0:
            progress.evaluations.append((progress.step, progress.latest["raw"]["top1_pct"]))
        return improved

    def _evaluation_batches(self) -> Iterator[Batch]:
        """This rank's validation batches, with a progress bar and a check for stop requests before each."""
        evaluation, world_size = self.parts.evaluation, self.parts.group.world_size
        # Shards differ by at most one image. `stop.check` is a collective: not called before a batch that a rank lacks.
        batch_size = self.parts.config.eval.batch_size * self.parts.plan.devices
        batches_on_all_ranks = -(-(evaluation.num_images // world_size) // batch_size)
        done = 0
        self.reporter.eval_progress(done, evaluation.num_images)
        for number, batch in enumerate(evaluation.batches()):
            if number < batches_on_all_ranks:
                self.stop.check()
            yield batch
            done = min(done + len(batch[1]) * world_size, evaluation.num_images)
            self.reporter.eval_progress(done, evaluation.num_images)

    def _image_names(self, step: int) -> list[str]:
        """Names of the images that this rank reads in a step (counted from 1), each once."""
        source, sampler = self.parts.data.train, copy.copy(self.parts.train_loader.sampler)
        assert source is not None
        sampler.set_epoch(*divmod(step - 1, sampler.steps_per_epoch))
        share = sampler.global_batch_size // sampler.world_size
        return list(dict.fromkeys(source.name(index) for _, index, _ in islice(sampler, share)))
