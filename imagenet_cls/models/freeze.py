"""Parameters that are not trained, and the BatchNorm layers that stand still with them.

Owns `model.freeze`, `model.head_only` and `model.freeze_bn`. Nothing is converted: parameters lose `requires_grad`, and
BatchNorm is put into evaluation mode, so names, classes and checkpoints stay as they are. Refuses patterns that fit no
parameter, a head that can't be told, and a model with nothing left to train. Called by `models.check` (what would be
refused, on a model without memory), by `engine.model` (before ranks are joined: DistributedDataParallel must know what
has no gradient), by `engine.train` and, for one batch tried out, `engine.run` (the modes, wherever training goes on).
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import ConfigError, Problem
from imagenet_cls.lookup import did_you_mean_part
from imagenet_cls.models.build import head_names


def freeze(model: nn.Module, cfg: ModelConfig, num_classes: int) -> str | None:
    """Take `requires_grad` from the parameters that the config freezes, in place; None where there are none.

    num_classes: outputs of the head, to find it. Returns a sentence about what is trained. Raises ConfigError for what
    `freeze_problems` names.
    """
    problems = freeze_problems(model, cfg, num_classes)
    if problems:
        raise ConfigError([f"{problem.key}: {problem.message}" for problem in problems])
    frozen = _frozen_names(model, cfg, num_classes)
    if not frozen:
        return None
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    still = sum(is_still(model, cfg).values())
    sentence = f"{trained:,} of {sum(size for size, _ in sizes):,} parameters are trained"
    return sentence + (f"; {still} BatchNorm layers keep their running statistics" if still else "")


def set_training(model: nn.Module, cfg: ModelConfig) -> None:
    """`model.train()`, and then frozen BatchNorm layers back into evaluation mode.

    Dropout and drop-path stay on in frozen parts, as in timm.
    """
    model.train()
    if not (cfg.freeze or cfg.head_only or cfg.freeze_bn):
        return
    for layer, still in is_still(model, cfg).items():
        layer.train(not still)


def is_still(model: nn.Module, cfg: ModelConfig) -> dict[_BatchNorm, bool]:
    """For each BatchNorm whether it uses its running statistics as they are: all do with `model.freeze_bn`, else those
    around which nothing is trained.

    Around it is the smallest module that has parameters at all. That is the layer itself, but for layers without weight
    and bias, which follow their surroundings: one in front of a head that is trained moves.
    """
    modules = dict(model.named_modules())
    still = {}
    for name, layer in modules.items():
        if isinstance(layer, _BatchNorm):
            around, parameters = name, list(layer.parameters())
            while around and not parameters:
                around = around.rpartition(".")[0]
                parameters = list(modules[around].parameters())
            is_trained = any(parameter.requires_grad for parameter in parameters)
            still[layer] = cfg.freeze_bn or (bool(parameters) and not is_trained)
    return still


def freeze_problems(model: nn.Module, cfg: ModelConfig, num_classes: int) -> list[Problem]:
    """What is wrong with `model.freeze`, `model.head_only` and `model.freeze_bn` for this model, on whatever device."""
    names = [name for name, _ in model.named_parameters()]
    if cfg.head_only and not head_names(model, num_classes):
        return [
            Problem("model.head_only", f"can't tell which layer of {cfg.name} is its head; name the rest in freeze")
        ]
    problems = [
        Problem("model.freeze", f"{pattern!r} fits no parameter of {cfg.name}{_remedy(pattern, names)}")
        for pattern in cfg.freeze
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if cfg.freeze_bn and not is_still(model, cfg):
        problems.append(Problem("model.freeze_bn", f"{cfg.name} has no BatchNorm; set it to false"))
    if not problems and names and _frozen_names(model, cfg, num_classes) >= set(names):
        key = "model.freeze" if cfg.freeze else "model.freeze_bn"
        problems.append(Problem(key, f"leaves no parameter of {cfg.name} to train; freeze less"))
    return problems


def _frozen_names(model: nn.Module, cfg: ModelConfig, num_classes: int) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    frozen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in cfg.freeze)}
    if cfg.head_only:
        frozen |= set(names) - set(head_names(model, num_classes))
    if cfg.freeze_bn:
        layers = [name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
        frozen |= {name for name in names if name.rpartition(".")[0] in layers}
    return frozen


def _remedy(pattern: str, names: Sequence[str]) -> str:
    """What could have been meant, else what there is."""
    tops = dict.fromkeys(name.partition(".")[0] for name in names)
    return did_you_mean_part(pattern, names) or f" (its parts: {', '.join(f'{top}.*' for top in tops)})"
