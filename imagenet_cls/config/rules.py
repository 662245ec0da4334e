"""Rules across keys that need no library, file or device. Each yields (key, message) for what does not fit together."""

from collections.abc import Callable, Iterator
from operator import attrgetter

from imagenet_cls.config.schema import Config
from imagenet_cls.errors import format_value

Found = Iterator[tuple[str, str]]

# Keys of which at most one may be set, to other than null, false and [].
ALTERNATIVES = (
    ("model.pretrained", "model.checkpoint"),
    ("model.head_only", "model.freeze"),
    ("model.freeze_bn", "model.split_bn"),
    ("data.val", "data.val_fraction"),
    ("distill.teacher.pretrained", "distill.teacher.checkpoint"),
    ("train.clip_norm", "train.clip_value", "train.clip_agc"),
    ("ema.decay", "ema.half_life_images"),
)
# A key, and the key whose value is its limit.
LIMITS = (
    ("train.micro_batch_size", "train.global_batch_size"),
    ("data.repeats", "train.global_batch_size"),
    ("eval.crop_px", "eval.resize_px"),
    ("schedule.warmup_epochs", "train.epochs"),
)


def _alternatives(*names: str) -> Callable[[Config], Found]:
    def rule(c: Config) -> Found:
        given = [name for name in names if attrgetter(name)(c) not in (None, False, [])]
        if len(given) > 1:
            yield given[1], f"is given and {given[0]} too; keep one"

    return rule


def _limit(name: str, limit: str) -> Callable[[Config], Found]:
    def rule(c: Config) -> Found:
        value, most = attrgetter(name)(c), attrgetter(limit)(c)
        if value is not None and most is not None and value > most:
            yield name, f"{format_value(value)} is more than {limit} {format_value(most)}"

    return rule


def _split_batch_norm(c: Config) -> Found:
    if not c.model.split_bn:
        return
    if c.augment.splits < 2:
        yield "model.split_bn", f"is true and augment.splits is {c.augment.splits}; use 2 or more splits"
    if c.parallel.sync_bn:
        yield "model.split_bn", "can't be synchronised over ranks; set parallel.sync_bn to false"
    if c.parallel.mode == "dp":
        yield "model.split_bn", "needs whole batches, and parallel.mode dp divides them; use ddp"


def _data(c: Config) -> Found:
    has_files = c.data.name != "synthetic" and ":" not in c.data.name
    if has_files and c.data.val is None and c.data.val_fraction is None:
        yield "data.val", "is null and there is no data.val_fraction; name a folder, or set data.val_fraction: 0.1"
    if c.data.name == "list":
        for key, value in (("train", c.data.train), ("val", c.data.val)):
            if value == key:  # the default, a folder
                yield f"data.{key}", f"{value!r} is a folder; data.name list needs a file, such as {key}.txt"
    if not has_files and c.data.exclude is not None:
        yield "data.exclude", f"excludes image files, and data.name {c.data.name!r} has none; set it to null"


def _cooldown(c: Config) -> Found:
    warmup, cooldown, epochs = c.schedule.warmup_epochs, c.schedule.cooldown_epochs, c.train.epochs
    if warmup <= epochs < warmup + cooldown:
        yield "schedule.cooldown_epochs", f"{cooldown:g} and {warmup:g} of warm-up are more than train.epochs {epochs}"


def _progressive(c: Config) -> Found:
    epochs, sizes = c.augment.progressive.epochs, c.augment.progressive.sizes_px
    key, multiple = "augment.progressive", c.augment.progressive.multiple_px
    if epochs is None and sizes is None:
        return
    if epochs is None or sizes is None or len(epochs) != len(sizes):
        text = f"{format_value(sizes)} for epochs {format_value(epochs)}: give one size for each epoch"
        yield f"{key}.sizes_px", text
    elif len(set(epochs)) < len(epochs):
        yield f"{key}.epochs", f"{format_value(epochs)} has an epoch twice"
    elif epochs[-1] > c.train.epochs:
        yield f"{key}.epochs", f"{epochs[-1]:g} is more than train.epochs {c.train.epochs}"
    elif unfit := [size for size in sizes if size % multiple]:
        yield f"{key}.sizes_px", f"{unfit[0]} is not a multiple of {key}.multiple_px {multiple}"
    elif max(sizes) != c.augment.size_px:
        yield f"{key}.sizes_px", f"the largest is {max(sizes)}, but augment.size_px is {c.augment.size_px}"


def _cutmix_sides(c: Config) -> Found:
    if c.mix.cutmix_minmax is not None:
        size_px = min([c.augment.size_px, *(c.augment.progressive.sizes_px or [])])
        smallest, largest = (int(size_px * share) for share in c.mix.cutmix_minmax)
        if smallest >= largest:
            text = f"{format_value(c.mix.cutmix_minmax)} differ by less than a pixel in images of {size_px} px"
            yield "mix.cutmix_minmax", text


def _mixing_and_splits(c: Config) -> Found:
    if c.mix.is_on and c.loss.name in ("focal", "jsd"):
        yield "mix", f"makes soft targets, which loss {c.loss.name!r} does not take; use cross_entropy or bce"
    if c.mix.is_on and c.augment.splits > 1:
        yield "augment.splits", "compares views of one image, and mix joins different images; use one of both"
    if c.loss.name == "jsd" and c.augment.splits < 2:
        yield "loss.name", f"'jsd' compares views, and augment.splits is {c.augment.splits}; use 3, as AugMix does"
    if c.augment.splits > 1 and c.loss.name != "jsd" and ":" not in c.loss.name:
        yield "augment.splits", f"{c.augment.splits} views of each image are for loss 'jsd', not {c.loss.name!r}"


def _distillation(c: Config) -> Found:
    teacher = c.distill.teacher
    if c.distill.kind == "none":
        return
    has_own_weights = teacher.name is not None and ":" in teacher.name and not teacher.name.startswith("torchvision:")
    if teacher.name is None:
        yield "distill.teacher.name", f"is null, and distill.kind is {c.distill.kind!r}; name a model"
    elif not (teacher.pretrained or teacher.checkpoint or has_own_weights):
        yield "distill.teacher.checkpoint", "is null: a teacher needs trained weights; name a file, or use pretrained"
    if c.augment.splits > 1:
        yield "distill.kind", "can't be used with augment.splits"


def _sam(c: Config) -> Found:
    if c.train.sam_rho is not None and c.train.precision == "fp16":
        yield "train.sam_rho", "needs gradients without a loss scale; use train.precision bf16 or fp32"


def _cpu(c: Config) -> Found:
    if c.device == "cpu" and c.parallel.backend == "nccl":
        yield "parallel.backend", "'nccl' needs GPUs and device is 'cpu'; use gloo or auto"
    if c.device == "cpu" and c.train.precision == "fp16":
        yield "train.precision", "'fp16' needs a GPU and device is 'cpu'; use fp32 or bf16"


def _devices(c: Config) -> Found:
    ids = c.parallel.device_ids
    if ids is not None and len(set(ids)) < len(ids):
        yield "parallel.device_ids", f"{format_value(ids)} lists a GPU twice"
    if ":" in c.device and (ids is not None or c.parallel.mode == "dp"):
        yield "device", f"{c.device!r} is one GPU; list the GPUs in parallel.device_ids instead"


def _data_parallel(c: Config) -> Found:
    if c.parallel.mode != "dp":
        if c.parallel.output_device is not None:
            yield "parallel.output_device", f"{c.parallel.output_device} is for parallel.mode dp; set it to null"
        return
    if c.train.compile:
        yield "train.compile", "can't be used with parallel.mode dp, which copies the model in every step"
    if c.parallel.sync_bn:
        yield "parallel.sync_bn", "synchronises ranks, and parallel.mode dp has one; use ddp and several ranks"


RULES = (
    *(_alternatives(*names) for names in ALTERNATIVES),
    *(_limit(name, limit) for name, limit in LIMITS),
    *(_split_batch_norm, _data, _cooldown, _progressive, _cutmix_sides, _mixing_and_splits),
    *(_distillation, _sam, _cpu, _devices, _data_parallel),
)
