"""Published weights, read from a file in place of a download: the head that they are evaluated
with, and its order.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import arguments, call, fails
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import ResNet18_Weights

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.schema import Config, DistillConfig, ModelConfig, TeacherConfig
from imagenet_cls.engine.training_model import build_distillation_teacher, build_initial_model
from imagenet_cls.errors import CheckpointError, DataError
from imagenet_cls.inference.load_weights import load_weights_of_config
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import RankContext

IDS = timm.data.ImageNetInfo("imagenet-1k").label_names()
CATEGORIES = ResNet18_Weights.DEFAULT.meta["categories"]
SYNONYMS = timm.data.ImageNetInfo("imagenet-1k").label_descriptions()
NUMBERS = sorted(str(number) for number in range(1000))
UNKNOWN = [f"class {number}" for number in range(1000)]
MEAN_STD = ([0.5] * 3, [0.5] * 3)

# Class names, and the outputs that belong to the first ones.
ORDERS: dict[str, tuple[Sequence[str], list[int]]] = {
    "ids": (IDS, [0, 1, 2]),
    "numbers": (NUMBERS, [0, 1, 10, 100]),
    "padded": (sorted(f"{number:04}" for number in range(1000)), [0, 1, 2]),
    "categories": (sorted(CATEGORIES), [CATEGORIES.index(name) for name in sorted(CATEGORIES)]),
    "underscores": (sorted(name.replace(" ", "_") for name in CATEGORIES), []),
    "synonyms": (SYNONYMS, [0, 1, 2]),
    "some": (IDS[500:510], [*range(500, 510), *range(500), *range(510, 1000)]),
}


@pytest.fixture(scope="module")
def source() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=1000).eval()


@pytest.fixture
def kwargs(source: nn.Module, tmp_path: Path) -> dict[str, Any]:
    """Arguments with which timm reads published weights from a file."""
    save_file(source.state_dict(), tmp_path / "published.safetensors")
    return {"pretrained_cfg_overlay": {"file": str(tmp_path / "published.safetensors")}}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32))[0]


@pytest.mark.parametrize("name", ORDERS)
def test_published_outputs_are_put_in_the_order_of_the_classes(
    name: str, source: nn.Module, kwargs: dict
) -> None:
    classes, order = ORDERS[name]
    config = Config(
        model=ModelConfig("test_resnet", pretrained=True, num_classes=1000, kwargs=kwargs)
    )
    evaluated = load_weights_of_config(config, None, classes).models["raw"]
    started, (message,) = build_initial_model(config, 1000, classes)
    expected = logits(source)[order]
    torch.testing.assert_close(logits(evaluated)[: len(order)], expected)
    torch.testing.assert_close(logits(started)[: len(order)], expected)
    torch.testing.assert_close(logits(evaluated).sort().values, logits(source).sort().values)
    assert ("in the order of" in message) == (
        name in ("numbers", "categories", "underscores", "some")
    )
    if name == "numbers":
        teacher = TeacherConfig("test_resnet", pretrained=True, kwargs=kwargs)
        config = Config(distill=DistillConfig("soft", teacher=teacher))
        built = build_distillation_teacher(
            config, 1000, classes, RankContext(RankInfo(), torch.device("cpu")), MEAN_STD
        )
        assert built is not None
        torch.testing.assert_close(logits(built.network)[: len(order)], expected)


@pytest.mark.parametrize(
    "classes",
    [
        UNKNOWN,
        [*IDS[:-1], "n00000000"],
        NUMBERS[:999],
        [*IDS[:-1], IDS[0]],
        [*CATEGORIES[::-1][:10], "0"],
    ],
)
def test_published_weights_with_unknown_classes_start_a_run_but_are_not_evaluated(
    classes: list[str], source: nn.Module, kwargs: dict
) -> None:
    config = Config(
        model=ModelConfig("test_resnet", pretrained=True, num_classes=1000, kwargs=kwargs)
    )
    with pytest.raises(DataError):
        load_weights_of_config(config, None, classes)
    started, messages = build_initial_model(config, 1000, classes)
    torch.testing.assert_close(logits(started), logits(source))
    assert "head of the published weights is kept" in messages[1]


def test_published_weights_are_not_evaluated_with_a_new_head(
    digits: Path, tmp_path: Path, kwargs: dict
) -> None:
    words = arguments(
        digits, tmp_path, "x", model__pretrained="true", **{"model.name": "test_resnet"}
    )[:-2]
    words.append(
        f"model.kwargs.pretrained_cfg_overlay.file={kwargs['pretrained_cfg_overlay']['file']}"
    )
    code, out, err = call(evaluate_command, *words)
    assert code == 4 and "top-1" not in out
    assert err.startswith("model.pretrained: ") and "model.num_classes=1000" in err
    # ten digits are no classes of ImageNet
    fails(3, evaluate_command, *words, "model.num_classes=1000")


def test_head_of_another_size_is_answered_by_num_classes(source: nn.Module, kwargs: dict) -> None:
    """pytorch/examples has 1,000 outputs for any number of classes. Weights of another model have
    another answer.
    """
    file = Path(kwargs["pretrained_cfg_overlay"]["file"])
    with pytest.raises(CheckpointError, match=r"model\.num_classes=1000"):
        load_weights_of_config(Config(model=ModelConfig("test_resnet")), file, NUMBERS[:10])
    wide = Config(model=ModelConfig("test_resnet", num_classes=1000))
    torch.testing.assert_close(
        logits(load_weights_of_config(wide, file, NUMBERS[:10]).models["raw"]), logits(source)
    )
    with pytest.raises(CheckpointError, match=r"model\.name"):
        load_weights_of_config(Config(model=ModelConfig("resnet18")), file, NUMBERS[:10])
