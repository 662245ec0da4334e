"""`tools/export.py`: write a trained model as ONNX or torch.export, and compare it with PyTorch."""

from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.commands import cli
from imagenet_cls.errors import UsageError, printable
from imagenet_cls.files import check_exists, check_output_path, write_output

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}


def export_command(argv: Sequence[str]) -> None:
    """Export a model, compare it with PyTorch, and then write the file. Raises CheckpointError if they differ."""
    parser = cli.build_parser(
        "export", "Write a trained model as ONNX or torch.export, and compare it with PyTorch."
    )
    cli.add_weights_arguments(parser)
    parser.add_argument(
        "--format", choices=tuple(SUFFIXES), required=True, help="onnx, or torch for torch.export"
    )
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE",
        help="default: model.onnx or model.pt2, in this folder",
    )
    parser.add_argument(
        "--preprocess", choices=("none", "normalize"), nargs="?", const="normalize", default="none",
        help="what the graph does. none: its input is normalized float32; normalize: its input is "
        "uint8. Both are resized and cropped. Default: none; without a value: normalize",
    )  # fmt: skip
    parser.add_argument(
        "--opset", type=cli.positive, metavar="N", help="of ONNX; default: that of torch"
    )
    arguments = parser.parse_args(argv)
    out = arguments.out or Path(f"model{SUFFIXES[arguments.format]}")
    if out.suffix != SUFFIXES[arguments.format]:
        kind = SUFFIXES[arguments.format]
        raise UsageError(f"--out {out}: not a {kind} file.\nName it so, or give another --format.")
    if arguments.opset and arguments.format != "onnx":
        raise UsageError(
            f"--opset {arguments.opset} is of ONNX.\nLeave it out, or give --format onnx."
        )
    check_exists(arguments.checkpoint)
    check_output_path(out)
    from imagenet_cls.engine.export import BATCHES, compare, comparison_images, export_model
    from imagenet_cls.engine.predictor import Predictor, check_packages

    if arguments.format == "onnx":
        check_packages("onnx", "onnxscript", "onnxruntime")
    predictor = Predictor(arguments.checkpoint, "cpu", arguments.weights, arguments.allow_import)
    export = export_model(predictor, arguments.format, arguments.preprocess, arguments.opset)
    images, described = comparison_images(predictor, arguments.allow_import)
    lines = compare(predictor, export, images)
    write_output(out, export.content)
    batches = " and ".join(map(str, BATCHES))
    for line in (
        *predictor.warnings,
        f"{described}, in batches of {batches}: {lines[-1]}",
        *lines[:-1],
    ):
        print(printable(line))
    print(f"wrote {predictor.path} to {out}")
