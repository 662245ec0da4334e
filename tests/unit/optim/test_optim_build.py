"""Optimizers: the libraries' steps, and problems found before a run starts."""

import random

import pytest
import timm.optim
import torch
from torch import nn

from imagenet_cls.config.schema import OptimizerConfig
from imagenet_cls.errors import UserError
from imagenet_cls.optim.build import build_optimizer, optimizer_problems, state_copies
from imagenet_cls.optim.groups import parameter_groups

BUILT_IN_EXAMPLES = {
    "sgd": {"momentum": 0.9},
    "adamw": {"betas": [0.9, 0.95]},
    "rmsprop": {"momentum": 0.9, "eps": 1e-3},
    "lamb": {"max_grad_norm": 1.0},
    "rmsproptf": {"eps": 1e-3},
}


# Only weights decay.
NO_DECAY = {"norm_weight_decay": 0.0, "bias_weight_decay": 0.0}


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def weights_after(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 5, generator=generator)).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def weights_of_ours(name: str, kwargs: dict, weight_decay: float = 0.1) -> list[torch.Tensor]:
    model = layer()
    config = OptimizerConfig(name=name, lr=0.01, weight_decay=weight_decay, kwargs=kwargs, **NO_DECAY)
    return weights_after(model, build_optimizer(config, parameter_groups(model, config)))


def reference(model: nn.Module) -> list[dict]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


@pytest.mark.parametrize("name", BUILT_IN_EXAMPLES)
def test_steps_equal_the_librarys(name: str) -> None:
    kwargs = BUILT_IN_EXAMPLES[name]
    classes = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
    classes |= {"lamb": timm.optim.Lamb, "rmsproptf": timm.optim.RMSpropTF}
    more = {"momentum": 0.9} if name == "rmsproptf" else {}  # timm's factory sets it
    model = layer()
    expected = weights_after(model, classes[name](reference(model), lr=0.01, **kwargs, **more))
    for a, b in zip(weights_of_ours(name, kwargs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_sgd_is_plain_and_timm_sgd_is_nesterov() -> None:
    plain, nesterov = (
        weights_of_ours("sgd", {"momentum": 0.9}),
        weights_of_ours("sgd", {"momentum": 0.9, "nesterov": True}),
    )
    theirs = weights_of_ours("timm:sgd", {})
    assert not torch.equal(plain[0], nesterov[0])
    torch.testing.assert_close(theirs, nesterov, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [*BUILT_IN_EXAMPLES, "timm:lion", "timm:lookahead_adamw"])
def test_groups_keep_decay_and_names(name: str) -> None:
    model = layer()
    config = OptimizerConfig(name=name, lr=0.01, weight_decay=0.1, lr_scales={"2.*": 10}, **NO_DECAY)
    optimizer = build_optimizer(config, parameter_groups(model, config))
    saved = optimizer.state_dict()["param_groups"]
    assert [g["weight_decay"] for g in saved] == [0.1, 0.0, 0.1, 0.0]
    assert [g["lr_scale"] for g in saved] == [1.0, 1.0, 10.0, 10.0]
    assert [g["names"] for g in saved] == [["0.weight"], ["0.bias", "1.weight", "1.bias"], ["2.weight"], ["2.bias"]]


@pytest.mark.parametrize("kwargs", [{}, {"lookahead_alpha": 0.8, "lookahead_k": 2}, {"lookahead_k": 1}])
def test_lookahead_takes_its_own_arguments_and_the_inner_ones(kwargs: dict) -> None:
    """Against SGD and the paper's algorithm in a plain loop. As with timm, slow weights begin after k steps."""
    alpha, k, steps = kwargs.get("lookahead_alpha", 0.5), kwargs.get("lookahead_k", 6), 13
    model = layer()
    inner = torch.optim.SGD(reference(model), lr=0.01, momentum=0.5)
    slow: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        inner.zero_grad()
        model(torch.randn(6, 5, generator=generator)).square().sum().backward()
        inner.step()
        if step % k == 0:
            fast = [p.detach().clone() for p in model.parameters()]
            slow = [s + alpha * (f - s) for s, f in zip(slow or fast, fast, strict=True)]
            for parameter, value in zip(model.parameters(), slow, strict=True):
                parameter.data.copy_(value)

    name, kwargs = "timm:Lookahead_Momentum", {"momentum": 0.5, **kwargs}
    config = OptimizerConfig(name, lr=0.01, weight_decay=0.1, kwargs=kwargs, **NO_DECAY)
    assert optimizer_problems(config) == []
    other = layer()
    got = weights_after(other, build_optimizer(config, parameter_groups(other, config)), steps)
    for a, b in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_lookahead_keeps_one_more_copy_of_the_weights() -> None:
    for k in (1, 6):
        config = OptimizerConfig("timm:lookahead_adamw", lr=0.1, kwargs={"lookahead_k": k})
        assert state_copies(config) == 1 + state_copies(OptimizerConfig("adamw", lr=0.1)) == 3


def test_timms_sync_lookahead_changes_nothing() -> None:
    """Its script calls it after `zero_grad`. If this fails, our epochs should end with it too."""
    model = layer()
    optimizer = timm.optim.create_optimizer_v2(model, opt="lookahead_sgd", lr=0.01)
    weights_after(model, optimizer, steps=8)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.sync_lookahead()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_fast_implementation_unless_kwargs_choose() -> None:
    groups = parameter_groups(layer(), OptimizerConfig(lr=0.1))
    assert build_optimizer(OptimizerConfig(name="sgd", lr=0.1), groups).defaults["fused"] is True
    assert build_optimizer(OptimizerConfig(name="adamw", lr=0.1), groups).defaults["fused"] is True
    assert build_optimizer(OptimizerConfig(name="rmsprop", lr=0.1), groups).defaults["foreach"] is True
    chosen = OptimizerConfig(name="sgd", lr=0.1, kwargs={"foreach": True})
    assert build_optimizer(chosen, groups).defaults["fused"] is None


@pytest.mark.parametrize("name", BUILT_IN_EXAMPLES)
def test_valid_section_has_no_problem(name: str) -> None:
    assert (
        optimizer_problems(OptimizerConfig(name=name, lr=0.1, weight_decay=0.01, kwargs=BUILT_IN_EXAMPLES[name])) == []
    )


@pytest.mark.parametrize("name", ["timm:lion", "timm:muon", "timm:novograd", "timm:madgrad", "timm:lookahead_radam"])
def test_timm_optimizer_has_no_problem(name: str) -> None:
    assert optimizer_problems(OptimizerConfig(name=name, lr=0.1)) == []


def only(name: str, **kwargs) -> tuple[str, str]:
    (problem,) = optimizer_problems(OptimizerConfig(name=name, lr=0.1, kwargs=kwargs))
    assert "\n" not in problem.message
    return problem.key, problem.message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("adamv", "'adamw'"),
        ("SGD", "'sgd'"),
        ("timm:lionn", "'timm:lion'"),
        ("timm:nonsense_adamw", "'timm:nadamw'"),
        ("lookahead_adamw", "'timm:lookahead_adamw'"),
        ("timm:lookahed_adamw", "'timm:lookahead_adamw'"),
        ("timm:lookahead_lookahead_adamw", "'timm:lookahead_adamw'"),
    ],
)
def test_unknown_name_suggests_a_known_one(name: str, meant: str) -> None:
    key, message = only(name)
    assert key == "optimizer.name"
    assert meant in message


def test_unknown_argument_suggests_a_known_one() -> None:
    key, message = only("sgd", momentun=0.9)
    assert key == "optimizer.kwargs.momentun"
    assert "'momentum'" in message
    assert only("timm:lion", beta=[0.9, 0.99])[0] == "optimizer.kwargs.beta"
    assert only("lamb", trust_clipp=True)[0] == "optimizer.kwargs.trust_clipp"
    assert only("timm:adamw", lookahead_k=5)[0] == "optimizer.kwargs.lookahead_k"
    for reserved in ("lr", "weight_decay", "params"):
        assert "set by the program" in only("adamw", **{reserved: 1})[1]


@pytest.mark.parametrize(
    ("slip", "key", "text"),
    [
        ({"lookahead_K": 5}, "lookahead_K", "'lookahead_k'"),
        ({"k": 5}, "k", "lookahead_alpha, lookahead_k)"),
        ({"lookahead_k": 0}, "lookahead_k", "a whole number, at least 1"),
        ({"lookahead_k": 2.5}, "lookahead_k", "2.5 is out of range"),
        ({"lookahead_k": True}, "lookahead_k", "true is out of range"),
        ({"lookahead_alpha": 0}, "lookahead_alpha", "more than 0 and at most 1"),
        ({"lookahead_alpha": 1.5}, "lookahead_alpha", "1.5 is out of range"),
        ({"lookahead_alpha": float("nan")}, "lookahead_alpha", "nan is out of range"),
        ({"lookahead_alpha": "half"}, "lookahead_alpha", "'half' is out of range"),
    ],
)
def test_bad_lookahead_argument_is_a_problem(slip: dict, key: str, text: str) -> None:
    got, message = only("timm:lookahead_adamw", **slip)
    assert got == f"optimizer.kwargs.{key}"
    assert text in message


@pytest.mark.parametrize("factor", [-0.1, "ten", True, None, [1.0], float("nan"), float("inf")])
def test_lr_scale_that_is_no_number_is_a_problem(factor: object) -> None:
    (problem,) = optimizer_problems(OptimizerConfig(lr=0.1, lr_scales={"fc.*": 10, "bn1.*": factor, "layer1.*": 0}))
    assert problem.key == "optimizer.lr_scales"
    assert "'bn1.*'" in problem.message and "at least 0" in problem.message


def test_lr_scales_and_layer_decay_are_not_checked_without_the_model() -> None:
    assert optimizer_problems(OptimizerConfig(lr=0.1, layer_decay=0.5, lr_scales={"head.*": 10})) == []


def test_bad_numbers_report_the_constructors_error() -> None:
    assert "Invalid momentum value" in only("sgd", momentum=-1)[1]
    assert "Invalid beta" in only("adamw", betas=[0.9, 1.5])[1]
    assert "Nesterov" in only("sgd", nesterov=True)[1]


def test_state_that_a_checkpoint_cannot_store_is_a_problem() -> None:
    key, message = only("timm:kron")
    assert key == "optimizer.name"
    assert "rng_state" in message
    assert "torch.dtype" in only("timm:adafactorbv")[1]


def test_optimizer_that_cannot_step_is_a_problem() -> None:
    assert only("timm:adahessian")[0] == "optimizer"
    if not torch.cuda.is_available():
        assert "CUDA required" in only("timm:fusedadam")[1]


class WithGeneratorInState(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["generator"] = [random.Random(0)]
        return super().step(closure)


def own_sgd(groups, lr, weight_decay, momentum):
    return torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay, momentum=momentum)


def own_generator(groups, lr, weight_decay):
    return WithGeneratorInState(groups, lr=lr, weight_decay=weight_decay)


def own_nothing(groups, lr, weight_decay):
    return None


def own_without_lr(groups):
    return torch.optim.SGD(groups, lr=0.1)


def test_own_factories() -> None:
    assert optimizer_problems(OptimizerConfig(name=f"{__name__}:own_sgd", lr=0.1, kwargs={"momentum": 0.9})) == []
    assert "'momentum'" in only(f"{__name__}:own_sgd")[1]
    assert "random.Random" in only(f"{__name__}:own_generator")[1]
    assert "returned NoneType" in only(f"{__name__}:own_nothing")[1]
    assert "unexpected keyword" in only(f"{__name__}:own_without_lr")[1]
    assert "'own_sgd'" in only(f"{__name__}:own_sdg")[1]
    with pytest.raises(UserError, match="returned NoneType"):
        build_optimizer(OptimizerConfig(name=f"{__name__}:own_nothing", lr=0.1), [])
