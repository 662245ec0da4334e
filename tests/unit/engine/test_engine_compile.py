"""`train.compile`: which values are read, and how the model is compiled."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from imagenet_cls.config.load import config_from_dict, load_config
from imagenet_cls.engine.build import check_compiler, compile_model
from imagenet_cls.errors import UsageError

STATIC, AUTOMATIC = {"dynamic": False}, {"dynamic": None}


@pytest.mark.parametrize(
    ("words", "value", "expected"),
    [
        (["train.compile=false"], False, []),
        (["train.compile=true"], True, [{"mode": "default", **STATIC}]),
        (["train.compile=max-autotune"], "max-autotune", [{"mode": "max-autotune", **STATIC}]),
        (
            [
                "train.compile=default",
                "augment.progressive.epochs=[0,1]",
                "augment.progressive.sizes_px=[32,64]",
                "augment.size_px=64",
            ],
            "default",
            [{"mode": "default", **AUTOMATIC}],
        ),
    ],
)
def test_model_is_compiled_in_the_mode_of_the_config(
    words: list[str],
    value: bool | str,
    expected: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, calls = load_config(None, words).config, []
    assert config.train.compile == value and config_from_dict(asdict(config)) == config
    monkeypatch.setattr(nn.Linear, "compile", lambda _, **keywords: calls.append(keywords))
    compile_model(nn.Linear(2, 2), config.train, config.augment)
    assert calls == expected


def test_compiling_for_a_gpu_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    compiled, eager = (
        load_config(None, [f"train.compile={value}"]).config.train for value in ("true", "false")
    )
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name == "clang" else None)
    check_compiler(compiled, gpu)
    monkeypatch.setattr("shutil.which", lambda _: None)
    # for CPUs inductor finds the compiler itself
    for train, device in ((eager, gpu), (compiled, cpu)):
        check_compiler(train, device)
    with pytest.raises(UsageError, match="needs a C compiler"):
        check_compiler(compiled, gpu)
    monkeypatch.setenv("CC", "/opt/bin/cc")
    check_compiler(compiled, gpu)
