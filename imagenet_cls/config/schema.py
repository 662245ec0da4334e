"""Every option there is. This file is the manual: one comment for each key, with its unit.

Owns names, types and defaults, and nothing else: ranges and rules across keys are in `check`, reading is in `load`.
Frozen, plain dataclasses: a part of the program is handed its own section and never the whole config.
`docs/config.md` is generated from this file: the comment block above a key is its description there.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

Kwargs = dict[str, Any]
Interpolation = Literal["nearest", "bilinear", "bicubic"]


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    # A timm model (`resnet50`), `torchvision:resnet50`, or `my_module:my_factory`, found from the working directory.
    name: str = "resnet50"
    # Start from the library's published weights (downloads them once; a timm name may carry a tag: `resnet50.a1_in1k`).
    pretrained: bool = False
    # Outputs of the head. null: as many as the data set has classes.
    num_classes: int | None = None
    # Weights to start from: a checkpoint folder of ours, or .pth, .pth.tar, .safetensors of timm, torchvision,
    # pytorch/examples. A head of another size is initialised anew; any other difference is an error.
    checkpoint: str | None = None
    # Further arguments of the model's own constructor, such as `{drop_path_rate: 0.05}`.
    kwargs: Kwargs = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """Where the images come from."""

    # `folder` (root/train/CLASS/*.JPEG), `list` (files of `path label` lines or CSV), `digits` (scikit-learn's, written
    # under root once), `synthetic` (random, made on the device), `torchvision:CIFAR10`, or `my_module:my_factory`.
    name: str = "folder"
    # The data set's folder. Relative paths are relative to the working directory.
    root: str = "data/imagenet"
    # Training part, below root: a folder of class folders, or for `list` an annotation file. Data sets that come with
    # parts of their own (torchvision's, factories) are asked for this name.
    train: str = "train"
    # Validation part, below root, likewise. null: taken from the training part by val_fraction.
    val: str | None = "val"
    # Share of the training part that is held out when val is null, 0 to 1: the same images on every machine, since it
    # is decided class by class by a hash of the path below root.
    val_fraction: float | None = None
    # Processes that read and decode, for each rank, at most 256. 0: in the training process itself. null: the CPU
    # cores that this rank can call its own, at most 16. The same samples come out whatever the number.
    num_workers: int | None = None
    # Batches that each worker prepares ahead.
    prefetch_batches: int = 2
    # Per channel (red, green, blue), of pixel values scaled to 0..1. null: what the model's weights were trained with
    # where the model says so, else ImageNet's.
    mean: list[float] | None = None
    # Likewise, the standard deviation.
    std: list[float] | None = None
    # Further arguments of a data set: `synthetic` takes {train_images, val_images, num_classes, size_px},
    # torchvision's classes and factories take what their signatures say.
    kwargs: Kwargs = field(default_factory=dict)


@dataclass(frozen=True)
class ColorJitterConfig:
    """Largest random change of each property, as torchvision's ColorJitter has it. 0: none."""

    # Factor drawn from [1 - x, 1 + x].
    brightness: float = 0.0
    # Factor drawn from [1 - x, 1 + x].
    contrast: float = 0.0
    # Factor drawn from [1 - x, 1 + x].
    saturation: float = 0.0
    # Shift drawn from [-x, x], in turns of the colour circle; at most 0.5.
    hue: float = 0.0


@dataclass(frozen=True)
class AugmentConfig:
    """How a training image is changed. Always this, never what the model library suggests."""

    # Side of the square training image, in pixels.
    size_px: int = 224
    # Resampling of the random crop.
    interpolation: Interpolation = "bilinear"
    # Area of the random crop, as shares of the image's area: [least, most].
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    # Width / height of the random crop: [least, most].
    ratio: list[float] = field(default_factory=lambda: [0.75, 4 / 3])
    # Probability of a left-right flip.
    hflip_prob: float = 0.5
    # Probability of a top-bottom flip.
    vflip_prob: float = 0.0
    # Random changes of brightness, contrast, saturation and hue.
    color_jitter: ColorJitterConfig = field(default_factory=ColorJitterConfig)


@dataclass(frozen=True)
class LossConfig:
    """What is minimised."""

    # `cross_entropy`, or `my_module:my_factory`.
    name: str = "cross_entropy"
    # Share of the target's probability that is spread over all classes, 0 to 1.
    label_smoothing: float = 0.0
    # Further arguments of an own loss.
    kwargs: Kwargs = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights follow gradients."""

    # `sgd` (momentum 0.9, no Nesterov unless kwargs say so), `adamw`, `rmsprop`: torch's. `lamb`, `rmsproptf`: timm's.
    # `timm:NAME` for any other of timm's, or `my_module:my_factory`.
    name: str = "sgd"
    # Learning rate at its highest, for train.global_batch_size. Has no default, and changing `name` forgets it.
    lr: float = MISSING
    # Pull towards zero: a share of the weight a step (times lr), as the optimizer itself defines it.
    weight_decay: float = 0.0
    # false: no weight decay on tensors of at most one dimension, which are the norms' weights and all biases.
    decay_norm_and_bias: bool = True
    # Further arguments of the optimizer, such as `{momentum: 0.9, nesterov: true}` or `{betas: [0.9, 0.95]}`.
    kwargs: Kwargs = field(default_factory=dict)


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a pure function of the step."""

    # `cosine`, `step`, `multistep`, `polynomial`, `exponential`, `constant`, or `my_module:my_factory`.
    name: str = "cosine"
    # Linear warm-up before it, in epochs (fractions allowed).
    warmup_epochs: float = 0.0
    # Where the warm-up begins, as a factor of the learning rate.
    warmup_start_factor: float = 0.01
    # Arguments of the schedule: cosine {min_lr}, step {every_epochs, gamma}, multistep {milestones_epochs, gamma},
    # polynomial {power, min_lr}, exponential {gamma (a factor an epoch)}.
    kwargs: Kwargs = field(default_factory=dict)


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    # Passes over the training images, in floor(images / global_batch_size) steps each.
    epochs: int = 90
    # End after this many optimizer steps, wherever the schedule is then. null: after the last epoch.
    max_steps: int | None = None
    # Images in one optimizer step, over all ranks and micro-batches together.
    global_batch_size: int = 256
    # Most images that a device takes at once; the rest of its share is accumulated. null: its whole share at once.
    micro_batch_size: int | None = None
    # Arithmetic of forward and backward. auto: bf16 on GPUs that have it, else fp32. fp16 uses a loss scale.
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    # torch.compile the model.
    compile: bool = False
    # Store weights and images channels-last, which convolutions like best.
    channels_last: bool = True
    # Largest global norm of the gradient; larger ones are scaled down. null: no limit.
    clip_norm: float | None = None
    # Only deterministic kernels on GPUs: slower, the same bits each time. (On a CPU they always are, for a given number
    # of threads.)
    deterministic: bool = False
    # End the run (exit code 6) after this many steps in a row with a loss or gradient that is NaN or infinite. Such a
    # gradient never changes the weights.
    max_nonfinite_steps: int = 10


@dataclass(frozen=True)
class EmaConfig:
    """A second set of weights: the exponential moving average of the trained ones."""

    # Share of the average that stays at each update, 0 to 1. null: no average is kept.
    decay: float | None = None
    # Update after every so many optimizer steps.
    every_steps: int = 1
    # Begin with a small decay that grows to `decay`, as timm does.
    warmup: bool = False


@dataclass(frozen=True)
class EvalConfig:
    """How images are prepared and counted in evaluation. Always this, never what the model library suggests."""

    # Side of the centre crop, in pixels.
    crop_px: int = 224
    # Share of the resized image's short side that the crop takes; sets the resize where resize_px is null.
    crop_pct: float = 0.875
    # Short side after the resize, in pixels. null: floor(crop_px / crop_pct).
    resize_px: int | None = None
    # Resampling of the resize.
    interpolation: Interpolation = "bilinear"
    # Images on a device at once.
    batch_size: int = 256
    # Evaluate after every so many epochs; after the last one always.
    every_epochs: int = 1


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks work together."""

    # `none`: one device. `ddp`: one process for each device. `dp`: one process for several GPUs, which is slower and
    # needs no launcher. `auto`: ddp where there is more than one rank, else none.
    mode: Literal["auto", "none", "ddp", "dp"] = "auto"
    # Transport between ranks. auto: nccl on GPUs, gloo on CPUs.
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    # For mode dp: the GPUs that take part, numbered as CUDA_VISIBLE_DEVICES orders them; the first one holds the
    # parameters. null: all that are visible.
    device_ids: list[int] | None = None
    # For mode dp: the GPU where the logits are joined and the loss is computed. null: the first of device_ids.
    output_device: int | None = None
    # BatchNorm sees the images of all ranks in training (SyncBatchNorm). Changes nothing on one rank.
    sync_bn: bool = False
    # How ranks meet: `env://` (MASTER_ADDR and MASTER_PORT), `tcp://host:port` or `file:///path`.
    init_method: str = "env://"
    # Longest wait for another rank, in seconds.
    timeout_sec: float = 600.0


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved. The last step always is."""

    # Save after every so many epochs. null: not by epochs.
    every_epochs: int | None = 1
    # Save after every so many optimizer steps. null: not by steps.
    every_steps: int | None = None
    # Newest checkpoints that stay; the best one stays besides. null: all.
    keep_last: int | None = 2


@dataclass(frozen=True)
class LogConfig:
    """What is reported."""

    # Optimizer steps between two looks at the loss; metrics.jsonl has every step all the same.
    every_steps: int = 50
    # Write event files for TensorBoard (rank 0 only).
    tensorboard: bool = True


@dataclass(frozen=True)
class ExpectConfig:
    """What a recipe claims, and what came out here. Changes nothing in a run."""

    # Top-1 that the source claims, in per cent.
    claimed_top1_pct: float | None = None
    # Where the claim and the settings are published.
    source: str | None = None
    # Top-1 of a run of this project, in per cent. null: not run.
    ours_top1_pct: float | None = None
    # Hardware, seed, date and duration of that run, or what is uncertain about the settings.
    note: str | None = None


@dataclass(frozen=True)
class Config:
    """A whole config: one section for each part of the program."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    expect: ExpectConfig = field(default_factory=ExpectConfig)
    # Modules to import before anything is built, so that they can register models with timm.
    imports: list[str] = field(default_factory=list)
    # Key of every random draw of the run.
    seed: int = 0
    # `auto` (a GPU where there is one, else the CPU), `cpu`, `cuda`, or `cuda:1` for a certain one.
    device: str = "auto"


# What a component's section falls back to when its name is changed, where that differs from the defaults above.
COMPONENT_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "optimizer": {"sgd": {"kwargs": {"momentum": 0.9}}, "rmsproptf": {"kwargs": {"momentum": 0.9}}},
}
