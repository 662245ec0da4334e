"""Models that timm saved: in a folder (`local-dir:`) and on the Hugging Face Hub (`hf-hub:`), here
in its cache.
"""

from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from helpers import train_here
from timm.models import save_for_hf
from torch import nn

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import CheckpointError, ConfigError
from imagenet_cls.models.factory import build_model, describe_initial_weights, model_problems


@pytest.fixture(scope="module")
def saved() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=7, depth=2)


def save(model: nn.Module, folder: Path) -> Path:
    save_for_hf(model, folder, safe_serialization=True)
    return folder


def cached(model: nn.Module, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    repository = cache / "models--someone--vit"
    save(model, repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")


@pytest.mark.parametrize("source", ["local-dir", "hf-hub"])
def test_model_of_a_source_is_checked_built_and_loaded(
    source: str, saved: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(saved, tmp_path / "hub", monkeypatch)
    name = (
        "hf-hub:someone/vit"
        if source == "hf-hub"
        else f"local-dir:{save(saved, tmp_path / 'saved')}"
    )
    model = ModelConfig(name, pretrained=True)
    assert model_problems(model) == []
    with pytest.raises(ConfigError, match=r"^model\.kwargs: .*zebra"):
        build_model(ModelConfig(name, kwargs={"zebra": 1}), 7)
    built = build_model(model, 7)
    assert all(
        torch.equal(value, saved.state_dict()[key]) for key, value in built.state_dict().items()
    )
    assert describe_initial_weights(model, built, 7) == f"starts from published weights ({name})"
    other = build_model(model, 3)
    assert "it had 7 outputs, the model has 3" in describe_initial_weights(model, other, 3)
    assert torch.equal(other.blocks[1].attn.qkv.weight, saved.blocks[1].attn.qkv.weight)
    # from scratch
    assert not torch.equal(build_model(ModelConfig(name), 7).cls_token, saved.cls_token)


def test_second_revision_of_a_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^model\.name: "):
        build_model(ModelConfig("hf-hub:someone/vit@main@v2"), 7)


def test_wrong_folder_is_an_error(saved: nn.Module, digits: Path, tmp_path: Path) -> None:
    words = [
        f"data.root={digits}",
        "optimizer.lr=0.1",
        "--work-dir",
        str(tmp_path / "run"),
        "--dry-run",
    ]
    for name in (tmp_path / "missing", tmp_path):
        with pytest.raises(CheckpointError, match=r"model.name: .*config.json"):
            train_here([*words, f"model.name=local-dir:{name}"])
    (tmp_path / "config.json").write_text('{"architecture": "bert"}')
    with pytest.raises(ConfigError, match="bert"):
        build_model(ModelConfig(f"local-dir:{tmp_path}"), 7)
    save(saved, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="local-dir:"):
        build_model(ModelConfig(f"local-dir:{tmp_path}", pretrained=True), 7)
