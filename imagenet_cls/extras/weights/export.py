"""`tools/export.py`: write a trained model as ONNX or torch.export, and compare it with PyTorch."""

from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.commands import cli
from imagenet_cls.errors import UsageError
from imagenet_cls.files import check_output_path, write_output
from imagenet_cls.lookup import check_packages
from imagenet_cls.text import printable

FORMATS = {".onnx": "onnx", ".pt2": "torch"}


def export_command(argv: Sequence[str]) -> None:
    """Export a model, compare it with PyTorch, and then write the file. Raises CheckpointError if
    their logits differ.
    """
    parser = cli.build_parser(
        "export", "Write a trained model as ONNX or torch.export, and compare it with PyTorch."
    )
    cli.add_weights_arguments(parser)
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS.values()),
        help="onnx, or torch for torch.export; default: by the suffix of --out",
    )
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE",
        help="default: model.onnx or model.pt2, in the run folder, or for another CHECKPOINT in "
        "the working directory",
    )
    parser.add_argument(
        "--preprocess",
        choices=("none", "normalize"),
        nargs="?",
        const="normalize",
        default="none",
        help="none: the graph takes normalized float32 images; normalize: it takes uint8 images. "
        "Both are resized and cropped before. Default: none; without a value: normalize",
    )
    parser.add_argument(
        "--opset",
        type=cli.positive,
        metavar="N",
        help="version of ONNX's operators; default: torch's",
    )
    arguments = parser.parse_intermixed_args(argv)
    options, others = cli.weights_arguments(arguments)
    if others:
        raise UsageError(f"Unexpected argument {others[0]!r}.", "Name the file with --out.")
    run = Path(options["checkpoint"])
    folder = run if (run / "config.yaml").is_file() else Path()
    suffixes = {name: suffix for suffix, name in FORMATS.items()}
    out = arguments.out or folder / f"model{suffixes.get(arguments.format, '')}"
    form = FORMATS.get(out.suffix)
    if form is None or arguments.format not in (None, form):
        raise UsageError(
            f"The format is not known: --format {arguments.format}, --out {arguments.out}.",
            "Give --out with a name that ends in .onnx or .pt2, or --format onnx or torch.",
        )
    if arguments.opset and form != "onnx":
        raise UsageError(
            f"--opset {arguments.opset}: only ONNX has opsets.",
            "Leave it out, or give --format onnx.",
        )
    check_output_path(out)
    from imagenet_cls.extras.weights.exported_model import BATCHES, compare, export_model
    from imagenet_cls.inference.predictor import Predictor

    if form == "onnx":
        check_packages("onnx", "onnx", "onnxscript", "onnxruntime")
    predictor = Predictor(**options, device="cpu")
    export = export_model(predictor, form, arguments.preprocess, arguments.opset)
    verdict = compare(predictor, export)
    write_output(out, export.content)
    batches = " and ".join(map(str, BATCHES))
    for line in (*predictor.warnings, f"random images, in batches of {batches}: {verdict}"):
        print(printable(line))
    print(f"wrote the {predictor.weights} weights of {predictor.path} to {out}")
