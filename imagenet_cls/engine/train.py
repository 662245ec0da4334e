"""The loop. Called by `engine.run`, which builds the parts and writes what comes out.

epoch = step // steps_per_epoch: where a run stands is one number, so a resumed run is this loop begun at another
step.
"""

from collections.abc import Iterator
from copy import copy
from itertools import islice
from math import isfinite
from typing import Any

from torch import Tensor, nn

from imagenet_cls.checkpoint.optimizer_state import Progress
from imagenet_cls.engine.build import Parts
from imagenet_cls.engine.evaluate import Batch, evaluate, outputs_of
from imagenet_cls.engine.meter import Meter
from imagenet_cls.engine.saving import Saver
from imagenet_cls.engine.step import autocast
from imagenet_cls.guards.agreement import tensors_held
from imagenet_cls.guards.nonfinite import NonFiniteGuard
from imagenet_cls.guards.replicas import ReplicaCheck
from imagenet_cls.models.freeze import set_training
from imagenet_cls.parallel.signals import StopRequest
from imagenet_cls.parallel.wrap import gradient_sync
from imagenet_cls.report.reporter import Reporter
from imagenet_cls.seeding import hash_key, seed_generators


def train(p: Parts, progress: Progress, reporter: Reporter, saver: Saver, stop: StopRequest) -> int:
    """Train from `progress.step` to the end of the plan. Every rank calls it, with the same `progress`.

    Returns 0, or the signal that the run was stopped for; then the present state is being saved. Raises NonFiniteError,
    DataError from a worker, or ResourceError from a save.
    """
    cfg, plan, device, seed = p.config, p.plan, p.group.device, p.config.seed
    meter, drift = Meter(p.group, plan.global_batch), drift_check_for(p, progress.step)
    nonfinite = nonfinite_guard_for(p)

    def report_steps() -> None:
        records = meter.flush()
        reporter.train(records)
        if note := nonfinite.note(records):
            reporter.event(progress.step, note)
        nonfinite.check(records, meter.own_losses)

    def save() -> None:
        drift.check(progress.step)  # what the ranks disagree about is not worth saving
        saver.save()

    while True:
        signal_number = 0
        if evaluation_due(p, progress):
            improved, signal_number = evaluate_all(p, progress, reporter, stop)
            if improved or signal_number or save_due(p, progress.step, nonfinite.last_step_finite):
                save()
        if signal_number or progress.step >= plan.total_steps:
            return signal_number

        epoch, first_step = divmod(progress.step, plan.steps_per_epoch)
        set_training(p.model, cfg.model)
        meter.restart_clock()
        micro_batches = meter.waiting_for(p.train_loader.epoch(epoch, first_step))
        for step in range(progress.step, min((epoch + 1) * plan.steps_per_epoch, plan.total_steps)):
            lr = p.schedule(step, progress.evaluations)
            losses: list[Tensor] = []
            # One pass over the step's micro-batches; with SAM a second one, from where the loss is higher.
            for batches in p.sam.points(step, islice(micro_batches, plan.accumulation)):
                for micro, batch in enumerate(batches):
                    if step == 0 and not losses:
                        reporter.first_batch(batch.images[: len(batch.targets)], batch.targets, p.data.classes)
                    images, targets = p.prepare(batch, epoch, step, micro)
                    seed_generators(hash_key("batch", seed, step, micro, p.group.rank), *p.devices.all)  # for dropout
                    with gradient_sync(p.wrapped, micro == plan.accumulation - 1):
                        with autocast(device, p.evaluation.autocast_dtype):
                            logits = p.wrapped(images)
                            loss = p.criterion(logits, targets, images) / plan.accumulation
                        p.scaler.scale(loss).backward()
                    losses.append(loss.detach().to(device, non_blocking=True))
            grad_norm, skipped = p.updater.update(lr, p.schedule.momentum(step))
            p.statistics.sync(skipped)
            p.ema.update(p.model, step)
            progress.step = step + 1
            meter.add(progress.step, epoch, lr, sum(losses[1 : plan.accumulation], losses[0]), grad_norm, skipped)

            if progress.step % cfg.log.every_steps == 0:
                report_steps()
            drift.check_if_due(progress.step)
            if signal_number := stop.agreed():
                report_steps()
                save()
                return signal_number
            saver.check()
            if save_due(p, progress.step) and not evaluation_due(p, progress):
                report_steps()
                if save_due(p, progress.step, nonfinite.last_step_finite):
                    save()
                meter.restart_clock()
        report_steps()


def nonfinite_guard_for(p: Parts) -> NonFiniteGuard:
    source, sampler = p.data.train, p.train_loader.sampler
    assert source is not None

    def samples_of(step: int) -> list[str]:
        """Names of the images that this rank reads in a step (counted from 1), each once: the order is a pure function
        of the step.
        """
        own = copy(sampler)
        own.set_epoch(*divmod(step - 1, own.steps_per_epoch))
        share = own.global_batch_size // own.world_size
        return list(dict.fromkeys(source.name(index) for _, index, _ in islice(own, share)))

    fp16 = p.scaler.is_enabled()
    return NonFiniteGuard(p.group, p.config.train.max_nonfinite_steps, p.plan.total_steps, fp16, samples_of)


def drift_check_for(p: Parts, start_step: int) -> ReplicaCheck:
    """Over everything that a step changes and that must be equal on all ranks."""
    every_steps = p.config.parallel.check_every_steps
    return ReplicaCheck(p.group, every_steps, start_step, lambda: tensors_held(p.model, p.ema.module, p.optimizer))


def evaluation_due(p: Parts, progress: Progress) -> bool:
    """At the end of every `eval.every_epochs`-th epoch and of the run, unless this step was evaluated already."""
    at_end = progress.step >= p.plan.total_steps
    epochs, rest = divmod(progress.step, p.plan.steps_per_epoch)
    at_epoch = rest == 0 and epochs > 0 and epochs % p.config.eval.every_epochs == 0
    return (at_end or at_epoch) and progress.evaluated_step < progress.step


def save_due(p: Parts, step: int, last_step_finite: bool = True) -> bool:
    """At the end of the run, and as `checkpoint.every_steps` and `checkpoint.every_epochs` say.

    last_step_finite: false where the last step was NaN. Until the end such a state does not replace a checkpoint.
    """
    every_steps, every_epochs = p.config.checkpoint.every_steps, p.config.checkpoint.every_epochs
    epochs, rest = divmod(step, p.plan.steps_per_epoch)
    by_steps = every_steps is not None and step % every_steps == 0
    by_epochs = every_epochs is not None and rest == 0 and epochs % every_epochs == 0
    return step >= p.plan.total_steps or ((by_steps or by_epochs) and last_step_finite)


class _Stopped(Exception):
    """The ranks agreed to stop, in the middle of an evaluation. Holds the signal."""


def evaluate_all(p: Parts, progress: Progress, reporter: Reporter, stop: StopRequest) -> tuple[bool, int]:
    """Evaluate the raw and the averaged weights, record both, and say whether either is the best so far.

    Returns that, and 0; or False and the signal that the run is to stop for. Then nothing was recorded, and a run that
    goes on evaluates this step from the start.
    """
    models: dict[str, nn.Module] = {"raw": p.model} | ({} if p.ema.module is None else {"ema": p.ema.module})
    e = p.evaluation
    # The shards' sizes differ by one image, so some ranks may have a batch that others have not.
    batches_of_all = -(-(e.num_images // p.group.world_size) // (p.config.eval.batch_size * p.plan.devices))

    def showing_progress() -> Iterator[Batch]:
        """This rank's batches; the others keep pace, so that its share tells how far all are."""
        done = 0
        reporter.evaluating(done, e.num_images)
        for number, batch in enumerate(e.batches()):
            if number < batches_of_all and (signal_number := stop.agreed()):
                raise _Stopped(signal_number)
            yield batch
            done = min(done + len(batch[1]) * p.group.world_size, e.num_images)
            reporter.evaluating(done, e.num_images)

    models = {kind: e.on_devices(model) for kind, model in models.items()}
    flip = p.config.eval.flip_tta
    outputs = outputs_of(models, showing_progress(), e.preprocess, p.group.device, e.autocast_dtype, flip)
    try:
        results = evaluate(outputs, list(models), p.group)
    except _Stopped as stopped:
        return False, stopped.args[0]
    improved = False
    for kind, result in results.items():
        record: dict[str, Any] = {
            "kind": "eval",
            "step": progress.step,
            "epoch": (progress.step - 1) // p.plan.steps_per_epoch,
            "weights": kind,
            **result,
        }
        reporter.evaluation(record)
        progress.latest[kind] = {name: value for name, value in result.items() if name != "seconds"}
        # Weights that give NaN have a top-1, too: whatever class NaN sorts to.
        if isfinite(result["loss"]) and result["top1_pct"] > progress.best.get(kind, {}).get("top1_pct", -1.0):
            progress.best[kind] = {"top1_pct": result["top1_pct"], "step": progress.step}
            improved = True
    progress.evaluated_step = progress.step
    if progress.step % (p.plan.steps_per_epoch * p.config.eval.every_epochs) == 0:  # not where max_steps cut the run
        progress.evaluations.append((progress.step, progress.latest["raw"]["top1_pct"]))
    return improved, 0
