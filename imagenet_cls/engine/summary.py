"""What a run prints at its start, after an evaluation, and at its end."""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from imagenet_cls.checkpoint.format import checkpoint_path
from imagenet_cls.checkpoint.progress import Progress, best_metric, best_weights
from imagenet_cls.config.metrics import MIN_CLASSES_FOR_TOP5, main_metric
from imagenet_cls.config.rules import EVALUATED, code_names
from imagenet_cls.config.schema import Config
from imagenet_cls.data.classes import HOLD_OUT_ADVICE
from imagenet_cls.data.image_set import EncodedImages, FileImages, ImageSet
from imagenet_cls.data.index import describe_unread
from imagenet_cls.data.samplers import samples_per_epoch
from imagenet_cls.data.targets import class_sizes
from imagenet_cls.data.turbojpeg import find_turbojpeg
from imagenet_cls.engine.loaders import describe_workers
from imagenet_cls.engine.meter import Meter
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.plan import Plan, part_sizes
from imagenet_cls.optim.groups import layer_lr_scales
from imagenet_cls.report.jsonl import Record, describe_result
from imagenet_cls.tasks import Task
from imagenet_cls.text import command_line, count_of, is_called_from_python, join_names

# An epoch that leaves out a larger share of the images is worth a warning.
_MAX_LEFT_OUT = 0.1


def startup_table(
    parts: TrainingParts, work_dir: Path | None, progress: Progress
) -> list[tuple[str, str]]:
    """Rows (label, text) about the run that begins. work_dir: None for a dry run."""
    plan = parts.plan
    context = parts.context
    config = parts.config
    parameters = sum(parameter.numel() for parameter in parts.model.parameters()) / 1e6
    classes = parts.num_classes
    present = parts.evaluation.present
    task = parts.evaluation.task
    shown_results = f"val {next(iter(task.metrics.values())).title}"
    if "top5" in task.metrics and classes >= MIN_CLASSES_FOR_TOP5:
        shown_results += "/top-5"
    if context.device.type == "cuda":
        device_name = torch.cuda.get_device_name(context.device)
    else:
        device_name = count_of(torch.get_num_threads(), "thread")
    precision = {
        None: "fp32",
        torch.bfloat16: "bf16 autocast",
        torch.float16: "fp16 autocast with a loss scale",
    }[parts.autocast_dtype]
    rows = {
        "model": f"{config.model.name}, {parameters:.2f} M parameters, "
        f"{count_of(classes, 'class')}",
        "training": describe_class_sizes(parts.data.train, task),
        "validation": describe_class_sizes(parts.data.val, task),
        "files not read": describe_unread(_unread_files(parts)),
        "validation classes": "" if present is None else f"{len(present)} of {classes}",
        "data workers": describe_workers(config.data, plan, context),
        "decoder": describe_decoder(parts.data.train),
        "device": f"{context.device} ({device_name}), {precision}",
        "other GPUs": _unused_gpus(parts),
        "ranks": f"{context.world_size} (launcher: {context.rank_info.launcher})",
        "batch": _describe_batch(plan),
        "steps": f"{plan.total_steps} ({plan.steps_per_epoch} per epoch, "
        f"{count_of(plan.epochs, 'epoch')})",
        "optimizer": f"{config.optimizer.name}, lr {parts.schedule.horizon.peak_lr:g}, "
        f"{config.schedule.name}",
        "layer decay": _describe_layer_decay(parts),
        "epoch lines": f"train loss and {task.train_metric.title}, {shown_results}; "
        f"*: best {config.checkpoint.best} so far",
        "run folder": "none: a dry run creates none" if work_dir is None else str(work_dir),
        "resumes at": f"step {progress.step}" if progress.step else "",
    }
    return [(label, text) for label, text in rows.items() if text]


def _describe_batch(plan: Plan) -> str:
    devices = count_of(plan.world_size, "rank")
    if plan.devices_per_rank > 1:
        devices = count_of(plan.devices_per_rank, "GPU")
    steps = count_of(plan.accumulation, "accumulation step")
    per_pass = " or ".join(map(str, part_sizes(plan.global_batch, plan.forward_passes)))
    return f"{plan.global_batch} = {devices} x {steps} x {per_pass} per device"


def _unused_gpus(parts: TrainingParts) -> str:
    """How to use all GPUs of this machine, if the training uses one that it has chosen itself."""
    count = torch.cuda.device_count()
    used = parts.plan.world_size * parts.plan.devices_per_rank
    if used > 1 or count < 2 or parts.config.device != "auto":
        return ""
    return f"{count - 1} not used; --gpus all uses all {count}"


def _describe_layer_decay(parts: TrainingParts) -> str:
    """The decay, and the parameters that have the full rate: the head, and those in no layer of the
    model's `group_matcher`.
    """
    decay = parts.config.optimizer.layer_decay
    if decay is None:
        return ""
    scales = layer_lr_scales(parts.model, decay)
    full = [name for name, scale in scales.items() if scale == 1]
    return f"{decay}, not for {len(full)} of {len(scales)} parameters: {join_names(full, 2)}"


def describe_class_sizes(source: ImageSet, task: Task) -> str:
    """The number of images, and of those in the smallest and the largest class if they are
    known.
    """
    targets, classes = source.targets, source.classes
    images = f"{len(source)} images"
    if source.left_out:
        images += f" ({source.left_out} left out)"
    if targets is None:
        return images
    counts = class_sizes(targets, len(classes))
    smallest, largest = counts.argmin(), counts.argmax()
    if counts[smallest] == counts[largest]:
        sizes = str(counts[0])
    else:
        sizes = (
            f"{counts[smallest]} ({classes[smallest]}) to {counts[largest]} ({classes[largest]})"
        )
    return f"{images}, {task.describe_sizes(sizes, targets)}"


def _unread_files(parts: TrainingParts) -> Counter[bytes]:
    """The number of files, by suffix, that lie beside the images and are not read."""
    unread = Counter[bytes]()
    # both parts may be of the same images
    for images in {parts.data.train.images, parts.data.val.images}:
        if isinstance(images, FileImages):
            unread.update(images.index.unread)
    return unread


def describe_decoder(source: ImageSet) -> str:
    """How the JPEG files of a source are decoded; "" for images that are not files."""
    images = source.images
    if not isinstance(images, EncodedImages):
        return ""
    library = find_turbojpeg()
    if library is None:
        return "whole images; faster with libjpeg-turbo: pip install turbojpeg"
    return "whole images" if images.decode == "whole" else f"regions, by {Path(library.path).name}"


def start_warnings(parts: TrainingParts) -> list[str]:
    """Warnings about a run that begins, whose config is valid but perhaps not what its user
    wants.
    """
    plan, config = parts.plan, parts.config
    warnings = []
    samples = samples_per_epoch(len(parts.data.train), config.data.repeats_multiple)
    left_out = samples - plan.steps_per_epoch * plan.global_batch
    if left_out > _MAX_LEFT_OUT * samples:
        warnings.append(
            f"each epoch leaves out {left_out} of {samples} images, which do not fill a batch; "
            "a smaller train.global_batch_size leaves out fewer"
        )
    starts_from_scratch = not config.model.pretrained and config.model.checkpoint is None
    if starts_from_scratch and (config.model.head_only or config.model.freeze):
        warnings.append(
            "frozen parameters have random values; set model.pretrained=true or model.checkpoint"
        )
    if parts.context.is_main:
        same = same_images_warning(parts.data.train, parts.data.val)
        warnings += [same] if same else []
    return [f"warning: {text}" for text in warnings]


def same_images_warning(train: ImageSet, val: ImageSet) -> str | None:
    """A warning if training and validation part have images in common, or all have the same names,
    classes and sizes.
    """
    ids = val.ids()
    shared = set(ids).intersection(train.ids())
    digests = [(source.digest, source.size_fingerprint()) for source in (train, val)]
    if digests[0] == digests[1]:  # of a copied folder
        shared = set(ids)
    if not shared:
        return None
    first = next(i for i, image in enumerate(ids) if image in shared)
    return (
        f"{len(shared)} of {len(val)} validation images are training images, such as "
        f"{val.name(first)}; name another data.val, or hold out some: {HOLD_OUT_ADVICE}"
    )


def epoch_lines(
    parts: TrainingParts, progress: Progress, records: Sequence[Record], training: str
) -> str:
    """The results of an evaluation in one line, with `*` at the best of the run so far. If
    `eval.metrics` are set, a line with all other values follows for each kind of weights.

    records: one of kind "eval" for each kind of weights. training: the result of
    `Meter.describe_epoch`.
    """
    best = progress.best
    marked = best_weights(best) if best else None
    columns = [f"epoch {records[0]['epoch'] + 1}/{parts.plan.epochs}"]
    if training:
        columns.append(training)
    lines = []
    main = main_metric(records[0]).field
    has_top5 = parts.num_classes >= MIN_CLASSES_FOR_TOP5 and "top5_pct" in records[0]
    for record in records:
        kind = record["weights"]
        title = {"raw": "val", "ema": "EMA"}[kind]
        column = f"{title} {record[main]:.2f}"
        if has_top5:
            column += f"/{record['top5_pct']:.2f}"
        column += " %"
        if kind == marked and best[kind]["step"] == record["step"]:
            column += " *"
        columns.append(column)
        if parts.config.eval.metrics:
            others = describe_result(record, 2, parts.num_classes)[2 if has_top5 else 1 :]
            lines.append("  ".join([f"  {title}", *others]))
    return "\n".join(["  ".join(columns), *lines])


def final_message(
    progress: Progress, config: Config, plan: Plan, work_dir: Path, meter: Meter
) -> str:
    """Duration and speed, the best results, the checkpoint and the weights that predict.py uses,
    and the next commands, with the names of the config's own code.
    """
    lines = ["done", f"trained {meter.describe_total()}"]
    if progress.best:
        used = best_weights(progress.best)
        for kind, best in progress.best.items():
            metric = best_metric(best)
            when = f"in epoch {plan.place(best['step'] - 1)[0] + 1}"
            if plan.offset:  # it may be of an epoch with other steps
                when = f"after step {best['step']}"
            note = ", used by predict.py" if kind == used else ""
            # All evaluations have the same images. Checkpoints of older versions lack the number.
            images = progress.latest.get(kind, {}).get("images")
            value = metric.format(best[metric.field], images=images)
            lines.append(f"best {metric.title} ({kind} weights{note}): {value} {when}")
        path = checkpoint_path(work_dir / "checkpoints", progress.best[used]["step"])
        lines.append(f"checkpoint: {path}{'' if path.exists() else ', which is missing'}")
    if is_called_from_python():
        lines += [
            "next:",
            f"  run = imagenet_cls.TrainedRun({str(work_dir)!r})",
            "  run.plot()  # curves",
            "  run.mistakes()",
            "  run.predictor()(IMAGES)",
        ]
        return "\n".join(lines)
    run = shlex.quote(str(work_dir))
    code = code_names(config, EVALUATED)
    trusting = "".join(f" --allow-import {shlex.quote(name)}" for name in code)
    report = shlex.quote(f"reports/{work_dir.name}.html")
    page = work_dir / "report.html"
    lines += [
        "next:",
        f"  {page}  # curves" if page.exists() else f"  {command_line('report')} {run}  # curves",
        f"  {command_line('test')} {run} --report {report}{trusting}  # mistakes by class",
        f"  {command_line('predict')} {run} IMAGES{trusting}",
        f"  {command_line('export')} {run}{trusting}  # ONNX",
    ]
    return "\n".join(lines)
