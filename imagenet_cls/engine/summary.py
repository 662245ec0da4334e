"""What a run prints at its start and at its end."""

from pathlib import Path

import torch

from imagenet_cls.checkpoint.format import Progress, checkpoint_path
from imagenet_cls.config.schema import Config
from imagenet_cls.engine.build import TrainingParts
from imagenet_cls.models.adapt import frozen_batch_norm


def startup_table(parts: TrainingParts, work_dir: Path | None, progress: Progress) -> list[tuple[str, str]]:
    """Rows (label, text) about the run that begins. work_dir: None for a dry run."""
    plan, group, config = parts.plan, parts.group, parts.config
    assert parts.data.train is not None
    parameters = sum(parameter.numel() for parameter in parts.model.parameters())
    device = f"{group.device} ({torch.get_num_threads()} threads)"
    if group.device.type == "cuda":
        device = f"{group.device} ({torch.cuda.get_device_name(group.device)})"
    precision = {None: "fp32", torch.bfloat16: "bf16 autocast", torch.float16: "fp16 autocast with a loss scale"}
    devices = _count(plan.devices, "GPU") if plan.devices > 1 else _count(plan.world_size, "rank")
    steps = _count(plan.accumulation, "accumulation step")
    rows = [
        ("model", f"{config.model.name}, {parameters / 1e6:.2f} M parameters, {parts.num_classes} classes"),
        ("data", f"{len(parts.data.train)} training and {parts.evaluation.num_images} validation images"),
        ("device", f"{device}, {precision[parts.evaluation.autocast_dtype]}"),
        ("ranks", f"{group.world_size} (launcher: {group.rank_info.launcher})"),
        ("batch", f"{plan.global_batch} = {devices} x {steps} x {plan.micro_batch} per device"),
        *([("BatchNorm batch", _batch_norm_batch(parts))] if frozen_batch_norm(parts.model, config.model) else []),
        ("steps", f"{plan.total_steps} ({plan.steps_per_epoch} per epoch, {plan.epochs} epochs)"),
        ("optimizer", f"{config.optimizer.name}, lr {parts.lr:g}, {config.schedule.name}"),
        *recipe_rows(config),
        ("seed", str(config.seed)),
        ("run folder", "none: a dry run writes nothing" if work_dir is None else str(work_dir)),
    ]
    return rows + ([("resumes at", f"step {progress.step}")] if progress.step else [])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _batch_norm_batch(parts: TrainingParts) -> str:
    """The images over which BatchNorm computes its statistics."""
    config, world_size = parts.config, parts.group.world_size
    images = parts.plan.micro_batch * (1 if config.model.split_bn else config.augment.splits)
    if config.model.freeze_bn:
        return "none: running statistics are frozen (model.freeze_bn)"
    if config.parallel.sync_bn and world_size > 1:
        return f"{images * world_size} images over all ranks (SyncBatchNorm)"
    return f"{images} images"


def recipe_rows(config: Config) -> list[tuple[str, str]]:
    """What the recipe adds to plain training."""
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
        "EMA": average and average + every,
    }
    return [(label, text) for label, text in rows.items() if text]


def final_message(parts: TrainingParts, progress: Progress, work_dir: Path) -> str:
    """One line for the raw weights and one for the EMA: the last and the best top-1."""
    lines = ["done"]
    for kind, best in progress.best.items():
        path = checkpoint_path(work_dir / "checkpoints", best["step"])
        saved = str(path) if path.exists() else f"{path}, which could not be saved"
        lines.append(
            f"{kind} weights: top-1 {progress.latest[kind]['top1_pct']:.2f} % at the end, "
            f"best {best['top1_pct']:.2f} % at step {best['step']} in {saved}"
        )
    return "\n".join(lines)
