"""Rules across keys: what does not fit together, and what to do about it.

Owns every such statement that needs no library, no file and no device to decide; keys that do nothing are in `idle`.
Each rule is a function from a config to problems; `RULES` lists them with the keys that they read. Called by `check`.
"""

import re
from collections.abc import Callable, Iterator

from imagenet_cls.config.idle import mixes
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import Problem, format_value


def _weights(config: Config) -> Iterator[Problem]:
    if config.model.pretrained and config.model.checkpoint is not None:
        yield Problem("model.checkpoint", "is given and model.pretrained is true; keep one source of weights")


def _validation_part(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.val is not None and data.val_fraction is not None:
        remedy = f"set data.val to null to hold out a share of data.train, or drop this to use {format_value(data.val)}"
        yield Problem(
            "data.val_fraction", f"{data.val_fraction} is given and data.val is {format_value(data.val)}; {remedy}"
        )
    brings_own_parts = data.name == "synthetic" or ":" in data.name
    if data.val is None and data.val_fraction is None and not brings_own_parts:
        yield Problem(
            "data.val", "is null and there is no data.val_fraction; name a folder, or say data.val_fraction: 0.1"
        )


def _list_files(config: Config) -> Iterator[Problem]:
    if config.data.name == "list":
        for key, value in (("train", config.data.train), ("val", config.data.val)):
            if value == key:  # the default, which names a folder
                yield Problem(
                    f"data.{key}",
                    f"{format_value(value)} names a folder; data.name list needs a file, such as {key}.txt",
                )


def _bad_images(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.exclude is not None and (data.name == "synthetic" or ":" in data.name):
        text = f"leaves image files out, and data.name {format_value(data.name)} has none; make it null"
        yield Problem("data.exclude", text)


def _sizes(config: Config) -> Iterator[Problem]:
    resize_px, crop_px = config.eval.resize_px, config.eval.crop_px
    if resize_px is not None and resize_px < crop_px:
        yield Problem(
            "eval.resize_px", f"{resize_px} is less than eval.crop_px {crop_px}; a crop can't be larger than its image"
        )


def _batches(config: Config) -> Iterator[Problem]:
    micro, whole = config.train.micro_batch_size, config.train.global_batch_size
    if micro is not None and micro > whole:
        yield Problem(
            "train.micro_batch_size", f"{micro} is more than train.global_batch_size {whole}; null takes all at once"
        )


def _warmup(config: Config) -> Iterator[Problem]:
    warmup, cooldown, epochs = config.schedule.warmup_epochs, config.schedule.cooldown_epochs, config.train.epochs
    if warmup > epochs:
        yield Problem(
            "schedule.warmup_epochs", f"{warmup:g} is more than train.epochs {epochs}; it is a part of the epochs"
        )
    elif warmup + cooldown > epochs:
        yield Problem(
            "schedule.cooldown_epochs",
            f"{cooldown:g} and {warmup:g} of warm-up are more than train.epochs {epochs}; they are parts of the epochs",
        )


def _progressive(config: Config) -> Iterator[Problem]:
    epochs, sizes = config.augment.progressive.epochs, config.augment.progressive.sizes_px
    key = "augment.progressive"
    if epochs is None and sizes is None:
        return
    if epochs is None or sizes is None or len(epochs) != len(sizes) or not epochs:
        yield Problem(
            f"{key}.sizes_px", f"{format_value(sizes)} for epochs {format_value(epochs)}: give one size for each epoch"
        )
        return
    if sorted(set(epochs)) != epochs or epochs[0] < 0:
        yield Problem(f"{key}.epochs", f"{format_value(epochs)} are not different epochs from 0 on, the smallest first")
    elif epochs[-1] > config.train.epochs:
        yield Problem(f"{key}.epochs", f"{epochs[-1]:g} is more than train.epochs {config.train.epochs}")
    multiple = config.augment.progressive.multiple_px
    unfit = [size for size in sizes if size < 1 or size % multiple]
    if unfit:
        yield Problem(f"{key}.sizes_px", f"{unfit[0]} is not a multiple of {key}.multiple_px {multiple}")
    elif max(sizes) != config.augment.size_px:
        yield Problem(
            f"{key}.sizes_px",
            f"the largest is {max(sizes)}, but augment.size_px is {config.augment.size_px}; make them equal",
        )


def _mixing(config: Config) -> Iterator[Problem]:
    if not mixes(config.mix):
        return
    if config.loss.name in ("focal", "jsd"):
        yield Problem("mix", f"makes soft targets, and loss {config.loss.name!r} takes none; use cross_entropy or bce")
    if config.augment.splits > 1:
        yield Problem("augment.splits", "compares views of one image, and mix joins different images; use one of both")


def _cutmix_sides(config: Config) -> Iterator[Problem]:
    if config.mix.cutmix_minmax is None:
        return
    least, most = config.mix.cutmix_minmax
    size_px = min([config.augment.size_px, *(config.augment.progressive.sizes_px or [])])
    if int(size_px * least) >= int(size_px * most):
        text = f"leaves no side to choose in images of {size_px} px; let the two differ by a pixel at least"
        yield Problem("mix.cutmix_minmax", f"{format_value(config.mix.cutmix_minmax)} {text}")


def _splits(config: Config) -> Iterator[Problem]:
    splits = config.augment.splits
    if config.loss.name == "jsd" and splits < 2:
        yield Problem("loss.name", f"'jsd' compares views, and augment.splits is {splits}; use 3, as AugMix has it")
    if splits > 1 and config.loss.name != "jsd" and ":" not in config.loss.name:
        yield Problem("augment.splits", f"{splits} views of each image are for loss 'jsd', not {config.loss.name!r}")
    if config.model.split_bn and splits < 2:
        yield Problem("model.split_bn", f"has a BatchNorm for each split, and augment.splits is {splits}")


def _is_own(name: str) -> bool:
    """Whether a model comes from a factory of the user's, which may bring weights along."""
    return ":" in name and not name.startswith("torchvision:")


def _distillation(config: Config) -> Iterator[Problem]:
    kind, teacher = config.distill.kind, config.distill.teacher
    if kind == "none":
        if teacher.name is not None:
            yield Problem(
                "distill.kind", f"is none, and distill.teacher.name is {format_value(teacher.name)}; say soft or hard"
            )
        elif teacher.checkpoint is not None or teacher.pretrained:
            text = "is none, and distill.teacher has weights; say soft or hard and name the teacher, or drop them"
            yield Problem("distill.kind", text)
        return
    if teacher.name is None:
        yield Problem("distill.teacher.name", f"is null, and distill.kind is {kind!r}; name a model")
    elif not (teacher.pretrained or teacher.checkpoint or _is_own(teacher.name)):
        yield Problem(
            "distill.teacher.checkpoint", "is null: an untrained teacher has nothing to teach; name its weights"
        )
    if teacher.pretrained and teacher.checkpoint is not None:
        yield Problem("distill.teacher.checkpoint", "is given and pretrained is true; keep one source of weights")
    if config.augment.splits > 1:
        yield Problem("distill.kind", "can't be used with augment.splits")


def _clipping(config: Config) -> Iterator[Problem]:
    given = [name for name in ("clip_norm", "clip_value", "clip_agc") if getattr(config.train, name) is not None]
    if len(given) > 1:
        yield Problem(f"train.{given[1]}", f"is given and train.{given[0]}, too; keep one way of clipping")


def _sharpness(config: Config) -> Iterator[Problem]:
    if config.train.sam_rho is not None and config.train.precision == "fp16":
        yield Problem("train.sam_rho", "needs gradients without a loss scale; use train.precision bf16 or fp32")


def _average(config: Config) -> Iterator[Problem]:
    if config.ema.decay is not None and config.ema.half_life_images is not None:
        yield Problem("ema.half_life_images", "is given and ema.decay, too; keep one of both, null for the other")


def _repeats(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.repeats > config.train.global_batch_size:
        yield Problem(
            "data.repeats",
            f"{data.repeats} views of an image are more than train.global_batch_size {config.train.global_batch_size}",
        )


def _frozen(config: Config) -> Iterator[Problem]:
    if config.model.head_only and config.model.freeze:
        yield Problem("model.freeze", "is given and model.head_only is true, which freezes all but the head; keep one")


def _split_batch_norm(config: Config) -> Iterator[Problem]:
    if config.model.split_bn and config.model.freeze_bn:
        yield Problem("model.split_bn", "is true and model.freeze_bn, too, which trains no BatchNorm; keep one")
    if config.model.split_bn and config.parallel.sync_bn:
        yield Problem("model.split_bn", "can't be synchronised over ranks; set parallel.sync_bn to false")
    if config.model.split_bn and config.parallel.mode == "dp":
        yield Problem("model.split_bn", "needs whole batches, and parallel.mode dp cuts views apart; use ddp")


def _devices(config: Config) -> Iterator[Problem]:
    if config.device == "cpu" and config.parallel.backend == "nccl":
        yield Problem("parallel.backend", "'nccl' joins GPUs and device is 'cpu'; use gloo or auto")
    if config.device == "cpu" and config.train.precision == "fp16":
        yield Problem("train.precision", "'fp16' needs a GPU and device is 'cpu'; use fp32 or bf16")


def _data_parallel(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    ids = parallel.device_ids
    if ids is not None and (not ids or min(ids) < 0 or len(set(ids)) < len(ids)):
        yield Problem("parallel.device_ids", f"{format_value(ids)} is not a list of different GPUs, numbered from 0")
    if ":" in config.device and (ids is not None or parallel.mode == "dp"):
        yield Problem(
            "device", f"{format_value(config.device)} is one GPU; name it in parallel.device_ids, or all of them there"
        )
    if parallel.mode != "dp":
        if parallel.output_device is not None:
            text = f"{parallel.output_device} is for parallel.mode dp; a rank's outputs are on its own GPU"
            yield Problem("parallel.output_device", text)
        return
    if config.train.compile:
        yield Problem("train.compile", "can't be used with parallel.mode dp, which copies the model in every step")
    if parallel.sync_bn:
        yield Problem("parallel.sync_bn", "synchronises ranks, and parallel.mode dp has one; use ddp and several ranks")


def _init_port(config: Config) -> Iterator[Problem]:
    port = re.fullmatch(r"tcp://.*:(\d+)", config.parallel.init_method)
    if port and int(port.group(1)) > 65535:
        yield Problem("parallel.init_method", f"port {port.group(1)} is out of range: 1 to 65535")


DATA_PARALLEL_KEYS = (
    *("device", "train.compile"),
    *("parallel.mode", "parallel.device_ids", "parallel.output_device", "parallel.sync_bn"),
)

PROGRESSIVE_KEYS = (
    *("augment.progressive.epochs", "augment.progressive.sizes_px", "augment.progressive.multiple_px"),
    *("augment.size_px", "train.epochs"),
)
MIXING_KEYS = ("mix.mixup_alpha", "mix.cutmix_alpha", "mix.cutmix_minmax")
TEACHER_KEYS = ("distill.kind", *(f"distill.teacher.{name}" for name in ("name", "pretrained", "checkpoint")))

# Each with the keys that it reads: a rule is left out where one of them is wrong by itself.
RULES: list[tuple[tuple[str, ...], Callable[[Config], Iterator[Problem]]]] = [
    (("model.pretrained", "model.checkpoint"), _weights),
    (("data.name", "data.val", "data.val_fraction"), _validation_part),
    (("data.name", "data.train", "data.val"), _list_files),
    (("data.name", "data.exclude"), _bad_images),
    (("eval.resize_px", "eval.crop_px"), _sizes),
    (("train.micro_batch_size", "train.global_batch_size"), _batches),
    (("schedule.warmup_epochs", "schedule.cooldown_epochs", "train.epochs"), _warmup),
    (PROGRESSIVE_KEYS, _progressive),
    ((*MIXING_KEYS, "loss.name", "augment.splits"), _mixing),
    (("mix.cutmix_minmax", "augment.size_px", "augment.progressive.sizes_px"), _cutmix_sides),
    (("loss.name", "augment.splits", "model.split_bn"), _splits),
    ((*TEACHER_KEYS, "augment.splits"), _distillation),
    (("train.clip_norm", "train.clip_value", "train.clip_agc"), _clipping),
    (("train.sam_rho", "train.precision"), _sharpness),
    (("ema.decay", "ema.half_life_images"), _average),
    (("data.repeats", "train.global_batch_size"), _repeats),
    (("model.head_only", "model.freeze"), _frozen),
    (("model.split_bn", "model.freeze_bn", "parallel.sync_bn", "parallel.mode"), _split_batch_norm),
    (("device", "parallel.backend", "train.precision"), _devices),
    (DATA_PARALLEL_KEYS, _data_parallel),
    (("parallel.init_method",), _init_port),
]
