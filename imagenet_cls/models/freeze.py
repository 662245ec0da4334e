"""Frozen parameters and BatchNorm layers: `model.freeze`, `model.head_only` and `model.freeze_bn`.

Frozen parameters lose `requires_grad`, frozen BatchNorm is put into evaluation mode: names, classes and checkpoints
stay.
"""

from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import ConfigError, Problem
from imagenet_cls.lookup import did_you_mean_part
from imagenet_cls.models.build import head_names


def freeze(model: nn.Module, cfg: ModelConfig, num_classes: int) -> str | None:
    """Freeze parameters as the config says, in place. Returns a sentence about what is trained; None if nothing is
    frozen.

    num_classes: outputs of the head, to find it. Raises ConfigError for what `freeze_problems` finds.
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
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layers = sum(frozen_batch_norm(model, cfg).values())
    sentence = f"{trained:,} of {total:,} parameters are trained"
    return sentence + (f"; {layers} BatchNorm layers keep their running statistics" if layers else "")


def set_training(model: nn.Module, cfg: ModelConfig) -> None:
    """`model.train()`, but frozen BatchNorm layers in evaluation mode. Dropout and drop-path stay on in frozen parts,
    as in timm."""
    model.train()
    if not (cfg.freeze or cfg.head_only or cfg.freeze_bn):
        return
    for layer, is_frozen in frozen_batch_norm(model, cfg).items():
        layer.train(not is_frozen)


def frozen_batch_norm(model: nn.Module, cfg: ModelConfig) -> dict[_BatchNorm, bool]:
    """For each BatchNorm layer whether its running statistics are frozen: with `model.freeze_bn` all are, else those
    whose parameters are.

    A layer without weight and bias follows the smallest module around it that has parameters: it is not frozen in front
    of a trained head.
    """
    modules = dict(model.named_modules())
    frozen = {}
    for name, layer in modules.items():
        if isinstance(layer, _BatchNorm):
            owner, parameters = name, list(layer.parameters())
            while owner and not parameters:
                owner = owner.rpartition(".")[0]
                parameters = list(modules[owner].parameters())
            is_trained = any(parameter.requires_grad for parameter in parameters)
            frozen[layer] = cfg.freeze_bn or (bool(parameters) and not is_trained)
    return frozen


def freeze_problems(model: nn.Module, cfg: ModelConfig, num_classes: int) -> list[Problem]:
    """What is wrong with `model.freeze`, `model.head_only` and `model.freeze_bn` for this model, on any device."""
    names = [name for name, _ in model.named_parameters()]
    if cfg.head_only and not head_names(model, num_classes):
        return [Problem("model.head_only", f"{cfg.name} has no recognised head; list the other layers in model.freeze")]
    problems = []
    for pattern in cfg.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            parts = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in names)
            hint = did_you_mean_part(pattern, names) or f" (its parts: {', '.join(parts)})"
            problems.append(Problem("model.freeze", f"{pattern!r} matches no parameter of {cfg.name}{hint}"))
    if cfg.freeze_bn and not frozen_batch_norm(model, cfg):
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
