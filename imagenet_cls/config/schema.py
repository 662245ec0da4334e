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
    # Weights to start from: a checkpoint of ours (its moving average where it has one) or a run folder (its best
    # weights), or .pth, .pth.tar, .safetensors of timm, torchvision, pytorch/examples (likewise the average: the first
    # lines say which). A head of another size is initialised anew, and position embeddings of another grid are resized;
    # any other difference is an error.
    checkpoint: str | None = None
    # Parameters that are not trained, by patterns of their names: `[conv1.*, bn1.*, layer1.*]`. BatchNorm in there uses
    # its running statistics as they are; dropout and drop-path stay on.
    freeze: list[str] = field(default_factory=list)
    # Train the head only: everything else is as if named in `freeze`.
    head_only: bool = False
    # All BatchNorm layers keep their running statistics, weights and biases.
    freeze_bn: bool = False
    # A BatchNorm of its own for each split of the batch (augment.splits), as AugMix training has it. Evaluation uses
    # the first one only.
    split_bn: bool = False
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
    # Longest wait for a batch from a worker, in seconds. Then the run ends, and names the worker and its image.
    timeout_sec: float = 300.0
    # The list of bad images that tools/verify_data.py wrote: those of the training part are left out, at most one in
    # 10,000. Any other image that can't be read ends the run, and validation leaves none out. null: leave none out.
    exclude: str | None = None
    # Per channel (red, green, blue), of pixel values scaled to 0..1. null: what the model's weights were trained with
    # where the model says so, else ImageNet's.
    mean: list[float] | None = None
    # Likewise, the standard deviation.
    std: list[float] | None = None
    # Repeated augmentation: so many views of an image come one after the other, each drawn for itself, and an epoch
    # covers that much fewer images. 1: each image once.
    repeats: int = 1
    # With repeats: cut the samples of an epoch to a multiple of this (DeiT's and torchvision's samplers: 256).
    repeats_multiple: int | None = None
    # Further arguments of a data set: `synthetic` takes {train_images, val_images, num_classes, size_px},
    # torchvision's classes and factories take what their signatures say.
    kwargs: Kwargs = field(default_factory=dict)


@dataclass(frozen=True)
class ColorJitterConfig:
    """Largest random change of each property, as torchvision's ColorJitter has it. 0: none."""

    # Probability that an image is changed at all.
    prob: float = 1.0
    # Factor drawn from [1 - x, 1 + x].
    brightness: float = 0.0
    # Factor drawn from [1 - x, 1 + x].
    contrast: float = 0.0
    # Factor drawn from [1 - x, 1 + x].
    saturation: float = 0.0
    # Shift drawn from [-x, x], in turns of the colour circle; at most 0.5.
    hue: float = 0.0


@dataclass(frozen=True)
class ErasingConfig:
    """Random erasing (Zhong et al. 2017): a rectangle of the normalised image is filled, on the device."""

    # Probability for an image. 0: none.
    prob: float = 0.0
    # What fills it: zeros (`const`), one normal colour (`rand`), or normal noise for each pixel (`pixel`).
    mode: Literal["const", "rand", "pixel"] = "const"
    # Most rectangles in one image; their number is drawn from 1 to this, and they share the area.
    max_count: int = 1
    # Area, as shares of the image's: [least, most].
    scale: list[float] = field(default_factory=lambda: [0.02, 1 / 3])
    # Height / width: [least, most].
    ratio: list[float] = field(default_factory=lambda: [0.3, 10 / 3])


@dataclass(frozen=True)
class ProgressiveConfig:
    """Training images that grow: a side in pixels as a function of the epoch, straight lines between points."""

    # Epochs of the points, ascending. Before the first and after the last the side stays. null: always size_px.
    epochs: list[float] | None = None
    # Side at each point, in pixels. The largest is augment.size_px.
    sizes_px: list[int] | None = None
    # Sides are rounded to a multiple of this.
    multiple_px: int = 32


@dataclass(frozen=True)
class AugmentConfig:
    """How a training image is changed. Always this, never what the model library suggests."""

    # Side of the square training image, in pixels.
    size_px: int = 224
    # Sides that grow in the course of the run.
    progressive: ProgressiveConfig = field(default_factory=ProgressiveConfig)
    # Resampling of the random crop. random: bilinear or bicubic, drawn for each image.
    interpolation: Literal["nearest", "bilinear", "bicubic", "random"] = "bilinear"
    # Area of the random crop, as shares of the image's area: [least, most].
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    # Width / height of the random crop: [least, most].
    ratio: list[float] = field(default_factory=lambda: [0.75, 4 / 3])
    # Probability of a left-right flip.
    hflip_prob: float = 0.5
    # Probability of a top-bottom flip.
    vflip_prob: float = 0.0
    # A policy of many operations, behind crop and flips. timm's, in its string form: `rand-m9-mstd0.5-inc1`
    # (RandAugment), `original`, `originalr`, `v0`, `v0r` (AutoAugment), `augmix-m3-w3`, `3a` (3-Augment of DeiT III).
    # torchvision's: `torchvision:rand_augment`, `torchvision:trivial_augment_wide`, `torchvision:auto_augment`,
    # `torchvision:aug_mix`. Or `my_module:my_factory`. null: none.
    policy: str | None = None
    # Further arguments of torchvision's policy or an own one, such as `{num_ops: 2, magnitude: 9}`. A layer that
    # changes the policy starts them anew.
    policy_kwargs: Kwargs = field(default_factory=dict)
    # Random changes of brightness, contrast, saturation and hue.
    color_jitter: ColorJitterConfig = field(default_factory=ColorJitterConfig)
    # Probability of becoming grey.
    grayscale_prob: float = 0.0
    # Random erasing.
    erasing: ErasingConfig = field(default_factory=ErasingConfig)
    # Views of each image in a batch, for the loss `jsd`: the first without policy, colour and erasing. 1: one view.
    splits: int = 1


@dataclass(frozen=True)
class MixConfig:
    """Mixing the images and targets of a micro-batch, on the device. Off where both alphas are 0."""

    # Of the Beta distribution that mixup's share is drawn from (Zhang et al. 2017). 0: no mixup.
    mixup_alpha: float = 0.0
    # Likewise for cutmix (Yun et al. 2019). 0: no cutmix.
    cutmix_alpha: float = 0.0
    # Sides of cutmix's rectangle as shares of the image's, [least, most], in place of its alpha. null: by alpha.
    cutmix_minmax: list[float] | None = None
    # Probability that a batch (or pair, or image) is mixed at all.
    prob: float = 1.0
    # Probability of cutmix where both are on.
    switch_prob: float = 0.5
    # One draw for a whole micro-batch, for each pair in it, or for each image.
    mode: Literal["batch", "pair", "elem"] = "batch"
    # No mixing from this epoch on, counted from 0. null: to the end.
    off_epoch: int | None = None


@dataclass(frozen=True)
class LossConfig:
    """What is minimised."""

    # `cross_entropy`; `bce`, binary cross-entropy for each class; `focal`; `jsd`, cross-entropy with the Jensen-Shannon
    # divergence between augment.splits views; or `my_module:my_factory`.
    name: str = "cross_entropy"
    # Share of the target's probability that is spread over all classes, 0 to less than 1.
    label_smoothing: float = 0.0
    # Weight of each class, in the order of the classes; only their ratios count. null: all alike.
    class_weights: list[float] | None = None
    # Arguments of the loss: bce {target_threshold (targets above it become 1), sum_classes}, focal {gamma}, jsd
    # {alpha}, or those of an own one.
    kwargs: Kwargs = field(default_factory=dict)


@dataclass(frozen=True)
class TeacherConfig:
    """A trained model to learn from. It sees the images that the model sees, augmented and mixed."""

    # As model.name. null: no teacher.
    name: str | None = None
    # As model.pretrained.
    pretrained: bool = False
    # As model.checkpoint.
    checkpoint: str | None = None
    # As model.kwargs.
    kwargs: Kwargs = field(default_factory=dict)


@dataclass(frozen=True)
class DistillConfig:
    """Knowledge distillation: part of the loss comes from a teacher's outputs."""

    # `soft`: divergence from the teacher's softened outputs (Hinton et al. 2015); `hard`: cross-entropy with its top
    # class (Touvron et al. 2021). A model with a distillation token (timm's deit_*_distilled) learns it with that one.
    kind: Literal["none", "soft", "hard"] = "none"
    # The teacher's share of the loss, 0 to 1.
    alpha: float = 0.5
    # For `soft`: both outputs are divided by it before the softmax.
    temperature: float = 1.0
    # Whose outputs.
    teacher: TeacherConfig = field(default_factory=TeacherConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights follow gradients."""

    # `sgd` (momentum 0.9, no Nesterov unless kwargs say so), `adamw`, `rmsprop`: torch's. `lamb`, `rmsproptf`: timm's.
    # `timm:NAME` for any other of timm's, `timm:lookahead_NAME` with Lookahead around it (evaluated and saved are the
    # fast weights, also amid its k steps), or `my_module:my_factory`.
    name: str = "sgd"
    # Learning rate at its highest, for train.global_batch_size. Has no default, and changing `name` forgets it.
    lr: float = MISSING
    # lr is for this global batch: another train.global_batch_size scales it, and the banner says by how much. null: lr
    # is used as it is written.
    lr_base_batch: int | None = None
    # How it scales: with the batch's factor, or with the square root of that.
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    # Pull towards zero: a share of the weight a step (times lr), as the optimizer itself defines it.
    weight_decay: float = 0.0
    # Likewise for weights and biases of normalisation layers. null: weight_decay.
    norm_weight_decay: float | None = None
    # Likewise for all other biases. null: weight_decay.
    bias_weight_decay: float | None = None
    # Likewise for class and position tokens, relative position tables, and what a model says to spare. null:
    # weight_decay.
    token_weight_decay: float | None = None
    # Likewise for layer scales and whatever else has at most one dimension. null: weight_decay.
    scale_weight_decay: float | None = None
    # Learning rate of each layer, as a factor of that of the layer behind it (the head has 1). null: the same for all.
    layer_decay: float | None = None
    # Factors of the learning rate by patterns of parameter names: `{"head.*": 10}`. The first pattern that fits counts.
    lr_scales: Kwargs = field(default_factory=dict)
    # Further arguments of the optimizer, such as `{momentum: 0.9, nesterov: true}` or `{betas: [0.9, 0.95]}`. Lookahead
    # has `lookahead_alpha` (0.5: how far slow weights go to the fast ones) and `lookahead_k` (6: every so many steps).
    kwargs: Kwargs = field(default_factory=dict)


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a pure function of the step."""

    # `cosine`, `step`, `multistep`, `polynomial`, `exponential`, `one_cycle`, `piecewise`, `plateau`, `constant`, or
    # `my_module:my_factory`.
    name: str = "cosine"
    # Linear warm-up before it, in epochs (fractions allowed).
    warmup_epochs: float = 0.0
    # Where the warm-up begins, as a factor of the learning rate.
    warmup_start_factor: float = 0.01
    # Where the warm-up begins, as a learning rate, in place of the factor. null: by the factor.
    warmup_start_lr: float | None = None
    # true: the schedule starts behind the warm-up (torchvision). false: it starts with the run, and the warm-up covers
    # its beginning (timm).
    warmup_prefix: bool = True
    # Epochs at the end with the learning rate that the schedule has come to.
    cooldown_epochs: float = 0.0
    # The learning rate changes between epochs only, as in torchvision's and timm's scripts; false: with every step.
    by_epoch: bool = False
    # Arguments of the schedule: cosine {min_lr, cycles, cycle_decay}, step {every_epochs, gamma}, multistep
    # {milestones_epochs, gamma}, polynomial {power, min_lr}, exponential {gamma (a factor an epoch)}, one_cycle
    # {pct_start, anneal (cos or linear), div_factor, final_div_factor, min_momentum, max_momentum}, piecewise {epochs,
    # factors}, plateau {patience (evaluations), gamma, min_lr, threshold}. Epochs count from where the schedule starts.
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
    # Largest absolute value of each element of the gradient. null: no limit.
    clip_value: float | None = None
    # Adaptive clipping (Brock et al. 2021): largest norm of each unit's gradient, as a share of its weights' norm; the
    # head is spared. null: no limit.
    clip_agc: float | None = None
    # Sharpness-aware minimisation (Foret et al. 2020): the gradient is taken where the loss is highest within this
    # distance of the weights. null: at the weights.
    sam_rho: float | None = None
    # With sam_rho: only in every so many steps, since it costs a second pass.
    sam_every_steps: int = 1
    # Keep few activations and compute the others anew in the backward pass: less memory, about a third slower.
    grad_checkpointing: bool = False
    # Only deterministic kernels on GPUs: slower, the same bits each time. (On a CPU they always are, for a given number
    # of threads.)
    deterministic: bool = False
    # End the run (exit code 6) after this many steps in a row with a loss or gradient that is NaN or infinite. Such a
    # gradient never changes the weights.
    max_nonfinite_steps: int = 10


@dataclass(frozen=True)
class EmaConfig:
    """A second set of weights: the exponential moving average of the trained ones."""

    # Share of the average that stays at each update, 0 to 1. null: no average is kept, unless half_life_images says so.
    decay: float | None = None
    # In place of decay: after so many training images a weight counts half in the average. It keeps its meaning for any
    # batch size and every_steps. null: by decay.
    half_life_images: float | None = None
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
    # Average the outputs for each image and its mirror image; predict.py does so, too.
    flip_tta: bool = False
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
    # Transport between ranks. auto: nccl on GPUs, gloo on CPUs. mpi: for a torch that was built with MPI, under mpirun.
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    # The GPUs that take part, numbered as CUDA_VISIBLE_DEVICES orders them. Under dp the first one holds the
    # parameters; of several ranks each takes the one at its local rank's place. null: all that are visible, in order.
    device_ids: list[int] | None = None
    # For mode dp: the GPU where the logits are joined and the loss is computed. null: the first of device_ids.
    output_device: int | None = None
    # BatchNorm sees the images of all ranks in training (SyncBatchNorm). Changes nothing on one rank.
    sync_bn: bool = False
    # How ranks meet: `env://` (MASTER_ADDR and MASTER_PORT), `tcp://host:port` or `file:///path`.
    init_method: str = "env://"
    # Longest wait for another rank, in seconds.
    timeout_sec: float = 600.0
    # Compare the bits of weights, average and optimizer between ranks after every so many optimizer steps, and before
    # each checkpoint; ranks that differ end the run. null: never.
    check_every_steps: int | None = 1000


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved. The last step always is."""

    # Save after every so many epochs. null: not by epochs.
    every_epochs: int | None = 1
    # Save after every so many optimizer steps. null: not by steps.
    every_steps: int | None = None
    # Newest checkpoints that stay; the best one stays besides. null: all.
    keep_last: int | None = 2
    # What a failed save means (a full disk, a folder that is gone). stop: the run ends with exit code 5, since what
    # it computes from there on could be lost, and nobody might notice before its end. continue: it says so, trains on
    # and saves at the next time; where the last save of a run fails, it ends with 5 all the same.
    on_error: Literal["stop", "continue"] = "stop"


@dataclass(frozen=True)
class LogConfig:
    """What is reported."""

    # Optimizer steps between two looks at the loss; metrics.jsonl has every step all the same.
    every_steps: int = 50
    # Write event files for TensorBoard (rank 0 only).
    tensorboard: bool = True
    # Draw the curves of loss, top-1 and learning rate into plots/ at the end (rank 0 only).
    plots: bool = True


@dataclass(frozen=True)
class ExpectConfig:
    """What a recipe claims, and what came out here. Changes nothing in a run."""

    # Top-1 that the source claims, in per cent.
    claimed_top1_pct: float | None = None
    # Where the claim and the settings are published.
    source: str | None = None
    # Top-1 of a run of this project, in per cent. null: not run.
    ours_top1_pct: float | None = None
    # On what the source trained, and for how long.
    hardware: str | None = None
    # Of a run of this project: hardware, seed, date and duration. Of the settings: `deviates:` and what could not be
    # expressed, `left out:` and what could, `uncertain:` and what the source does not say for sure.
    note: str | None = None


@dataclass(frozen=True)
class Config:
    """A whole config: one section for each part of the program."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
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


# Arguments of what a name names: a layer that writes another name forgets them, where the section as a whole stays.
KWARGS_OF: dict[str, str] = {
    "augment.policy": "augment.policy_kwargs",
    "distill.teacher.name": "distill.teacher.kwargs",
}

# What a component's section falls back to when its name is changed, where that differs from the defaults above.
COMPONENT_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "optimizer": {"sgd": {"kwargs": {"momentum": 0.9}}, "rmsproptf": {"kwargs": {"momentum": 0.9}}},
}
