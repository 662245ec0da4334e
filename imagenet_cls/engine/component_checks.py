"""Stage 2 of the checks: names, signatures and the arithmetic of batches, before any data is read.

Stage 1 (files, keys, types, ranges) is `config.load`, which needs no torch.
"""

from imagenet_cls.config.load import LoadedConfig, format_problems
from imagenet_cls.config.schema import Config
from imagenet_cls.data.datasets import data_problems
from imagenet_cls.data.policies import policy_problems
from imagenet_cls.engine.build import devices_per_rank
from imagenet_cls.engine.plan import batch_problem
from imagenet_cls.engine.user_metrics import metric_problems
from imagenet_cls.engine.user_step import step_problems
from imagenet_cls.errors import ConfigError, Problem
from imagenet_cls.guards.agreement import check_same_code, check_same_config
from imagenet_cls.lookup import NameNotFoundError, import_from_cwd
from imagenet_cls.models.factory import model_problems
from imagenet_cls.models.teacher import distillation_problems
from imagenet_cls.optim.losses import loss_problems
from imagenet_cls.optim.optimizers import optimizer_problems
from imagenet_cls.optim.schedule import schedule_problems
from imagenet_cls.parallel.collectives import run_on_main
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.report.writers import writer_problems


def check_on_all_ranks(loaded: LoadedConfig, context: RankContext, training: bool) -> None:
    """Raise a UserError on every rank unless all have the same code and config, and stage 2 of the
    checks passes.

    If a launching process has made the other checks, only the number of ranks is left to check,
    which the launching process does not know in an elastic job.
    """
    check_same_code(loaded.config, context, training)
    check_same_config(loaded.config, context)
    find_problems = rank_problems if context.rank_info.launched else config_problems

    def check() -> None:
        raise_problems(find_problems(loaded.config, context.world_size, training), loaded)

    run_on_main(context, check)


def raise_problems(problems: list[Problem], loaded: LoadedConfig) -> None:
    """Raise ConfigError with a line for each problem, if there is any."""
    if problems:
        raise ConfigError(format_problems(problems, loaded.origins))


def config_problems(config: Config, world_size: int | None, training: bool = True) -> list[Problem]:
    """The problems of a config that show before its components are built. If a module in `imports`
    can't be imported, only this problem: it may define the names that other keys refer to.

    world_size: None where it is not known yet. training: false for an evaluation, of which only
    model, data and metrics are checked.
    """
    for name in config.imports:
        try:
            import_from_cwd(name)
        except NameNotFoundError as error:
            return [Problem("imports", str(error))]
    problems = model_problems(config.model)
    problems += data_problems(config.data)
    problems += metric_problems(config.eval.metrics)
    if training:
        problems += policy_problems(config.augment)
        problems += loss_problems(config.loss, config.data.labels)
        problems += distillation_problems(config.distill)
        problems += schedule_problems(config.schedule, config.train.epochs)
        problems += optimizer_problems(config.optimizer)
        problems += step_problems(config.train.step)
        problems += writer_problems(config.log)
    if world_size is not None:
        problems += rank_problems(config, world_size, training)
    return problems


def rank_problems(config: Config, world_size: int, training: bool = True) -> list[Problem]:
    """Problems of the parallel mode, and in training of the batch, with this number of ranks."""
    mode = config.parallel.mode
    if world_size > 1 and mode in ("none", "dp"):
        purpose = {"none": "is for one device", "dp": "runs all GPUs from one process"}[mode]
        return [
            Problem(
                "parallel.mode",
                f"{mode!r} {purpose}, but {world_size} ranks were started; use 'ddp'",
            )
        ]
    if not training:
        return []
    # DataParallel divides a batch in its own way, so it needs equal shares.
    num_devices = world_size * devices_per_rank(config)
    problem = batch_problem(config.train, num_devices, uneven=mode != "dp")
    return [] if problem is None else [problem]
