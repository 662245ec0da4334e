"""Before a run: rendezvous of the ranks, and a check that all have the same code and config."""

import logging

from imagenet_cls.config.load import Loaded, format_problems
from imagenet_cls.engine.build import data_parallel_devices
from imagenet_cls.engine.check import config_problems, rank_problems
from imagenet_cls.errors import ConfigError, Problem
from imagenet_cls.guards.agreement import check_same_code, check_same_config
from imagenet_cls.guards.heartbeat import start_heartbeat
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group, choose_device, init_group, run_on_main


def join_group(loaded: Loaded, rank_info: RankInfo) -> Group:
    """Rendezvous with the other ranks. Raises UsageError or ResourceError if it fails."""
    logging.captureWarnings(True)  # warnings of libraries go to the log files
    parallel = loaded.config.parallel
    device = choose_device(loaded.config.device, rank_info, None if parallel.mode == "dp" else parallel.device_ids)
    if parallel.mode == "dp" and device.type == "cuda" and rank_info.world_size == 1:
        device = data_parallel_devices(loaded.config).all[0]
    group = init_group(rank_info, device, parallel.mode, parallel.backend, parallel.init_method, parallel.timeout_sec)
    return start_heartbeat(group, parallel.timeout_sec)


def check_agreement(loaded: Loaded, group: Group, training: bool) -> None:
    """Raise a UserError on every rank unless all have the same code and config, and stage 2 of the checks passes.

    The launching process has made most of these checks; in an elastic job it does not know the number of ranks.
    """
    check_same_code(loaded.config, group)
    check_same_config(loaded.config, group)
    stage_2 = rank_problems if group.rank_info.launched else config_problems
    run_on_main(group, lambda: raise_problems(stage_2(loaded.config, group.world_size, training), loaded))


def raise_problems(problems: list[Problem], loaded: Loaded) -> None:
    """Raise ConfigError with a line for each problem, if there is any."""
    if problems:
        raise ConfigError(format_problems(problems, loaded.origins))
