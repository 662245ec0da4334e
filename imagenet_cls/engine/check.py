"""Stage 2 of the checks: names, signatures and the arithmetic of batches, before any data is read.

Stage 1 (files, keys, types, ranges) is `config.load`, which needs no torch.
"""

from imagenet_cls.config.schema import Config
from imagenet_cls.data import data_problems, mixing_problems, policy_problems, repeats_problems
from imagenet_cls.engine.build import num_devices
from imagenet_cls.engine.plan import batch_problem, micro_batch_for
from imagenet_cls.errors import Problem
from imagenet_cls.lookup import import_from_here
from imagenet_cls.models.check import model_problems
from imagenet_cls.models.teacher import distillation_problems
from imagenet_cls.optim.build import initial_momentum, optimizer_problems
from imagenet_cls.optim.losses import loss_problems
from imagenet_cls.optim.schedule import scaled_lr, schedule_problems


def config_problems(config: Config, world_size: int | None, training: bool = True) -> list[Problem]:
    """All problems of a config at once, or only the first module in `imports` that cannot be imported.

    world_size: None where it is not known yet. training: false for an evaluation, whose batch is not checked.
    """
    for name in config.imports:
        try:
            import_from_here(name)
        except LookupError as error:
            return [Problem("imports", str(error))]
    problems = model_problems(config.model, training and config.train.grad_checkpointing)
    problems += data_problems(config.data) + policy_problems(config.augment)
    problems += loss_problems(config.loss) + distillation_problems(config.distill)
    lr, _ = scaled_lr(config.optimizer, config.train.global_batch_size)
    problems += optimizer_problems(config.optimizer) + schedule_problems(config.schedule, config.train.epochs, lr)
    problems += momentum_problems(config)
    if world_size is not None:
        problems += rank_problems(config, world_size, training)
    return problems


def momentum_problems(config: Config) -> list[Problem]:
    """The problem of a `one_cycle` schedule that sets the momentum of an optimizer without momentum."""
    names = [name for name in ("min_momentum", "max_momentum") if name in config.schedule.kwargs]
    if config.schedule.name != "one_cycle" or not names or optimizer_problems(config.optimizer):
        return []
    if initial_momentum(config.optimizer) is not None:
        return []
    text = f"{config.optimizer.name!r} has no momentum to schedule; leave it out, or choose another optimizer"
    return [Problem(f"schedule.kwargs.{names[0]}", text)]


def rank_problems(config: Config, world_size: int, training: bool = True) -> list[Problem]:
    """Problems of the parallel mode, and in training of the batch, with this number of ranks."""
    mode = config.parallel.mode
    if world_size > 1 and mode in ("none", "dp"):
        purpose = {"none": "is for one device", "dp": "runs all GPUs from one process"}[mode]
        return [Problem("parallel.mode", f"{mode!r} {purpose}, but {world_size} ranks were started; use 'ddp'")]
    if not training:
        return []
    devices = num_devices(config, world_size)
    train = config.train
    problem = batch_problem(train, devices, "GPUs" if mode == "dp" else "ranks")
    if problem is not None:
        return [problem]
    loader_batch = micro_batch_for(train, devices) * devices // world_size
    problems = mixing_problems(config.mix, loader_batch, train.global_batch_size)
    return problems + repeats_problems(config.data.repeats_multiple, world_size)
