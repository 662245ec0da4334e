"""predict.py on ONNX files whose outputs or metadata are not those of export.py: a sentence and the
exit code.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import call, fails

from imagenet_cls.commands.predict import predict_command

pytest.importorskip("onnx")
from onnx import TensorProto, helper

CONSTANTS = {
    "sides": [2, 3],
    "images_axis": [0],
    "classes_axis": [1],
}


def first(name: str) -> Any:
    """The first node of a graph: the means of each channel."""
    return helper.make_node("ReduceMean", ["images", "sides"], [name], keepdims=0)


# Three logits.
MEANS = [first("logits")]


def last(operator: str, *inputs: str, **attributes: Any) -> Any:
    return helper.make_node(operator, list(inputs), ["logits"], **attributes)


def write_onnx(file: Path, nodes: list[Any], **changes: Any) -> None:
    """A file with the metadata of export.py, for images of 16 px. changes: of the metadata."""
    images = helper.make_tensor_value_info(
        "images", TensorProto.FLOAT, ["batch", 3, "height", "width"]
    )
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    constants = [
        helper.make_tensor(k, TensorProto.INT64, [len(v)], v) for k, v in CONSTANTS.items()
    ]
    constants += [helper.make_tensor("nan", TensorProto.FLOAT, [1], [float("nan")])]
    graph = helper.make_graph(nodes, "graph", [images], [logits], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    values: dict[str, Any] = {"weights": "raw", "classes": ["a", "b", "c"], "preprocess": "none"}
    values |= {"mean": [0.5] * 3, "std": [0.5] * 3, "exif": "ignore"}
    values["eval"] = {"mode": "crop", "crop_px": 16, "resize_px": 16, "flip_tta": False}
    helper.set_model_props(
        model, {key: json.dumps(value) for key, value in (values | changes).items()}
    )
    file.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        ([last("Identity", "images")], "(2, 3, 16, 16)"),
        ([first("m"), last("ReduceMean", "m", "classes_axis", keepdims=0)], "(2,)"),
        ([first("m"), last("ReduceMean", "m", "images_axis", keepdims=1)], "(1, 3)"),
        ([first("m"), last("ReduceMean", "m", "classes_axis", keepdims=1)], "(2, 1)"),
    ],
)
def test_output_of_another_shape_exits_with_4(
    nodes: list[Any], shape: str, digits: Path, tmp_path: Path
) -> None:
    images = sorted((digits / "train" / "3").iterdir())[:2]
    write_onnx(tmp_path / "odd.onnx", nodes)
    err = fails(4, predict_command, tmp_path / "odd.onnx", *images)
    assert "odd.onnx" in err and shape in err


def test_nan_exits_with_4_and_more_outputs_than_names_are_numbered(
    digits: Path, tmp_path: Path
) -> None:
    image = next((digits / "train" / "3").iterdir())
    write_onnx(tmp_path / "model.onnx", [first("m"), last("Mul", "m", "nan")])
    err = fails(4, predict_command, tmp_path / "model.onnx", image)
    assert str(image) in err
    write_onnx(tmp_path / "model.onnx", MEANS, classes=["a", "b"])
    _, out, _ = call(predict_command, tmp_path / "model.onnx", image, "--json")
    assert {name for name, _ in json.loads(out)["top"]} == {"a", "b", "class 2"}
