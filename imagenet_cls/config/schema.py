"""Every key of a config: type, default, range, flags and comment.

docs/config.md is generated from the comments.
"""
# ruff: noqa: RUF009 (`key` and `section` return dataclass fields)

import math
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from imagenet_cls.config.metrics import BY_NAME
from imagenet_cls.entry_points import DATA_OPENERS

Kwargs = dict[str, Any]
Size = int | list[int]  # of an image in pixels: the side of a square, or [height, width]
if TYPE_CHECKING:
    MetricName = str
else:
    MetricName = Literal[tuple(BY_NAME)]
REQUIRED = "???"  # the value of a key that a later layer has to set


@dataclass(frozen=True)
class Range:
    """Which numbers are allowed: from low to high, if their absolute value is below 2^64."""

    low: float = 0.0
    high: float = math.inf
    # Whether an end is itself not allowed.
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, number: Any) -> bool:
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        # not math.isfinite, which overflows for long integers
        return above and below and abs(number) < 2.0**64

    def __str__(self) -> str:
        if not (self.low_open or self.high_open or self.high == math.inf):
            high = f"{self.high:,}" if isinstance(self.high, int) else f"{self.high:g}"
            return f"{self.low:g} to {high}"
        low = f"more than {self.low:g}" if self.low_open else f"at least {self.low:g}"
        high = f"less than {self.high:g}" if self.high_open else f"at most {self.high:g}"
        return low if self.high == math.inf else f"{low} and {high}"


NOT_NEGATIVE = Range()
POSITIVE = Range(low_open=True)
COUNT = Range(1)
BATCH = Range(1, 10**9)
PIXELS = Range(1, 100_000)
SHARE = Range(0, 1)
SHARE_BELOW_1 = Range(0, 1, high_open=True)
POSITIVE_SHARE = Range(0, 1, low_open=True)
PERCENT = Range(0, 100)
RATIO = Range(0.001, 1000)
JITTER = Range(0, 1000)
ALPHA = Range(0, 1000)  # of a beta distribution


def height_width(size_px: Size) -> tuple[int, int]:
    height, width = [size_px, size_px] if isinstance(size_px, int) else size_px
    return height, width


def format_size(size_px: Size) -> str:
    """`224 px` or `192 x 256 px` (height, width)."""
    height, width = height_width(size_px)
    return f"{height} px" if height == width else f"{height} x {width} px"


@dataclass(frozen=True)
class KeyInfo:
    """What the schema states about a key, or about all keys of a section."""

    # The range of the number, or of each number in a list.
    allowed: Range | None = None
    # The length of a list.
    count: int | None = None
    # Whether a list must be in ascending order.
    ascending: bool = False
    # A regular expression for the text, or for each text of a list, and its description.
    form: tuple[str, str] | None = None
    # Keyword arguments from 0 to below 1.
    shares: tuple[str, ...] = ()
    # The key that is the limit.
    at_most: str | None = None
    # What may not be the case if the key is not at its default: each as in `needs`.
    excludes: tuple[str, ...] = ()
    # When the key has an effect: `KEY`, set to other than null, false, 0 and [], or `KEY=VALUE`,
    # joined by ` and ` and ` or `. "": always.
    needs: str = ""
    # Whether the key decides what is computed, so that it is compared on resume.
    recipe: bool = True
    # Whether the machines of a run may differ in it.
    per_machine: bool = False
    # Whether values may name code, `my_module:my_factory`. A tuple: the prefixes with a colon that
    # don't, such as `timm:`. None: they never do.
    code: tuple[str, ...] | None = None


def key(default: Any, allowed: Range | None = None, **info: Any) -> Any:
    """A field of the schema: a key with its default and, as keywords, the other attributes of
    `KeyInfo`.
    """
    metadata = {"info": KeyInfo(allowed, **info)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(of: type, **info: Any) -> Any:
    """A field of the schema that holds a section; the flags in `info` hold for all its keys."""
    return field(default_factory=of, metadata={"info": KeyInfo(**info)})


DEVICE = (r"auto|cpu|mps|(cuda:)?\d+|cuda", "auto, cpu, mps, cuda, or cuda:1 (or 1) for one GPU")
INIT_METHOD = (
    r"env://|tcp://(\[[\da-fA-F:]+\]|[^:/\s]+):[1-9]\d{0,4}|file:///\S.*",
    "env://, tcp://host:port or file:///path",
)
MODULES = (r"[^\W\d]\w*(\.[^\W\d]\w*)*", "a list of modules, such as [my_package.my_models]")
FACTORIES = (
    r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*",
    "a list of factories, such as [my_module:my_factory]",
)

# When keys have an effect, for more than one key.
MIXES = "mix.mixup_alpha or mix.cutmix_alpha"
DISTILS = "distill.kind=soft or distill.kind=hard"
AVERAGES = "ema.decay or ema.half_life_images"


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    # A timm model (`resnet50`, with the tag of its weights `resnet50.a1_in1k`),
    # `torchvision:resnet50`, a model that timm saved (`hf-hub:USER/NAME`, `local-dir:PATH`), or
    # `my_module:my_factory`.
    name: str = key("resnet50", code=("torchvision:",))
    # Start from the published weights of the library.
    pretrained: bool = key(False, recipe=False, per_machine=True)
    # Outputs of the head. null: the number of classes.
    num_classes: int | None = key(None, Range(1, 10**9))
    # Weights to start from: a run, a checkpoint or a file ([Weights](docs/usage.md#weights)). A
    # head of another size is initialized. Other tensors must match, but timm resizes position
    # embeddings. Of a self-supervised pre-training the encoder is loaded.
    checkpoint: str | None = key(
        None, recipe=False, per_machine=True, excludes=("model.pretrained",)
    )
    # Parameters that are not trained, by patterns of their names: `[conv1.*, bn1.*, layer1.*]`.
    # Their BatchNorm layers keep the running statistics.
    freeze: list[str] = key([], excludes=("model.head_only",))
    # Train the head only.
    head_only: bool = False
    # Freeze all BatchNorm layers: running statistics, weights and biases.
    freeze_bn: bool = False
    # Separate BatchNorm layers for each of augment.splits, as in AugMix. Evaluation uses the first.
    split_bn: bool = key(
        False, excludes=("model.freeze_bn", "parallel.sync_bn=true", "parallel.mode=dp")
    )
    # Further arguments, such as `{drop_path_rate: 0.05}`.
    kwargs: Kwargs = key(
        {}, shares=("drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate")
    )


# Of `data.name` in the other forms than `my_module:my_factory`.
DATA_PREFIXES = tuple(
    form.partition(":")[0] + ":" for form in DATA_OPENERS if not form.startswith("my_module:")
)


@dataclass(frozen=True)
class DataConfig:
    """The dataset."""

    # `folder` (root/train/CLASS/*.JPEG, [archives or shards](docs/data.md#archives)), `list` (`path
    # label` lines or CSV), `digits` (scikit-learn's, written under root once), `synthetic` (random,
    # kept on the device), `torchvision:CIFAR10`, `hf:USER/NAME` ([The Hugging Face
    # Hub](docs/data.md#the-hugging-face-hub)), or `my_module:my_factory`.
    name: str = key("folder", code=DATA_PREFIXES)
    # The folder of the dataset, or an archive with the folders `train` and `val`.
    root: str = key("data/imagenet", recipe=False, per_machine=True)
    # Training part below root: a folder of class folders or archives, an archive, archives by a
    # pattern (`train-{0000..1023}.tar`, `train-*.tar`), or a list; of other datasets the name of a
    # split.
    train: str = "train"
    # Validation part, likewise. null: held out from the training part ([Validation
    # images](docs/data.md#validation-images-from-the-training-part)).
    val: str | None = "val"
    # Share of each class to hold out, by a hash of the path.
    val_fraction: float | None = key(
        None, Range(0, 1, low_open=True, high_open=True), excludes=("data.val",)
    )
    # Hold out fold i of k: `[i, k]`, i from 0.
    fold: list[int] | None = key(
        None, Range(0, 1000), count=2, excludes=("data.val", "data.val_fraction")
    )
    # Folds with equal shares of each class, to within one image.
    stratify: bool = key(False, needs="data.fold and data.group=null")
    # Hold out images of a group together. A regular expression, searched in the path below the
    # training part: its group 1, or the whole match, names the group.
    group: str | None = key(None, needs="data.val_fraction or data.fold")
    # The classes to use, in this order: names, or a text file with one a line. Images of other
    # classes are left out. null: all.
    classes: list[str] | str | None = None
    # single: each image has one class. multi: any number of them ([Multi-label
    # classification](docs/multilabel.md)).
    labels: Literal["single", "multi"] = key("single", excludes=("loss.class_weights=effective",))
    # Share of each class to train on (with data.labels multi, of all images), by a hash of the
    # path: 0.2 includes the images of 0.1.
    fraction: float = key(1.0, POSITIVE_SHARE)
    # Processes of each rank that read and decode. 0: the training process. auto, null: by the CPUs
    # ([Data workers](docs/data.md#data-workers)). The samples don't depend on it.
    num_workers: int | Literal["auto"] | None = key(
        "auto", Range(0, 256), recipe=False, per_machine=True
    )
    # What of a JPEG file is decoded. auto: the region that a sample needs, with the same pixels
    # ([Decoding](docs/data.md#decoding)). whole: all of it, which also finds damage elsewhere.
    decode: Literal["auto", "whole"] = key("auto", recipe=False, per_machine=True)
    # The EXIF orientation of photos. ignore: as published recipes do. apply: rotate and mirror
    # ([EXIF orientation](docs/data.md#exif-orientation)).
    exif: Literal["ignore", "apply"] = "ignore"
    # Longest wait for a batch from a worker, in seconds. Then the run ends with an error.
    timeout_sec: float = key(300.0, Range(0, 86_400, low_open=True), recipe=False, per_machine=True)
    # A list of bad images by tools/verify_data.py, to leave out ([Bad images in a
    # run](docs/data.md#bad-images-in-a-run)): of each part at most 1 % or 10, and at most a tenth
    # or 3, whichever is more.
    exclude: str | None = key(None, recipe=False, per_machine=True)
    # 3: RGB. 1: gray ([Gray images](docs/data.md#gray-images)), not for torchvision's models.
    channels: int = key(3, Range(1, 3), excludes=("distill.kind=soft", "distill.kind=hard"))
    # Mean of each channel, of values in 0..1. null: that of the model's pretrained weights, else
    # ImageNet's; for one channel, the average.
    mean: list[float] | None = key(None, SHARE)
    # Standard deviation of each channel, likewise.
    std: list[float] | None = key(None, RATIO)
    # Repeated augmentation: each drawn image appears this often in a row, and an epoch covers fewer
    # images.
    repeats: int = key(1, Range(1, 100), at_most="train.global_batch_size")
    # Cut the samples of an epoch to a multiple of this (DeiT's and torchvision's samplers: 256).
    repeats_multiple: int | None = key(None, COUNT)
    # Draws a class of n images in proportion to n^(1 - balance) ([Classes of different
    # sizes](docs/data.md#classes-of-different-sizes)). 0: each image once in an epoch. 1: each
    # class equally often.
    balance: float = key(0.0, SHARE, excludes=("data.labels=multi",))
    # Further arguments: of `synthetic` {train_images, val_images, num_classes, size_px}, of
    # `hf:USER/NAME` {image, label, subset, revision}, of a class or factory.
    kwargs: Kwargs = key({})


@dataclass(frozen=True)
class ColorJitterConfig:
    """Largest random change of each property, as in torchvision's ColorJitter. 0: none."""

    # Probability that an image is changed at all.
    prob: float = key(
        1.0,
        SHARE,
        needs="augment.color_jitter.brightness or augment.color_jitter.contrast "
        "or augment.color_jitter.saturation or augment.color_jitter.hue",
    )
    # Factor drawn from [1 - x, 1 + x].
    brightness: float = key(0.0, JITTER)
    # Factor drawn from [1 - x, 1 + x].
    contrast: float = key(0.0, JITTER)
    # Factor drawn from [1 - x, 1 + x].
    saturation: float = key(0.0, JITTER)
    # Shift drawn from [-x, x], in turns of the color circle.
    hue: float = key(0.0, Range(0, 0.5))


@dataclass(frozen=True)
class ErasingConfig:
    """Random erasing (Zhong et al. 2017): a rectangle of the normalized image is filled, on the
    device.
    """

    # Probability for an image.
    prob: float = key(0.0, SHARE)
    # What fills it: zeros (`const`), one normal color (`rand`), or normal noise (`pixel`).
    mode: Literal["const", "rand", "pixel"] = key("const", needs="augment.erasing.prob")
    # Largest number of rectangles, drawn from 1; they share the area.
    max_count: int = key(1, Range(1, 100), needs="augment.erasing.prob")
    # Area, as shares of the image's: [smallest, largest].
    scale: list[float] = key(
        [0.02, 1 / 3], POSITIVE_SHARE, count=2, ascending=True, needs="augment.erasing.prob"
    )
    # Height / width: [smallest, largest].
    ratio: list[float] = key(
        [0.3, 10 / 3], RATIO, count=2, ascending=True, needs="augment.erasing.prob"
    )


@dataclass(frozen=True)
class ProgressiveConfig:
    """Progressive resizing: the side of square training images as a piecewise linear function of
    the epoch.
    """

    # Epochs of the points, ascending; constant before and after them. null: always size_px.
    epochs: list[float] | None = key(None, NOT_NEGATIVE, ascending=True)
    # Side at each point, in pixels. The largest is augment.size_px.
    sizes_px: list[int] | None = key(None, PIXELS)
    # Sides are rounded to a multiple of this.
    multiple_px: int = key(32, PIXELS, needs="augment.progressive.epochs")


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of training images. Its defaults do not depend on the model."""

    # Size in pixels: the side of a square, or `[height, width]`.
    size_px: Size = key(224, PIXELS, count=2)
    # Sides that grow during the run.
    progressive: ProgressiveConfig = section(ProgressiveConfig)
    # `random_resized`: a random crop, resized to size_px (ImageNet). `pad_crop`: the image, resized
    # to size_px and padded, then a random crop of size_px (CIFAR). `resize`: the image, resized to
    # size_px. The last two change the aspect ratio.
    crop: Literal["random_resized", "pad_crop", "resize"] = "random_resized"
    # Pixels added on each side, less than size_px.
    pad_px: int = key(4, Range(0, 10_000), needs="augment.crop=pad_crop")
    # What fills them: zeros (`constant`), the nearest pixel (`edge`), or the mirror image without
    # (`reflect`) or with (`symmetric`) the edge.
    pad_mode: Literal["constant", "edge", "reflect", "symmetric"] = key(
        "constant", needs="augment.crop=pad_crop"
    )
    # Resampling. random: bilinear or bicubic, drawn for each image.
    interpolation: Literal["nearest", "bilinear", "bicubic", "random"] = "bilinear"
    # Area of the random crop, as shares of the image: [smallest, largest].
    scale: list[float] = key(
        [0.08, 1.0], POSITIVE_SHARE, count=2, ascending=True, needs="augment.crop=random_resized"
    )
    # Width / height of the random crop: [smallest, largest].
    ratio: list[float] = key(
        [0.75, 4 / 3], RATIO, count=2, ascending=True, needs="augment.crop=random_resized"
    )
    # Probability of a left-right flip.
    hflip_prob: float = key(0.5, SHARE)
    # Probability of a top-bottom flip.
    vflip_prob: float = key(0.0, SHARE)
    # A policy after crop and flips. timm's, as its string: `rand-m9-mstd0.5-inc1` (RandAugment),
    # `original`, `originalr`, `v0`, `v0r` (AutoAugment), `augmix-m3-w3`, `3a` (3-Augment of DeiT
    # III). torchvision's: `torchvision:rand_augment`, `torchvision:trivial_augment_wide`,
    # `torchvision:auto_augment`, `torchvision:aug_mix`. Or `my_module:my_factory`.
    policy: str | None = key(None, code=("torchvision:",))
    # Arguments of torchvision's policy or a factory, such as `{num_ops: 2}`.
    policy_kwargs: Kwargs = key({})
    # Random changes of brightness, contrast, saturation and hue.
    color_jitter: ColorJitterConfig = section(ColorJitterConfig)
    # Probability of conversion to grayscale.
    grayscale_prob: float = key(0.0, SHARE)
    # Random erasing.
    erasing: ErasingConfig = section(ErasingConfig)
    # Copies of each image in a batch, augmented differently, for the loss `jsd`. The first has only
    # crop and flips.
    splits: int = key(1, Range(1, 10))


@dataclass(frozen=True)
class MixConfig:
    """Mixup and cutmix of the images and targets of a micro-batch, on the device. Off if both
    alphas are 0.
    """

    # Parameter of the beta distribution of mixup's share (Zhang et al. 2017).
    mixup_alpha: float = key(0.0, ALPHA, excludes=("loss.name=focal", "loss.name=jsd"))
    # Likewise for cutmix (Yun et al. 2019).
    cutmix_alpha: float = key(0.0, ALPHA, excludes=("loss.name=focal", "loss.name=jsd"))
    # Probability that a batch (or pair, or image) is mixed.
    prob: float = key(1.0, SHARE, needs=MIXES)
    # Probability of cutmix if both are on.
    switch_prob: float = key(0.5, SHARE, needs="mix.mixup_alpha and mix.cutmix_alpha")
    # One draw for the micro-batch, for each pair of images, or for each image.
    mode: Literal["batch", "pair", "elem"] = key("batch", needs=MIXES)
    # No mixing from this epoch on, counted from 0.
    off_epoch: int | None = key(None, NOT_NEGATIVE, needs=MIXES)

    @property
    def is_on(self) -> bool:
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0


@dataclass(frozen=True)
class LossConfig:
    """The loss function."""

    # `cross_entropy`; `bce`, binary cross-entropy for each class; `focal`; `jsd`, with the
    # Jensen-Shannon divergence between splits (augment.splits); or `my_module:my_factory`. With
    # data.labels multi: `bce`, `asymmetric` (Ridnik et al. 2021) or a factory.
    name: str = key("cross_entropy", code=())
    # Share s of the target's probability that is spread over all classes. With data.labels multi,
    # targets become s/2 and 1 - s/2.
    label_smoothing: float = key(0.0, SHARE_BELOW_1)
    # Weights of the classes ([Classes of different
    # sizes](docs/data.md#classes-of-different-sizes)): numbers, of which only the ratios matter; or
    # by the number n of training images `balanced`, 1/n, or `effective`, (1 - beta) / (1 - beta^n).
    # With data.labels multi, of the positive terms; `balanced`: negatives / positives.
    class_weights: list[int | float] | Literal["balanced", "effective"] | None = key(
        None, NOT_NEGATIVE, excludes=("loss.name=jsd",)
    )
    # beta of `effective` (Cui et al. 2019).
    effective_beta: float = key(0.999, SHARE_BELOW_1, needs="loss.class_weights=effective")
    # Arguments: bce {target_threshold (above it targets are 1), sum_classes}, focal {gamma}, jsd
    # {alpha}; with data.labels multi, bce {sum_classes}, asymmetric {gamma_neg, gamma_pos, clip}.
    kwargs: Kwargs = key({})


@dataclass(frozen=True)
class TeacherConfig:
    """The teacher model. It gets the student's images, normalized by its own mean and std."""

    # As model.name.
    name: str | None = key(None, needs=DISTILS, code=("torchvision:",))
    # As model.pretrained.
    pretrained: bool = key(
        False,
        excludes=("distill.teacher.checkpoint",),
        needs=DISTILS,
        recipe=False,
        per_machine=True,
    )
    # As model.checkpoint.
    checkpoint: str | None = key(None, needs=DISTILS, recipe=False, per_machine=True)
    # As model.kwargs.
    kwargs: Kwargs = key({})


@dataclass(frozen=True)
class DistillConfig:
    """Knowledge distillation: part of the loss comes from a teacher's outputs."""

    # `soft`: divergence from the teacher's softened outputs (Hinton et al. 2015); `hard`:
    # cross-entropy with its top class (Touvron et al. 2021). In a model with a distillation token
    # (timm's deit_*_distilled), of that token's output.
    kind: Literal["none", "soft", "hard"] = key(
        "none", excludes=("loss.name=jsd", "data.labels=multi")
    )
    # The teacher's share of the loss.
    alpha: float = key(0.5, SHARE, needs=DISTILS)
    # Both outputs are divided by it before the softmax.
    temperature: float = key(1.0, Range(0.01, 1000), needs="distill.kind=soft")
    # The teacher.
    teacher: TeacherConfig = section(TeacherConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer."""

    # torch's `sgd`, `adamw`, `rmsprop`; timm's `lamb` (scales a larger gradient down to the norm 1,
    # unless kwargs have `max_grad_norm: null`), `rmsproptf`, `timm:NAME` for any other,
    # `timm:lookahead_NAME` with Lookahead; or `my_module:my_factory`.
    name: str = key("sgd", code=("timm:",))
    # Peak learning rate.
    lr: float = key(REQUIRED, NOT_NEGATIVE)
    # The global batch size that lr is meant for: another one scales lr in proportion.
    lr_base_batch: int | None = key(None, BATCH)
    # Weight decay, as the optimizer defines it.
    weight_decay: float = key(0.0, NOT_NEGATIVE)
    # That of normalization layers. null: weight_decay.
    norm_weight_decay: float | None = key(None, NOT_NEGATIVE)
    # That of all other biases. null: weight_decay.
    bias_weight_decay: float | None = key(None, NOT_NEGATIVE)
    # That of class and position tokens, relative position tables, and the model's
    # `no_weight_decay`. null: weight_decay.
    token_weight_decay: float | None = key(None, NOT_NEGATIVE)
    # That of layer scales and other parameters of at most one dimension. null: weight_decay.
    scale_weight_decay: float | None = key(None, NOT_NEGATIVE)
    # Layer-wise decay: factor of a layer's learning rate relative to the next layer's (the head has
    # 1).
    layer_decay: float | None = key(None, POSITIVE_SHARE)
    # Factors of the learning rate by patterns of parameter names: `{"head.*": 10}`. The first match
    # counts.
    lr_scales: Kwargs = key({})
    # Further arguments, such as `{momentum: 0.9, nesterov: true}`.
    kwargs: Kwargs = key({}, shares=("momentum", "alpha"))


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate as a function of the step."""

    # `cosine`, `step`, `multistep`, `polynomial`, `piecewise`, `constant`, or
    # `my_module:my_factory`.
    name: str = key("cosine", code=())
    # Linear warm-up, in epochs (fractions allowed).
    warmup_epochs: float = key(0.0, NOT_NEGATIVE, at_most="train.epochs")
    # Learning rate at the start of the warm-up, as a factor of that at its end.
    warmup_start_factor: float = key(
        0.01, SHARE, needs="schedule.warmup_epochs and schedule.warmup_start_lr=null"
    )
    # Learning rate at the start of the warm-up, in place of the factor.
    warmup_start_lr: float | None = key(None, NOT_NEGATIVE, needs="schedule.warmup_epochs")
    # true: the schedule starts after the warm-up (torchvision). false: the warm-up replaces its
    # beginning (timm).
    warmup_prefix: bool = key(True, needs="schedule.warmup_epochs")
    # Epochs at the end with the schedule's last learning rate.
    cooldown_epochs: float = key(0.0, NOT_NEGATIVE)
    # Change the learning rate between epochs only, as in torchvision's and timm's scripts.
    by_epoch: bool = False
    # Arguments: cosine {min_lr}, step {every_epochs, gamma}, multistep {milestones_epochs, gamma},
    # polynomial {power, min_lr}, piecewise {epochs, factors}. Epochs count from where the schedule
    # starts.
    kwargs: Kwargs = key({})


@dataclass(frozen=True)
class EarlyStopConfig:
    """An early end of the run, if evaluations get no better."""

    # Evaluations in a row without a better one. null: no early end.
    patience_evals: int | None = key(None, COUNT)
    # What is compared: of the moving average if there is one, else of the raw weights.
    metric: MetricName = key("top1", needs="train.early_stop.patience_evals")
    # Smaller improvements do not count: in percentage points, or of the loss.
    min_delta: float = key(0.0, NOT_NEGATIVE, needs="train.early_stop.patience_evals")


@dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    # Passes over the training images, in floor(images / global_batch_size) steps each.
    epochs: int = key(90, Range(1, 10**6))
    # End after this many optimizer steps; the schedule is not shortened.
    max_steps: int | None = key(None, COUNT, recipe=False)
    # An early end of the run.
    early_stop: EarlyStopConfig = section(EarlyStopConfig, recipe=False)
    # Images in one optimizer step, over all ranks and micro-batches.
    global_batch_size: int = key(256, BATCH)
    # Most images in one forward pass of a device. Gradients are accumulated over as few
    # micro-batches as possible: with 64, 96 images per device become two of 48. null: the device's
    # whole share.
    micro_batch_size: int | None = key(None, BATCH, recipe=False, at_most="train.global_batch_size")
    # Mixed precision with bf16 or fp16 (with a loss scale). auto: bf16 on GPUs since Ampere, fp16
    # on Volta and Turing (not with train.sam_rho), else fp32. With fp32, convolutions on GPUs since
    # Ampere use TF32.
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    # torch.compile model and loss, in this mode ([Which
    # `train.compile`](docs/scaling.md#which-traincompile)). true: `default`. Shapes are static,
    # except with augment.progressive.
    compile: (
        bool | Literal["default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead"]
    ) = key(False, recipe=False, excludes=("parallel.mode=dp",))
    # Your own forward and backward passes of a step, `my_module:my_step` ([A training
    # step](docs/extending.md#a-training-step)).
    step: str | None = key(None, code=())
    # The channels-last memory format, the fastest for convolutions.
    channels_last: bool = True
    # Largest global norm of the gradient; a larger one is scaled down.
    clip_norm: float | None = key(None, POSITIVE)
    # Largest absolute value of each element of the gradient.
    clip_value: float | None = key(None, POSITIVE, excludes=("train.clip_norm",))
    # Adaptive gradient clipping (Brock et al. 2021): largest norm of a unit's gradient, as a share
    # of its weights'. The head is not clipped.
    clip_agc: float | None = key(None, POSITIVE, excludes=("train.clip_norm", "train.clip_value"))
    # Sharpness-aware minimization (Foret et al. 2020): radius of the neighborhood.
    sam_rho: float | None = key(None, POSITIVE, excludes=("train.precision=fp16",))
    # Use it every this many steps, since it costs a second pass.
    sam_every_steps: int = key(1, COUNT, needs="train.sam_rho")
    # Recompute activations in the backward pass: less memory, about a third slower.
    grad_checkpointing: bool = key(False, recipe=False)
    # Deterministic kernels on GPUs: slower, but with the same bits in every run, as on CPUs. An
    # operator without one, as in torchvision's VGG and timm's resnetblur50, is an error.
    deterministic: bool = key(False, recipe=False)
    # End the run (exit code 6) after this many consecutive steps with a NaN or infinite loss or
    # gradient. They don't change the weights.
    max_nonfinite_steps: int = key(10, COUNT, recipe=False)


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average of the weights."""

    # Decay of the average at each update. null, as half_life_images: no average.
    decay: float | None = key(None, SHARE_BELOW_1)
    # Half-life of the average in training images.
    half_life_images: float | None = key(None, POSITIVE, excludes=("ema.decay",))
    # Update every this many optimizer steps.
    every_steps: int = key(1, COUNT, needs=AVERAGES)
    # Start with a small decay that grows to `decay`, as in timm.
    warmup: bool = key(False, needs=AVERAGES)


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation. Its defaults do not depend on the model."""

    # How an image is resized before the center is cut out. `crop`: by its short side. `squash`:
    # both sides. `pad`: by its long side, with borders of the mean color. timm calls them center,
    # squash and border.
    mode: Literal["crop", "squash", "pad"] = "crop"
    # Size of the center crop in pixels, as augment.size_px.
    crop_px: Size = key(224, PIXELS, count=2, at_most="eval.resize_px")
    # Sides of the crop as a share of the resized sides. 1 keeps the whole image with squash and
    # pad.
    crop_pct: float = key(0.875, Range(0.01, 1), needs="eval.resize_px=null")
    # Side after the resize, in pixels: the short one, with `squash` both, with `pad` the long one.
    # null: floor(crop_px / crop_pct) of each side; the image covers both, or with `pad` fits into
    # both.
    resize_px: int | None = key(None, PIXELS)
    # Resampling of the resize.
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    # Minimum probability of a predicted class.
    threshold: float = key(0.5, SHARE, needs="data.labels=multi")
    # Average the outputs for each image and its mirror image.
    flip_tta: bool = False
    # present: the validation part may have some of the classes only, as ImageNet-A and -R ([Some of
    # the classes](docs/data.md#some-of-the-classes)).
    classes: Literal["all", "present"] = key("all", excludes=("data.labels=multi",))
    # Further metrics, each `my_module:my_factory` ([A metric](docs/extending.md#a-metric)).
    metrics: list[str] = key([], form=FACTORIES, recipe=False, code=())
    # Images in one forward pass of a device.
    batch_size: int = key(256, BATCH, recipe=False)
    # Evaluate every this many epochs, and after the last one.
    every_epochs: int = key(1, COUNT, recipe=False)


@dataclass(frozen=True)
class ParallelConfig:
    """Distributed training."""

    # `none`: one device. `ddp`: one process for each device. `dp`: one process for several GPUs
    # ([Choose a mode](docs/parallel.md#choose-a-mode)). `auto`: ddp for more than one rank, else
    # none.
    mode: Literal["auto", "none", "ddp", "dp"] = key("auto", recipe=False)
    # Backend of torch.distributed. auto: nccl on GPUs, gloo on CPUs. mpi needs a torch built with
    # MPI, and mpirun.
    backend: Literal["auto", "nccl", "gloo", "mpi"] = key("auto", recipe=False)
    # The GPUs to use, numbered in the order of CUDA_VISIBLE_DEVICES. In mode dp the first one holds
    # the parameters; in mode ddp a rank uses the one at its local rank. null: all.
    device_ids: list[int] | None = key(None, NOT_NEGATIVE, recipe=False)
    # Synchronize BatchNorm over all ranks ([BatchNorm and
    # SyncBN](docs/parallel.md#batchnorm-and-syncbn)).
    sync_bn: bool = key(False, excludes=("parallel.mode=dp",))
    # DDP looks in each step for parameters without a gradient, such as those of layers that are
    # dropped at random.
    find_unused_parameters: bool = key(False, recipe=False)
    # Rendezvous of the ranks: `env://` (MASTER_ADDR and MASTER_PORT), `tcp://host:port` or
    # `file:///path`.
    init_method: str = key("env://", form=INIT_METHOD, recipe=False, per_machine=True)
    # Longest wait for another rank, in seconds.
    timeout_sec: float = key(
        600.0, Range(0, 7 * 86_400, low_open=True), recipe=False, per_machine=True
    )
    # Compare the bits of weights, moving average and optimizer state between ranks every this many
    # steps and before each checkpoint. Diverged ranks end the run. null: never.
    check_every_steps: int | None = key(1000, COUNT, recipe=False)


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save. The last step is always saved."""

    # Save every this many epochs.
    every_epochs: int | None = key(1, COUNT)
    # Save every this many optimizer steps.
    every_steps: int | None = key(None, COUNT)
    # Newest checkpoints to keep, besides the best ones. null: all.
    keep_last: int | None = key(2, COUNT)
    # The best evaluation has the highest accuracy (balanced: the mean recall of the classes), with
    # data.labels multi map (mean average precision) or F1, or the lowest loss. The best raw weights
    # and the best average are kept.
    best: MetricName = "top1"


@dataclass(frozen=True)
class LogConfig:
    """Logging."""

    # Optimizer steps between two log lines.
    every_steps: int = key(50, COUNT)
    # What rank 0 writes: `jsonl` (always), `tensorboard`, `wandb`, or `my_module:MyWriter`
    # ([TensorBoard and Weights & Biases](docs/trackers.md)).
    writers: list[str] = key(["jsonl", "tensorboard"], per_machine=True, code=())
    # false: no TensorBoard files, even if `writers` lists it.
    tensorboard: bool = key(True, per_machine=True)
    # Draw the curves into plots/ at the end.
    plots: bool = key(True, per_machine=True)
    # Write report.html at the end ([Run report](docs/reports.md#run-report)).
    report: bool = key(True, per_machine=True)


@dataclass(frozen=True)
class ExpectConfig:
    """Published and measured results of a recipe. No effect on a run."""

    # Top-1 accuracy that the source claims, in percent.
    claimed_top1_pct: float | None = key(None, PERCENT)
    # Where claim and settings are published.
    source: str | None = None
    # Top-1 accuracy of a run with this repository, in percent.
    ours_top1_pct: float | None = key(None, PERCENT)
    # Hardware and training time of the source.
    hardware: str | None = None
    # Of a run with this repository: hardware, seed, date, duration. Of the settings: `deviates`,
    # `left out`, `uncertain` ([Recipes](docs/recipes.md)).
    note: str | None = None


@dataclass(frozen=True)
class Config:
    """A whole config."""

    model: ModelConfig = section(ModelConfig)
    data: DataConfig = section(DataConfig)
    augment: AugmentConfig = section(AugmentConfig)
    mix: MixConfig = section(MixConfig)
    loss: LossConfig = section(LossConfig)
    distill: DistillConfig = section(DistillConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    train: TrainConfig = section(TrainConfig)
    ema: EmaConfig = section(EmaConfig)
    eval: EvalConfig = section(EvalConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig, recipe=False)
    log: LogConfig = section(LogConfig, recipe=False)
    expect: ExpectConfig = section(ExpectConfig, recipe=False, per_machine=True)
    # Modules to import at the start, such as one that registers models with timm.
    imports: list[str] = key([], form=MODULES, recipe=False, per_machine=True)
    # Seed of the run.
    seed: int = key(0, Range(0, 2.0**63, high_open=True))
    # `auto` (CUDA if there is a GPU, else the CPU), `cpu`, `cuda`, `cuda:1` for a certain GPU, or
    # `mps`.
    device: str = key("auto", form=DEVICE, recipe=False, per_machine=True)


COMPONENTS = ("model", "data", "loss", "optimizer", "schedule")  # sections with a name
# A key, and the section or the arguments that a layer resets to their defaults when it changes the
# key.
RESETS = {
    **{f"{component}.name": component for component in COMPONENTS},
    "augment.policy": "augment.policy_kwargs",
    "distill.teacher.name": "distill.teacher.kwargs",
}

# Arguments of optimizers that differ from torch's defaults.
DEFAULT_KWARGS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "rmsproptf": {"momentum": 0.9},
}
