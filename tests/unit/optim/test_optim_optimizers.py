"""Optimizers: the libraries' steps, and problems found before a run starts."""

import pytest
import timm.optim
import torch
from torch import Tensor, nn

from imagenet_cls.config.schema import OptimizerConfig
from imagenet_cls.errors import ConfigError, UserError
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.optimizers import (
    build_optimizer,
    optimizer_problems,
)

# Each built-in optimizer with arguments, the library's class, and what timm's factory sets.
BUILT_IN = {
    "sgd": ({"momentum": 0.9}, torch.optim.SGD, {}),
    "adamw": ({"betas": [0.9, 0.95]}, torch.optim.AdamW, {}),
    "rmsprop": ({"momentum": 0.9, "eps": 1e-3}, torch.optim.RMSprop, {}),
    "lamb": ({"max_grad_norm": 1.0}, timm.optim.Lamb, {}),
    "rmsproptf": ({"eps": 1e-3}, timm.optim.RMSpropTF, {"momentum": 0.9}),
    "timm:sgd": ({}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}
# Only weights decay.
NO_DECAY = {"norm_weight_decay": 0.0, "bias_weight_decay": 0.0}


def network() -> nn.Module:
    """Without a bias before BatchNorm: its gradient is rounding error, which Adam scales up."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 3))


def groups_by_hand(model: nn.Module) -> list[dict]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters after four steps."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 5, generator=generator)).square().sum().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", BUILT_IN)
def test_steps_equal_the_librarys(name: str) -> None:
    kwargs, optimizer, more = BUILT_IN[name]
    config = OptimizerConfig(name=name, lr=0.01, weight_decay=0.1, kwargs=kwargs, **NO_DECAY)
    assert optimizer_problems(config) == []
    ours, theirs = network(), network()
    found = trained(ours, build_optimizer(config, parameter_groups(ours, config)))
    expected = trained(theirs, optimizer(groups_by_hand(theirs), lr=0.01, **kwargs, **more))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "kwargs", "defaults"),
    [
        ("sgd", {}, {"fused": True}),
        ("rmsprop", {}, {"foreach": True}),
        ("sgd", {"foreach": True}, {"foreach": True, "fused": None}),
    ],
)
def test_implementation_is_the_fastest_unless_kwargs_choose(
    name: str, kwargs: dict, defaults: dict
) -> None:
    config = OptimizerConfig(name=name, lr=0.1, kwargs=kwargs)
    assert (
        defaults.items()
        <= build_optimizer(config, parameter_groups(network(), config)).defaults.items()
    )


def own_sgd(groups, lr, weight_decay, momentum):
    return torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay, momentum=momentum)


def own_with_tag(groups, lr, weight_decay, tag: str | None = None):
    return own_sgd(groups, lr, weight_decay, 0.9)


def own_nothing(groups, lr, weight_decay):
    return None


def problem_keys(name: str = "sgd", kwargs: dict | None = None, **settings) -> list[str]:
    problems = optimizer_problems(
        OptimizerConfig(name=name, lr=0.1, kwargs=kwargs or {}, **settings)
    )
    assert not any("\n" in problem.message for problem in problems)
    return [problem.key for problem in problems]


@pytest.mark.parametrize(
    ("name", "kwargs", "key"),
    [
        ("adamw", {"weight_decay": 1}, "optimizer.kwargs.weight_decay"),
        ("adamw", {"params": 1}, "optimizer.kwargs.params"),
        ("timm:lookahead_adamw", {"k": 5}, "optimizer.kwargs.k"),
        ("timm:lookahead_lookahead_adamw", {}, "optimizer.name"),
        ("timm:fusedadam", {}, "optimizer.name"),  # needs CUDA
    ],
)
def test_bad_section_is_a_problem(name: str, kwargs: dict, key: str) -> None:
    assert problem_keys(name, kwargs) == [key]


@pytest.mark.parametrize("factor", [-0.1, "ten", float("inf")])
def test_lr_scale_that_is_no_number_is_a_problem(factor: object) -> None:
    (problem,) = optimizer_problems(
        OptimizerConfig(lr=0.1, lr_scales={"fc.*": 10, "bn1.*": factor, "layer1.*": 0})
    )
    assert problem.key == "optimizer.lr_scales" and "'bn1.*'" in problem.message


def test_numbers_that_the_constructor_rejects_are_a_config_error() -> None:
    config = OptimizerConfig(name="adamw", lr=0.1, kwargs={"betas": [0.9, 1.5]})
    with pytest.raises(ConfigError, match=r"^optimizer\.kwargs: "):
        build_optimizer(config, parameter_groups(network(), config))


def test_user_factory_is_called_with_groups() -> None:
    name = f"{__name__}:own_sgd"
    assert problem_keys(name, {"momentum": 0.9}, layer_decay=0.5, lr_scales={"head.*": 10}) == []
    assert problem_keys(f"{__name__}:own_with_tag", {"tag": "2012"}) == []
    with pytest.raises(UserError):
        build_optimizer(OptimizerConfig(name=f"{__name__}:own_nothing", lr=0.1), [])
    config = OptimizerConfig(name=name, lr=0.1, kwargs={"momentum": -1})
    with pytest.raises(ValueError):  # with a traceback: it is the user's code
        build_optimizer(config, parameter_groups(network(), config))
