"""What a training run does between two steps of the loop.

Batches, reports, evaluations, stop requests and saves.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice

from torch import nn

from imagenet_cls.checkpoint.format import checkpoint_path
from imagenet_cls.checkpoint.optimizer_state import check_state
from imagenet_cls.checkpoint.progress import Progress, stops_early
from imagenet_cls.checkpoint.saver import CheckpointSaver
from imagenet_cls.config.metrics import BY_FIELD, BY_NAME
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.engine.loaders import EvalBatch
from imagenet_cls.engine.meter import Meter, StepResult
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.plan import Due, ceil_div, due_after
from imagenet_cls.engine.summary import epoch_lines
from imagenet_cls.errors import Stopped
from imagenet_cls.guards.hang import HangLog
from imagenet_cls.guards.nonfinite import NonFiniteGuard, check_finite_weights
from imagenet_cls.guards.replicas import ReplicaCheck, replicated_tensors
from imagenet_cls.parallel.collectives import run_on_main
from imagenet_cls.parallel.stop_requests import StopRequested, StopSignalHandler
from imagenet_cls.private_names import base_optimizer
from imagenet_cls.report.reporter import Reporter


class Run:
    """A training run. It implements `engine.train.TrainingRun`, the protocol of the loop."""

    def __init__(
        self,
        parts: TrainingParts,
        progress: Progress,
        reporter: Reporter,
        saver: CheckpointSaver,
        stop_signals: StopSignalHandler,
        hang_log: HangLog,
    ):
        self.parts = parts
        self.progress = progress
        self.reporter = reporter
        self.saver = saver
        self.stop_signals = stop_signals
        self.hang_log = hang_log
        # recomputed: `train.early_stop` may have changed since the checkpoint
        progress.stopped_early = stops_early(progress.history, parts.config.train.early_stop)
        self.meter = Meter(
            parts.context, parts.plan.global_batch, parts.evaluation.task.train_metric
        )
        self.nonfinite_guard = NonFiniteGuard(
            parts.context,
            parts.config.train.max_nonfinite_steps,
            fp16=parts.scaler.is_enabled(),
            samples_of=self.sample_names,
        )
        self.replica_check = ReplicaCheck(
            parts.context,
            parts.config.parallel.check_every_steps,
            progress.step,
            lambda: replicated_tensors(
                parts.model, parts.ema.module, base_optimizer(parts.optimizer).state
            ),
        )

    @contextmanager
    def save_when_stopped(self) -> Iterator[None]:
        """Context manager for the training. After a stop signal, save and raise Stopped."""
        try:
            yield
        except StopRequested as request:
            self.log_steps()
            self.save()
            run_on_main(self.parts.context, self.saver.wait)
            step = self.progress.step
            raise Stopped(
                f"{request} after step {step} of {self.parts.plan.total_steps}, saved in "
                f"{checkpoint_path(self.saver.checkpoints, step)}",
                "Resume with the same command and --resume, without --overwrite.",
                request.signal_number,
            ) from None

    def epoch_batches(self, epoch: int, first_step: int) -> Iterator[TrainBatch]:
        """This rank's micro-batches of an epoch, from its step `first_step` on, already copied to a
        GPU if there is one.

        Adds the time that the loop waits for a batch to the meter.
        """
        parts = self.parts
        batches = parts.prefetch(parts.train_loader.epoch(epoch, first_step))
        if self.progress.step == 0 and parts.config.log.report:
            first = next(batches)
            self.reporter.write_pages(["first batch"], parts, first)
            batches = chain([first], batches)
        self.meter.restart_clock()
        while True:
            wait_started = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            self.meter.add_wait(time.perf_counter() - wait_started)
            yield batch

    def after_step(self, result: StepResult) -> None:
        """Record a step; log, check replicas, stop and save where that is due, in this order. A
        collective.
        """
        step = self.progress.step
        if step == 1:  # not as late as the first save
            check_state(self.parts.optimizer, self.parts.config.optimizer.name)
        due = self.due()
        self.hang_log.reset()
        self.meter.add(result)
        if due.log:
            self.log_steps()  # waits for the device
        self.replica_check.check_if_due(step)  # raises if replicas have diverged
        # Raises StopRequested, on all ranks at the same step.
        self.stop_signals.check_after_step(force=due.save or due.end_of_epoch)
        self.saver.check()  # raises if a save in the background has failed
        if due.save and not due.evaluation:  # otherwise `after_epoch` saves
            self.log_steps()
            # Not after a non-finite step: an older, good checkpoint would be removed. A stop and
            # the end of the run save in any case, if the weights are finite.
            if self.nonfinite_guard.last_step_finite:
                self.save()
            self.meter.restart_clock()

    def after_epoch(self) -> None:
        """Log the epoch's last steps, and evaluate if that is due."""
        self.log_steps()
        self.evaluate_if_due()

    def evaluate_if_due(self) -> None:
        """Evaluate, if that is due and not done, and then save if the result is the best so far or
        a save is due.
        """
        if self.due().evaluation and self.progress.evaluated_step < self.progress.step:
            improved = self.evaluate()
            due = self.due()  # the evaluation may have stopped the run early
            # The end is always saved: `save` raises if the weights are not finite.
            if improved or due.end or (due.save and self.nonfinite_guard.last_step_finite):
                self.save()

    def due(self) -> Due:
        """What is due after the last step."""
        progress, parts = self.progress, self.parts
        return due_after(progress.step, parts.plan, parts.config, progress.stopped_early)

    def log_steps(self) -> None:
        """Report the steps since the last call. A collective.

        Raises NonFiniteError after too many non-finite ones in a row.
        """
        records = self.meter.flush()
        if not records:
            return
        self.stop_signals.set_interval(*self.meter.last_interval)
        self.reporter.report_steps(records)
        nonfinite_message = self.nonfinite_guard.count_and_describe(records)
        if nonfinite_message is not None:
            self.reporter.event(self.progress.step, nonfinite_message)
        self.nonfinite_guard.check(records, self.meter.own_losses)

    def save(self) -> None:
        """Save in the background. Raises without saving if replicas have diverged or weights are
        not finite.
        """
        self.replica_check.check(self.progress.step)
        check_finite_weights(self.parts.model, self.progress.step, self.parts.context)
        self.saver.save()

    def evaluate(self) -> bool:
        """Evaluate the raw and the EMA weights and record both. Returns whether either is the best
        so far.

        Raises StopRequested; then nothing is recorded, and a resumed run repeats the evaluation.
        """
        parts, progress = self.parts, self.progress
        models: dict[str, nn.Module] = {"raw": parts.model}
        if parts.ema.module is not None:
            models["ema"] = parts.ema.module
        outputs = parts.evaluation.outputs(models, self.evaluation_batches())
        results = parts.evaluation.results(outputs, list(models), parts.num_classes, parts.metrics)
        epoch, step_of_epoch = parts.plan.place(progress.step - 1)
        common = {"kind": "eval", "step": progress.step, "epoch": epoch}
        records = [common | {"weights": kind} | result for kind, result in results.items()]
        metric = BY_NAME[parts.config.checkpoint.best]
        improved = [progress.record(kind, result, metric) for kind, result in results.items()]
        training = self.meter.describe_epoch(steps=step_of_epoch + 1)
        self.reporter.eval_results(records, epoch_lines(parts, progress, records, training))
        self.reporter.write_classes(common | parts.evaluation.by_class, parts.data.classes)
        progress.evaluated_step = progress.step
        # Early stopping does not count an evaluation that is due only because the run ends:
        # `max_steps`, or epochs that are no multiple of `eval.every_epochs`.
        if self.due().regular_evaluation:
            preferred = results["ema" if "ema" in models else "raw"]
            progress.history.append(
                {name: preferred[name] for name in BY_FIELD if name in preferred}
            )
        early_stop = parts.config.train.early_stop
        progress.stopped_early = stops_early(progress.history, early_stop)
        if progress.stopped_early and progress.step < parts.plan.total_steps:
            self.reporter.event(
                progress.step,
                f"stopped early: {early_stop.metric} of the "
                f"{'ema' if 'ema' in models else 'raw'} weights did not improve in "
                f"{early_stop.patience_evals} evaluations (train.early_stop)",
            )
        return any(improved)

    def evaluation_batches(self) -> Iterator[EvalBatch]:
        """This rank's validation batches, with a progress bar. Raises StopRequested after a stop
        signal.
        """
        evaluation, world_size = self.parts.evaluation, self.parts.context.world_size
        # `check` is a collective, so it is not called before a batch that another rank lacks.
        # Shards differ by at most one image.
        smallest_shard = len(evaluation.source) // world_size
        batch_size = self.parts.config.eval.batch_size * self.parts.plan.devices_per_rank
        batches_on_all_ranks = ceil_div(smallest_shard, batch_size)
        done = 0
        self.reporter.eval_progress(done, len(evaluation.source))
        for number, batch in enumerate(evaluation.batches()):
            if number < batches_on_all_ranks:
                self.stop_signals.check()
            self.hang_log.reset()
            yield batch
            done = min(done + len(batch[1]) * world_size, len(evaluation.source))
            self.reporter.eval_progress(done, len(evaluation.source))

    def sample_names(self, step: int) -> list[str]:
        """Names of the images that this rank reads in a step (counted from 1), each once."""
        source = self.parts.data.train
        sampler = copy.copy(self.parts.train_loader.sampler)  # the loader is using its own
        sampler.set_epoch(*self.parts.plan.place(step - 1))
        samples = islice(sampler, sum(sampler.micro_batch_sizes))
        return list(dict.fromkeys(source.name(index) for _, index, _ in samples))
