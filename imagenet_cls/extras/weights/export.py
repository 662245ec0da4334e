"""`tools/export.py`: write a trained model as ONNX or torch.export, and compare it with PyTorch."""

from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.commands import cli
from imagenet_cls.errors import UsageError
from imagenet_cls.files import check_output_path, write_output
from imagenet_cls.lookup import check_packages
from imagenet_cls.text import printable


def export_command(argv: Sequence[str]) -> None:
    """Export a model, compare it with PyTorch, and then write the file. Raises CheckpointError if
    their logits differ.
    """
    parser = cli.build_parser(
        "export", "Write a trained model as ONNX or torch.export, and compare it with PyTorch."
    )
    cli.add_weights_arguments(parser)
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE",
        help="a file of ONNX (.onnx) or torch.export (.pt2); default: model.onnx, in the run "
        "folder, or for another CHECKPOINT in the working directory",
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
    arguments = parser.parse_intermixed_args(argv)
    options, others = cli.weights_arguments(arguments)
    if others:
        raise UsageError(f"Unexpected argument {others[0]!r}.", "Name the file with --out.")
    run = Path(options["checkpoint"])
    folder = run if (run / "config.yaml").is_file() else Path()
    usual = folder / "model.onnx"
    out = arguments.out or usual
    if out.suffix not in (".onnx", ".pt2"):
        raise UsageError(
            f"--out {out}: the format is not known.", "Give a name that ends in .onnx or .pt2."
        )
    if folder != run or out.resolve() != usual.resolve():  # that of a run folder is replaced
        check_output_path(out)
    from imagenet_cls.extras.weights.exported_model import BATCHES, compare, export_model
    from imagenet_cls.inference.predictor import Predictor

    is_onnx = out.suffix == ".onnx"
    if is_onnx:
        check_packages("onnx", "onnx", "onnxscript", "onnxruntime")
    predictor = Predictor(**options, device="cpu")
    content, run_exported = export_model(predictor, is_onnx, arguments.preprocess)
    verdict = compare(predictor, run_exported, arguments.preprocess)
    write_output(out, content)
    batches = " and ".join(map(str, BATCHES))
    for line in (*predictor.warnings, f"random images, in batches of {batches}: {verdict}"):
        print(printable(line))
    print(f"wrote the {predictor.weights} weights of {predictor.path} to {out}")
