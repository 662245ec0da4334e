"""`train.compile`: runs with accumulation, on one rank and on two, against runs without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forked_ranks import RankServer
from helpers import arguments, newest
from safetensors.torch import load_file
from torch import Tensor, nn


class GraphLinear(torch.autograd.Function):
    """A linear layer whose gradients are all returned in the same memory, as by a CUDA graph."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, memory: Tensor) -> Tensor:
        ctx.images, ctx.memory = images, memory
        return images @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        ctx.memory.copy_(gradient.T @ ctx.images)
        return None, ctx.memory.detach(), None  # a new tensor, so that autograd takes it as `.grad`


class Graphed(nn.Module):
    """Stands for a model that is compiled with CUDA graphs, which need a GPU."""

    def __init__(self, num_classes: int):
        super().__init__()
        weight = torch.linspace(-0.1, 0.1, 3 * 16 * 16 * num_classes)
        self.weight = nn.Parameter(weight.view(num_classes, -1))
        self.memory = torch.zeros_like(self.weight)

    def forward(self, images: Tensor) -> Tensor:
        return GraphLinear.apply(images.flatten(1), self.weight, self.memory)


class Traced(nn.Module):
    """Compiled as in a run, but torch executes the graphs, which needs no C++ compiler."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=4)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 4 * 4, num_classes)
        self.is_compiled = False

    def forward(self, images: Tensor) -> Tensor:
        assert torch.compiler.is_compiling() == self.is_compiled
        return self.head(self.norm(self.conv(images)).relu().flatten(1))


def graphed(num_classes: int) -> nn.Module:
    """`Graphed`, which is as good as compiled: nothing is compiled in this process."""
    mock.patch.object(nn.Module, "compile", lambda module, **_: None).start()
    return Graphed(num_classes)


def traced(num_classes: int) -> nn.Module:
    """`Traced`, of which this process compiles what a run does, in one graph."""
    model, compile_module = Traced(num_classes), nn.Module.compile
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        assert len(graphs) <= 2, "one graph for training and one for evaluations"
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def trace(module: nn.Module, **settings: Any) -> None:
        model.is_compiled = True
        compile_module(module, backend=backend, dynamic=settings["dynamic"], fullgraph=True)

    mock.patch.object(nn.Module, "compile", trace).start()
    return model


Run = Callable[..., dict[str, Tensor]]


@pytest.fixture
def final_weights(rank_server: RankServer, tmp_path: Path, digits: Path) -> Run:
    """Runs train.py for three steps, and returns weights, buffers and their averages."""

    def train(
        ranks: int, model: str, compiled: str, micro_batch: str, **more: Any
    ) -> dict[str, Tensor]:
        folder = tmp_path / f"{compiled}-{micro_batch}"
        settings = {"model__name": model, "train__compile": compiled, "device": "cpu", **more}
        settings |= {"train__micro_batch_size": micro_batch, "train__max_steps": 3}
        rank_server.train(arguments(digits, folder, **settings), ranks)
        checkpoint = newest(folder)
        return {
            f"{path.stem}.{name}": tensor
            for path in (checkpoint / "model.safetensors", checkpoint / "ema.safetensors")
            if path.exists()
            for name, tensor in load_file(path).items()
        }

    return train


@pytest.mark.parametrize(
    ("mode", "ranks", "sam_rho"),
    [("reduce-overhead", 1, 0.05), ("max-autotune", 2, "null")],
)
def test_gradients_in_memory_of_cuda_graphs_are_accumulated(
    final_weights: Run, mode: str, ranks: int, sam_rho: float | str
) -> None:
    model, settings = "test_compiled_runs:graphed", {"train__sam_rho": sam_rho}
    whole = final_weights(ranks, model, mode, "null", **settings)
    accumulated = final_weights(ranks, model, mode, "16", **settings)
    torch.testing.assert_close(accumulated, whole)


TRACED = "test_compiled_runs:traced"
SAM_MIXUP_EMA = {"train__sam_rho": 0.05, "mix__mixup_alpha": 0.4, "ema__decay": 0.9}
DISTILLATION = {"distill__kind": "soft", "distill__teacher__name": "helpers:plain"}


@pytest.mark.parametrize(
    ("model", "mode", "ranks", "settings"),
    [
        (TRACED, "true", 2, SAM_MIXUP_EMA),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (TRACED, "true", 1, SAM_MIXUP_EMA),
                (TRACED, "true", 2, DISTILLATION),
                ("helpers:plain", "true", 1, SAM_MIXUP_EMA),  # by inductor
                ("helpers:plain", "reduce-overhead", 2, SAM_MIXUP_EMA),
            )
        ),
    ],
)
def test_compiled_run_with_accumulation_ends_with_the_weights_of_an_eager_one(
    final_weights: Run, model: str, mode: str, ranks: int, settings: dict[str, Any]
) -> None:
    eager, compiled = (
        final_weights(ranks, model, value, "32", **settings) for value in ("false", mode)
    )
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
